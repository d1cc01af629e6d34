"""What an executor promises: N ranks that run one worker each, and one way to call all of them.

A worker is an object with ordinary methods. It is named by a string ("enfold.worker:Worker"), because ranks in other
processes import it themselves; it is made with the keywords `rank`, `world_size`, `group` and `device`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from enfold.errors import EncodeError

DEFAULT_WORKER = "enfold.worker:Worker"


NoteTaker = Callable[[Any], None]
"""Takes what a worker says while it works (plain values, no tensors)."""


def ignore_note(note: Any) -> None:
    """Take a note and do nothing: what a worker's `note` is while nobody listens."""


class Notes:
    """Hands the notes of one call on. What the taker raises waits until the ranks, who do no wrong, have answered."""

    def __init__(self, taker: NoteTaker | None) -> None:
        self._taker = taker
        self._failure: Exception | None = None

    def take(self, value: Any) -> None:
        """Pass one note on, unless the taker has raised before."""
        if self._taker is None or self._failure is not None:
            return
        try:
            self._taker(value)
        except Exception as error:
            self._failure = error

    def raise_failure(self) -> None:
        """Raise what the taker raised, if it did."""
        if self._failure is not None:
            raise self._failure


def find_worker(name: str) -> Callable[..., Any]:
    """Return the worker class that "module:Class" names."""
    module, _, attribute = name.partition(":")
    worker: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return worker


class Executor(ABC):
    """All ranks of one replica. `with executor:` starts them and never leaves one behind."""

    num_ranks: int

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether every rank is there to be called."""

    @property
    @abstractmethod
    def rank_states(self) -> list[bool]:
        """Whether each rank is there, in rank order; asks the system and not the rank, so it is answered at once."""

    @abstractmethod
    def start(self) -> None:
        """Start the ranks and wait until each has made its worker. After `shutdown` it may be called again."""

    @abstractmethod
    def call(
        self,
        method: str,
        *args: Any,
        every_rank: bool = False,
        patience_s: float | None = None,
        limit_s: float | None = None,
        on_note: NoteTaker | None = None,
    ) -> Any:
        """Call `method(*args)` on the worker of every rank and return rank 0's result.

        With `every_rank` return the list of all results. Once one rank has answered, the others have `patience_s`
        seconds to follow (the executor knows a default); `limit_s` bounds the whole call. Arguments and results are
        plain values and tensors. A worker that has an attribute `note` finds a function there while it works for a call
        with `on_note`: what rank 0 passes to it reaches `on_note`, in this thread, before the call returns.
        A rank's EnfoldError is raised here as the same class; any other exception as EncodeError with the rank's
        traceback as a note. LostRankError means that the ranks are gone: `start` again.
        """

    @abstractmethod
    def shutdown(self, *, graceful: bool = True) -> None:
        """End the ranks within a few seconds; with graceful=False at once. Calling it twice does no harm."""

    def kill(self) -> None:  # noqa: B027  # a rank in this process can't be killed
        """Kill the ranks, from any thread and without waiting: a call that runs raises LostRankError."""

    def restart(self) -> None:
        """End whatever is left of the ranks and start them anew; what the workers had loaded is gone."""
        self.shutdown(graceful=False)
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(graceful=error is None)


def rank_failed(rank: int, num_ranks: int, text: str, trace: str) -> EncodeError:
    """Return the error for an exception in a rank that is not one of enfold's own."""
    where = f"rank {rank} of {num_ranks} failed: " if num_ranks > 1 else ""
    error = EncodeError(where + text)
    error.add_note(trace)
    return error
