"""How the ranks serve a diffusion pipeline: replicas, and what splits the transformer (DiT) inside a replica.

Pure arithmetic: no torch. The encoders' layout is another matter (enfold.layout): all ranks of a replica are their
ranks, whatever the DiT does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

from enfold.errors import InputError, LayoutError
from enfold.layout import check_size, divisors

DENOISERS = ("transformer", "transformer_2", "unet")
"""Components that a pipeline denoises with, by their names in model_index.json; Wan 2.2 has two."""

AXES = ("dp", "copies", "tp", "ring", "ulysses")
"""Outermost first: the ranks of a replica are contiguous, and inside it ulysses neighbours are."""


@dataclass(frozen=True)
class PipelineLayout:
    """How num_ranks ranks serve one pipeline: dp replicas of copies x tp x ring x ulysses ranks each.

    ulysses and ring cut the tokens of the DiT, tp its weights; the ranks of `copies` run it whole, each the same work.
    Replicas serve requests of their own. A DiT is either split or copied.
    """

    dp: int = 1
    tp: int = 1
    ring: int = 1
    ulysses: int = 1
    copies: int = 1

    def __post_init__(self) -> None:
        for name in AXES:
            check_size(name, getattr(self, name))
        if self.is_split and self.copies > 1:
            raise LayoutError(
                f"tp {self.tp} x ring {self.ring} x ulysses {self.ulysses} split the DiT, copies={self.copies} run it "
                f"whole; use dp={self.dp * self.copies} for more replicas, or tp, ring and ulysses of 1"
            )

    @property
    def replica_size(self) -> int:
        """Number of ranks that serve one request together."""
        return self.copies * self.tp * self.ring * self.ulysses

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all replicas."""
        return self.dp * self.replica_size

    @property
    def is_split(self) -> bool:
        """Whether the ranks of a replica share the work of the DiT."""
        return self.tp * self.ring * self.ulysses > 1

    def ranks_of(self, replica: int) -> range:
        """Return the ranks of replica 0, 1, ..., dp - 1; LayoutError for any other."""
        if not 0 <= replica < self.dp:
            raise LayoutError(f"replica {replica} of {self.dp}; use 0 to {self.dp - 1}")
        return range(replica * self.replica_size, (replica + 1) * self.replica_size)

    def __str__(self) -> str:
        middle = (
            f"copies {self.copies}" if self.copies > 1 else f"tp {self.tp} x ring {self.ring} x ulysses {self.ulysses}"
        )
        return f"dp {self.dp} x {middle}"


def resolve_pipeline_layout(
    num_ranks: int,
    *,
    ulysses: int | None = None,
    ring: int | None = None,
    tp: int | None = None,
    dp: int | None = None,
    split_dit: bool = True,
    transformer: str = "FluxTransformer2DModel",
    can_split_sequence: bool = True,
    can_split_weights: bool = True,
    num_heads: int | None = None,
) -> PipelineLayout:
    """Return the layout of `num_ranks` ranks for the sizes a user gave; raise LayoutError where they don't fit.

    ring, tp and dp that were left out are 1, and ulysses takes what they leave. `split_dit=False` (--whole-dit): every
    rank of a replica runs the whole DiT. `transformer` is the name of the DiT's class, the two `can_split` are what
    Diffusers says of it (enfold.diffusion.split.split_facts), `num_heads` its attention heads where they are known.
    """
    check_size("--num-gpus", num_ranks)
    given = {"--ulysses-degree": ulysses, "--ring-degree": ring, "--tp-size": tp, "--dp-size": dp}
    for flag, size in given.items():
        if size is not None:
            check_size(flag, size)
    replicas = dp or 1
    if not split_dit:
        return _whole(num_ranks, replicas, {flag: size for flag, size in given.items() if flag != "--dp-size"})
    if ulysses is None:
        ulysses = _rest(num_ranks, replicas, tp or 1, ring or 1)
    layout = PipelineLayout(replicas, tp or 1, ring or 1, ulysses)
    _check_kind(layout, num_ranks, transformer, can_split_sequence, can_split_weights)
    _check_product(layout, num_ranks)
    _check_heads(layout, transformer, num_heads)
    return layout


def _whole(num_ranks: int, dp: int, splits: dict[str, int | None]) -> PipelineLayout:
    for flag, size in splits.items():
        if size is not None and size > 1:
            raise LayoutError(
                f"{flag} {size} splits the DiT, --whole-dit keeps it whole on every rank; drop one of them"
            )
    if num_ranks % dp:
        choices = ", ".join(map(str, divisors(num_ranks)))
        raise LayoutError(f"--dp-size {dp} does not divide --num-gpus {num_ranks}; use one of {choices}")
    return PipelineLayout(dp, copies=num_ranks // dp)


def _rest(num_ranks: int, dp: int, tp: int, ring: int) -> int:
    """Return the ranks that dp x tp x ring leave to ulysses."""
    taken = dp * tp * ring
    if num_ranks % taken:
        raise LayoutError(
            f"--dp-size {dp} x --tp-size {tp} x --ring-degree {ring} = {taken} does not divide --num-gpus {num_ranks}; "
            f"use sizes whose product is one of {', '.join(map(str, divisors(num_ranks)))}"
        )
    return num_ranks // taken


def _check_kind(layout: PipelineLayout, num_ranks: int, transformer: str, sequence: bool, weights: bool) -> None:
    """Raise LayoutError where Diffusers can't split this DiT in the way that the layout asks for."""
    tokens = layout.ring * layout.ulysses
    where = f"--num-gpus {num_ranks}: {transformer}"
    whole = f"use --dp-size {num_ranks} for {num_ranks} replicas, or --whole-dit to run it whole on every rank"
    if tokens > 1 and not sequence:
        tensor = f", or --tp-size {num_ranks // layout.dp} to split its weights" if weights else ""
        raise LayoutError(f"{where} can't be split over ranks (no _cp_plan in Diffusers); {whole}{tensor}")
    if layout.tp > 1 and not weights:
        other = f", or --ulysses-degree {layout.tp} to split its tokens" if sequence else ""
        raise LayoutError(
            f"{where} can't be split over --tp-size {layout.tp} ranks (no _tp_plan in Diffusers); {whole}{other}"
        )
    if tokens > 1 and layout.tp > 1:
        raise LayoutError(
            f"{where} is split by its weights or by its tokens in Diffusers, not by both: --tp-size {layout.tp}, and "
            f"ring {layout.ring} x ulysses {layout.ulysses}; use --tp-size 1, or --ulysses-degree 1 --ring-degree 1 "
            f"and --tp-size x --dp-size = {num_ranks}"
        )


def _check_product(layout: PipelineLayout, num_ranks: int) -> None:
    if layout.num_ranks == num_ranks:
        return
    if num_ranks % layout.replica_size == 0:
        remedy = f"--dp-size {num_ranks // layout.replica_size} for as many replicas, or --num-gpus {layout.num_ranks}"
    else:
        remedy = f"--num-gpus {layout.num_ranks}, or sizes whose product is {num_ranks}"
    raise LayoutError(
        f"--ulysses-degree {layout.ulysses} x --ring-degree {layout.ring} x --tp-size {layout.tp} x "
        f"--dp-size {layout.dp} = {layout.num_ranks} ranks, --num-gpus is {num_ranks}; use {remedy}"
    )


def _check_heads(layout: PipelineLayout, transformer: str, num_heads: int | None) -> None:
    """Raise LayoutError where ulysses or tp, which give each rank whole attention heads, does not divide them."""
    if num_heads is None:
        return
    for flag, size in (("--ulysses-degree", layout.ulysses), ("--tp-size", layout.tp)):
        if num_heads % size:
            fitting = divisors(gcd(num_heads, layout.num_ranks))
            raise LayoutError(
                f"{flag} {size} does not divide the {num_heads} attention heads of {transformer} on "
                f"{layout.num_ranks} ranks; use one of {', '.join(map(str, fitting))} and give the other ranks to "
                f"--dp-size{' or --ring-degree' if flag == '--ulysses-degree' else ''}"
            )


def check_lengths(layout: PipelineLayout, lengths: Mapping[str, int]) -> None:
    """Raise InputError where the ranks that split the DiT's tokens can't have equal shares of a sequence.

    `lengths` is a number of tokens by what they are, such as {"picture tokens": 4096, "prompt tokens": 512}. Every rank
    finds the same, so this is safe before a collective.
    """
    num_parts = layout.ring * layout.ulysses
    for name, length in lengths.items():
        if length % num_parts:
            raise InputError(
                f"{length} {name} can't be cut into {num_parts} equal shares (ring {layout.ring} x ulysses "
                f"{layout.ulysses}); choose sizes that give a multiple of {num_parts}, such as "
                f"{max(length // num_parts, 1) * num_parts}, or --whole-dit"
            )
