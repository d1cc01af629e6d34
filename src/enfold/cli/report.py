"""What the commands say while they work: a moving bar on a terminal, plain lines in a log; always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

LINE_EVERY_S = 10.0

Advance = Callable[[int], None]


def say(text: str) -> None:
    """Print one line on stderr."""
    print(f"enfold: {text}", file=sys.stderr, flush=True)


@contextmanager
def stage(title: str, total: int | None = None, unit: str = "") -> Iterator[Advance]:
    """Show one stage of the work. The block gets a function that moves the stage on by a number of units."""
    on_terminal = sys.stderr.isatty()
    with (_bar if on_terminal else _lines)(title, total, unit) as advance:
        yield advance


@contextmanager
def _bar(title: str, total: int | None, unit: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    counts = [BarColumn(), MofNCompleteColumn(), TextColumn(unit)] if total is not None else []
    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), *counts, TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda steps: progress.advance(task, steps)


@contextmanager
def _lines(title: str, total: int | None, unit: str) -> Iterator[Advance]:
    size = f" ({total} {unit})" if total is not None else ""
    say(f"{title}{size}")
    done, said_at = 0, time.monotonic()

    def advance(steps: int) -> None:
        nonlocal done, said_at
        done += steps
        now = time.monotonic()
        if total is not None and now - said_at >= LINE_EVERY_S:
            say(f"{title}: {done} of {total} {unit}")
            said_at = now

    yield advance


@contextmanager
def stages(titles: Sequence[str]) -> Iterator[Callable[[str, int, int], None]]:
    """Show several stages at once, one bar each; the block gets a function of (title, steps done, steps in all)."""
    if not sys.stderr.isatty():
        begun: set[str] = set()

        def tell(title: str, done: int, total: int) -> None:
            if title not in begun:
                begun.add(title)
                say(f"{title} ({total} steps)")

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = [TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks = {title: progress.add_task(title, total=None) for title in titles}
        yield lambda title, done, total: progress.update(tasks[title], completed=done, total=total)


def table(headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return an aligned text table."""
    widths = [max(len(row[column]) for row in [headers, *rows]) for column in range(len(headers))]
    rule = tuple("-" * width for width in widths)
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [headers, rule, *rows]
    ]
    return "\n".join(lines)
