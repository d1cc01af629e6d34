"""What the rows of a tower need beside their pixels, computed on the host from the sizes of frames alone.

A frame's patches come in merge order: the m x m patches of a merge group stand together, groups in raster order.
Letters: T rows of a rank, N blocks, B tokens of a block, K taps (4), D features of a head, F values of a patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from enfold.encoders.family import TowerSizes
from enfold.vision.packing import ImagePacking


@dataclass(frozen=True)
class FrameInputs:
    """The per-patch inputs of one frame of p patches, in the order in which they are computed.

    order: the merge groups in that order (int64 [p / m^2]); None: their own. windows: lengths of the attention windows.
    tap_indices int64 [K, p], tap_weights fp32 [K, p]; cos, sin fp32 [p, D]. What the tower does not have is None.
    """

    order: torch.Tensor | None
    windows: tuple[int, ...]
    tap_indices: torch.Tensor | None
    tap_weights: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None


def frame_inputs(sizes: TowerSizes, height: int, width: int) -> FrameInputs:
    """Return the per-patch inputs of a frame of `height` x `width` patches."""
    rows, columns = patch_places(height, width, sizes.merge_size)
    order, windows = window_order(sizes, height, width)
    if order is not None:
        unit = sizes.merge_size**2
        patches = (order[:, None] * unit + torch.arange(unit)).flatten()
        rows, columns = rows[patches], columns[patches]
    indices = weights = cos = sin = None
    if sizes.position_side:
        indices, weights = position_taps(rows, columns, height, width, sizes.position_side)
    elif sizes.fixed_grid is not None:
        indices, weights = (rows * width + columns)[None], torch.ones(1, len(rows))
    if sizes.rope_theta:
        cos, sin = rotary(rows, columns, sizes.head_dim, sizes.rope_theta)
    return FrameInputs(order, windows, indices, weights, cos, sin)


def patch_places(height: int, width: int, merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and the column of each patch of a frame, int64 [height * width] each, in merge order."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    shape = (height // merge, merge, width // merge, merge)
    return rows.reshape(shape).transpose(1, 2).flatten(), columns.reshape(shape).transpose(1, 2).flatten()


def position_taps(
    rows: torch.Tensor, columns: torch.Tensor, height: int, width: int, side: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the four entries of a learned side x side grid that each patch lies between, and their bilinear weights.

    The grid is resampled with its corners aligned (F.interpolate, align_corners=True). int64 [4, p], fp32 [4, p].
    """
    row_taps, row_weights = _axis_taps(rows, height, side)
    column_taps, column_weights = _axis_taps(columns, width, side)
    indices = [row * side + column for row in row_taps for column in column_taps]
    weights = [row * column for row in row_weights for column in column_weights]
    return torch.stack(indices), torch.stack(weights)


def _axis_taps(places: torch.Tensor, size: int, side: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the entries below and above each place along one axis, and their weights."""
    source = places.float() * (side - 1) / max(size - 1, 1)
    low = source.floor()
    taps = [low.long(), (low.long() + 1).clamp(max=side - 1)]
    return taps, [1 - (source - low), 1 - (source - low - 1).abs()]


def rotary(rows: torch.Tensor, columns: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, fp32 [p, head_dim]: half of the frequencies turn with the row, half with the column."""
    half = head_dim // 2
    frequencies = 1.0 / (theta ** (torch.arange(0, half, 2, dtype=torch.float) / half))
    angles = torch.cat([places[:, None].float() * frequencies for places in (rows, columns)], -1)
    return torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)


def window_order(sizes: TowerSizes, height: int, width: int) -> tuple[torch.Tensor | None, tuple[int, ...]]:
    """Return a frame's merge groups window by window, and the number of patches of each window (none is empty)."""
    side, merge = sizes.window_side, sizes.merge_size
    if not side:
        return None, ()
    groups = torch.arange((height // merge) * (width // merge)).view(height // merge, width // merge)
    windows = [tile.flatten() for band in torch.split(groups, side) for tile in torch.split(band, side, 1)]
    return torch.cat(windows), tuple(len(window) * merge * merge for window in windows)


@dataclass
class FrameTable:
    """The inputs of the frames of one call; frames of equal size (all of a video) are computed once."""

    sizes: TowerSizes
    made: dict[tuple[int, int], FrameInputs] = field(default_factory=dict)
    orders: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)

    def get(self, height: int, width: int) -> FrameInputs:
        """Return the inputs of a frame of this size."""
        key = (height, width)
        if key not in self.made:
            self.made[key] = frame_inputs(self.sizes, height, width)
        return self.made[key]

    def order(self, height: int, width: int) -> torch.Tensor | None:
        """Return the order in which a frame's merge groups are computed; None: their own."""
        key = (height, width)
        if key not in self.orders:
            self.orders[key] = window_order(self.sizes, height, width)[0]
        return self.orders[key]


# The rows of one rank: its frames one after another.


@dataclass(frozen=True)
class RowInputs:
    """The inputs of T rows: frames one after another, without padding.

    lengths: tokens of each frame. window_lengths: tokens of each attention window, empty where there are none.
    """

    pixels: torch.Tensor
    tap_indices: torch.Tensor | None
    tap_weights: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    lengths: tuple[int, ...]
    window_lengths: tuple[int, ...]


def row_inputs(table: FrameTable, packing: ImagePacking, numbers: Sequence[int], pixels: torch.Tensor) -> RowInputs:
    """Return the inputs of the frames `numbers`, at least one; `pixels` [P, F] are those of the whole call."""
    frames = [packing.frames[number] for number in numbers]
    made = [table.get(frame.height, frame.width) for frame in frames]
    unit = table.sizes.merge_size**2
    parts = [
        _in_order(pixels[frame.first : frame.first + frame.num_tokens], each.order, unit)
        for frame, each in zip(frames, made, strict=True)
    ]
    return RowInputs(
        pixels=_join(parts),
        tap_indices=_join_optional([each.tap_indices for each in made], 1),
        tap_weights=_join_optional([each.tap_weights for each in made], 1),
        cos=_join_optional([each.cos for each in made], 0),
        sin=_join_optional([each.sin for each in made], 0),
        lengths=tuple(frame.num_tokens for frame in frames),
        window_lengths=tuple(length for each in made for length in each.windows),
    )


def _in_order(pixels: torch.Tensor, order: torch.Tensor | None, unit: int) -> torch.Tensor:
    if order is None:
        return pixels
    return pixels.view(-1, unit, pixels.shape[-1])[order.to(pixels.device)].flatten(0, 1)


def _join(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def _join_optional(tensors: Sequence[torch.Tensor | None], dim: int) -> torch.Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return _join(present, dim) if present else None


# The same rows in whole blocks, padding included: the shapes of a bucket never change.


@dataclass(frozen=True)
class BlockInputs:
    """The inputs of N blocks of B tokens; padding is zero, and no token attends to it.

    pixels [N, B, F]. pos_emb_idx int64 [K, N, B], pos_emb_weight fp32 [K, N, B]. cos, sin fp32 [N, B, D].
    bound_min (inclusive), bound_max (exclusive) int32 [N, B, 1]: what a token attends to, in places of its own block;
    0 and 0 on padding. window_min, window_max: the same for layers that attend inside windows.
    """

    pixels: torch.Tensor
    pos_emb_idx: torch.Tensor | None
    pos_emb_weight: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    bound_min: torch.Tensor
    bound_max: torch.Tensor
    window_min: torch.Tensor | None
    window_max: torch.Tensor | None


def block_places(packing: ImagePacking, blocks: Sequence[int]) -> torch.Tensor:
    """Return int64 [T]: the place of each row of the frames of `blocks` (of one width) among their N * B tokens."""
    places = [torch.zeros(0, dtype=torch.int64)]
    for number, block in enumerate(blocks):
        num_tokens = sum(packing.frames[frame].num_tokens for frame in packing.blocks[block].frames)
        places.append(torch.arange(num_tokens) + number * packing.blocks[block].width)
    return torch.cat(places)


def block_inputs(table: FrameTable, packing: ImagePacking, blocks: Sequence[int], pixels: torch.Tensor) -> BlockInputs:
    """Return the inputs of `blocks`, which have one width and hold at least one frame."""
    numbers = [frame for block in blocks for frame in packing.blocks[block].frames]
    rows = row_inputs(table, packing, numbers, pixels)
    places, shape = block_places(packing, blocks), (len(blocks), packing.blocks[blocks[0]].width)

    def scatter(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else scatter_to_blocks(x, places, shape)

    def scatter_taps(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else torch.stack([scatter_to_blocks(tap, places, shape) for tap in x])

    low, high = block_bounds(rows.lengths, places, shape)
    windows = block_bounds(rows.window_lengths, places, shape) if rows.window_lengths else (None, None)
    return BlockInputs(
        scatter_to_blocks(rows.pixels, places, shape),
        scatter_taps(rows.tap_indices),
        scatter_taps(rows.tap_weights),
        scatter(rows.cos),
        scatter(rows.sin),
        low,
        high,
        *windows,
    )


def scatter_to_blocks(x: torch.Tensor, places: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return [N, B, ...]: the rows of `x` at their places, zeros elsewhere."""
    blocks = x.new_zeros(shape[0] * shape[1], *x.shape[1:])
    blocks[places.to(x.device)] = x
    return blocks.view(*shape, *x.shape[1:])


def block_bounds(
    lengths: Sequence[int], places: torch.Tensor, shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bound_min and bound_max, int32 [N, B, 1], of segments of these lengths whose rows stand at `places`."""
    starts = torch.tensor([0, *accumulate(lengths)])[:-1]
    sizes = torch.tensor(lengths)
    low = (places[starts] % shape[1]).repeat_interleave(sizes).int()
    high = low + sizes.repeat_interleave(sizes).int()
    return tuple(scatter_to_blocks(bound, places, shape).unsqueeze(-1) for bound in (low, high))  # type: ignore[return-value]
