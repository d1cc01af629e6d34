"""What `enfold verify` keeps of one layout, for encoders and towers alike: whether it ran, and whether ranks agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enfold.cli.report import table
from enfold.errors import ConfigError, EncodeError, LayoutError, LostRankError

if TYPE_CHECKING:
    from enfold.probe import Comparison

FP32_ROUNDING = 1e-5
"""Relative; errors of the maths (a wrong activation function) have been seen from 1e-4 on."""


@dataclass
class Outcome:
    """One layout by name. skipped, failed: why it can't run, or how it ended."""

    name: str
    layout: str
    ranks_agree: bool = True
    skipped: str = ""
    failed: str = ""

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what goes wrong in the block with this layout alone; a lost rank ends the command."""
        try:
            yield
        except LostRankError:
            raise
        except EncodeError as error:
            self.failed = str(error)
        except (ConfigError, LayoutError) as error:
            self.skipped = str(error)


def notes_on(outcomes: Sequence[Outcome]) -> list[str]:
    """Return what the table does not show."""
    notes: list[str] = []
    for outcome in outcomes:
        if outcome.skipped:
            notes.append(f"{outcome.name} can't run: {outcome.skipped}")
        if outcome.failed:
            notes.append(f"{outcome.name} failed: {outcome.failed}")
        if not outcome.ranks_agree:
            notes.append(f"{outcome.name}: the ranks returned different bits")
    return notes


def page(
    about: dict[str, Any], legend: str, headers: tuple[str, ...], rows: list[tuple[str, ...]], notes: Sequence[str]
) -> str:
    """Return what is printed: facts about the machine, what the columns mean, the table, notes."""
    facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items())
    return "\n".join([facts, legend, "", table(headers, rows), *notes])


def shape_cell(row: Comparison) -> str:
    """Return shape and precision of an output."""
    return "x".join(map(str, row.shape)) + f" {row.dtype}"


def bits_cell(row: Comparison) -> str:
    """Return whether the bits are equal, in a word."""
    return "equal" if row.bits_equal else "differ"
