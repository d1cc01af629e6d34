"""`enfold verify` for vision towers: does a tower, spread over ranks on this machine, return the bits of one rank?

Random images of different sizes go through every tp x dp layout of the ranks, through the tower on one rank, and
through Transformers' own tower. exact means the bits of one rank, on every rank. Transformers sums in another order
(one image after another, through other kernels), so against it the maths is checked: by rounding in fp32, by eye in
lower precision.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from enfold.cli.outcome import FP32_ROUNDING, Outcome, bits_cell, notes_on, page, shape_cell
from enfold.cli.report import stage
from enfold.layout import divisors
from enfold.vision.config import VisionParallelConfig

if TYPE_CHECKING:
    from enfold.probe import Comparison
    from enfold.runtime.base import Executor
    from enfold.worker import TowerSpec

PRECISE = ("float32", "float64")


@dataclass
class TowerResult(Outcome):
    """What one layout gave: comparisons with one rank and with Transformers' tower, or why it can't run."""

    one_rank: list[Comparison] = field(default_factory=list)
    plain: list[Comparison] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether every output of every rank has the bits of one rank, and those are Transformers' but for rounding."""
        same = all(row.bits_equal for row in self.one_rank)
        return self.ranks_agree and not self.failed and same and all(is_close(row) for row in self.plain)


def is_close(row: Comparison) -> bool:
    """Return whether an output is the reference's but for rounding; in lower precision there is no such bound."""
    return row.bits_equal or row.dtype not in PRECISE or row.max_rel <= FP32_ROUNDING


def list_sizes(num_ranks: int) -> dict[str, tuple[int, int]]:
    """Return the (tp, dp) of every layout by name, one rank first."""
    sizes = {"one rank": (1, 1)}
    for tp in divisors(num_ranks) if num_ranks > 1 else ():
        dp = num_ranks // tp
        sizes[" x ".join(f"{word} {size}" for word, size in (("dp", dp), ("tp", tp)) if size > 1)] = (tp, dp)
    return sizes


def verify_tower(executor: Executor, spec: TowerSpec, num_images: int) -> tuple[dict[str, Any], list[TowerResult]]:
    """Return facts about the machine, and one result per layout, one rank first."""
    sizes = list_sizes(executor.num_ranks)
    about: dict[str, Any] = executor.call("describe")
    results: list[TowerResult] = []
    with stage("verifying", len(sizes), "layouts") as advance:
        for name, (tp, dp) in sizes.items():
            result = TowerResult(name, f"1x{dp}x{tp}")
            results.append(result)
            vision = VisionParallelConfig(tp_size=tp, dp_size=dp, gather_hidden_states=True)
            if tp == dp == 1:
                about |= _run_one_rank(executor, replace(spec, vision=vision), result, num_images)
            else:
                _run_layout(executor, replace(spec, vision=vision), result, num_images)
            advance(1)
    return about, results


def _run_one_rank(executor: Executor, spec: TowerSpec, result: TowerResult, num_images: int) -> dict[str, Any]:
    """Run the two references; what fails here fails the command."""
    from enfold.engine import LOAD_PATIENCE_S
    from enfold.worker import ONE_RANK, REFERENCE

    about: dict[str, Any] = executor.call("probe_one_rank", spec, num_images, patience_s=LOAD_PATIENCE_S)
    result.one_rank = executor.call("compare", ONE_RANK, ONE_RANK)
    result.plain = executor.call("compare", ONE_RANK, REFERENCE)
    return {**about, "images": num_images}


def _run_layout(executor: Executor, spec: TowerSpec, result: TowerResult, num_images: int) -> None:
    from enfold.engine import LOAD_PATIENCE_S
    from enfold.worker import ONE_RANK, REFERENCE

    with result.noting():
        executor.call("load_tower", spec, patience_s=LOAD_PATIENCE_S)
        digests = executor.call("probe_tower", result.name, num_images, every_rank=True)
        result.ranks_agree = all(digest == digests[0] for digest in digests)
        result.one_rank = executor.call("compare", result.name, ONE_RANK)
        result.plain = executor.call("compare", result.name, REFERENCE)
        executor.call("forget", result.name)


def to_text(about: dict[str, Any], results: list[TowerResult]) -> str:
    """Return the table, and notes on what it does not show."""
    headers = ("layout", "output", "shape", "bits of one rank", "max abs", "Transformers: max abs", "max rel")
    rows = [
        (result.name, *_cells(own, plain))
        for result in results
        for own, plain in zip(result.one_rank, result.plain, strict=True)
    ]
    notes = notes_on(results)
    if about["dtype"] not in PRECISE:
        notes.append(f"{about['dtype']} is only shown against Transformers; --dtype float32 checks the maths")
    return page(about, "max rel is over the largest magnitude", headers, rows, notes)


def _cells(own: Comparison, plain: Comparison) -> tuple[str, ...]:
    return (
        own.output,
        shape_cell(own),
        bits_cell(own),
        f"{own.max_abs:.3g}",
        f"{plain.max_abs:.3g}",
        f"{plain.max_rel:.3g}",
    )
