"""A Diffusers pipeline on ranks: encoders spread, DiT split, each text encoded once; the engine that a user holds."""
