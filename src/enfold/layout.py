"""Layouts: how the R ranks of a replica are spread over the axes replicate x dp x tp, and where weights are cut.

Pure arithmetic: no torch, no process group.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from enfold.errors import LayoutError

Cut = tuple[int, int]
"""One rank's share of a dimension: [start, stop)."""

FEATURE_UNIT = 64
"""Output features are cut at multiples of this, so that vector loops of a shard end where the whole one's do."""


def check_size(name: str, value: object) -> int:
    """Return `value` if it is a whole number of at least 1; raise LayoutError with the name and the value else."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise LayoutError(f"{name}={value!r} is a {type(value).__name__}; use a whole number such as 1, 2 or 4")
    if value < 1:
        raise LayoutError(f"{name}={value} is smaller than 1; use 1, 2, 4, ...")
    return value


def divisors(number: int) -> list[int]:
    """Return the divisors of `number` in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]


@dataclass(frozen=True)
class Layout:
    """A grid of ranks: replicate x dp x tp, tp innermost.

    Every rank of one `dp` row holds the same slice of the batch as its tp neighbours; the ranks of one tp group hold
    the weights between them; `replicate` copies repeat the same work.
    """

    replicate: int = 1
    dp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name in ("replicate", "dp", "tp"):
            check_size(name, getattr(self, name))

    @property
    def size(self) -> int:
        """Number of ranks of the replica."""
        return self.replicate * self.dp * self.tp

    def __str__(self) -> str:
        return f"{self.replicate}x{self.dp}x{self.tp}"

    def check_fits(self, replica_size: int) -> None:
        """Raise LayoutError unless the grid has exactly `replica_size` ranks."""
        if self.size != replica_size:
            raise LayoutError(
                f"layout replicate {self.replicate} x dp {self.dp} x tp {self.tp} needs {self.size} ranks, "
                f"the replica has {replica_size}; their product must be {replica_size}"
            )


def resolve_layout(replica_size: int, tp_size: int | None = None, dp_size: int | None = None) -> Layout:
    """Return the layout for the sizes a user gave; an axis that was left out takes the ranks that remain.

    Neither given is the caller's business (a mode decides then) and raises LayoutError here.
    """
    check_size("replica_size", replica_size)
    if tp_size is None and dp_size is None:
        raise LayoutError("neither tp_size nor dp_size is given")
    for name, size in (("tp_size", tp_size), ("dp_size", dp_size)):
        if size is not None and replica_size % check_size(name, size):
            choices = ", ".join(map(str, divisors(replica_size)))
            raise LayoutError(f"{name}={size} does not divide the {replica_size} ranks; use one of {choices}")
    if tp_size is None or dp_size is None:
        given = tp_size or dp_size or 1
        rest = replica_size // given
        return Layout(1, rest, given) if dp_size is None else Layout(1, given, rest)
    if replica_size % (tp_size * dp_size):
        raise LayoutError(
            f"tp_size={tp_size} x dp_size={dp_size} = {tp_size * dp_size} does not divide the {replica_size} ranks; "
            f"with tp_size={tp_size} use a dp_size of {', '.join(map(str, divisors(replica_size // tp_size)))}"
        )
    return Layout(replica_size // (tp_size * dp_size), dp_size, tp_size)


def tp_groups(world_size: int, tp: int, dp: int) -> list[list[int]]:
    """Return the tp groups of the whole world: contiguous ranks, in rank order."""
    _check_world(world_size, tp, dp)
    return [list(range(start, start + tp)) for start in range(0, world_size, tp)]


def dp_groups(world_size: int, tp: int, dp: int) -> list[list[int]]:
    """Return the dp groups of the whole world: inside each super-group of tp x dp ranks, those at one tp coordinate."""
    _check_world(world_size, tp, dp)
    return [
        [start + column + row * tp for row in range(dp)]
        for start in range(0, world_size, tp * dp)
        for column in range(tp)
    ]


def _check_world(world_size: int, tp: int, dp: int) -> None:
    for name, size in (("world_size", world_size), ("tp", tp), ("dp", dp)):
        check_size(name, size)
    if world_size % (tp * dp):
        raise LayoutError(
            f"tp={tp} x dp={dp} = {tp * dp} does not divide world_size={world_size}; "
            f"use sizes whose product is one of {', '.join(map(str, divisors(world_size)))}"
        )


def cut_evenly(num_units: int, num_parts: int) -> list[Cut]:
    """Cut `num_units` into `num_parts` contiguous shares that differ by at most one; the first ones are larger."""
    share, extra = divmod(num_units, num_parts)
    starts = [part * share + min(part, extra) for part in range(num_parts + 1)]
    return list(pairwise(starts))


def cut_features(num_features: int, num_parts: int, unit: int = FEATURE_UNIT) -> list[Cut] | None:
    """Cut output features at multiples of `unit`; None where there are fewer units than parts (it stays whole).

    No share is narrower than a unit: the last one takes what is left over. A matrix product with a few output features
    takes another kernel, and with it other bits.
    """
    num_units = num_features // unit
    if num_units < num_parts:
        return None
    shares = cut_evenly(num_units, num_parts)
    return [(start * unit, num_features if stop == num_units else stop * unit) for start, stop in shares]


@dataclass(frozen=True)
class HeadCut:
    """One rank's share of an attention: query heads [q.start, q.stop), the key-value heads those attend with."""

    query: Cut
    key_value: Cut

    @property
    def num_query(self) -> int:
        """Number of query heads on this rank."""
        return self.query[1] - self.query[0]

    @property
    def num_key_value(self) -> int:
        """Number of key-value heads on this rank."""
        return self.key_value[1] - self.key_value[0]


def cut_heads(num_heads: int, num_kv_heads: int, num_parts: int) -> list[HeadCut] | None:
    """Cut the heads of an attention; None where a rank would get none (the attention stays whole).

    Query heads are partitioned. Key-value heads are partitioned too where there are enough; where they are fewer than
    ranks, each rank holds the one head that its query heads share, so several ranks hold a copy of it.
    """
    check_size("num_heads", num_heads)
    if num_heads % check_size("num_kv_heads", num_kv_heads):
        raise LayoutError(f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}")
    group = num_heads // num_kv_heads
    if num_kv_heads >= num_parts:
        cuts = cut_evenly(num_kv_heads, num_parts)
        return [HeadCut((start * group, stop * group), (start, stop)) for start, stop in cuts]
    heads: list[HeadCut] = []
    for kv_head, (first, last) in enumerate(cut_evenly(num_parts, num_kv_heads)):
        if last - first > group:
            return None
        for start, stop in cut_evenly(group, last - first):
            heads.append(HeadCut((kv_head * group + start, kv_head * group + stop), (kv_head, kv_head + 1)))
    return heads
