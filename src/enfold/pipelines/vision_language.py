"""The vision tower of a vision-language model, spread in place; the model is used as before, generate() included."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel

from enfold.comm import DEFAULT_TIMEOUT_S, Groups
from enfold.config import Numerics, check_numerics
from enfold.encoders import family_of
from enfold.errors import ConfigError
from enfold.vision.config import VisionParallelConfig
from enfold.vision.spread import prepare_tower, spread_tower


def parallelize_vision(
    model: PreTrainedModel,
    vision: VisionParallelConfig,
    *,
    group: dist.ProcessGroup | None = None,
    text_group: dist.ProcessGroup | None = None,
    numerics: Numerics = "exact",
    timeout: float = DEFAULT_TIMEOUT_S,
) -> PreTrainedModel:
    """Spread the vision tower of `model` (or `model` itself, where it is one) over the ranks of `group`, in place.

    Collective. The tower keeps its call and its output class; the language model is not touched, however it may be
    spread itself. text_group: its tensor parallel group, used again where the tower's tp ranks are the same.

    Raises ConfigError where the model has no tower, or more than one; LayoutError where the sizes do not fit.
    """
    check_numerics(numerics)
    groups = Groups(group)
    spread_tower(prepare_tower(find_tower(model), vision, groups, numerics), groups, timeout, text_group)
    return model


def find_tower(model: Any) -> PreTrainedModel:
    """Return the one vision tower inside a model that enfold packs."""
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"{type(model).__name__} is no Hugging Face model; vision= needs one with a vision tower")
    towers = {name or type(model).__name__: module for name, module in model.named_modules() if _is_tower(module)}
    if len(towers) != 1:
        found = f"{len(towers)} vision towers ({', '.join(towers)}): pass one" if towers else "no vision tower"
        raise ConfigError(f"{type(model).__name__} has {found} that enfold packs (Qwen-VL towers, SigLIP vision)")
    return next(iter(towers.values()))


def _is_tower(module: Any) -> bool:
    family = family_of(module.config.model_type) if isinstance(module, PreTrainedModel) else None
    return family is not None and family.tower is not None
