"""What /metrics tells Prometheus. All names begin with enfold_; times are in seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

WAITS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300)
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """The figures of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(
            "enfold_requests", "HTTP requests by route, method and status", ["route", "method", "status"], **own
        )
        self.request_time = Histogram(
            "enfold_request_seconds", "Time from a request to its answer", ["route"], buckets=WAITS, **own
        )
        self.queue_length = Gauge("enfold_queue_length", "Requests that wait for a replica", **own)
        self.queue_wait = Histogram("enfold_queue_wait_seconds", "How long requests waited", buckets=WAITS, **own)
        self.batch_size = Histogram("enfold_batch_size", "Requests per batch", ["kind"], buckets=SIZES, **own)
        self.batch_time = Histogram("enfold_batch_seconds", "Time of a batch", ["kind"], buckets=WAITS, **own)
        self.stage_time = Histogram(
            "enfold_stage_seconds", "Time of a stage of a batch on rank 0", ["stage"], buckets=WAITS, **own
        )
        self.rank_busy = Counter(
            "enfold_rank_busy_seconds", "Time that a rank spent in stages", ["replica", "rank", "stage"], **own
        )
        self.texts = Counter(
            "enfold_texts", "Different texts of batches: encoded, or found in the embedding cache", ["found"], **own
        )
        self.errors = Counter("enfold_errors", "Requests that failed, by the class of the error", ["type"], **own)
        self.restarts = Counter("enfold_replica_restarts", "Starts of a replica after its ranks were lost", **own)
        self.ready = Gauge("enfold_replica_ready", "1 where a replica can take requests", ["replica"], **own)
        self.alive = Gauge("enfold_rank_alive", "1 where the process of a rank is there", ["replica", "rank"], **own)
        self.encoders = Info("enfold_encoder", "How an encoder is spread, and why", ["encoder"], **own)
        self._lately_s: float | None = None
        self.look: Callable[[], None] = lambda: None

    def request_done(self, route: str, method: str, status: int, seconds: float) -> None:
        """Note one HTTP request."""
        known = method if method in {"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"} else "other"
        self.requests.labels(route, known, status).inc()
        self.request_time.labels(route).observe(seconds)

    def batch_done(self, kind: str, waits_s: Sequence[float], seconds: float) -> None:
        """Note one batch, of as many requests as there are waits."""
        self.batch_size.labels(kind).observe(len(waits_s))
        self.batch_time.labels(kind).observe(seconds)
        self._lately_s = seconds if self._lately_s is None else 0.8 * self._lately_s + 0.2 * seconds
        for wait_s in waits_s:
            self.queue_wait.observe(wait_s)

    def mean_batch_s(self) -> float:
        """Return what batches took lately; 1 s before the first."""
        return 1.0 if self._lately_s is None else self._lately_s

    def spans(self, replica: int, times: Sequence[Any]) -> None:
        """Note what ranks did in a batch; `times` as in GenerateResult."""
        for each in times:
            for stage, begin, end in each.spans:
                self.rank_busy.labels(replica, each.rank, stage).inc(max(0.0, end - begin))
                if each.rank == 0:
                    self.stage_time.labels(stage).observe(max(0.0, end - begin))

    def cache(self, num_texts: int, cached_texts: int) -> None:
        """Note the texts of a batch."""
        self.texts.labels("in_cache").inc(cached_texts)
        self.texts.labels("encoded").inc(max(0, num_texts - cached_texts))

    def plans(self, plans: Mapping[str, Mapping[str, Any]]) -> None:
        """Note how each encoder is spread."""
        for name, plan in plans.items():
            reasons = "; ".join(map(str, plan.get("reasons", ())))
            layout = plan.get("layout", {})
            shape = "x".join(str(layout.get(axis, 1)) for axis in ("replicate", "dp", "tp"))
            told = {
                "mode": plan.get("mode", ""),
                "resolved": plan.get("resolved", ""),
                "numerics": plan.get("numerics", ""),
            }
            self.encoders.labels(name).info({**told, "layout": shape, "reason": reasons})

    def page(self) -> bytes:
        """Return all figures in Prometheus' text format."""
        self.look()
        return generate_latest(self.registry)
