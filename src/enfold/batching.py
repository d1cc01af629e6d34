"""Requests of many clients in batches: a bounded queue, and what becomes of a batch that fails.

 clients --submit--> waiting --take--> a batch of one signature --start--> live tickets --run_batch--> outcomes
                        |                                           |
             cancelled or late: dropped                  cancelled or late: dropped

Pure: no torch, no asyncio. Any number of threads may submit, and any number (one per replica) may take.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from enfold.errors import ConfigError, DeadlineError, LostRankError, QueueClosedError, QueueFullError

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(eq=False)
class Ticket(Generic[ItemT, ResultT]):
    """One request in the queue: what it is, what it may be batched with, and the future that gets its outcome.

    deadline and submitted_at are seconds on the queue's clock; deadline is math.inf where there is none.
    """

    item: ItemT
    signature: Hashable
    deadline: float
    submitted_at: float
    future: Future[ResultT] = field(default_factory=Future)

    def fail(self, error: BaseException) -> None:
        """Give the future an error, unless it was cancelled."""
        if self.future.running() or self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class RequestQueue(Generic[ItemT, ResultT]):
    """Waiting requests, at most `max_pending`, given out in batches of at most `max_size` of one signature.

    A batch is ready when it is full, or when its oldest request has waited `delay_s`; the ready batch with the oldest
    request goes first, so no signature can starve another. Raises ConfigError for sizes that can't be used.
    """

    def __init__(
        self, max_pending: int, max_size: int = 1, delay_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if max_pending < 1 or max_size < 1 or not 0 <= delay_s < threading.TIMEOUT_MAX:
            raise ConfigError(
                f"max_pending={max_pending} and max_size={max_size} must be at least 1, and delay_s={delay_s} 0 or more"
            )
        self.max_pending, self.max_size, self.delay_s, self.clock = max_pending, max_size, delay_s, clock
        self._changed = threading.Condition()
        self._waiting: list[Ticket[ItemT, ResultT]] = []
        self._closed = False

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        with self._changed:
            return sum(not ticket.future.done() for ticket in self._waiting)

    @property
    def closed(self) -> bool:
        """Whether no more requests are taken."""
        return self._closed

    @property
    def finished(self) -> bool:
        """Whether the queue is closed and nothing waits."""
        with self._changed:
            return self._closed and not self._waiting

    def submit(self, item: ItemT, signature: Hashable, deadline: float | None = None) -> Ticket[ItemT, ResultT]:
        """Queue a request; its ticket's future gives the outcome, and can be cancelled until the batch starts.

        Raises QueueFullError where max_pending requests wait, QueueClosedError after `close`, TypeError for a signature
        that can't be hashed.
        """
        hash(signature)
        late = self.drop_late()
        with self._changed:
            if self._closed:
                raise QueueClosedError("the server is shutting down and takes no more requests")
            if len(self._waiting) >= self.max_pending:
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait and at most {self.max_pending} may ({late} were dropped just "
                    "now); try again later"
                )
            ticket: Ticket[ItemT, ResultT] = Ticket(
                item, signature, math.inf if deadline is None else deadline, self.clock()
            )
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    def take(self, timeout_s: float | None = None) -> list[Ticket[ItemT, ResultT]]:
        """Wait for a batch and take it out of the queue; nothing after `timeout_s`, or where the queue is finished.

        The tickets are not started yet (see `start`), so a batch can still be given to another with `put_back`.
        """
        ends = math.inf if timeout_s is None else self.clock() + timeout_s
        while True:
            self.drop_late()
            with self._changed:
                batch, ready_at = self._ready(self.clock())
                if batch or self.clock() >= ends or (self._closed and not self._waiting):
                    self._waiting = [ticket for ticket in self._waiting if ticket not in batch]
                    self._changed.notify_all()
                    return batch
                until = min(ready_at, ends, *(ticket.deadline for ticket in self._waiting))
                self._changed.wait(None if until == math.inf else max(0.0, until - self.clock()))

    def put_back(self, batch: Sequence[Ticket[ItemT, ResultT]]) -> None:
        """Return a batch that was taken and not started; it keeps its place in the order."""
        with self._changed:
            self._waiting = sorted([*batch, *self._waiting], key=lambda ticket: ticket.submitted_at)
            self._changed.notify_all()

    def start(self, batch: Sequence[Ticket[ItemT, ResultT]]) -> list[Ticket[ItemT, ResultT]]:
        """Return the tickets of a taken batch that are still wanted; from now on they can't be cancelled."""
        live: list[Ticket[ItemT, ResultT]] = []
        for ticket in batch:
            if self._is_late(ticket):
                ticket.fail(self._late(ticket))
            elif ticket.future.set_running_or_notify_cancel():
                live.append(ticket)
        return live

    def drop_late(self) -> int:
        """Drop cancelled requests, fail those past their deadline; return how many there were of both."""
        with self._changed:
            kept = [each for each in self._waiting if not (each.future.cancelled() or self._is_late(each))]
            dropped = [each for each in self._waiting if each not in kept]
            self._waiting = kept
            if dropped:
                self._changed.notify_all()
        for ticket in dropped:  # outside of the lock: a callback of a future may use the queue
            ticket.fail(self._late(ticket))
        return len(dropped)

    def close(self, *, drain: bool = True) -> None:
        """Take no more requests. Those that wait are given out without delay; with drain=False they fail."""
        with self._changed:
            self._closed = True
            dropped = [] if drain else self._waiting
            self._waiting = self._waiting if drain else []
            self._changed.notify_all()
        for ticket in dropped:
            ticket.fail(QueueClosedError("the server shut down before the request was started; send it again"))

    def _ready(self, now: float) -> tuple[list[Ticket[ItemT, ResultT]], float]:
        """Return the batch that is ready, or nothing and the time at which the next one will be."""
        groups: dict[Hashable, list[Ticket[ItemT, ResultT]]] = {}
        for ticket in self._waiting:
            groups.setdefault(ticket.signature, []).append(ticket)
        for group in groups.values():  # in the order of their oldest requests
            if self._closed or len(group) >= self.max_size or group[0].submitted_at + self.delay_s <= now:
                return group[: self.max_size], now
        return [], min((group[0].submitted_at + self.delay_s for group in groups.values()), default=math.inf)

    def _is_late(self, ticket: Ticket[ItemT, ResultT]) -> bool:
        return ticket.deadline <= self.clock()

    def _late(self, ticket: Ticket[ItemT, ResultT]) -> DeadlineError:
        waited_s = self.clock() - ticket.submitted_at
        return DeadlineError(
            f"the request waited {waited_s:.1f} s and its deadline passed before it was started; send it again, or "
            "give it more time"
        )


def run_batch(
    items: Sequence[ItemT],
    call: Callable[[list[ItemT]], Sequence[ResultT]],
    is_fatal: Callable[[Exception], bool] = lambda error: isinstance(error, LostRankError),
) -> list[ResultT | Exception]:
    """Return one result or error per item, in order. A batch that fails is run again one by one.

    So only the item at fault fails. After an error that is fatal nothing is run any more: all that is left gets it.
    """
    try:
        results = list(call(list(items)))
        if len(results) != len(items):
            raise RuntimeError(f"{len(items)} requests gave {len(results)} results")
        return [*results]
    except Exception as error:
        if len(items) == 1 or is_fatal(error):
            return [error] * len(items)
    outcomes: list[ResultT | Exception] = []
    for place, item in enumerate(items):
        outcomes.extend(run_batch([item], call, is_fatal))
        last = outcomes[-1]
        if isinstance(last, Exception) and is_fatal(last):
            return outcomes + [last] * (len(items) - place - 1)
    return outcomes
