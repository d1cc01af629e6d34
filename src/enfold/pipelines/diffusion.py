"""The text and image encoders of a Diffusers pipeline, spread in place; the pipeline is used as before."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PreTrainedModel

from enfold.comm import Groups
from enfold.config import Mode, Numerics
from enfold.errors import ConfigError, EnfoldError
from enfold.flow import MAIN_INPUTS
from enfold.layout import Layout
from enfold.spread import Prepared, prepare, spread_out


def parallelize_pipeline(
    pipeline: Any,
    mode: Mode,
    groups: Groups,
    layout: Layout | None,
    numerics: Numerics,
    timeout: float,
    batch_size: int | None,
) -> Any:
    """Spread every text and image encoder of a Diffusers pipeline, in place; return the pipeline.

    Raises before any encoder is touched, naming the component, where one of them can't be spread as asked.
    """
    prepared: list[Prepared] = []
    for name, encoder in encoders_of(pipeline).items():
        try:
            prepared.append(prepare(encoder, mode, groups, layout, numerics, batch_size))
        except EnfoldError as error:
            raise type(error)(f"{name}: {error}") from error
    for each in prepared:
        spread_out(each, groups, timeout)
    return pipeline


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
