"""Attention that also returns the log-sum-exp of its scores, which ring attention of Diffusers merges its parts by.

On a GPU torch's flash attention does, through Diffusers. On a CPU Diffusers 0.42 has none: _native_attention_forward_op
(models/attention_dispatch.py) raises "Native attention does not support return_lse=True". It is replaced while a
transformer that is split by a ring runs, and put back after.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models import attention_dispatch

from enfold.errors import ConfigError, InputError

GPU_DTYPES = (torch.bfloat16, torch.float16)
"""What torch's flash attention takes."""

_without_lse = attention_dispatch._native_attention_forward_op


def check_ring_attention(transformer: Any, device: torch.device) -> None:
    """Raise ConfigError where no attention on this device gives a ring what it needs; touch nothing."""
    name = type(transformer).__name__
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{name}: ring attention runs on cpu and cuda, not on {device.type}; use --ulysses-degree")
    if device.type == "cuda" and transformer.dtype not in GPU_DTYPES:
        raise ConfigError(
            f"{name}: ring attention on a GPU needs bfloat16 or float16, the weights are {transformer.dtype}; "
            "use --dtype bfloat16, or --ulysses-degree in place of --ring-degree"
        )


def take_ring_attention(transformer: Any, device: torch.device) -> None:
    """Let this transformer, which is split by a ring, use an attention that returns the log-sum-exp."""
    if device.type == "cuda":
        registry = attention_dispatch._AttentionBackendRegistry
        active = registry._active_backend
        transformer.set_attention_backend("_native_flash")
        registry.set_active_backend(active)  # it would hold for every model of the process
        return
    transformer.register_forward_pre_hook(_lend)
    transformer.register_forward_hook(_end, always_call=True)


def _lend(module: Any, args: tuple[Any, ...]) -> None:
    if module._parallel_config is not None:  # not within `whole`
        attention_dispatch._native_attention_forward_op = _with_lse


def _end(module: Any, args: tuple[Any, ...], output: Any) -> None:
    attention_dispatch._native_attention_forward_op = _without_lse


def _with_lse(
    ctx: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    **others: Any,
) -> Any:
    """Attend on a CPU, tensors as [B, S, H, D]; with `return_lse` also return the scores' log-sum-exp [B, S, H]."""
    if not return_lse:
        return _without_lse(ctx, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, **others)
    if attn_mask is not None:
        raise InputError("ring attention takes no attention mask; use --ulysses-degree in place of --ring-degree")
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *heads_first, dropout_p, is_causal, attn_mask=None, scale=scale
    )
    return out.transpose(1, 2), lse.transpose(1, 2)
