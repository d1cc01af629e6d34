"""Every vision tower in every layout returns the bits of (tp 1, dp 1), and n packed images those of n single runs."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
import towers
from ranks import Ranks
from tower_cells import cell

SIZES = {2: [(1, 2), (2, 1)], 4: [(1, 4), (2, 2), (4, 1)]}
"""(tp, dp) by number of ranks, for Qwen3-VL; tower_matrix.py runs them for every family."""

FEW_SIZES = {4: [(2, 2), (4, 1)]}

FEW = ["1 image", "5 mixed", "one huge, three small", "two videos, one image"]
SETS = {
    **{(name, torch.float32): FEW for name in towers.TOWERS},
    ("Qwen3-VL", torch.float32): list(towers.IMAGES),
    ("Qwen3-VL", torch.bfloat16): ["5 mixed"],
    ("Qwen2.5-VL", torch.bfloat16): ["5 mixed"],
}


@lru_cache
def reference(name: str, dtype: torch.dtype) -> dict[str, dict[str, str]]:
    with torch.no_grad():
        return cell(None, name, dtype, (1, 1), SETS[name, dtype])


@pytest.mark.parametrize(("name", "dtype"), SETS, ids=lambda value: str(value).removeprefix("torch."))
def test_bits_are_those_of_one_rank(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    want = reference(name, dtype)
    found = [
        f"tp {sizes[0]} x dp {sizes[1]}, rank {rank}, {which}, {key}: {outputs.get(key)} is not {value}"
        for world, layouts in (SIZES if name == "Qwen3-VL" else FEW_SIZES).items()
        for sizes in layouts
        for rank, answer in enumerate(ranks.run(cell, world, name, dtype, sizes, SETS[name, dtype]))
        for which, outputs in answer.items()
        for key, value in want[which].items()
        if outputs.get(key) != value
    ]
    assert not found, "\n".join(found)
