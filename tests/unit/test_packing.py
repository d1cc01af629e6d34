"""pack_images and unpack_indices: whole frames in blocks, blocks over dp by cost, and the receipt that undoes it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from enfold.encoders.qwen_vl import qwen2_5_sizes, qwen3_sizes
from enfold.errors import ConfigError, InputError
from enfold.vision.config import VisionParallelConfig, select_vision_bucket
from enfold.vision.geometry import FrameTable, block_places
from enfold.vision.packing import (
    ROW_TILE,
    Grid,
    ImagePacking,
    assign_blocks,
    first_fit_decreasing,
    frames_of_grids,
    pack_images,
    spread_evenly,
    unpack_indices,
)

QWEN3 = qwen3_sizes({})
QWEN2_5 = qwen2_5_sizes({})

few = settings(deadline=None, max_examples=60)
sides = st.integers(1, 6).map(lambda side: 2 * side)
grid_lists = st.lists(st.tuples(st.integers(1, 3), sides, sides), max_size=12)


def config_of(block_size: int = 64, **options: Any) -> VisionParallelConfig:
    return VisionParallelConfig(vision_attention_block_size=block_size, **options)


def pack(grids: Sequence[Grid], dp: int = 1, block_size: int = 64, **options: Any) -> ImagePacking:
    return pack_images(grids, config_of(block_size, **options), dp, QWEN3.frame_cost)


def images(*sizes: int) -> list[Grid]:
    """Return grids of images of these numbers of patches, two rows each."""
    return [(1, 2, size // 2) for size in sizes]


def sizes_in(packing: ImagePacking) -> list[list[int]]:
    """Return the sizes of the frames in each block."""
    return [[packing.frames[number].num_tokens for number in block.frames] for block in packing.blocks]


# The unit is a frame, whole inside a block.


def test_the_frames_of_a_video_are_packed_one_by_one() -> None:
    frames = frames_of_grids([(1, 2, 4), (3, 4, 2), (1, 2, 2)])
    assert [(frame.item, frame.first, frame.num_tokens) for frame in frames] == [
        (0, 0, 8), (1, 8, 8), (1, 16, 8), (1, 24, 8), (2, 32, 4)
    ]  # fmt: skip
    assert [block.frames for block in pack([(5, 6, 4)], block_size=48).blocks] == [(0, 3), (1, 4), (2,)]


@few
@given(grid_lists, st.integers(1, 5), st.booleans())
def test_each_frame_is_in_one_block_and_each_block_on_one_rank(grids: list[Grid], dp: int, pad_blocks: bool) -> None:
    packing = pack(grids, dp, pad_blocks=pad_blocks)
    assert sorted(frame for block in packing.blocks for frame in block.frames) == list(range(len(packing.frames)))
    assert sorted(block for share in packing.shares for block in share) == list(range(len(packing.blocks)))
    assert len(packing.shares) == len(packing.loads) == packing.dp == dp
    for block, sizes in zip(packing.blocks, sizes_in(packing), strict=True):
        assert sum(sizes) <= block.width, "frames are whole inside a block"
        assert list(block.frames) == sorted(block.frames), "inside a block they stand in the order of the call"
    assert packing.num_tokens == sum(t * h * w for t, h, w in grids) == sum(packing.rows_per_share)
    assert packing.num_padded_tokens == sum(block.width for block in packing.blocks)


@few
@given(grid_lists, st.integers(1, 5))
def test_the_number_of_blocks_is_a_multiple_of_dp(grids: list[Grid], dp: int) -> None:
    widths = [block.width for block in pack(grids, dp).blocks]
    assert widths.count(64) % dp == 0
    packing = pack(grids, dp, pad_blocks=True)
    for width in packing.widths():
        here = [sum(packing.blocks[block].width == width for block in share) for share in packing.shares]
        assert len(set(here)) == 1, "with fixed shapes every rank has as many blocks of each width"


@few
@given(grid_lists, st.integers(1, 5), st.booleans())
def test_every_rank_comes_to_the_same_packing(grids: list[Grid], dp: int, pad_blocks: bool) -> None:
    assert pack(grids, dp, pad_blocks=pad_blocks) == pack(list(grids), dp, pad_blocks=pad_blocks)


# First-fit-decreasing.


def test_ffd_takes_the_largest_first_and_equal_ones_in_order() -> None:
    assert first_fit_decreasing([100, 500, 300, 500, 100, 300], 1000) == [[1, 3], [2, 5, 0, 4]]
    assert first_fit_decreasing([4] * 5, 8) == [[0, 1], [2, 3], [4]]
    assert first_fit_decreasing([6, 2, 6, 2], 8) == [[0, 1], [2, 3]], "the first block with room, not the last"
    assert first_fit_decreasing([], 8) == []
    with pytest.raises(ValueError, match="9 tokens do not fit a block of 8"):
        first_fit_decreasing([1, 9], 8)


def plain_first_fit(sizes: Sequence[int], block_size: int) -> list[list[int]]:
    """Return what the definition says, step by step."""
    blocks: list[list[int]] = []
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        for block in blocks:
            if sum(sizes[other] for other in block) + sizes[place] <= block_size:
                block.append(place)
                break
        else:
            blocks.append([place])
    return blocks


@few
@given(st.lists(st.integers(1, 20), max_size=40))
def test_ffd_is_its_definition(sizes: list[int]) -> None:
    assert first_fit_decreasing(sizes, 20) == plain_first_fit(sizes, 20)


def fewest_blocks(sizes: Sequence[int], block_size: int) -> int:
    """Return the optimum: for each subset the fewest blocks, and of those the fullest room left in the last."""
    best = [(1, 0)] + [(len(sizes) + 1, 0)] * (2 ** len(sizes) - 1)
    for subset in range(1, 2 ** len(sizes)):
        for place, size in enumerate(sizes):
            if subset >> place & 1:
                blocks, used = best[subset ^ 1 << place]
                best[subset] = min(
                    best[subset], (blocks, used + size) if used + size <= block_size else (blocks + 1, size)
                )
    return best[-1][0] if sizes else 0


@few
@given(st.lists(st.integers(1, 20), max_size=8))
def test_ffd_needs_at_most_11_ninths_of_the_optimum_and_one(sizes: list[int]) -> None:
    assert len(first_fit_decreasing(sizes, 20)) <= 11 / 9 * fewest_blocks(sizes, 20) + 1


def test_blocks_come_from_ffd_with_fixed_shapes() -> None:
    assert sizes_in(pack(images(100, 500, 300, 500, 100, 300), block_size=1008, pad_blocks=True)) == [
        [500, 500], [100, 300, 100, 300]
    ]  # fmt: skip


# Pack first, then the bucket, then a multiple of dp.


def test_three_images_of_600_need_three_blocks_of_1024() -> None:
    packing = pack(images(600, 600, 600), block_size=1024)
    assert sizes_in(packing) == [[600], [600], [600]]
    assert packing.num_tokens < 2 * 1024, "a choice by the number of tokens would have taken two"


@pytest.mark.parametrize(
    ("dp", "bucket", "num_blocks"), [(1, 3072, 3), (2, 3072, 4), (3, 1024, 3), (4, 1024, 4), (8, 1024, 8)]
)
@pytest.mark.parametrize("pad_blocks", [False, True])
def test_the_bucket_is_chosen_by_blocks(dp: int, bucket: int, num_blocks: int, pad_blocks: bool) -> None:
    """By tokens, 1,800, it would always be 2048: two blocks, where three are needed."""
    buckets = [8192, 1024, 3072, 2048]
    packing = pack(images(600, 600, 600), dp, 1024, num_vision_tokens_buckets=buckets, pad_blocks=pad_blocks)
    assert (packing.bucket, len(packing.blocks)) == (bucket, num_blocks)
    config = config_of(1024, tp_size=1, dp_size=dp, num_vision_tokens_buckets=buckets)
    assert num_blocks == config.num_total_vision_attention_blocks[[1024, 2048, 3072, 8192].index(bucket)]


def test_without_buckets_there_are_no_more_blocks_than_needed() -> None:
    for dp, num_blocks in ((1, 3), (2, 4), (3, 3), (4, 4), (8, 8)):
        packing = pack(images(600, 600, 600), dp, 1024)
        assert (packing.bucket, len(packing.blocks)) == (None, num_blocks)


def test_the_smallest_bucket_that_fits() -> None:
    buckets = [4096, 1024, 2500]
    assert select_vision_bucket(1, buckets, 1024, 1) == (1024, 1)
    assert select_vision_bucket(2, buckets, 1024, 1) == (2500, 3)
    assert select_vision_bucket(2, buckets, 1024, 2) == (1024, 2)
    assert select_vision_bucket(4, buckets, 1024, 4) == (1024, 4)
    words = "need 5 blocks of 1024 patches, and the largest of num_vision_tokens_buckets=[4096, 1024, 2500] holds 4"
    with pytest.raises(ConfigError, match=re.escape(words)):
        select_vision_bucket(5, buckets, 1024, 1)


def test_too_many_images_for_the_largest_bucket_name_one_that_would_do() -> None:
    options = {"num_vision_tokens_buckets": [1024, 2048]}
    with pytest.raises(ConfigError, match=r"need 3 blocks of 1024 patches.*holds 2; add a bucket of 3072"):
        pack(images(600, 600, 600), block_size=1024, **options)
    larger = {"num_vision_tokens_buckets": [1024, 2048, 3072]}
    assert pack(images(600, 600, 600), block_size=1024, **larger).bucket == 3072


@few
@given(grid_lists, st.integers(1, 5), st.booleans())
def test_padding_follows_the_same_rule_with_buckets(grids: list[Grid], dp: int, pad_blocks: bool) -> None:
    config = config_of(
        144, tp_size=1, dp_size=dp, num_vision_tokens_buckets=[144, 600, 36 * 144], pad_blocks=pad_blocks
    )
    packing = pack_images(grids, config, dp, QWEN3.frame_cost)
    counts = config.num_total_vision_attention_blocks
    assert counts is not None
    assert len(packing.blocks) == (counts[[144, 600, 36 * 144].index(packing.bucket)] if grids else 0)


# Over the ranks: by cost.


def test_contiguous_slices_would_leave_ranks_idle() -> None:
    """FFD fills the first 4 of 16 blocks, which all fall into the first of 4 slices."""
    options = {"num_vision_tokens_buckets": [16 * 1024], "pad_blocks": True}
    packing = pack(images(*[256] * 16), 4, 1024, **options)
    assert [len(block.frames) for block in packing.blocks] == [4] * 4 + [0] * 12
    slices = [sum(len(packing.blocks[4 * rank + i].frames) for i in range(4)) for rank in range(4)]
    assert slices == [16, 0, 0, 0]
    assert packing.balance == 1.0
    assert packing.rows_per_share == [1024] * 4


def test_blocks_that_would_be_empty_are_used() -> None:
    """Five images fit one block; four ranks share them all the same."""
    packing = pack(images(200, 200, 200, 200, 200), 4, 1024)
    assert sorted(packing.rows_per_share) == [200, 200, 200, 400]


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [40, 256, 300, 600, 1024, 1500])
@pytest.mark.parametrize("per_rank", [1, 2, 5])
def test_equal_images_balance(dp: int, size: int, per_rank: int) -> None:
    packing = pack(images(*[size] * dp * per_rank), dp, 1024)
    assert packing.balance == pytest.approx(1.0)
    assert packing.rows_per_share == [size * per_rank] * dp


def test_balance_is_the_mean_over_the_maximum() -> None:
    cost = QWEN3.frame_cost(2, 300)
    packing = pack(images(600, 600, 600), 2, 1024)
    assert sorted(packing.loads) == [cost, 2 * cost]
    assert packing.balance == pytest.approx(0.75)
    assert pack([], 4).balance == 1.0


def test_cost_is_linear_and_quadratic() -> None:
    """p * (p + alpha): four images of 512 cost less than one of 2048, and a rank may have more patches for that."""
    assert QWEN3.frame_cost(32, 64) > 4 * QWEN3.frame_cost(16, 32) > 0
    assert QWEN3.frame_cost(64, 32) == 2048 * (2048 + QWEN3.linear_keys)
    packing = pack([(1, 64, 128), *[(1, 16, 16)] * 69], 2)
    assert packing.rows_per_share[0] < packing.rows_per_share[1]
    assert packing.balance > 0.99


costs_of_blocks = st.lists(st.integers(0, 50), max_size=7)


@few
@given(costs_of_blocks, st.integers(1, 3))
def test_no_rank_has_more_than_four_thirds_of_the_optimum(costs: list[int], dp: int) -> None:
    shares = assign_blocks([64] * len(costs), [float(cost) for cost in costs], dp, even=False)
    assert sorted(block for share in shares for block in share) == list(range(len(costs)))
    most = max(sum(costs[block] for block in share) for share in shares)
    optimum = min(
        max(sum(cost for cost, rank in zip(costs, ranks, strict=True) if rank == each) for each in range(dp))
        for ranks in product(range(dp), repeat=len(costs))
    )
    assert most <= (4 / 3 - 1 / (3 * dp)) * optimum + 1e-9


@few
@given(grid_lists, st.integers(1, 5))
def test_no_rank_is_a_block_above_the_mean(grids: list[Grid], dp: int) -> None:
    packing = pack(grids, dp)
    cost = {number: QWEN3.frame_cost(frame.height, frame.width) for number, frame in enumerate(packing.frames)}
    largest = max((sum(cost[number] for number in block.frames) for block in packing.blocks), default=0)
    assert max(packing.loads) <= sum(packing.loads) / dp + largest * (1 - 1 / dp) + 1e-6
    assert list(packing.loads) == [sum(cost[n] for n in packing.frames_of(share)) for share in range(dp)]


def test_with_even_shares_each_rank_has_as_many_blocks_of_each_width() -> None:
    shares = assign_blocks([64, 64, 64, 64, 128, 128], [9.0, 8.0, 1.0, 0.0, 5.0, 0.0], 2, even=True)
    assert shares == [[0, 2, 5], [1, 3, 4]]


def plain_spread(sizes: Sequence[int], costs: Sequence[float], num_blocks: int, size: int) -> list[list[int]] | None:
    """Return what the definition of spread_evenly says, step by step."""
    blocks: list[list[int]] = [[] for _ in range(num_blocks)]
    for place in sorted(range(len(sizes)), key=lambda place: (-costs[place], place)):
        fitting = [block for block in blocks if sum(sizes[other] for other in block) + sizes[place] <= size]
        if not fitting:
            return None
        min(fitting, key=lambda block: sum(costs[other] for other in block)).append(place)
    return blocks


@few
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), max_size=30), st.integers(1, 12), st.booleans())
def test_frames_are_spread_to_the_least_loaded_block_with_room(
    frames: list[tuple[int, int]], num_blocks: int, by_size: bool
) -> None:
    sizes = [size for size, _ in frames]
    costs = [float(size * (size + 7) if by_size else cost) for size, cost in frames]
    assert spread_evenly(sizes, costs, num_blocks, 20) == plain_spread(sizes, costs, num_blocks, 20)


@few
@given(grid_lists, st.integers(2, 5))
def test_with_fixed_shapes_a_frame_has_the_same_place_in_its_block_for_every_dp(grids: list[Grid], dp: int) -> None:
    """The bits of masked attention hang on it; found by 3 images whose bits were others on 2 ranks than on one."""

    def places(packing: ImagePacking) -> dict[int, tuple[int, tuple[int, ...]]]:
        return {number: (block.width, block.frames) for block in packing.blocks for number in block.frames}

    assert places(pack(grids, dp, pad_blocks=True)) == places(pack(grids, 1, pad_blocks=True))


# An image that is larger than a block.


@pytest.mark.parametrize("pad_blocks", [False, True])
def test_a_large_image_gets_a_block_of_its_own(pad_blocks: bool) -> None:
    packing = pack(images(100, 2500, 700, 1026), 2, 1024, pad_blocks=pad_blocks)
    wide = {block.frames: block.width for block in packing.blocks if block.width > 1024}
    if pad_blocks:
        assert wide == {(1,): 3072, (3,): 2048, (): 2048 if wide[()] == 2048 else 3072}
        assert sorted(block.width for block in packing.blocks) == [1024] * 2 + [2048] * 2 + [3072] * 2
    else:
        assert wide == {(1,): 2560, (3,): 1152}, f"whole tiles of {ROW_TILE}"
        assert sorted(block.width for block in packing.blocks) == [1024] * 2 + [1152, 2560]


def test_only_large_images_need_no_regular_block_and_no_bucket() -> None:
    packing = pack(images(2000, 3000), 2, 1024, num_vision_tokens_buckets=[1024])
    assert packing.bucket is None
    assert [block.frames for block in packing.blocks] == [(0,), (1,)]
    assert packing.shares == ((1,), (0,))


def test_an_image_above_the_limit_is_refused_with_the_limit() -> None:
    words = "image 1 has 50 x 60 = 3000 patches, the limit is max_vision_seq_len=2999; resize it, or raise the limit"
    with pytest.raises(InputError, match=re.escape(words)):
        pack([(1, 2, 2), (4, 50, 60)], max_vision_seq_len=2999)
    assert len(pack([(1, 2, 2), (4, 50, 60)], max_vision_seq_len=3000).frames) == 5, "a frame, not the whole video"


def test_the_limit_counts_below_the_block_size_too() -> None:
    with pytest.raises(InputError, match="= 100 patches, the limit is max_vision_seq_len=99"):
        pack(images(100), block_size=1024, max_vision_seq_len=99)


# Nothing, little, and much.


@pytest.mark.parametrize("options", [{}, {"pad_blocks": True}, {"num_vision_tokens_buckets": [64, 1024]}])
def test_no_images(options: dict[str, Any]) -> None:
    packing = pack([], 3, **options)
    assert (packing.blocks, packing.shares, packing.rows_per_share) == ((), ((), (), ()), [0, 0, 0])
    assert (packing.num_tokens, packing.num_padded_tokens, packing.balance, packing.bucket) == (0, 0, 1.0, None)
    assert unpack_indices(packing, 2, lambda *_: None).tolist() == []


def test_fewer_images_than_ranks() -> None:
    packing = pack([(1, 4, 4)], 4)
    assert sorted(packing.rows_per_share) == [0, 0, 0, 16]
    assert len(packing.blocks) == 4


def test_twenty_thousand_small_images_are_packed_in_no_time() -> None:
    """About 0.3 s with their unpacking; quadratic loops took 4 s, and 6 s for a video of 2,000 frames."""
    grids = [(1, 2 + 2 * (i * i % 5), 2 + 2 * (i % 7)) for i in range(20_000)]
    for each, block_size in ((grids, 2048), ([(2000, 30, 40)], 2048), ([(2000, 60, 80)], 2048)):
        start = time.monotonic()
        packing = pack(each, 16, block_size)
        unpack_indices(packing, 2, FrameTable(QWEN2_5).order)
        assert time.monotonic() - start < 4
        assert packing.balance > 0.99


# The receipt: unpack_indices.


def gathered_rows(packing: ImagePacking, merge: int, order: Callable[[int, int], torch.Tensor | None]) -> torch.Tensor:
    """Return [rows, 2]: (frame, merge group) of each row that the ranks gather, -1 on the padding of short shares."""
    unit = merge * merge
    most = max(packing.rows_per_share, default=0) // unit
    shares = []
    for share in range(packing.dp):
        rows = [torch.zeros(0, 2, dtype=torch.int64)]
        for number in packing.frames_of(share):
            frame = packing.frames[number]
            groups = order(frame.height, frame.width)
            groups = torch.arange(frame.num_tokens // unit) if groups is None else groups
            rows.append(torch.stack([torch.full_like(groups, number), groups], 1))
        share_rows = torch.cat(rows)
        shares.append(torch.cat([share_rows, torch.full((most - len(share_rows), 2), -1)]))
    return torch.cat(shares)


@few
@given(grid_lists, st.integers(1, 5), st.booleans(), st.booleans())
def test_unpacking_inverts_packing(grids: list[Grid], dp: int, pad_blocks: bool, windows: bool) -> None:
    """Rows come back in the order of the call, whatever order windows were computed in."""
    packing = pack(grids, dp, pad_blocks=pad_blocks)
    order = FrameTable(QWEN2_5 if windows else QWEN3).order
    rows = gathered_rows(packing, 2, order)[unpack_indices(packing, 2, order)]
    frames = enumerate(packing.frames)
    assert rows.tolist() == [[number, group] for number, frame in frames for group in range(frame.num_tokens // 4)]


@few
@given(grid_lists, st.integers(1, 4))
def test_unpacking_without_merging(grids: list[Grid], dp: int) -> None:
    packing = pack(grids, dp)
    rows = gathered_rows(packing, 1, lambda *_: None)[unpack_indices(packing, 1, lambda *_: None)]
    assert rows.tolist() == [[n, patch] for n, frame in enumerate(packing.frames) for patch in range(frame.num_tokens)]


def test_windows_change_the_order_of_an_odd_grid() -> None:
    """Else the test above would hold without undoing it."""
    order = FrameTable(QWEN2_5).order(12, 20)
    assert order is not None and order.tolist() != list(range(60))
    assert sorted(order.tolist()) == list(range(60))


@few
@given(grid_lists, st.integers(1, 4))
def test_rows_of_whole_blocks_stand_where_block_places_says(grids: list[Grid], dp: int) -> None:
    packing = pack(grids, dp, pad_blocks=True)
    for share in packing.shares:
        for width in packing.widths():
            blocks = [block for block in share if packing.blocks[block].width == width]
            want = [
                number * width + place
                for number, block in enumerate(blocks)
                for place in range(sum(packing.frames[frame].num_tokens for frame in packing.blocks[block].frames))
            ]
            assert block_places(packing, blocks).tolist() == want
