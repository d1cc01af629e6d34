"""Every family in every layout returns the bits of the plain module on one rank. The whole table: matrix.py --full."""

from __future__ import annotations

import pytest
import torch
from cells import cell
from matrix import LAYOUTS, ODD_WIDTHS
from models import BY_NAME
from ranks import Ranks

from enfold.exact import has_bf16_instructions

SWEPT = ("T5", "CLIP text", "SigLIP vision", "Qwen3")
"""These try every batch size around the number of ranks."""

KIN = {"T5 (relu)", "mT5", "RoBERTa", "XLM-R", "SigLIP2 text", "CLIP text + projection", "CLIP vision + projection"}
KIN |= {"Llama", "Mistral", "Qwen2", "Gemma 3 text"}
"""Cut and run as another row of the table: one layout, with both axes. `make matrix` runs the rest."""


def cases(name: str, world: int, label: str, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Return (rows of the batch, threads) for one layout; none where `make matrix` alone runs it."""
    if name not in SWEPT and (world == 2 or "partial" in label or (name in KIN and label != "combined")):
        return []
    if dtype == torch.float32:
        if name in SWEPT:
            return [*((rows, 1) for rows in sorted({0, 1, world - 1, world, world + 1})), (world + 1, 2), (1, 2)]
        return [(1, 1), (world + 1, 2)]
    if not has_bf16_instructions():
        # There bf16 is several times slower than fp32, and with two threads plain torch is no reference.
        return [(world + 1, 1)] if name in SWEPT else []
    return [] if name not in SWEPT and label != "combined" else [(world + 1, 2)]


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in ODD_WIDTHS])
def test_bits_are_those_of_one_rank(ranks: Ranks, name: str) -> None:
    found = []
    for world, layouts in LAYOUTS.items():
        for label, layout in layouts.items():
            for dtype in (torch.float32, torch.bfloat16):
                if not (todo := cases(name, world, label, dtype)):
                    continue
                answers = ranks.run(cell, world, name, dtype, layout, todo)
                found += [
                    f"{label} on {world} ranks, {dtype}, rank {rank}, (rows, threads) {case}: {texts[0]}"
                    for rank, answer in enumerate(answers)
                    for case, texts in answer.items()
                    if texts
                ]
    assert not found, "\n".join(found)


def test_kin_are_rows_of_the_table() -> None:
    assert KIN | set(SWEPT) <= set(BY_NAME)
