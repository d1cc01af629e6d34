"""The mesh of one encoder, and the only collectives of the data path.

An `Axis` is one line of the grid as a rank sees it: its tp neighbours, its dp column, or the whole replica. A size-1
axis is the identity and needs no process group. Collectives move bytes; only `all_reduce` (numerics="fast") adds.

Every wait goes through a `Watch` (watch.py), so that a rank that fails or dies can't leave its peers waiting.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast

import torch
import torch.distributed as dist

from enfold.errors import LayoutError, LostRankError
from enfold.layout import Layout, dp_groups, tp_groups
from enfold.watch import Op, Watch

DEFAULT_TIMEOUT_S = 60.0

LINGER_S = 0.2
"""A process that exits within milliseconds of its last gloo collective aborts now and then (torch 2.13: about one in
six, "terminate called without an active exception"), also after destroy_process_group. None of 28 did after this."""


@lru_cache(maxsize=1)
def _linger_at_exit() -> None:
    atexit.register(time.sleep, LINGER_S)


@dataclass
class Axis:
    """The ranks along one axis of the mesh, in axis order; `index` is this rank's place among them."""

    name: str
    ranks: tuple[int, ...]
    index: int
    held: weakref.ref[dist.ProcessGroup] | None
    watch: Watch

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of this axis; None for a single rank. Raises LostRankError once it is destroyed.

        Held weakly, torch keeps it alive. A spread encoder is part of reference cycles and ends with the interpreter;
        torch 2.13 aborts about every second time where a gloo group lives that long, even a destroyed one.
        """
        group = None if self.held is None else self.held()
        if group is None and self.held is not None:
            raise LostRankError(f"the process group of ranks {self.ranks} was destroyed; spread the encoder again")
        return group

    @property
    def size(self) -> int:
        """Number of ranks along this axis."""
        return len(self.ranks)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return [size, *x.shape]: the tensors of all ranks of this axis, which must agree in shape and dtype."""
        if self.size == 1:
            return x.unsqueeze(0)
        x = x.contiguous()
        gathered = x.new_empty(self.size, *x.shape)
        if x.numel():
            op = Op("all_gather", x.numel() * x.element_size(), x.device.type)
            work = _start(op, self.group, x.view(-1).view(torch.uint8), gathered.view(-1).view(torch.uint8))
            self.watch.wait(work, self.name, op)
        return gathered

    def gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks one after another: [n, ...] on every rank becomes [size * n, ...]."""
        return self.all_gather(x).flatten(0, 1)

    def gather_features(self, x: torch.Tensor, widths: Sequence[int], dim: int = -1) -> torch.Tensor:
        """Return `x` whole along `dim`, of which rank i holds `widths[i]` entries; the shares may be uneven."""
        if self.size == 1:
            return x
        widest = max(widths)
        if x.shape[dim] < widest:
            missing = list(x.shape)
            missing[dim] = widest - x.shape[dim]
            x = torch.cat([x, x.new_zeros(missing)], dim)
        parts = self.all_gather(x)
        return torch.cat([part.narrow(dim, 0, width) for part, width in zip(parts, widths, strict=True)], dim)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of this axis. The order of the sum is the backend's: numerics="fast" only."""
        if self.size == 1:
            return x
        x = x.contiguous()
        op = Op(f"all_reduce {str(x.dtype).removeprefix('torch.')}", x.numel() * x.element_size(), x.device.type)
        self.watch.wait(_start(op, self.group, x.view(-1), None), self.name, op)
        return x

    def answer(self, op: Op) -> dist.Work:
        """Join a collective that a peer waits in with zeros, so that it can end; used when this rank has failed."""
        dtype = getattr(torch, op.kind.split()[1]) if " " in op.kind else torch.uint8
        x = torch.zeros(op.num_bytes, dtype=torch.uint8, device=op.device).view(dtype)
        out = None if " " in op.kind else x.new_empty(self.size * x.numel())
        return _start(op, self.group, x, out)


def _start(op: Op, group: dist.ProcessGroup | None, x: torch.Tensor, out: torch.Tensor | None) -> dist.Work:
    if op.kind != "all_gather":
        return cast(dist.Work, dist.all_reduce(x, group=group, async_op=True))
    # torch 2.13 renamed all_gather_into_tensor.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast(dist.Work, gather(out, x, group=group, async_op=True))


@dataclass
class Groups:
    """The process groups made so far inside `parent`, by their global ranks: an equal one is reused, never made twice.

    Pass one Groups to every encoder of a pipeline. Making a group is collective over `parent`: every rank asks for the
    same groups in the same order.
    """

    parent: dist.ProcessGroup | None = None
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.parent is None and dist.is_initialized():
            self.parent = dist.group.WORLD
        if self.parent is not None:
            self.made[self.ranks] = self.parent

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the parent group; (0,) where there is no process group."""
        return (0,) if self.parent is None else tuple(dist.get_process_group_ranks(self.parent))

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return 0 if self.parent is None else dist.get_rank()

    def get(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Return the group of these global ranks, made if it is new; None for a single rank."""
        key = tuple(ranks)
        if len(key) == 1:
            return None
        if key not in self.made:
            whole_world = self.parent is dist.group.WORLD
            self.made[key] = dist.new_group(list(key), use_local_synchronization=not whole_world)
        return self.made[key]

    def adopt(self, group: dist.ProcessGroup, lines: Sequence[tuple[int, ...]]) -> None:
        """Use `group` again, which the caller has made, where its ranks are this rank's line among `lines`.

        Every rank passes its own group of one partition, so the lines of the others count as made too.
        """
        if tuple(dist.get_process_group_ranks(group)) in lines:
            own = tuple(dist.get_process_group_ranks(group))
            self.made.update({line: group if line == own else self.made.get(line) for line in lines})


@dataclass
class Mesh:
    """The grid of one encoder's replica as this rank sees it."""

    layout: Layout
    replica: Axis
    dp: Axis
    tp: Axis
    watch: Watch


def replica_ranks(world: Sequence[int], replica_size: int) -> list[tuple[int, ...]]:
    """Cut the ranks of a world into replicas of `replica_size` neighbours."""
    if len(world) % replica_size:
        raise LayoutError(f"replica_size={replica_size} does not divide the {len(world)} ranks of the group")
    return [tuple(world[start : start + replica_size]) for start in range(0, len(world), replica_size)]


def build_mesh(
    layout: Layout,
    groups: Groups,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    tp_group: dist.ProcessGroup | None = None,
) -> Mesh:
    """Return this rank's mesh for `layout`; collective over `groups.parent`, whose ranks it cuts into replicas.

    tp_group: a group that is there already (a text model's), used again where it has the ranks of this mesh's tp axis.
    Raises LayoutError where layout.size does not divide the number of ranks.
    """
    if groups.parent is not None:
        _linger_at_exit()
    world = groups.ranks
    lines = {
        "replica": replica_ranks(world, layout.size),
        "dp": [tuple(world[i] for i in line) for line in dp_groups(len(world), layout.tp, layout.dp)],
        "tp": [tuple(world[i] for i in line) for line in tp_groups(len(world), layout.tp, layout.dp)],
    }
    if tp_group is not None and layout.tp > 1:
        groups.adopt(tp_group, lines["tp"])
    made = {name: {ranks: groups.get(ranks) for ranks in line} for name, line in lines.items()}
    mine = {name: next(ranks for ranks in line if groups.rank in ranks) for name, line in lines.items()}
    control = _control_group(groups, lines["replica"], mine["replica"])
    watch = Watch(groups.rank, mine["replica"], control, timeout_s)

    def axis(name: str, group: dist.ProcessGroup | None) -> Axis:
        return Axis(
            name, mine[name], mine[name].index(groups.rank), None if group is None else weakref.ref(group), watch
        )

    mesh = Mesh(
        layout,
        replica=axis("replica", control),
        dp=axis("dp", made["dp"][mine["dp"]]),
        tp=axis("tp", made["tp"][mine["tp"]]),
        watch=watch,
    )
    watch.axes.update(replica=mesh.replica, dp=mesh.dp, tp=mesh.tp)
    return mesh


def build_watch(groups: Groups, timeout_s: float = DEFAULT_TIMEOUT_S) -> Watch:
    """Return a watch over all ranks of `groups.parent`, for work that they do together before there is a mesh."""
    return build_mesh(Layout(replicate=len(groups.ranks)), groups, timeout_s).watch


def _control_group(
    groups: Groups, replicas: Sequence[tuple[int, ...]], mine: tuple[int, ...]
) -> dist.ProcessGroup | None:
    """Return a group that carries CPU tensors for this rank's replica: what a call agrees on travels there."""
    own = groups.get(mine)
    if own is None or "cpu" in str(dist.get_backend_config(own)):
        return own
    key_of = {ranks: (*ranks, -1) for ranks in replicas}
    for ranks in replicas:
        if key_of[ranks] not in groups.made:
            whole_world = groups.parent is dist.group.WORLD
            if whole_world or mine == ranks:
                groups.made[key_of[ranks]] = dist.new_group(
                    list(ranks), backend="gloo", use_local_synchronization=not whole_world
                )
    return groups.made[key_of[mine]]
