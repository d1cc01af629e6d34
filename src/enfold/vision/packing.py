"""pack_images and unpack_indices: which frames share a block, which rank computes it, and the receipt that undoes it.

The unit is one frame of an image or video, whole inside a block; t, h, w count patches before merging. Packing looks at
sizes only, so every rank comes to the same result by itself.

1. First-fit-decreasing says how many blocks are needed. That chooses the bucket, never the sum of patches: 600, 600 and
   600 patches need three blocks of 1024.
2. The number is rounded up to a multiple of dp. What would be empty blocks is used: where the frames also fit when each
   goes to the least loaded block, they are spread so. With fixed shapes they are not: a whole block costs the same
   however full it is, and where a frame stands in its block, which the bits of masked attention hang on, must not hang
   on dp.
3. Blocks go to ranks by cost, the costliest first, each to the least loaded rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush, heapreplace

import torch

from enfold.errors import InputError
from enfold.vision.config import VisionParallelConfig, round_up, select_vision_bucket

Grid = tuple[int, int, int]
"""(frames, rows, columns) of an image (one frame) or video, in patches."""

Cost = Callable[[int, int], float]
"""From the rows and columns of a frame to what its encoding costs, in any unit."""

ROW_TILE = 128
"""A rank's rows are padded to a multiple of this, so that no product, not even after merging 2 x 2, has few rows."""


@dataclass(frozen=True)
class Frame:
    """One frame: `item` is the image or video that it belongs to, `first` its first row in the call's pixel_values."""

    item: int
    first: int
    height: int
    width: int

    @property
    def num_tokens(self) -> int:
        """Patches of the frame."""
        return self.height * self.width


@dataclass(frozen=True)
class Block:
    """`width` tokens that hold whole frames (their numbers, in ascending order); the rest is padding."""

    width: int
    frames: tuple[int, ...]


@dataclass(frozen=True)
class ImagePacking:
    """The receipt of pack_images: frames in blocks, and for each dp rank the numbers of its blocks.

    A rank's rows are the frames of its blocks, one after another, without padding.
    """

    frames: tuple[Frame, ...]
    blocks: tuple[Block, ...]
    shares: tuple[tuple[int, ...], ...]
    loads: tuple[float, ...]
    bucket: int | None = None

    def frames_of(self, share: int) -> list[int]:
        """Return the numbers of the frames of dp rank `share`, in the order of its rows."""
        return [frame for block in self.shares[share] for frame in self.blocks[block].frames]

    @cached_property
    def rows_per_share(self) -> list[int]:
        """Number of valid tokens on each dp rank."""
        return [sum(self.frames[number].num_tokens for number in self.frames_of(share)) for share in range(self.dp)]

    @property
    def dp(self) -> int:
        """Number of dp ranks."""
        return len(self.shares)

    @property
    def num_tokens(self) -> int:
        """Valid tokens of all frames."""
        return sum(frame.num_tokens for frame in self.frames)

    @property
    def num_padded_tokens(self) -> int:
        """Tokens of all blocks, padding and empty blocks included."""
        return sum(block.width for block in self.blocks)

    @property
    def balance(self) -> float:
        """Mean over maximum of the ranks' costs: 1 where all finish together. dp can gain a factor of dp x this."""
        most = max(self.loads, default=0)
        return sum(self.loads) / (most * self.dp) if most else 1.0

    def widths(self) -> list[int]:
        """Return the widths of blocks that occur, in ascending order."""
        return sorted({block.width for block in self.blocks})


def frames_of_grids(grids: Sequence[Grid]) -> tuple[Frame, ...]:
    """Return the frames of all images and videos, in order."""
    frames: list[Frame] = []
    first = 0
    for item, (num_frames, height, width) in enumerate(grids):
        for _ in range(num_frames):
            frames.append(Frame(item, first, height, width))
            first += height * width
    return tuple(frames)


def check_admissible(frames: Sequence[Frame], config: VisionParallelConfig) -> None:
    """Raise InputError, with the limit, for a frame that no block may hold."""
    for frame in frames:
        if frame.num_tokens > config.max_vision_seq_len:
            raise InputError(
                f"image {frame.item} has {frame.height} x {frame.width} = {frame.num_tokens} patches, the limit is "
                f"max_vision_seq_len={config.max_vision_seq_len}; resize it, or raise the limit"
            )


def pack_images(grids: Sequence[Grid], config: VisionParallelConfig, dp: int, cost: Cost) -> ImagePacking:
    """Pack the frames of images and videos into blocks and spread the blocks over `dp` ranks.

    Raises InputError for a frame above config.max_vision_seq_len, ConfigError where the largest bucket is too small.
    """
    frames = frames_of_grids(grids)
    check_admissible(frames, config)
    size = config.vision_attention_block_size
    regular = [number for number, frame in enumerate(frames) if frame.num_tokens <= size]
    packed = first_fit_decreasing([frames[number].num_tokens for number in regular], size)
    num_blocks, bucket = round_up(len(packed), dp), None
    if config.num_vision_tokens_buckets is not None and packed:
        bucket, num_blocks = select_vision_bucket(len(packed), config.num_vision_tokens_buckets, size, dp)
    if not config.has_fixed_shapes:
        tokens = [frames[number].num_tokens for number in regular]
        costs = [cost(frames[number].height, frames[number].width) for number in regular]
        packed = spread_evenly(tokens, costs, num_blocks, size) or packed
    blocks = [Block(size, tuple(sorted(regular[place] for place in block))) for block in packed]
    blocks += [Block(size, ())] * (num_blocks - len(blocks))
    blocks += _wide_blocks(frames, config, dp)
    block_costs = [sum(cost(frames[i].height, frames[i].width) for i in block.frames) for block in blocks]
    shares = assign_blocks([block.width for block in blocks], block_costs, dp, even=config.has_fixed_shapes)
    loads = tuple(sum(block_costs[block] for block in share) for share in shares)
    return ImagePacking(frames, tuple(blocks), tuple(map(tuple, shares)), loads, bucket)


def _wide_blocks(frames: Sequence[Frame], config: VisionParallelConfig, dp: int) -> list[Block]:
    """Return one block for each frame that is larger than a block. With fixed shapes they come in few widths, and of
    each width as many as a multiple of dp."""
    size = config.vision_attention_block_size
    unit = size if config.has_fixed_shapes else ROW_TILE
    blocks = [
        Block(round_up(frame.num_tokens, unit), (number,))
        for number, frame in enumerate(frames)
        if frame.num_tokens > size
    ]
    if config.has_fixed_shapes:
        for width in sorted({block.width for block in blocks}):
            count = sum(block.width == width for block in blocks)
            blocks += [Block(width, ())] * (round_up(count, dp) - count)
    return blocks


def first_fit_decreasing(sizes: Sequence[int], block_size: int) -> list[list[int]]:
    """Return places grouped into blocks: the largest first (ties in order), each into the first block with room."""
    blocks: list[list[int]] = []
    room: list[int] = []
    block, last = 0, block_size
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        size = sizes[place]
        if size > block_size:
            raise ValueError(f"{size} tokens do not fit a block of {block_size}")
        block = block if size == last else 0  # a block that was too full for this size still is
        while block < len(blocks) and room[block] < size:
            block += 1
        if block == len(blocks):
            blocks.append([])
            room.append(block_size)
        blocks[block].append(place)
        room[block] -= size
        last = size
    return blocks


def spread_evenly(
    sizes: Sequence[int], costs: Sequence[float], num_blocks: int, block_size: int
) -> list[list[int]] | None:
    """Return places grouped into `num_blocks` blocks of like cost; None where they don't all fit so.

    The costliest first, each into the least loaded block that has room.
    """
    blocks: list[list[int]] = [[] for _ in range(num_blocks)]
    room, last = [block_size] * num_blocks, 0
    loads = [(0.0, number) for number in range(num_blocks)]  # a heap: the least loaded block first
    too_full: list[tuple[float, int]] = []
    for place in sorted(range(len(sizes)), key=lambda place: -costs[place]):
        if sizes[place] != last:
            for each in too_full:
                heappush(loads, each)
            too_full, last = [], sizes[place]
        while loads and room[loads[0][1]] < last:
            too_full.append(heappop(loads))
        if not loads:
            return None
        load, block = loads[0]
        heapreplace(loads, (load + costs[place], block))
        blocks[block].append(place)
        room[block] -= last
    return blocks


def assign_blocks(widths: Sequence[int], costs: Sequence[float], dp: int, *, even: bool) -> list[list[int]]:
    """Return the numbers of the blocks of each rank, ascending: the costliest first, each to the least loaded rank.

    even: every rank gets the same number of blocks of each width (whose counts are multiples of dp), so that the
    shapes are the same on all ranks.
    """
    shares: list[list[int]] = [[] for _ in range(dp)]
    loads = [0.0] * dp
    left = {(width, rank): count // dp for width, count in Counter(widths).items() for rank in range(dp)}
    for block in sorted(range(len(widths)), key=lambda block: -costs[block]):
        ranks = [rank for rank in range(dp) if not even or left[widths[block], rank] > 0]
        rank = min(ranks, key=lambda rank: loads[rank])
        shares[rank].append(block)
        loads[rank] += costs[block]
        left[widths[block], rank] -= 1
    return [sorted(share) for share in shares]


def unpack_indices(packing: ImagePacking, merge: int, order: Callable[[int, int], torch.Tensor | None]) -> torch.Tensor:
    """Return int64 [merged tokens]: for each row in the order of the call's items, its place among the gathered rows.

    Gathered are the merged rows of all dp ranks, each padded to those of the rank that has most. `order` gives, for
    the rows and columns of a frame, in which order its merge groups were computed; None: in their own.
    """
    unit = merge * merge
    share_size = max(packing.rows_per_share, default=0) // unit
    starts = [0] * len(packing.frames)
    for share in range(packing.dp):
        start = share * share_size
        for number in packing.frames_of(share):
            starts[number] = start
            start += packing.frames[number].num_tokens // unit
    places: list[torch.Tensor] = []
    for frame, start in zip(packing.frames, starts, strict=True):
        groups = order(frame.height, frame.width)
        within = torch.arange(frame.num_tokens // unit) if groups is None else torch.argsort(groups)
        places.append(within + start)
    return torch.cat(places) if places else torch.zeros(0, dtype=torch.int64)
