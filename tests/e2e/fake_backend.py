"""A backend without ranks: prompts say what happens. And a server on a real port, in a thread of the test's process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import uvicorn

from enfold.diffusion.requests import GenerateResult, PipelineReport, Progress, RankTimes
from enfold.errors import ConfigError, EncodeError, InputError, LostRankError
from enfold.server.app import make_app
from enfold.server.jobs import Job
from enfold.server.running import bind
from enfold.server.service import Service, Settings

COLOURS = {"red": (220, 30, 30), "green": (30, 160, 60), "blue": (30, 60, 220)}
PLAN = {
    "mode": "dp",
    "resolved": "dp",
    "numerics": "exact",
    "layout": {"replicate": 1, "dp": 2, "tp": 1},
    "reasons": ["dp was asked"],
}


@dataclass
class FakeBackend:
    """Draws a picture of one colour. Words in a prompt: boom, misfit, slow, kill, hang, memory, hold.

    boom fails on the ranks; kill and hang lose them; memory runs out of it; slow takes 0.3 s; hold waits for `release`.
    """

    num_replicas: int = 1
    replica_size: int = 2
    is_video: bool = False
    load_s: float = 0.0
    restart_s: float = 0.2
    kind: str = "diffusion"
    batches: list[list[str]] = field(default_factory=list)
    restarts: int = 0
    release: threading.Event = field(default_factory=threading.Event)
    load_error: Exception | None = None
    refuse_restarts: int = 0
    draw_s: float = 0.05  # as long as the spans of its ranks say

    def __post_init__(self) -> None:
        self.alive = [[False] * self.replica_size for _ in range(self.num_replicas)]
        self.lock = threading.Lock()
        self.killed = False
        frames = {"num_frames": 3} if self.is_video else {}
        self.report = PipelineReport(
            pipeline_class="FakePipeline",
            is_video=self.is_video,
            dtype="float32",
            plans={"text_encoder": PLAN},
            summaries={"text_encoder": "T5: dp, layout 1x2x1: dp was asked"},
            defaults={"height": 64, "width": 64, "num_inference_steps": 2, **frames},
            splits="split over 2 ranks by Ulysses",
            multiple=8,
            accepts=("prompt", "seed"),
        )

    def start(self) -> None:
        time.sleep(self.load_s)
        if self.load_error is not None:
            raise self.load_error
        self.alive = [[True] * self.replica_size for _ in range(self.num_replicas)]

    def run(self, jobs: Sequence[Job], replica: int, limit_s: float) -> list[Any]:
        if not all(self.alive[replica]):
            raise LostRankError("rank 1 is gone")
        payloads: list[Any] = [job.payload for job in jobs]
        texts = [text for p in payloads for text in (p.texts if jobs[0].kind == "encode" else [p.prompt])]
        with self.lock:
            self.batches.append(texts)
        self._misbehave(" ".join(texts), replica, limit_s)
        if jobs[0].kind == "encode":
            return [[self._conditioning(text) for text in payload.texts] for payload in payloads]
        time.sleep(self.draw_s)
        for step in range(2):
            for job in jobs:
                job.on_progress(Progress("denoise", step + 1, 2))
        return [self._draw(payload, len(jobs)) for payload in payloads]

    def _misbehave(self, words: str, replica: int, limit_s: float) -> None:
        if "slow" in words:
            time.sleep(0.3)
        if "hold" in words and not self._held():
            raise LostRankError("the ranks were ended")
        if "kill" in words or "hang" in words:
            time.sleep(min(limit_s, 0.2) if "hang" in words else 0)
            self.alive[replica] = [True, False][: self.replica_size]
            raise LostRankError("rank 1 of 2 was killed by signal 9, SIGKILL")
        if "memory" in words:
            raise EncodeError("rank 0 of 2 failed: OutOfMemoryError: tried to allocate 2 GiB")
        if "boom" in words:
            raise EncodeError("rank 1 of 2 failed: ValueError: boom")
        if "misfit" in words:
            raise ConfigError("this pipeline can't do that")

    def _held(self) -> bool:
        while not self.release.wait(0.02):
            if self.killed:
                return False
        return True

    def _draw(self, request: Any, batch_size: int) -> GenerateResult:
        height, width = request.height or 64, request.width or 64
        colour = next((rgb for word, rgb in COLOURS.items() if word in request.prompt), (128, 128, 128))
        frames = (request.num_frames or 3) if self.is_video else 1
        pictures = torch.tensor(colour, dtype=torch.uint8).expand(request.num_images, frames, height, width, 3).clone()
        if request.embeds is not None:
            pictures[:] = int(request.embeds["prompt_embeds"].flatten()[0])
        seeds = [request.seed + i for i in range(request.num_images)]
        pictures[:, :, 0, 0, 0] = torch.tensor([seed % 256 for seed in seeds], dtype=torch.uint8)[:, None]
        pictures[:, :, 0, 1, 0] = torch.arange(frames, dtype=torch.uint8)  # equal frames of a GIF would become one
        spans = (("encode", 0.0, 0.01), ("denoise", 0.01, 0.04), ("decode", 0.04, 0.05))
        times = [RankTimes(rank, spans) for rank in range(self.replica_size)]
        return GenerateResult(pictures, seeds, batch_size, times, 1, int("again" in request.prompt))

    def _conditioning(self, text: str) -> dict[str, torch.Tensor]:
        rows = torch.full((1, 4, 8), float(len(text)))
        return {"prompt_embeds": rows, "pooled_prompt_embeds": rows[:, 0], "text_encoder.hidden_states.1": rows + 1}

    def check(self, job: Job) -> None:
        payload: Any = job.payload
        if job.kind == "embed":
            raise InputError("a pipeline has no vector per text")
        if job.kind == "generate" and (payload.height or 64) % 8:
            raise InputError(f"height {payload.height} is no multiple of 8; use {payload.height // 8 * 8 + 8}")

    def rank_states(self) -> list[list[bool]]:
        return [list(states) for states in self.alive]

    def restart(self, replica: int) -> None:
        time.sleep(self.restart_s)
        if self.refuse_restarts > 0:
            self.refuse_restarts -= 1
            raise EncodeError("no memory left to start in")
        self.restarts += 1
        self.alive[replica] = [True] * self.replica_size

    def kill(self) -> None:
        self.killed = True
        self.alive = [[False] * self.replica_size for _ in range(self.num_replicas)]

    def plans(self) -> dict[str, dict[str, Any]]:
        return self.report.plans

    def words(self) -> dict[str, str]:
        return {**self.report.summaries, "transformer": self.report.splits}


@dataclass
class Live:
    """A server that answers at `url`."""

    url: str
    service: Service
    backend: Any


@contextlib.contextmanager
def serving(backend: Any, wait: bool = True, **settings: Any) -> Iterator[Live]:
    """Serve a backend on a free port; the service is drained at the end of the block."""
    service = Service(lambda: backend, Settings(**{"model": "fake", "model_type": backend.kind, **settings}))
    with on_port(service) as url:
        failures: list[BaseException] = []
        service.start(on_failure=failures.append)
        if wait:
            until(lambda: service.ready or failures, 150, "the server is ready")
            assert failures == []
        try:
            yield Live(url, service, backend)
        finally:
            getattr(backend, "release", threading.Event()).set()
            service.drain(2.0)


@contextlib.contextmanager
def on_port(service: Service) -> Iterator[str]:
    """Run the HTTP server of a service in a thread."""
    listening = bind("127.0.0.1", 0)
    config = uvicorn.Config(make_app(service), log_level="error", ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        until(lambda: server.started, 30, "the server listens")
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()
        assert not thread.is_alive()


def until(condition: Callable[[], Any], limit_s: float, what: str) -> Any:
    """Return the first true answer; fail after `limit_s`."""
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        if answer := condition():
            return answer
        time.sleep(0.02)
    raise AssertionError(f"not within {limit_s:g} s: {what}")
