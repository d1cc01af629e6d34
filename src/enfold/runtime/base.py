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
    ) -> Any:
        """Call `method(*args)` on the worker of every rank and return rank 0's result.

        With `every_rank` return the list of all results. Once one rank has answered, the others have `patience_s`
        seconds to follow (the executor knows a default); `limit_s` bounds the whole call. Arguments and results are
        plain values and tensors.
        A rank's EnfoldError is raised here as the same class; any other exception as EncodeError with the rank's
        traceback as a note. LostRankError means that the ranks are gone: `start` again.
        """

    @abstractmethod
    def shutdown(self, *, graceful: bool = True) -> None:
        """End the ranks within a few seconds; with graceful=False at once. Calling it twice does no harm."""

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
