"""What rows need beside their pixels, against Transformers' own functions bit by bit; the shapes of whole blocks."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import towers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from enfold.encoders import family_of
from enfold.encoders.family import TowerSizes
from enfold.encoders.qwen_vl import qwen2_5_sizes, qwen3_sizes
from enfold.vision.config import VisionParallelConfig
from enfold.vision.geometry import (
    BlockInputs,
    FrameTable,
    block_inputs,
    block_places,
    frame_inputs,
    patch_places,
    position_taps,
    rotary,
    row_inputs,
    window_order,
)
from enfold.vision.packing import Grid, ImagePacking, pack_images

few = settings(deadline=None, max_examples=40)
even_sides = st.integers(1, 40).map(lambda side: 2 * side)

SHAPES = [
    (2, 2),
    (2, 4),
    (4, 2),
    (2, 80),
    (80, 2),
    (24, 24),
    (22, 26),
    (96, 96),
    (98, 94),
    (14, 6),
    (64, 46),
    (10, 130),
]
"""Sides below, at and above those of the learned grid (12, 48) and of windows (8 patches); multiples or not."""


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of finite values agree in shape, dtype and bits, the sign of a zero included."""
    same = a.dtype == b.dtype and torch.equal(a, b)
    return same and torch.equal(torch.signbit(a), torch.signbit(b))


def grid(height: int, width: int, frames: int = 1) -> torch.Tensor:
    return torch.tensor([[frames, height, width]])


# Taps and weights of the learned positions.


@pytest.mark.parametrize("side", [1, 2, 12, 48])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_taps_are_those_of_transformers(shape: tuple[int, int], side: int) -> None:
    indices, weights = position_taps(*patch_places(*shape, 2), *shape, side)
    want = get_vision_interpolation_indices_and_weights(
        grid(*shape), side, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    assert indices.dtype == torch.int64 and weights.dtype == torch.float32
    assert indices.shape == weights.shape == (4, shape[0] * shape[1])
    assert torch.equal(indices.T, want[0])
    assert bits_equal(weights, want[1].T)


@few
@given(even_sides, even_sides, st.integers(1, 50))
def test_taps_of_any_shape(height: int, width: int, side: int) -> None:
    indices, weights = position_taps(*patch_places(height, width, 2), height, width, side)
    want = get_vision_interpolation_indices_and_weights(
        grid(height, width), side, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    assert torch.equal(indices.T, want[0]) and bits_equal(weights, want[1].T)
    assert int(indices.min()) >= 0 and int(indices.max()) < side * side
    assert torch.allclose(weights.sum(0), torch.ones(height * width), atol=1e-5)


def test_taps_without_merging_and_on_axes_of_one_patch() -> None:
    """Towers that merge nothing have raster order and odd sides; an axis of one patch lies at coordinate 0."""
    for shape in ((1, 1), (1, 7), (7, 1), (3, 5)):
        indices, weights = position_taps(*patch_places(*shape, 1), *shape, 12)
        want = get_vision_interpolation_indices_and_weights(grid(*shape), 12, align_corners=True)
        assert torch.equal(indices.T, want[0]) and bits_equal(weights, want[1].T)


def test_corners_of_the_image_are_corners_of_the_grid() -> None:
    """align_corners=True: the other convention would put them between entries."""
    rows, columns = patch_places(10, 14, 2)
    indices, weights = position_taps(rows, columns, 10, 14, 12)
    corner = (rows == 9) & (columns == 13)
    assert (indices[:, corner] * (weights[:, corner] == 1)).sum() == 143
    other = get_vision_interpolation_indices_and_weights(grid(10, 14), 12, align_corners=False, spatial_merge_size=2)
    assert not torch.equal(weights.T, other[1]), "negative control"


def test_the_whole_table_is_used_as_interpolate_would() -> None:
    table = torch.randn(144, 5, generator=torch.Generator().manual_seed(0))
    indices, weights = position_taps(*patch_places(20, 6, 1), 20, 6, 12)
    mine = (table[indices] * weights[..., None]).sum(0)
    square = table.T.reshape(1, 5, 12, 12)
    want = nn.functional.interpolate(square, (20, 6), mode="bilinear", align_corners=True)[0].flatten(1).T
    assert torch.allclose(mine, want, atol=1e-5)


# Rotary positions, and the order of patches that everything hangs on.


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_patches_are_in_the_order_of_transformers(shape: tuple[int, int]) -> None:
    for merge in (1, 2):
        assert torch.equal(torch.stack(patch_places(*shape, merge), 1), get_vision_position_ids(grid(*shape), merge))


@pytest.mark.parametrize("name", ["Qwen3-VL", "Qwen2.5-VL", "Qwen2-VL", "Qwen3.5"])
@pytest.mark.parametrize("shape", [(2, 2), (2, 80), (22, 26), (98, 94)], ids=str)
def test_rotary_positions_are_those_of_the_module(name: str, shape: tuple[int, int]) -> None:
    module: Any = rotary_of(name)
    sizes = sizes_of(name)
    cos, sin = rotary(*patch_places(*shape, 2), sizes.head_dim, sizes.rope_theta)
    want = module(torch.zeros(1), get_vision_position_ids(grid(*shape), 2))
    assert cos.shape == sin.shape == (shape[0] * shape[1], sizes.head_dim)
    assert bits_equal(cos, want[0]) and bits_equal(sin, want[1])


def config_of(name: str) -> Any:
    configs = {
        "Qwen3-VL": towers.Qwen3VLVisionConfig(hidden_size=1152, num_heads=16),
        "Qwen2.5-VL": towers.Qwen2_5_VLVisionConfig(hidden_size=1280, num_heads=16),
        "Qwen2-VL": towers.Qwen2VLVisionConfig(embed_dim=1280, num_heads=16),
        "Qwen3.5": towers.Qwen3_5VisionConfig(hidden_size=544, num_heads=8),
    }
    return configs[name]


def rotary_of(name: str) -> nn.Module:
    """Return the class's own rotary embedding, without the rest of the tower."""
    config = config_of(name)
    model = {
        "Qwen3-VL": towers.hf.Qwen3VLVisionModel,
        "Qwen2.5-VL": towers.Qwen2_5_VisionTransformerPretrainedModel,
        "Qwen2-VL": towers.Qwen2VisionTransformerPretrainedModel,
        "Qwen3.5": towers.Qwen3_5VisionModel,
    }[name]
    with torch.device("meta"):
        made = type(model(config).rotary_pos_emb)
    return made(config)


def sizes_of(name: str) -> TowerSizes:
    family = family_of(config_of(name).model_type)
    assert family is not None and family.tower is not None
    return family.tower.read(config_of(name).to_dict())


# Windows.

QWEN2_5 = qwen2_5_sizes({"hidden_size": 1280})
WINDOW_SHAPES = [(2, 2), (2, 6), (8, 8), (16, 24), (10, 8), (8, 10), (14, 22), (2, 50), (50, 2), (18, 34), (6, 6)]


def check_windows(sizes: TowerSizes, height: int, width: int, window_size: int) -> None:
    order, lengths = window_order(sizes, height, width)
    index, bounds = get_vision_window_index(grid(height, width), sizes.merge_size, window_size, sizes.patch_size)
    assert order is not None and torch.equal(order, index)
    assert list(lengths) == torch.diff(bounds).tolist()
    assert min(lengths) > 0 and sum(lengths) == height * width


@pytest.mark.parametrize("shape", WINDOW_SHAPES, ids=str)
def test_windows_are_those_of_transformers(shape: tuple[int, int]) -> None:
    check_windows(QWEN2_5, *shape, 112)


@few
@given(even_sides, even_sides, st.sampled_from([28, 56, 84, 112, 140, 224]))
def test_windows_of_any_shape_and_size(height: int, width: int, window_size: int) -> None:
    check_windows(qwen2_5_sizes({"window_size": window_size}), height, width, window_size)


def test_windows_of_a_video_are_those_of_its_frames() -> None:
    order, lengths = window_order(QWEN2_5, 10, 14)
    index, bounds = get_vision_window_index(grid(10, 14, frames=3), 2, 112, 14)
    assert order is not None
    assert torch.equal(torch.cat([order + 35 * frame for frame in range(3)]), index)
    assert list(lengths) * 3 == torch.diff(bounds).tolist()


def test_a_tower_without_windows_keeps_its_order() -> None:
    assert window_order(qwen3_sizes({}), 10, 14) == (None, ())


def test_all_inputs_of_a_frame_follow_its_windows() -> None:
    made = frame_inputs(replace(QWEN2_5, position_side=12), 10, 14)
    plain = frame_inputs(replace(QWEN2_5, position_side=12, window_side=0), 10, 14)
    assert made.order is not None and plain.order is None
    patches = (made.order[:, None] * 4 + torch.arange(4)).flatten()
    for mine, want in ((made.cos, plain.cos), (made.sin, plain.sin)):
        assert mine is not None and want is not None and torch.equal(mine, want[patches])
    for mine, want in ((made.tap_indices, plain.tap_indices), (made.tap_weights, plain.tap_weights)):
        assert mine is not None and want is not None and torch.equal(mine, want[:, patches])


# Whole blocks: [N, B, ...] of N blocks of B tokens.

GRIDS: list[Grid] = [(1, 2, 6), (2, 4, 4), (1, 8, 10), (1, 6, 2), (1, 2, 4), (1, 10, 4)]
BLOCK = 80
LEARNED = replace(QWEN2_5, position_side=12)
"""A tower that has everything: learned positions, rotary ones, windows."""


def packed(dp: int = 2, grids: list[Grid] = GRIDS) -> ImagePacking:
    config = VisionParallelConfig(vision_attention_block_size=BLOCK, pad_blocks=True)
    return pack_images(grids, config, dp, QWEN2_5.frame_cost)


def tagged_pixels(grids: list[Grid] = GRIDS) -> torch.Tensor:
    """Return pixels [P, F] whose first value is the number of the patch, counted from 1."""
    num_patches = sum(t * h * w for t, h, w in grids)
    return torch.arange(1.0, num_patches + 1)[:, None].repeat(1, QWEN2_5.patch_features)


def blocks_of(share: int = 0, sizes: TowerSizes = LEARNED) -> tuple[ImagePacking, list[int], BlockInputs]:
    packing = packed()
    blocks = list(packing.shares[share])
    return packing, blocks, block_inputs(FrameTable(sizes), packing, blocks, tagged_pixels())


def test_shapes_and_precisions_of_blocks() -> None:
    _, blocks, made = blocks_of()
    count = len(blocks)
    assert count == 2
    shapes = {
        "pixels": ((count, BLOCK, 1176), torch.float32),
        "pos_emb_idx": ((4, count, BLOCK), torch.int64),
        "pos_emb_weight": ((4, count, BLOCK), torch.float32),
        "cos": ((count, BLOCK, 80), torch.float32),
        "sin": ((count, BLOCK, 80), torch.float32),
        "bound_min": ((count, BLOCK, 1), torch.int32),
        "bound_max": ((count, BLOCK, 1), torch.int32),
        "window_min": ((count, BLOCK, 1), torch.int32),
        "window_max": ((count, BLOCK, 1), torch.int32),
    }
    found = {name: (tuple(getattr(made, name).shape), getattr(made, name).dtype) for name in shapes}
    assert found == shapes
    assert set(shapes) == {field.name for field in fields(BlockInputs)}


def test_positions_are_fp32_whatever_the_pixels_are() -> None:
    packing = packed()
    made = block_inputs(FrameTable(LEARNED), packing, packing.shares[0], tagged_pixels().bfloat16())
    assert made.pixels.dtype == torch.bfloat16
    positions = (made.pos_emb_weight, made.cos, made.sin)
    assert {x.dtype for x in positions if x is not None} == {torch.float32}


def test_what_a_tower_lacks_is_none() -> None:
    packing = packed()
    sizes = replace(QWEN2_5, rope_theta=0.0, window_side=0)
    made = block_inputs(FrameTable(sizes), packing, packing.shares[0], tagged_pixels())
    absent = ("pos_emb_idx", "pos_emb_weight", "cos", "sin", "window_min", "window_max")
    assert [getattr(made, name) for name in absent] == [None] * 6


def expected_bounds(packing: ImagePacking, blocks: list[int], windows: bool) -> list[list[tuple[int, int]]]:
    """Return (min, max) of each token of each block, from the definition."""
    found = []
    for block in blocks:
        bounds: list[tuple[int, int]] = []
        for number in packing.blocks[block].frames:
            frame = packing.frames[number]
            lengths = window_order(QWEN2_5, frame.height, frame.width)[1] if windows else (frame.num_tokens,)
            for length in lengths:
                bounds += [(len(bounds), len(bounds) + length)] * length
        found.append(bounds + [(0, 0)] * (BLOCK - len(bounds)))
    return found


@pytest.mark.parametrize("share", [0, 1])
@pytest.mark.parametrize("windows", [False, True])
def test_bounds_are_local_to_the_block_and_zero_on_padding(share: int, windows: bool) -> None:
    packing, blocks, made = blocks_of(share)
    low, high = (made.window_min, made.window_max) if windows else (made.bound_min, made.bound_max)
    assert low is not None and high is not None
    found = torch.cat([low, high], -1).tolist()
    assert [[tuple(pair) for pair in block] for block in found] == expected_bounds(packing, blocks, windows)


def test_a_block_that_is_all_padding() -> None:
    packing = packed(dp=4, grids=[(1, 2, 4)] * 2)
    blocks = [packing.shares[0][0], packing.shares[3][0]]
    made = block_inputs(FrameTable(LEARNED), packing, blocks, tagged_pixels([(1, 2, 4)] * 2))
    assert made.bound_max[0].any() and not made.bound_max[1].any()
    assert not made.pixels[1].any() and not made.cos[1].any()  # type: ignore[index]


def test_blocks_hold_the_rows_and_zeros_elsewhere() -> None:
    """Pixels and positions of each frame stand together, in the order of its windows; padding is zero."""
    packing, blocks, made = blocks_of()
    numbers = [number for block in blocks for number in packing.blocks[block].frames]
    rows = row_inputs(FrameTable(LEARNED), packing, numbers, tagged_pixels())
    places = block_places(packing, blocks)
    padding = torch.ones(len(blocks) * BLOCK, dtype=torch.bool)
    padding[places] = False
    assert padding.any() and torch.equal(padding, (made.bound_max == 0).flatten())
    for name, mine in (("pixels", made.pixels), ("cos", made.cos), ("sin", made.sin)):
        flat = mine.flatten(0, 1)  # type: ignore[union-attr]
        assert torch.equal(flat[places], getattr(rows, name)) and not flat[padding].any()
    for name, mine in (("tap_indices", made.pos_emb_idx), ("tap_weights", made.pos_emb_weight)):
        flat = mine.flatten(1)  # type: ignore[union-attr]
        assert torch.equal(flat[:, places], getattr(rows, name)) and not flat[:, padding].any()


def test_rows_take_the_pixels_of_their_own_frames() -> None:
    packing = packed()
    for share in range(2):
        numbers = packing.frames_of(share)
        rows = row_inputs(FrameTable(QWEN2_5), packing, numbers, tagged_pixels())
        start = 0
        for number in numbers:
            frame = packing.frames[number]
            mine = rows.pixels[start : start + frame.num_tokens, 0]
            order = window_order(QWEN2_5, frame.height, frame.width)[0]
            patches = torch.arange(frame.num_tokens).view(-1, 4)[order].flatten()
            assert torch.equal(mine, frame.first + 1.0 + patches)
            start += frame.num_tokens
        assert rows.lengths == tuple(packing.frames[number].num_tokens for number in numbers)
        assert sum(rows.window_lengths) == sum(rows.lengths) == len(rows.pixels)


# A rank materialises only its own.


def num_bytes(inputs: Any) -> int:
    tensors = [getattr(inputs, field.name) for field in fields(inputs)]
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("pad_blocks", [False, True])
def test_a_rank_materialises_only_its_own_blocks(pad_blocks: bool) -> None:
    grids: list[Grid] = [(1, 8, 10)] * 8
    config = VisionParallelConfig(vision_attention_block_size=BLOCK, pad_blocks=pad_blocks)
    pixels = tagged_pixels(grids)

    def bytes_of(dp: int) -> list[int]:
        packing = pack_images(grids, config, dp, QWEN2_5.frame_cost)
        made: list[Any] = [
            block_inputs(FrameTable(LEARNED), packing, packing.shares[share], pixels)
            if pad_blocks
            else row_inputs(FrameTable(LEARNED), packing, packing.frames_of(share), pixels)
            for share in range(dp)
        ]
        return [num_bytes(each) for each in made]

    whole = bytes_of(1)[0]
    assert bytes_of(2) == [whole / 2] * 2
    assert bytes_of(4) == [whole / 4] * 4


def test_frames_of_one_size_are_computed_once() -> None:
    table = FrameTable(LEARNED)
    packing = packed(dp=1, grids=[(40, 4, 6), (1, 4, 6), (1, 6, 4)])
    row_inputs(table, packing, range(42), tagged_pixels([(40, 4, 6), (1, 4, 6), (1, 6, 4)]))
    assert sorted(table.made) == [(4, 6), (6, 4)]
    assert table.get(4, 6) is table.get(4, 6)
    assert table.order(4, 6) is table.order(4, 6)
