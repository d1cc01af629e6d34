"""The shipped text-to-image model: pictures of two coloured shapes in a relation, and all that made it.

`model_folder()` is what every command takes when `--model-path` is left out. Grammar of the prompts and pictures are
in scenes.py, the check of a picture against its prompt in checker.py; `python -m enfold.shapes.train` makes the
weights again and `python -m enfold.shapes.evaluate` counts how many held-out prompts they follow.
"""

from pathlib import Path

__all__ = ["model_folder"]


def model_folder() -> Path:
    """Return the folder of the shipped pipeline (Diffusers format): it is part of the package."""
    return Path(__file__).parent / "model"
