"""What a pipeline will say of itself, from its config files alone: wrong sizes are refused before weights are read."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from enfold.diffusion.conditioning import way_of
from enfold.diffusion.facts import describe, merged_defaults
from enfold.diffusion.layout import PipelineLayout
from enfold.diffusion.opening import Opened, pipeline_class, read_index
from enfold.diffusion.requests import PipelineReport
from enfold.errors import EnfoldError

__all__ = ["outline"]


def outline(folder: Path, layout: PipelineLayout) -> PipelineReport | None:
    """Return the report of a pipeline without its encoders; None where only the loaded pipeline can tell.

    The DiT and the VAE are built on the meta device; no weight is read and nothing is computed. Raises ConfigError
    where the folder can't be used.
    """
    index = read_index(folder)
    cls = pipeline_class(index)
    try:
        pipeline = cls(**_without_weights(cls, folder, index))
        opened = Opened(pipeline, encoders={}, split="", dtype=torch.float32)
        return describe(opened, way_of(pipeline), merged_defaults(pipeline, folder), layout)
    except EnfoldError:
        raise  # among them ConfigError, which is a ValueError too
    except (OSError, ValueError, TypeError, AttributeError, KeyError, IndexError):
        return None  # configs are missing, or this class asks its encoders; after loading the same is checked again


def _without_weights(cls: Any, folder: Path, index: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a pipeline is made of: None for encoders and tokenizers, configs for the rest."""
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        entry = index.get(name)
        if isinstance(entry, list):
            given[name] = _component(folder / name, entry)
        elif entry is not None:
            given[name] = entry
        elif parameter.default is parameter.empty:
            given[name] = None
    return given


def _component(folder: Path, entry: list[Any]) -> Any:
    import diffusers

    library, name = entry
    cls = getattr(diffusers, name, None) if library == "diffusers" and name else None
    if cls is None:
        return None
    with torch.device("meta"):
        return cls.from_config(cls.load_config(folder, local_files_only=True))
