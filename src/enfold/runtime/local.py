"""One rank in this process: no pipes, no process group."""

from __future__ import annotations

import traceback
from typing import Any

from enfold.errors import EncodeError, EnfoldError
from enfold.runtime.base import DEFAULT_WORKER, Executor, Notes, NoteTaker, find_worker, ignore_note, rank_failed


class LocalExecutor(Executor):
    """A single worker that is called directly. `num_threads` sets torch's thread count for this whole process."""

    num_ranks = 1

    def __init__(self, worker: str = DEFAULT_WORKER, num_threads: int | None = None) -> None:
        self._worker_name = worker
        self._num_threads = num_threads
        self._worker: Any = None

    @property
    def alive(self) -> bool:
        """Whether the worker has been made."""
        return self._worker is not None

    @property
    def rank_states(self) -> list[bool]:
        """Whether the worker has been made, as the one entry of a list."""
        return [self.alive]

    def start(self) -> None:
        """Make the worker, on cuda:0 where there is a GPU."""
        import torch

        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self._worker = find_worker(self._worker_name)(rank=0, world_size=1, group=None, device=device)

    def call(
        self,
        method: str,
        *args: Any,
        every_rank: bool = False,
        patience_s: float | None = None,
        limit_s: float | None = None,
        on_note: NoteTaker | None = None,
    ) -> Any:
        """Call the worker's method; there is nothing to wait for, so the limits mean nothing here."""
        if self._worker is None:
            raise EncodeError("the rank is not started; call start() first")
        notes = Notes(on_note)
        hears = on_note is not None and hasattr(self._worker, "note")
        try:
            if hears:
                self._worker.note = notes.take
            result = getattr(self._worker, method)(*args)
        except EnfoldError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise rank_failed(0, 1, text, traceback.format_exc()) from None
        finally:
            if hears and self._worker is not None:
                self._worker.note = ignore_note
        notes.raise_failure()
        return [result] if every_rank else result

    def shutdown(self, *, graceful: bool = True) -> None:
        """Forget the worker and what it holds."""
        self._worker = None
