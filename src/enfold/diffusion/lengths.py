"""Lengths of the sequences that the ranks of a split DiT share: each rank's part is as long as the others'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.hooks import context_parallel
from torch import nn
from torch.nn import functional

from enfold.diffusion.layout import PipelineLayout, check_lengths
from enfold.errors import InputError

PADDED_TEXT = {"QwenImageTransformer2DModel": ("encoder_hidden_states", "encoder_hidden_states_mask")}
"""Transformers that take prompts of any length and a mask for them: the arguments' names. They can be padded."""


def explain_lengths(transformer: nn.Module, layout: PipelineLayout) -> None:
    """Let every cut of a sequence say its length where it can't be cut evenly; Diffusers only asserts."""
    for module in transformer.modules():
        registry = getattr(module, "_diffusers_hook", None)
        for hook in registry.hooks.values() if registry is not None else ():
            if isinstance(hook, context_parallel.ContextParallelSplitHook):
                hook._prepare_cp_input = _checked(hook, type(module).__name__, layout)


def _checked(hook: Any, where: str, layout: PipelineLayout) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    cut = hook._prepare_cp_input
    name_of = {
        id(how): key if isinstance(key, str) else f"output {key} of {where}"
        for key, hows in hook.metadata.items()
        for how in (hows if isinstance(hows, (list, tuple)) else (hows,))
    }

    def check_and_cut(x: torch.Tensor, how: Any) -> torch.Tensor:
        if how.expected_dims in (None, x.dim()):  # Diffusers leaves any other whole
            check_lengths(layout, {f"tokens ({name_of[id(how)]})": x.shape[how.split_dim]})
        return cut(x, how)  # type: ignore[no-any-return]

    return check_and_cut


def fit_text(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pad prompts to a length that the ranks can share, behind the mask, where the model takes one."""
    parallel = module._parallel_config
    names = PADDED_TEXT.get(type(module).__name__)
    if parallel is None or names is None or not isinstance(kwargs.get(names[0]), torch.Tensor):
        return args, kwargs
    config = parallel.context_parallel_config
    text, mask = kwargs[names[0]], kwargs.get(names[1])
    missing = -text.shape[1] % (config.ring_degree * config.ulysses_degree)
    if config.ring_degree > 1 and (missing or mask is not None):
        raise InputError(
            f"{text.shape[0]} prompts of up to {text.shape[1]} tokens need a mask on ring {config.ring_degree} x "
            f"ulysses {config.ulysses_degree} ranks, and ring attention takes none; use --ulysses-degree alone"
        )
    if missing:
        mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device) if mask is None else mask
        padded = {names[0]: functional.pad(text, (0, 0, 0, missing)), names[1]: functional.pad(mask, (0, missing))}
        kwargs = {**kwargs, **padded}
    return args, kwargs
