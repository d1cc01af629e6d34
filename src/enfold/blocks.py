"""pack and split, all_gather and unpack: which rows of a batch a rank encodes, and the receipt that undoes it.

For text and fixed-size images a block is one row of the batch, padded by the caller; rows are never cut and their
length is never changed, because some pipelines attend to padding by design.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Packing:
    """The receipt of pack_rows: `num_rows` rows over `num_shares` ranks, `share_size` on each.

    The last rows of the last ranks are copies of the last row where num_rows is no multiple of num_shares.
    """

    num_rows: int
    num_shares: int

    @property
    def share_size(self) -> int:
        """Rows that each rank encodes, padding rows included."""
        return -(-self.num_rows // self.num_shares)


def pack_rows(num_rows: int, num_shares: int) -> Packing | None:
    """Return how `num_rows` are split over `num_shares` ranks; None where a split can't help: each encodes them all."""
    return Packing(num_rows, num_shares) if num_shares > 1 and num_rows > 1 else None


def split_rows(x: torch.Tensor, packing: Packing, share: int, dim: int = 0) -> torch.Tensor:
    """Return the rows of `x` along `dim` that rank `share` encodes. Rows hold k entries each where x has k*num_rows."""
    per_row = x.shape[dim] // packing.num_rows
    start = share * packing.share_size
    size = packing.share_size
    if start + size <= packing.num_rows:
        return x.narrow(dim, start * per_row, size * per_row)
    rows = torch.arange(start, start + size, device=x.device).clamp(max=packing.num_rows - 1)
    index = (rows[:, None] * per_row + torch.arange(per_row, device=x.device)).flatten()
    return x.index_select(dim, index)


def unpack_rows(gathered: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Undo split_rows for the gathered rows of all ranks: drop the padding rows at the end."""
    per_row = gathered.shape[0] // (packing.share_size * packing.num_shares)
    return gathered[: packing.num_rows * per_row]
