"""Diffusers pipelines on top of the encoders: thin, the models stay Diffusers' and Transformers' own."""
