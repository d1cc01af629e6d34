"""The rows of an image and its pooled vector as one tensor, so that scheduler and cache carry one tensor per image."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attach_pooled(rows_TD: torch.Tensor, pooled_D: torch.Tensor) -> torch.Tensor:
    """Return [T, D + ceil(D / T)]: the rows of one image, and its pooled vector in the further columns, row by row."""
    num_columns = -(-len(pooled_D) // len(rows_TD))
    padded = F.pad(pooled_D, (0, num_columns * len(rows_TD) - len(pooled_D)))
    return torch.cat([rows_TD, padded.view(-1, num_columns)], 1)


def detach_pooled(rows: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rows [T, width] of one image and its pooled vector [width], None where there is none."""
    if rows.shape[1] == width:
        return rows, None
    return rows[:, :width], rows[:, width:].flatten()[:width]
