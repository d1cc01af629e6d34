"""What a pipeline's text encoders see and return while its encode_prompt runs: masks, hidden states, pooled outputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from enfold.diffusion.embedding_cache import Row
from enfold.errors import InputError

POOLED = ("pooler_output", "text_embeds")
Calls = dict[str, list[dict[str, torch.Tensor]]]
"""By component, for each call of it: [rows, ...] tensors by name."""


def hidden_state_counts(encoders: Mapping[str, Any]) -> dict[str, int]:
    """Return how many hidden states each text encoder has: one per layer, and the embedding."""
    counts = {}
    for name, encoder in encoders.items():
        if "input_ids" in inspect.signature(type(encoder).forward).parameters:
            counts[name] = int(encoder.config.get_text_config().num_hidden_layers) + 1
    return counts


@contextmanager
def captured(encoders: Mapping[str, nn.Module], layers: Sequence[int]) -> Iterator[Calls]:
    """Note what the encoders are called with and return within the block; have them return their hidden states."""
    calls: Calls = {name: [] for name in encoders}
    with ExitStack() as stack:
        for name, encoder in encoders.items():
            if layers:
                stack.callback(encoder.register_forward_pre_hook(_with_hidden_states, with_kwargs=True).remove)
            note = partial(_note, calls[name], layers)
            stack.callback(encoder.register_forward_hook(note, with_kwargs=True).remove)
        yield calls


def _with_hidden_states(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs)
    # By name, whichever way it was passed.
    names = list(bound.signature.parameters)[1 : len(args) + 1]
    return (), {**dict(zip(names, args, strict=True)), **kwargs, "output_hidden_states": True}


def _note(
    calls: list[dict[str, torch.Tensor]],
    layers: Sequence[int],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    call = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments
    seen = {"attention_mask": call.get("attention_mask")}
    seen |= {name: getattr(output, name, None) for name in POOLED}
    states = getattr(output, "hidden_states", None) or ()
    seen |= {f"hidden_states.{layer}": states[layer] for layer in layers if -len(states) <= layer < len(states)}
    calls.append({name: value for name, value in seen.items() if isinstance(value, torch.Tensor)})


def split_captured(calls: Calls, num_texts: int, layers: Sequence[int]) -> list[Row]:
    """Return for each text the tensors of its own row, by "<component>.<name>".

    An encoder that was not called is left out, and so is what does not hold one row per text. Raises InputError for a
    layer that no encoder has.
    """
    rows: list[Row] = [{} for _ in range(num_texts)]
    found: set[str] = set()
    for component, seen in calls.items():
        for name in seen[0] if seen else ():
            parts = [call[name] for call in seen if name in call]
            if sum(part.shape[0] for part in parts) == num_texts and len({part.shape[1:] for part in parts}) == 1:
                found.add(name)
                for row, value in zip(rows, torch.cat(parts).unsqueeze(1), strict=True):
                    row[f"{component}.{name}"] = value
    if missing := [layer for layer in layers if f"hidden_states.{layer}" not in found]:
        raise InputError(f"no text encoder of {', '.join(calls)} has the hidden states {missing}; 0 is the embedding")
    return rows
