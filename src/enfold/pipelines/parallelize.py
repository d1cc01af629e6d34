"""enfold.parallelize: one encoder, every encoder of a Diffusers pipeline, or the tower of a vision-language model."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from enfold.comm import DEFAULT_TIMEOUT_S, Groups
from enfold.config import Mode, Numerics, check_mode, check_numerics
from enfold.layout import Layout
from enfold.pipelines.diffusion import parallelize_pipeline
from enfold.pipelines.vision_language import parallelize_vision
from enfold.spread import parallelize_encoder
from enfold.vision.config import VisionParallelConfig
from enfold.vision.spread import check_only_vision, config_of_mode, is_tower


def parallelize(
    module_or_pipeline: Any,
    mode: Mode = "auto",
    *,
    group: dist.ProcessGroup | None = None,
    layout: Layout | None = None,
    numerics: Numerics = "exact",
    timeout: float = DEFAULT_TIMEOUT_S,
    batch_size: int | None = None,
    vision: VisionParallelConfig | None = None,
    text_group: dist.ProcessGroup | None = None,
) -> Any:
    """Spread an encoder, or every text and image encoder of a Diffusers pipeline, in place; return what was passed.

    With `vision` it is the vision tower of a vision-language model that is spread, and nothing else of the model: see
    `enfold.pipelines.vision_language.parallelize_vision`.

    Collective over `group` (default: all ranks). See `parallelize_encoder` for the arguments; they hold for every
    encoder of a pipeline, and `auto` decides for each by itself. Encoders of one pipeline share their process groups.

    Raises before any encoder is touched, naming the component, where one of them can't be spread as asked.
    """
    if vision is not None:
        check_only_vision(mode, layout, batch_size)
    elif is_tower(module_or_pipeline) and check_mode(mode) != "replicate":
        vision = config_of_mode(mode, layout)
    if vision is not None:
        return parallelize_vision(
            module_or_pipeline, vision, group=group, text_group=text_group, numerics=numerics, timeout=timeout
        )
    if isinstance(module_or_pipeline, nn.Module):
        return parallelize_encoder(
            module_or_pipeline, mode, group=group, layout=layout, numerics=numerics, timeout=timeout,
            batch_size=batch_size,
        )  # fmt: skip
    check_mode(mode)
    check_numerics(numerics)
    return parallelize_pipeline(module_or_pipeline, mode, Groups(group), layout, numerics, timeout, batch_size)
