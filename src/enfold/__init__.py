"""Spread the text, image and vision encoders of diffusion pipelines and VLMs over ranks, with the bits of one rank."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enfold.checkpoint import load_encoder
    from enfold.layout import Layout
    from enfold.pipelines.parallelize import parallelize
    from enfold.plan import Plan, plan_encoder
    from enfold.vision.config import VisionParallelConfig

__version__ = "0.1.0"

__all__ = ["Layout", "Plan", "VisionParallelConfig", "load_encoder", "parallelize", "plan_encoder"]

_HOMES = {
    "Layout": "enfold.layout",
    "Plan": "enfold.plan",
    "VisionParallelConfig": "enfold.vision.config",
    "load_encoder": "enfold.checkpoint",
    "parallelize": "enfold.pipelines.parallelize",
    "plan_encoder": "enfold.plan",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the planner starts without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'enfold' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
