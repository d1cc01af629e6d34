"""The thread of one replica: it takes batches, runs them, and starts the replica's ranks again when they were lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from enfold.batching import RequestQueue, Ticket, run_batch
from enfold.errors import EncodeError, LostRankError
from enfold.server.jobs import Done, Job
from enfold.server.metrics import Metrics

if TYPE_CHECKING:
    from enfold.server.backends import Backend

logger = logging.getLogger(__name__)

State = Literal["loading", "ready", "restarting", "stopped"]

LOOK_S = 0.5
"""How often an idle replica looks whether its ranks are all there."""

PAUSES_S = (0.0, 1.0, 2.0, 5.0, 10.0)
"""Waits before the first start of lost ranks, the second, ...; the last is for all that follow."""

OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError", "out of memory", "can't allocate memory", "Cannot allocate memory")


def is_fatal(error: Exception) -> bool:
    """Return whether the ranks are of no more use: one was lost, or has run out of memory."""
    if isinstance(error, LostRankError):
        return True
    return isinstance(error, EncodeError) and any(word in str(error) for word in OUT_OF_MEMORY)


class Replica:
    """One replica of the model. The thread begins with `begin`, once the ranks are loaded, and ends with the queue."""

    def __init__(
        self, number: int, backend: Backend, queue: RequestQueue[Job, Done], metrics: Metrics, limit_s: float
    ) -> None:
        self.number, self.backend, self.queue, self.metrics, self.limit_s = number, backend, queue, metrics, limit_s
        self.state: State = "loading"
        self.error: str | None = None
        self.restarts = 0
        self.running = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"enfold-replica-{number}", daemon=True)

    def begin(self) -> None:
        """Take requests from now on."""
        self.state = "ready"
        self._thread.start()

    def stop(self) -> None:
        """Start no ranks and take no batch any more; a batch that runs is finished."""
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; return whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    @property
    def ranks(self) -> list[bool]:
        """Whether each rank's process is there."""
        return self.backend.rank_states()[self.number]

    @property
    def ready(self) -> bool:
        """Whether the replica can take a request now."""
        return self.state == "ready" and all(self.ranks)

    def health(self) -> dict[str, Any]:
        """Return what /health says of this replica."""
        ranks = self.ranks
        state = "restarting" if self.state == "ready" and not all(ranks) else self.state
        told = {"replica": self.number, "state": state, "ranks": ["alive" if here else "gone" for here in ranks]}
        return {**told, "running": self.running, "restarts": self.restarts, "error": self.error}

    def _work(self) -> None:
        while not self._stop.is_set() and not self.queue.finished:
            try:
                self._step()
            except Exception as error:  # the thread must outlive it: nobody else would take requests
                logger.exception("replica %d", self.number)
                self._lose(f"{type(error).__name__}: {error}")
        self.state = "stopped"

    def _step(self) -> None:
        if self.state != "ready":
            return self._restart()
        if not all(self.ranks):
            return self._lose("a rank ended while the replica was idle")
        batch = self.queue.take(LOOK_S)
        if batch and not all(self.ranks):  # it died while nothing ran: no request need suffer for that
            self.queue.put_back(batch)
        elif live := self.queue.start(batch):
            self._run(live)

    def _run(self, tickets: Sequence[Ticket[Job, Done]]) -> None:
        began = self.queue.clock()
        self.running = len(tickets)
        try:
            for ticket in tickets:
                ticket.item.on_start()
            outcomes = run_batch([ticket.item for ticket in tickets], self._call, is_fatal)
        except BaseException as error:
            for ticket in tickets:
                ticket.fail(error)
            raise
        finally:
            self.running = 0
        ran_s = self.queue.clock() - began
        waits_s = [began - ticket.submitted_at for ticket in tickets]
        self.metrics.batch_done(tickets[0].item.kind, waits_s, ran_s)
        self._note(outcomes)
        for ticket, wait_s, outcome in zip(tickets, waits_s, outcomes, strict=True):
            self._settle(ticket, wait_s, ran_s, outcome)

    def _call(self, jobs: list[Job]) -> list[Any]:
        return self.backend.run(jobs, self.number, self.limit_s)

    def _settle(self, ticket: Ticket[Job, Done], wait_s: float, ran_s: float, outcome: Any) -> None:
        if not isinstance(outcome, Exception):
            size, times = getattr(outcome, "batch_size", 1), getattr(outcome, "times", [])
            return ticket.future.set_result(Done(outcome, self.number, size, wait_s, ran_s, list(times)))
        if is_fatal(outcome) and not isinstance(outcome, LostRankError):
            outcome = LostRankError(f"a rank ran out of memory, and the ranks are started again: {outcome}")
        ticket.fail(outcome)

    def _note(self, outcomes: Sequence[Any]) -> None:
        """Put the batch into the metrics, and the replica out of service where its ranks are of no more use."""
        good = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
        seen: set[int] = set()
        for outcome in good:
            times = getattr(outcome, "times", None)
            if times and id(times) not in seen:  # requests of one batch share the times of its ranks
                seen.add(id(times))
                self.metrics.spans(self.number, times)
                self.metrics.cache(outcome.num_texts, outcome.cached_texts)
        for error in outcomes:
            if isinstance(error, Exception) and is_fatal(error):
                return self._lose(str(error))

    def _lose(self, why: str) -> None:
        self.state, self.error = "restarting", why
        logger.warning("replica %d: %s; its ranks are started again", self.number, why)

    def _restart(self) -> None:
        """Try to start the lost ranks, after a pause that grows with each failure."""
        tries = 0
        while not self._stop.wait(PAUSES_S[min(tries, len(PAUSES_S) - 1)]):
            began = time.monotonic()
            try:
                self.backend.restart(self.number)
            except Exception as error:
                tries += 1
                self.error = f"{type(error).__name__}: {error}"
                logger.warning("replica %d can't start: %s", self.number, self.error)
                continue
            self.restarts += 1
            self.metrics.restarts.inc()
            self.state, self.error = "ready", None
            logger.warning("replica %d is ready again after %.1f s", self.number, time.monotonic() - began)
            return
