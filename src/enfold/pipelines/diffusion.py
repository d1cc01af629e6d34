"""The text and image encoders of a Diffusers pipeline, spread in place; the pipeline is used as before."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from enfold.comm import DEFAULT_TIMEOUT_S, Groups
from enfold.config import Mode, Numerics, check_mode, check_numerics
from enfold.errors import ConfigError, EnfoldError
from enfold.flow import MAIN_INPUTS
from enfold.layout import Layout
from enfold.spread import Prepared, parallelize_encoder, prepare, spread_out


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

    Raises before any encoder is touched, naming the component, where one of them can't be spread as asked.
    """
    if isinstance(module_or_pipeline, nn.Module):
        return parallelize_encoder(
            module_or_pipeline, mode, group=group, layout=layout, numerics=numerics, timeout=timeout,
            batch_size=batch_size,
        )  # fmt: skip
    check_mode(mode)
    check_numerics(numerics)
    groups = Groups(group)
    prepared: list[Prepared] = []
    for name, encoder in encoders_of(module_or_pipeline).items():
        try:
            prepared.append(prepare(encoder, mode, groups, layout, numerics, batch_size))
        except EnfoldError as error:
            raise type(error)(f"{name}: {error}") from error
    for each in prepared:
        spread_out(each, groups, timeout)
    return module_or_pipeline


def encoders_of(pipeline: Any) -> dict[str, PreTrainedModel]:
    """Return the text and image encoders among the components of a Diffusers pipeline, by component name.

    They are the Transformers models whose call takes token ids, embeddings or pixels (a safety checker or a vocoder
    takes neither). One that stands under two names is returned once.
    """
    components = getattr(pipeline, "components", None)
    if not isinstance(components, dict):
        raise ConfigError(
            f"{type(pipeline).__name__} is neither a torch module nor a Diffusers pipeline; "
            "pass one encoder, or a pipeline with .components"
        )
    found: dict[str, PreTrainedModel] = {}
    for name, component in components.items():
        if is_encoder(component) and not any(component is other for other in found.values()):
            found[name] = component
    if not found:
        raise ConfigError(f"{type(pipeline).__name__} has no text or image encoder among {', '.join(components)}")
    return found


def is_encoder(component: Any) -> bool:
    """Return whether a pipeline's component is a Transformers model that takes texts or images."""
    if not isinstance(component, PreTrainedModel):
        return False
    return not set(MAIN_INPUTS).isdisjoint(inspect.signature(component.forward).parameters)
