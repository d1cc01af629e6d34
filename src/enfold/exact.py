"""What numerics="exact" takes beside gather-fold, on the CPU: each rule was found by a failure (DESIGN 5).

Activations: a vectorised loop computes the last elements of a chunk with scalar code, and for some functions scalar
and vector code round differently. Where a chunk of the tensor would end inside a vector, the tensor is lengthened.

Few rows: a matrix product with few rows takes another kernel, and with it other bits. So where a dp split leaves a
layer with few rows (a pooling head, a one-token prompt), the rows of all ranks are gathered, and every rank runs the
layer in the shape that one rank would.

A row tile: where the CPU has no bf16 instructions, several threads cut a half-precision product into pieces whose rows
round by their place. There every layer's rows are padded to whole tiles, in every mode.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enfold.blocks import Packing, split_rows, unpack_rows
from enfold.comm import Axis
from enfold.shard import wrap_forward

GRAIN_SIZE = 32768
"""at::internal::GRAIN_SIZE: a thread of an elementwise kernel gets at least this many elements."""

FEW_ROWS = 32
"""From 4 rows per thread on, row slices keep their bits (fp32 GEMM breaks at 1-3 rows per thread, bf16 at 1)."""

ROW_TILE = 16

ELEMENTWISE = (nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Mish, nn.Softplus)


def vector_unit(dtype: torch.dtype) -> int:
    """Return how many elements one step of an unrolled AVX-512 loop takes: two registers of 64 bytes."""
    return 128 // dtype.itemsize


def chunk_counts(num_elements: int, num_threads: int) -> tuple[int, int]:
    """Return into how many chunks elementwise kernels may cut a tensor: one per grain, or (GELU) one per thread."""
    return max(1, min(num_threads, -(-num_elements // GRAIN_SIZE))), num_threads


def is_aligned(num_elements: int, dtype: torch.dtype, num_threads: int) -> bool:
    """Return whether every thread's chunk of an elementwise kernel ends at the end of a vector step."""
    unit = vector_unit(dtype)
    chunks = [-(-num_elements // count) for count in chunk_counts(num_elements, num_threads)]
    return not any(size % unit for size in (num_elements, *chunks))


def aligned_size(num_elements: int, dtype: torch.dtype, num_threads: int) -> int:
    """Return the smallest number of elements found that is at least `num_elements` and aligned."""
    while not is_aligned(num_elements, dtype, num_threads):
        step = vector_unit(dtype) * math.lcm(*chunk_counts(num_elements, num_threads))
        num_elements = -(-num_elements // step) * step  # it may make one grain more: then once more
    return num_elements


def aligned_map(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply an elementwise function so that each element's bits do not hang on its place in the tensor."""
    if x.device.type != "cpu":
        return forward(x)
    num_threads = torch.get_num_threads()
    if is_aligned(x.numel(), x.dtype, num_threads):
        return forward(x)
    longer = x.new_zeros(aligned_size(x.numel(), x.dtype, num_threads))
    longer[: x.numel()] = x.reshape(-1)
    return forward(longer)[: x.numel()].view(x.shape)


def align_activations(module: nn.Module) -> None:
    """Make every activation of `module` independent of where in a tensor an element stands."""
    modules: Iterable[Any] = module.modules()
    for child in modules:
        if isinstance(child, ELEMENTWISE) or type(child).__module__ == "transformers.activations":
            wrap_forward(child, aligned_map)


@lru_cache(maxsize=1)
def has_bf16_instructions() -> bool:
    """Return whether oneDNN multiplies bf16 natively here: the CPU can, and ONEDNN_MAX_CPU_ISA does not forbid it."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    allowed = limit in ("ALL", "DEFAULT") or "BF16" in limit or "AMX" in limit or "FP16" in limit
    info = Path("/proc/cpuinfo")
    return allowed and info.is_file() and "avx512_bf16" in info.read_text()


def row_tile(x: torch.Tensor) -> int:
    """Return the number that a layer's rows are padded to a multiple of; 1 where no tile is needed."""
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    needed = x.device.type == "cpu" and is_half and torch.get_num_threads() > 1 and not has_bf16_instructions()
    return ROW_TILE if needed else 1


def tile_rows(module: nn.Module) -> None:
    """Make the rows of every linear layer independent of their place, where this CPU needs it."""
    modules: Iterable[Any] = module.modules()
    for child in modules:
        if isinstance(child, nn.Linear):
            wrap_forward(child, _tiled)


def _tiled(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    tile, num_rows = row_tile(x), x.numel() // max(1, x.shape[-1])
    if num_rows % tile == 0:
        return forward(x)
    flat = x.reshape(num_rows, x.shape[-1])
    y = forward(torch.cat([flat, flat.new_zeros(-num_rows % tile, x.shape[-1])]))
    return y[:num_rows].reshape(*x.shape[:-1], y.shape[-1])


@dataclass
class Current:
    """The packing of the call that runs now; None where its batch is not split."""

    packing: Packing | None = None


def gather_few_rows(module: nn.Module, axis: Axis, current: Current) -> None:
    """Have linear layers and attention pools run on the rows of all dp ranks where their own are few.

    Shapes are the same on all ranks, so they decide alike. The rows of an item must stand together along dimension 0.
    """
    modules: list[Any] = list(module.modules())
    for child in modules:
        if isinstance(child, nn.Linear):
            wrap_forward(child, _linear, axis, current)
        elif any(isinstance(part, nn.MultiheadAttention) for part in child.children()):
            # The whole pool, not its attention: whether that gets a mask hangs on the data of each rank.
            wrap_forward(child, _pool, axis, current)


def is_few(num_rows: int) -> bool:
    """Return whether a matrix product with `num_rows` rows may have other bits than the same rows among more."""
    return num_rows < max(FEW_ROWS, 4 * torch.get_num_threads())


def _linear(
    forward: Callable[[torch.Tensor], torch.Tensor], axis: Axis, current: Current, x: torch.Tensor
) -> torch.Tensor:
    packing = current.packing
    if packing is None or not x.numel() or not is_few(x.numel() // x.shape[-1]):
        return forward(x)
    return split_rows(forward(unpack_rows(axis.gather_rows(x), packing)), packing, axis.index)


def _pool(forward: Callable[..., Any], axis: Axis, current: Current, *args: Any, **kwargs: Any) -> Any:
    packing = current.packing
    if packing is None or not is_few(packing.share_size):
        return forward(*args, **kwargs)

    def whole(x: Any) -> Any:
        return unpack_rows(axis.gather_rows(x), packing) if isinstance(x, torch.Tensor) else x

    arguments = [whole(x) for x in args], {name: whole(x) for name, x in kwargs.items()}
    current.packing = None  # the layers inside see the whole batch
    try:
        output = forward(*arguments[0], **arguments[1])
    finally:
        current.packing = packing
    return split_rows(output, packing, axis.index)
