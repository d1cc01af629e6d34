"""The same text gives the same bits whatever it was encoded with: what a cache hit needs to have the bits of a miss.

Token-wise layers see enough rows for that as they are (DESIGN 5). A layer over pooled vectors, one per text, does not:
with few rows a matrix product takes another kernel for each number of them. So there each text is a product of its own,
which is what a pipeline with one prompt runs anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from enfold.blocks import split_rows, unpack_rows
from enfold.exact import is_few
from enfold.flow import Spread
from enfold.shard import wrap_forward


def separate_texts(encoder: Any) -> None:
    """Have the linear layers of a spread encoder take the pooled vectors of a few texts one by one."""
    spread: Spread = encoder.forward.func.__self__
    for child in encoder.modules():
        if isinstance(child, nn.Linear):
            wrap_forward(child, partial(_each_row, spread))


def _each_row(spread: Spread, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    packing, axis = spread.current.packing, spread.mesh.dp
    if x.dim() != 2 or not x.numel() or not is_few(x.shape[0] * axis.size):
        return forward(x)
    if packing is None:
        return torch.cat([forward(row) for row in x.unsqueeze(1)])
    rows = unpack_rows(axis.gather_rows(x), packing)
    spread.current.packing = None  # the layer sees the rows of all ranks: nothing is left to gather
    try:
        return split_rows(torch.cat([forward(row) for row in rows.unsqueeze(1)]), packing, axis.index)
    finally:
        spread.current.packing = packing
