"""How a vision tower is spread: its own tp and dp sizes, block size, buckets. Pure: no torch.

Sizes are counted in patches before merging, the tokens that the tower's layers see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from enfold.errors import ConfigError, LayoutError
from enfold.layout import Layout, check_size, divisors, resolve_layout

DEFAULT_BLOCK_SIZE = 2048

DEFAULT_MAX_SEQ_LEN = 65536
"""The largest image that the published Qwen3-VL checkpoints make: 4096 x 4096 pixels in patches of 16."""

BLOCK_UNIT = 16
"""A block holds whole merge groups of up to 4 x 4 patches."""


@dataclass
class VisionParallelConfig:
    """How one vision tower is spread over the ranks of a replica, independently of the text model.

    tp_size: ranks that share one copy of the weights. dp_size: copies that share the images of a call. Left out (None)
        is decided by `resolve_tp_dp`.
    num_vision_tokens_buckets: sizes in patches that calls are padded to; None pads to no more blocks than are needed.
    vision_attention_block_size: patches per block; an image (or frame) is always whole inside a block.
    max_vision_seq_len: patches of the largest image that is admitted (default 65,536); one that is larger than a block
        gets a wider block of its own.
    pad_blocks: compute whole blocks [N, B], padding included, so that the shapes of a bucket never change; without it
        padding is skipped. The mask of N blocks takes N * B * B bytes: set max_vision_seq_len to what is needed. All
        layouts have the bits of (tp 1, dp 1) in either form; only without padding also those of an image by itself.
    compile: torch.compile the forward of each shape (implies pad_blocks); it has no effect on a CPU.
    gather_hidden_states: gather `last_hidden_state` over dp too; without it that field is None where dp > 1, because
        no model reads it and it is larger than the features.

    Raises ConfigError or LayoutError for a value that can't be used.
    """

    tp_size: int | None = None
    dp_size: int | None = None
    num_vision_tokens_buckets: Sequence[int] | None = None
    vision_attention_block_size: int = DEFAULT_BLOCK_SIZE
    max_vision_seq_len: int = DEFAULT_MAX_SEQ_LEN
    pad_blocks: bool = False
    compile: bool = False
    gather_hidden_states: bool = False
    _world_size: int | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("tp_size", "dp_size"):
            if getattr(self, name) is not None:
                check_size(f"vision {name}", getattr(self, name))
        for name in ("vision_attention_block_size", "max_vision_seq_len"):
            check_size(name, getattr(self, name))
        for name in ("pad_blocks", "compile", "gather_hidden_states"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} can't be used; it must be True or False")
        self._check_block_size()
        if self.num_vision_tokens_buckets is not None:
            self.num_vision_tokens_buckets = _checked_buckets(self.num_vision_tokens_buckets)

    def _check_block_size(self) -> None:
        size = self.vision_attention_block_size
        if size % BLOCK_UNIT:
            near = max(BLOCK_UNIT, round(size / BLOCK_UNIT) * BLOCK_UNIT)
            raise ConfigError(f"vision_attention_block_size={size} is no multiple of {BLOCK_UNIT}; use {near}")

    def check_merge_size(self, merge_size: int) -> None:
        """Raise ConfigError where a block would end inside a merge group of merge_size x merge_size patches."""
        size, unit = self.vision_attention_block_size, merge_size**2
        if size % unit:
            near = round_up(size, math.lcm(unit, BLOCK_UNIT))
            raise ConfigError(
                f"vision_attention_block_size={size} is no multiple of {merge_size} x {merge_size} = {unit}, the "
                f"patches that this tower merges; use {near}"
            )

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether blocks are computed with their padding."""
        return self.pad_blocks or self.compile

    def resolve_tp_dp(self, world_size: int) -> tuple[int, int]:
        """Decide tp and dp for a replica of `world_size` ranks, write both back, and return (tp_size, dp_size).

        Neither given, or both 1 (the documented default): tp 1, dp world. Only tp: dp = world // tp. Only dp:
        tp = world // dp. Both: their product must be the world. With the same world a second call returns the same;
        with another it raises LayoutError.
        """
        check_size("world_size", world_size)
        if self._world_size not in (None, world_size):
            raise LayoutError(
                f"this VisionParallelConfig is resolved for {self._world_size} ranks (tp {self.tp_size} x dp "
                f"{self.dp_size}), not for {world_size}; make a new one for another number of ranks"
            )
        tp, dp = self.tp_size, self.dp_size
        for name, size in (("tp_size", tp), ("dp_size", dp)):
            if size is not None and world_size % check_size(f"vision {name}", size):
                choices = ", ".join(map(str, divisors(world_size)))
                raise LayoutError(f"vision {name}={size} does not divide the {world_size} ranks; use one of {choices}")
        if (tp, dp) in ((None, None), (1, 1)):
            tp, dp = 1, world_size
        if tp is not None and dp is not None and tp * dp != world_size:
            raise LayoutError(
                f"vision tp_size={tp} x dp_size={dp} = {tp * dp} must be the {world_size} ranks; with "
                f"tp_size={tp} use dp_size={world_size // tp}, or leave one of them out"
            )
        layout = resolve_layout(world_size, tp, dp)
        self.tp_size, self.dp_size, self._world_size = layout.tp, layout.dp, world_size
        return layout.tp, layout.dp

    def layout(self, world_size: int) -> Layout:
        """Return the layout 1 x dp x tp for a replica of `world_size` ranks; resolves the sizes."""
        tp, dp = self.resolve_tp_dp(world_size)
        return Layout(1, dp, tp)

    @property
    def num_total_vision_attention_blocks(self) -> list[int] | None:
        """Number of blocks of each bucket, smallest first; a multiple of dp once that is resolved. None: no buckets."""
        if self.num_vision_tokens_buckets is None:
            return None
        size, dp = self.vision_attention_block_size, self.dp_size or 1
        return [bucket_blocks(bucket, size, dp) for bucket in self.num_vision_tokens_buckets]


def _checked_buckets(buckets: Sequence[int]) -> tuple[int, ...]:
    if isinstance(buckets, str | bytes) or not isinstance(buckets, Sequence):
        raise ConfigError(f"num_vision_tokens_buckets={buckets!r} is no list; use one such as [2048, 8192]")
    if not buckets:
        raise ConfigError("num_vision_tokens_buckets is empty; leave it out (None), or use one such as [2048, 8192]")
    return tuple(sorted({check_size("num_vision_tokens_buckets", bucket) for bucket in buckets}))


def round_up(number: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `number`."""
    return -(-number // unit) * unit


def bucket_blocks(bucket: int, block_size: int, dp_size: int) -> int:
    """Return the number of blocks of a bucket of `bucket` patches: enough for them, and a multiple of dp_size."""
    return round_up(-(-bucket // block_size), dp_size)


def select_vision_bucket(num_blocks: int, buckets: Sequence[int], block_size: int, dp_size: int) -> tuple[int, int]:
    """Return (bucket, blocks of that bucket) for the smallest bucket that holds `num_blocks` packed blocks.

    Takes the number of blocks that packing needs, not the number of patches: whole images don't fill blocks to the
    brim. Raises ConfigError, with the limit, where the largest bucket is too small.
    """
    for bucket in sorted(buckets):
        size = bucket_blocks(bucket, block_size, dp_size)
        if size >= num_blocks:
            return bucket, size
    largest = max(buckets, default=0)
    raise ConfigError(
        f"these images need {num_blocks} blocks of {block_size} patches, and the largest of "
        f"num_vision_tokens_buckets={list(buckets)} holds {bucket_blocks(largest, block_size, dp_size)}; add a bucket "
        f"of {num_blocks * block_size}, or send fewer images per call"
    )
