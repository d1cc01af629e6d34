"""A thread that collects the vision requests of many others and runs them in batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self

import torch

from enfold.errors import ConfigError, QueueClosedError, QueueFullError
from enfold.vision.batching import VisionScheduler
from enfold.vision.requests import VisionRequest, check_count, check_request

_Waiting = tuple[float, VisionRequest, Future[list[torch.Tensor]]]
"""When it was submitted, what it is, where its outputs go."""


class VisionQueue:
    """Collects the requests of many threads for up to `max_delay_s`, then runs them as one batch on its own thread.

    At most `max_pending` requests wait (those being run don't count); as many as that are run at once. For one rank
    that serves others: where each rank had a queue, their batches would differ. Close it, or use it in a with block.
    """

    def __init__(self, scheduler: VisionScheduler, max_delay_s: float, max_pending: int) -> None:
        if not 0 <= max_delay_s < threading.TIMEOUT_MAX:
            raise ConfigError(f"max_delay_s={max_delay_s!r} must be a number of seconds, 0 or more")
        self.scheduler, self.max_delay_s = scheduler, max_delay_s
        self.max_pending = check_count("max_pending", max_pending)
        self._changed = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="enfold-vision-queue", daemon=True)
        self._thread.start()

    def submit(self, request: VisionRequest) -> Future[list[torch.Tensor]]:
        """Queue a request; the future gives its outputs, one per item, or raises its error. See VisionScheduler.run.

        Cancelled before its batch starts, it is never encoded. Raises QueueFullError, QueueClosedError or InputError.
        """
        future: Future[list[torch.Tensor]] = Future()
        check_request(request)
        with self._changed:
            if self._closed:
                raise QueueClosedError("the vision queue is closed; make a new one")
            self._waiting = [each for each in self._waiting if not each[2].cancelled()]
            if len(self._waiting) >= self.max_pending:
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait for the vision encoder, the limit is "
                    f"max_pending={self.max_pending}; try again later, or raise the limit"
                )
            self._waiting.append((time.monotonic(), request, future))
            self._changed.notify_all()
        return future

    def close(self, *, drain: bool = True) -> None:
        """Take no more requests, encode those that wait (`drain=False`: fail them), and end the thread.

        A batch that is running is finished in any case. May be called again.
        """
        with self._changed:
            self._closed = True
            dropped = [] if drain else self._waiting
            self._waiting = self._waiting if drain else []
            self._changed.notify_all()
        for _, _, future in dropped:  # outside of the lock: a callback of a future may use the queue
            if future.set_running_or_notify_cancel():
                future.set_exception(QueueClosedError("the vision queue was closed before the request was encoded"))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=error is None)

    def _work(self) -> None:
        while self._run(self._next_batch()):
            pass  # nothing of a batch is kept while the thread waits for the next

    def _run(self, batch: list[_Waiting]) -> bool:
        live = [(request, future) for _, request, future in batch if future.set_running_or_notify_cancel()]
        outcomes: Sequence[list[torch.Tensor] | BaseException]
        try:
            results = self.scheduler.run([request for request, _ in live]) if live else []
            outcomes = [result.error or result.outputs for result in results]
        except BaseException as error:  # the thread must outlive it, and nobody may wait for ever
            outcomes = [error] * len(live)
        for (_, future), outcome in zip(live, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        return bool(batch)

    def _next_batch(self) -> list[_Waiting]:
        """Wait for a request, then for more until the first is `max_delay_s` old; nothing where the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            while self._waiting and not self._closed and len(self._waiting) < self.max_pending:
                left = self._waiting[0][0] + self.max_delay_s - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            batch, self._waiting = self._waiting, []
            return batch
