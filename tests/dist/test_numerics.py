"""Tests of the tests' power (each wrong form must be seen), and of the cases where plain torch is no reference."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from cells import bits, cell, differences, plain, spread
from ranks import Ranks

from enfold import exact

HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Where plain torch is no fixed reference hangs on the CPU: these controls are known to fail with AVX-512."""


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_all_reduce_fold_is_seen(ranks: Ranks, world: int, dtype: torch.dtype) -> None:
    for answer in ranks.run(cell, world, "T5", dtype, (1, 1, world), [(3, 1)], {"numerics": "fast"}):
        assert any("values differ" in text for text in answer[3, 1])


@pytest.mark.parametrize("name", ["T5", "BERT", "ModernBERT", "Qwen3", "CLIP text + projection", "SigLIP2 vision"])
def test_fast_is_close(ranks: Ranks, name: str) -> None:
    for gap in ranks.run(_fast_gap, 4, name):
        assert 0 < gap < 1e-5  # fp32


def _fast_gap(group: dist.ProcessGroup, name: str) -> float:
    batch = models.inputs(name, 3)
    got = spread(group, name, torch.float32, (1, 1, 4), numerics="fast")(**batch).last_hidden_state
    want = plain(name, torch.float32)(**batch).last_hidden_state
    return ((got - want).abs().max() / want.abs().max()).item()


def test_few_rows_without_the_rule_are_seen(ranks: Ranks) -> None:
    """A pooler on one row per rank has other bits than on four rows; with the rule (the matrix) it has the same."""
    for texts in ranks.run(_without_few_rows_rule, 4, "BERT"):
        assert any("pooler_output" in text for text in texts)


def _without_few_rows_rule(group: dist.ProcessGroup, name: str) -> list[str]:
    rule, exact.FEW_ROWS = exact.FEW_ROWS, 0
    few, exact.is_few = exact.is_few, lambda num_rows: False
    try:
        return cell(group, name, torch.float32, (1, 4, 1), [(4, 1)])[4, 1]
    finally:
        exact.FEW_ROWS, exact.is_few = rule, few


def test_a_pad_length_per_rank_is_seen(ranks: Ranks) -> None:
    """Cutting the padding of a slice changes the number of keys, and with it the bits of valid tokens."""
    (texts,) = ranks.run(_with_own_length, 1, "T5")
    assert texts


def _with_own_length(group: Any, name: str) -> list[str]:
    batch = models.inputs(name, 2, length=77)
    batch["attention_mask"][:, 61:] = 0
    module = plain(name, torch.float32)
    want = module(**batch).last_hidden_state[:, :61]
    got = module(**{key: value[:, :61].contiguous() for key, value in batch.items()}).last_hidden_state
    return differences(want.contiguous(), got, "valid tokens")


@pytest.mark.parametrize("world,layout", [(2, (1, 1, 2)), (2, (1, 2, 1)), (4, (1, 2, 2))])
def test_odd_widths_keep_the_bits_of_replicate(ranks: Ranks, world: int, layout: tuple[int, int, int]) -> None:
    """silu over 2904 features: plain torch rounds the tail of the tensor in another way, every mode here alike."""
    for to_replicate, to_plain in ranks.run(_against_replicate, world, "DINOv2 (odd width)", layout):
        assert not to_replicate
        assert to_plain or not HAS_AVX512, "plain torch has the same bits now: make it the reference"


def _against_replicate(
    group: dist.ProcessGroup, name: str, layout: tuple[int, int, int]
) -> tuple[list[str], list[str]]:
    """The tail is a few numbers long: of several batches some show it."""
    module = spread(group, name, torch.float32, layout)
    replicate = spread(group, name, torch.float32, (dist.get_world_size(group), 1, 1))
    to_replicate, to_plain = [], []
    for seed in range(6):
        batch = models.inputs(name, 5, seed=seed)
        got = module(**batch, output_hidden_states=True)
        to_replicate += differences(replicate(**batch, output_hidden_states=True), got)
        to_plain += differences(plain(name, torch.float32)(**batch, output_hidden_states=True), got)
    return to_replicate, to_plain


def test_unaligned_activations_without_the_rule_are_seen() -> None:
    """31 elements are all computed by scalar code, 31,000 nearly all by vector code."""
    silu = torch.nn.functional.silu
    x = torch.randn(31_000, generator=torch.Generator().manual_seed(0))
    parts = x.split(31)
    assert not exact.is_aligned(31, x.dtype, 1)
    assert not torch.equal(bits(silu(x)), bits(torch.cat([silu(part) for part in parts])))
    mapped = torch.cat([exact.aligned_map(silu, part) for part in parts])
    assert torch.equal(bits(exact.aligned_map(silu, x)), bits(mapped))


def test_padding_full_of_nan_reaches_no_valid_row(ranks: Ranks) -> None:
    """dp pads the batch with copies, a fold pads uneven shares: neither may read memory that is not its own."""
    for texts in ranks.run(_poisoned, 4, "CLIP text"):
        assert not texts


def _poisoned(group: dist.ProcessGroup, name: str) -> list[str]:
    empty = torch.Tensor.new_empty
    torch.Tensor.new_empty = lambda self, *shape: empty(self, *shape).fill_(255 if self.dtype == torch.uint8 else 1)
    zeros = torch.Tensor.new_zeros
    torch.Tensor.new_zeros = lambda self, *shape: zeros(self, *shape).fill_(
        float("nan") if self.is_floating_point() else 1
    )
    try:
        found = cell(group, name, torch.float32, (1, 2, 2), [(3, 1), (5, 1)])
    finally:
        torch.Tensor.new_empty, torch.Tensor.new_zeros = empty, zeros
    return [text for texts in found.values() for text in texts]


def test_the_row_tile_where_the_cpu_has_no_bf16_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads, bf16: plain torch rounds rows by their place there, so every mode has the bits of `replicate`."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    own = Ranks(4)
    try:
        for layout in ((1, 2, 2), (1, 1, 4)):
            for texts in own.run(_tiled_against_replicate, 4, "T5", layout):
                assert not texts
        without = [own.run(_rows_by_place, 2), own.run(_rows_by_place, 2)]
    finally:
        own.stop()
    needed = any(found for answer in without for found in answer)
    assert needed or not HAS_AVX512, "no tile is needed on this CPU"


def _tiled_against_replicate(group: dist.ProcessGroup, name: str, layout: tuple[int, int, int]) -> list[str]:
    torch.set_num_threads(2)
    assert not exact.has_bf16_instructions()
    batch = models.inputs(name, 5, torch.bfloat16)
    want = spread(group, name, torch.bfloat16, (4, 1, 1))(**batch, output_hidden_states=True)
    return differences(want, spread(group, name, torch.bfloat16, layout)(**batch, output_hidden_states=True))


def _rows_by_place(group: dist.ProcessGroup) -> list[int]:
    """Return numbers of rows for which a plain bf16 product with two threads has other bits than among more rows."""
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(77, 1088, generator=generator).bfloat16()
    w = torch.randn(1088, 1088, generator=generator).bfloat16() / 33
    y = torch.nn.functional.linear(x, w)
    return [rows for rows in range(32, 77) if not torch.equal(torch.nn.functional.linear(x[:rows], w), y[:rows])]
