"""How a rank waits: a collective that ends in the moment in which the wait runs out has not failed."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest

from enfold.errors import LostRankError
from enfold.watch import Watch


class EndsLate:
    """A collective that ends between the end of a limited wait and the next look at it."""

    def __init__(self, error: str = "") -> None:
        self.error = error

    def wait(self, limit: timedelta | None = None) -> None:
        if limit is not None:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return True


def watch() -> Watch:
    made = Watch(0, (0, 1), None, 1.0)
    made.axes["dp"] = SimpleNamespace(ranks=(0, 1))  # type: ignore[assignment]
    return made


def test_a_collective_that_ends_as_the_wait_runs_out() -> None:
    assert watch()._done(EndsLate(), "dp")  # type: ignore[arg-type]


def test_a_collective_that_fails_as_the_wait_runs_out() -> None:
    with pytest.raises(LostRankError, match=r"a rank of \(0, 1\) died in a collective \(connection closed\)"):
        watch()._done(EndsLate("connection closed"), "dp")  # type: ignore[arg-type]
