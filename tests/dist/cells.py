"""One cell of the equivalence matrix: a model, a precision and a layout, against the plain module on one rank."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import models
import torch
import torch.distributed as dist

import enfold
from enfold.comm import Groups
from enfold.spread import parallelize_encoder

CACHES = ("cache", "past_key_values")


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bit patterns: equal bits is more than equal values (-0.0, NaN)."""
    return x.contiguous().view(torch.uint8) if x.dim() else x.reshape(1).view(torch.uint8)


def differences(want: Any, got: Any, name: str = "output") -> list[str]:
    """Return in words where two outputs differ in class, shape, dtype or bits."""
    if isinstance(want, torch.Tensor):
        if not isinstance(got, torch.Tensor) or want.shape != got.shape or want.dtype != got.dtype:
            return [f"{name}: {getattr(want, 'shape', want)} {want.dtype} became {getattr(got, 'shape', got)}"]
        if torch.equal(bits(want), bits(got)):
            return []
        gap = (want.double() - got.double()).abs().max().item()
        share = (want != got).double().mean().item()
        return [f"{name}: {share:.1%} of the values differ, by {gap:.3g} at most"]
    if type(want) is not type(got):
        return [f"{name}: {type(want).__name__} became {type(got).__name__}"]
    if isinstance(want, dict):
        keys = [key for key in want if key not in CACHES]
        if keys != [key for key in got if key not in CACHES]:
            return [f"{name}: fields {keys} became {list(got)}"]
        return [text for key in keys for text in differences(want[key], got[key], key)]
    if isinstance(want, tuple | list):
        if len(want) != len(got):
            return [f"{name}: {len(want)} entries became {len(got)}"]
        return [
            text for i, (a, b) in enumerate(zip(want, got, strict=True)) for text in differences(a, b, f"{name}[{i}]")
        ]
    return [] if want == got else [f"{name}: {want} became {got}"]


@lru_cache(maxsize=2)
def plain(name: str, dtype: torch.dtype) -> torch.nn.Module:
    return models.build(name, dtype)


@lru_cache(maxsize=32)
def wanted(name: str, dtype: torch.dtype, num_rows: int, num_threads: int) -> Any:
    """Return what the plain module gives; it hangs on no layout, so each rank computes it once for all of them."""
    torch.set_num_threads(num_threads)
    return plain(name, dtype)(**models.inputs(name, num_rows, dtype), output_hidden_states=True)


def spread(group: dist.ProcessGroup | None, name: str, dtype: torch.dtype, layout: tuple, **options: Any) -> Any:
    return parallelize_encoder(
        copy.deepcopy(plain(name, dtype)), layout=enfold.Layout(*layout), groups=groups_of(group), **options
    )


@lru_cache
def groups_of(group: dist.ProcessGroup | None) -> Groups:
    """Make each process group once: with gloo that takes longer than most cells."""
    return Groups(group)


def cell(
    group: dist.ProcessGroup | None,
    name: str,
    dtype: torch.dtype,
    layout: tuple[int, int, int],
    cases: list[tuple[int, int]],
    options: dict[str, Any] | None = None,
) -> dict[tuple[int, int], list[str]]:
    """Return the differences for each case (rows of the batch, threads)."""
    module = spread(group, name, dtype, layout, **(options or {}))
    found: dict[tuple[int, int], list[str]] = {}
    for num_rows, num_threads in cases:
        torch.set_num_threads(num_threads)
        batch = models.inputs(name, num_rows, dtype)
        got = module(**batch, output_hidden_states=True)
        if num_rows:
            found[num_rows, num_threads] = differences(wanted(name, dtype, num_rows, num_threads), got)
        else:  # many modules can't encode zero rows: shapes and dtypes must be those of one row, without the row
            want = wanted(name, dtype, 1, num_threads)
            empty = {key: value for key, value in want.items() if isinstance(value, torch.Tensor)}
            found[num_rows, num_threads] = [
                f"{key} of an empty batch: {list(got[key].shape)} {got[key].dtype}"
                for key, value in empty.items()
                if got[key].shape != (0, *value.shape[1:]) or got[key].dtype != value.dtype
            ]
    return found
