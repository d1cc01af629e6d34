"""What stands between the routes and the replicas: loading, the queue, deadlines, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from enfold.batching import RequestQueue, Ticket
from enfold.errors import DeadlineError, QueueClosedError, QueueFullError
from enfold.server.failures import RequestError
from enfold.server.jobs import Done, Job
from enfold.server.limits import Limits
from enfold.server.metrics import Metrics
from enfold.server.replica import Replica
from enfold.server.shelf import Shelf

if TYPE_CHECKING:
    from enfold.server.backends import Backend, ModelType

DRAIN_S = 7.0
"""What running requests have to finish after SIGTERM; ending the ranks and the connections takes up to 2 s more."""

END_S = 1.0
MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """What a server is started with, beside its model."""

    model: str
    model_type: ModelType
    batching_max_size: int = 1
    batching_delay_s: float = 0.0
    limits: Limits = field(default_factory=Limits)
    api_key: str | None = None
    pooling: str = "mean"


class Service:
    """One model behind a queue. `start` loads it on a thread; routes `submit` jobs and wait for them.

    make_backend is called on that thread, since it may import torch and read files. Where loading fails, on_failure
    gets the error.
    """

    def __init__(self, make_backend: Callable[[], Backend], settings: Settings) -> None:
        self.settings, self.limits = settings, settings.limits
        self.metrics = Metrics()
        self.queue: RequestQueue[Job, Done] = RequestQueue(
            self.limits.pending, settings.batching_max_size, settings.batching_delay_s
        )
        self.pictures, self.clips = Shelf(256 * MIB), Shelf(512 * MIB)
        self.started_at = int(time.time())
        self._make_backend = make_backend
        self._backend: Backend | None = None
        self._making: Backend | None = None
        self._replicas: list[Replica] = []
        self._closing = False
        self.metrics.look = self._look

    # Loading.

    def start(
        self, on_ready: Callable[[], None] = lambda: None, on_failure: Callable[[BaseException], None] = lambda e: None
    ) -> None:
        """Load the model on a thread of its own, and serve it then."""

        def load() -> None:
            try:
                self._load()
            except BaseException as error:
                on_failure(error)
            else:
                on_ready()

        threading.Thread(target=load, name="enfold-load", daemon=True).start()

    def _load(self) -> None:
        backend = self._making = self._make_backend()
        if self._closing:
            raise QueueClosedError("the server was stopped while it loaded")
        backend.start()
        self._replicas = [
            Replica(number, backend, self.queue, self.metrics, self.limits.call_s)
            for number in range(backend.num_replicas)
        ]
        self.metrics.plans(backend.plans())
        self._backend = backend
        for replica in self._replicas:
            replica.begin()

    @property
    def backend(self) -> Backend:
        """The loaded model; a 503 before it is loaded."""
        if self._backend is None:
            raise RequestError(503, "loading", "the model is still being loaded; GET /health tells when", None, 5.0)
        return self._backend

    @property
    def closing(self) -> bool:
        """Whether the server takes no more requests, since it is about to end."""
        return self._closing

    @property
    def loaded(self) -> bool:
        """Whether the model has been loaded, now or once."""
        return self._backend is not None

    # Requests.

    def submit(self, job: Job, deadline_s: float | None = None) -> Ticket[Job, Done]:
        """Check a job and queue it. Raises RequestError and what the backend and the queue raise."""
        if self._closing:
            raise QueueClosedError("the server is shutting down and takes no more requests")
        self.backend.check(job)
        limit_s = min(self.limits.request_s, deadline_s or self.limits.request_s)
        try:
            return self.queue.submit(job, job.signature(), self.queue.clock() + limit_s)
        except QueueFullError as error:
            raise RequestError(429, "queue_full", str(error), None, self.retry_after_s()) from error

    def retry_after_s(self) -> float:
        """Return a guess of when a place may be free: the batches that wait times what batches took lately."""
        wait_s = self.metrics.mean_batch_s() * len(self.queue) / self.settings.batching_max_size
        return min(60.0, max(1.0, wait_s / max(1, len(self._replicas))))

    async def answer(self, request: Request, job: Job, deadline_s: float | None = None) -> Done:
        """Queue a job and wait for its result, at most until its deadline or as long as the client is there.

        What a client no longer waits for is dropped, unless it has been started.
        """
        try:
            return await self._answer(request, job, deadline_s)
        except Exception as error:
            self.metrics.errors.labels(type(error.__cause__ or error).__name__).inc()
            raise

    async def _answer(self, request: Request, job: Job, deadline_s: float | None) -> Done:
        ticket = await asyncio.to_thread(self.submit, job, deadline_s)
        done = asyncio.wrap_future(ticket.future)
        gone = asyncio.create_task(_disconnected(request))
        try:
            both: set[asyncio.Future[Any]] = {done, gone}
            await asyncio.wait(both, timeout=self._left_s(ticket) + 0.1, return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                return done.result()
            if gone.done():
                raise RequestError(499, "client_gone", "the client closed the connection before the answer")
            had_s = self.queue.clock() - ticket.submitted_at
            raise DeadlineError(f"no result after {had_s:.1f} s, which is all the time that the request had")
        finally:
            done.cancel()  # drops the job, if it still waits
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gone

    def _left_s(self, ticket: Ticket[Job, Done]) -> float:
        return max(0.0, ticket.deadline - self.queue.clock())

    # Health and metrics.

    @property
    def ready(self) -> bool:
        """Whether a request would be taken and could be run now."""
        return not self._closing and any(replica.ready for replica in self._replicas)

    def health(self) -> dict[str, Any]:
        """Return the truth about the server, its replicas and their ranks."""
        replicas = [replica.health() for replica in self._replicas]
        num_ready = sum(replica["state"] == "ready" for replica in replicas)
        status = "ready" if replicas and num_ready == len(replicas) else "degraded" if num_ready else "restarting"
        if not replicas:
            status = "loading"
        if self._closing:
            status = "stopping"
        told = {"status": status, "live": True, "ready": self.ready, "model": self.settings.model}
        return {**told, "waiting": len(self.queue), "replicas": replicas}

    def _look(self) -> None:
        self.metrics.queue_length.set(len(self.queue))
        for replica in self._replicas:
            self.metrics.ready.labels(replica.number).set(replica.ready)
            for rank, here in enumerate(replica.ranks):
                self.metrics.alive.labels(replica.number, rank).set(here)

    # The end.

    def drain(self, limit_s: float = DRAIN_S) -> None:
        """Take no more requests, finish what there is within `limit_s`, end all ranks; what is left gets a 503."""
        ends = time.monotonic() + limit_s
        self._closing = True
        self.queue.close(drain=bool(self._replicas))
        in_time = all(replica.join(ends - time.monotonic()) for replica in self._replicas)
        self.abandon()
        if not in_time:
            for replica in self._replicas:
                replica.join(END_S)

    def abandon(self) -> None:
        """Cut `drain` short: end the ranks under the requests that run; they get a 503."""
        self.queue.close(drain=False)
        for replica in self._replicas:
            replica.stop()
        if self._making is not None:
            self._making.kill()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
