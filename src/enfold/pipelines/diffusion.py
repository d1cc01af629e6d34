"""The text and image encoders of a Diffusers pipeline, spread in place; the pipeline is used as before."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from enfold.comm import DEFAULT_TIMEOUT_S, Groups
from enfold.config import Mode, Numerics, check_mode, check_numerics
from enfold.errors import ConfigError
from enfold.layout import Layout
from enfold.spread import parallelize_encoder


def parallelize(
    module_or_pipeline: Any,
    mode: Mode = "auto",
    *,
    group: dist.ProcessGroup | None = None,
    layout: Layout | None = None,
    numerics: Numerics = "exact",
    timeout: float = DEFAULT_TIMEOUT_S,
    batch_size: int | None = None,
) -> Any:
    """Spread an encoder, or every text and image encoder of a Diffusers pipeline, in place; return what was passed.

    Collective over `group` (default: all ranks). See `parallelize_encoder` for the arguments; they hold for every
    encoder of a pipeline, and `auto` decides for each by itself. Encoders of one pipeline share their process groups.
    """
    if isinstance(module_or_pipeline, nn.Module):
        return parallelize_encoder(
            module_or_pipeline, mode, group=group, layout=layout, numerics=numerics, timeout=timeout,
            batch_size=batch_size,
        )  # fmt: skip
    check_mode(mode)
    check_numerics(numerics)
    found = encoders_of(module_or_pipeline)
    groups = Groups(group)
    for encoder in found.values():
        parallelize_encoder(
            encoder, mode, layout=layout, numerics=numerics, timeout=timeout, batch_size=batch_size, groups=groups
        )
    return module_or_pipeline


def encoders_of(pipeline: Any) -> dict[str, nn.Module]:
    """Return the text and image encoders among the components of a Diffusers pipeline, by component name.

    They are the Transformers models; the safety checker is one too, and encodes nothing for the pipeline.
    """
    components = getattr(pipeline, "components", None)
    if not isinstance(components, dict):
        raise ConfigError(
            f"{type(pipeline).__name__} is neither a torch module nor a Diffusers pipeline; "
            "pass one encoder, or a pipeline with .components"
        )
    found = {
        name: component
        for name, component in components.items()
        if isinstance(component, PreTrainedModel) and name != "safety_checker"
    }
    if not found:
        raise ConfigError(f"{type(pipeline).__name__} has no text or image encoder among {', '.join(components)}")
    return found
