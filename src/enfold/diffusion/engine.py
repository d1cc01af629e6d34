"""What a user of a diffusion pipeline holds: its replicas on their ranks, requests checked before they go there.

with PipelineEngine(PipelineSpec("path/to/model", PipelineLayout(ulysses=2), mode="auto")) as engine:
    result, = engine.generate([GenerateRequest("a red circle above a blue square", seed=7)])
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import torch

from enfold.diffusion.checks import check_request
from enfold.diffusion.requests import GenerateRequest, GenerateResult, PipelineReport, PipelineSpec, Progress
from enfold.errors import ConfigError, EncodeError, InputError
from enfold.runtime.base import Executor
from enfold.runtime.local import LocalExecutor
from enfold.runtime.machine import available_cores, rank_devices
from enfold.runtime.spawn import SpawnExecutor

WORKER = "enfold.diffusion.worker:PipelineWorker"
LOAD_PATIENCE_S = 1800.0
"""One rank may read its weights from a cold disk long after the other had them from the page cache."""


@dataclass
class _Replica:
    executor: Executor
    lock: threading.Lock = field(default_factory=threading.Lock)


class PipelineEngine:
    """A pipeline on spec.layout.dp replicas, each of them ranks of its own: the end of one leaves the others.

    threads_per_rank: default cores / ranks. in_process: the one rank of a layout of 1 runs in this process. Methods may
    be called from any thread; a replica does one call at a time. Raises ConfigError where in_process can't be.
    """

    def __init__(self, spec: PipelineSpec, *, threads_per_rank: int | None = None, in_process: bool = False) -> None:
        layout = spec.layout
        if in_process and layout.num_ranks > 1:
            raise ConfigError(f"in_process runs one rank, the layout has {layout.num_ranks} ({layout}); leave it out")
        self.spec = spec
        threads = threads_per_rank or max(1, available_cores() // layout.num_ranks)
        self._replicas = [
            _Replica(
                LocalExecutor(WORKER, threads_per_rank)
                if in_process
                else SpawnExecutor(
                    layout.replica_size,
                    worker=WORKER,
                    threads_per_rank=threads,
                    timeout_s=spec.timeout_s,
                    first_gpu=layout.ranks_of(number).start,
                )
            )
            for number in range(layout.dp)
        ]
        self._report: PipelineReport | None = None

    @property
    def num_replicas(self) -> int:
        """Number of replicas, each of which serves one call at a time."""
        return len(self._replicas)

    @property
    def report(self) -> PipelineReport:
        """What the ranks said of the pipeline; raises EncodeError before `start`."""
        if self._report is None:
            raise EncodeError("the pipeline is not loaded yet; call start() first")
        return self._report

    def start(self) -> PipelineReport:
        """Start the ranks of all replicas, at the same time, and load the pipeline on them.

        Raises, with no rank left behind, what one of them raised.
        """
        rank_devices(self.spec.layout.num_ranks)  # raises where there are too few GPUs
        self.spec = replace(self.spec, path=_found(self.spec.path))
        with ThreadPoolExecutor(self.num_replicas) as pool:
            futures = [pool.submit(self._load, number) for number in range(self.num_replicas)]
        failed = [error for future in futures if (error := future.exception()) is not None]
        if failed:
            self.close(graceful=False)
            raise failed[0]
        self._report = futures[0].result()
        return self._report

    def _load(self, number: int) -> PipelineReport:
        executor = self._replicas[number].executor
        try:
            executor.start()
            report: PipelineReport = executor.call("load", self.spec, patience_s=LOAD_PATIENCE_S)
        except BaseException:
            executor.shutdown(graceful=False)
            raise
        return report

    def close(self, graceful: bool = True) -> None:
        """End the ranks of all replicas; with graceful=False at once, also in the middle of a call."""
        if not graceful:
            for replica in self._replicas:
                replica.executor.kill()
        with ThreadPoolExecutor(self.num_replicas) as pool:
            list(pool.map(lambda replica: replica.executor.shutdown(graceful=graceful), self._replicas))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(graceful=error is None)

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        replica: int = 0,
        on_progress: Callable[[Progress], None] | None = None,
        limit_s: float | None = None,
        whole_dit: bool = False,
    ) -> list[GenerateResult]:
        """Draw requests of one signature in one batch on a replica; blocks until the pictures are there.

        on_progress is called in this thread. limit_s: the ranks are ended where it takes longer. whole_dit: run a split
        DiT unsplit on every rank, to compare.

        Raises InputError before any work where a request can't be honoured, EncodeError where it failed on the ranks
        (the next call works), LostRankError where ranks are gone (`restart` them).
        """
        for request in requests:
            self.check(request)
        if len({request.signature() for request in requests}) != 1:
            raise InputError(
                f"{len(requests)} requests don't agree in all that a batch must agree in; send them one by one"
            )
        rows = [{**vars(request), "embeds": _own_embeds(request)} for request in requests]
        chosen = self._replicas[replica]
        with chosen.lock:
            found = chosen.executor.call("generate_plain", rows, whole_dit, on_note=on_progress, limit_s=limit_s)
        return [GenerateResult(**row) for row in found]

    def encode(
        self,
        texts: Sequence[str],
        *,
        replica: int = 0,
        max_sequence_length: int | None = None,
        layers: Sequence[int] = (),
        limit_s: float | None = None,
    ) -> list[dict[str, torch.Tensor]]:
        """Return the whole conditioning set of each text, see PipelineWorker.encode; raises as `generate` does."""
        for text in texts:
            self.check(GenerateRequest(text, seed=0, max_sequence_length=max_sequence_length))
        if not texts:
            return []
        if not self.report.embeds:
            raise InputError(
                f"{self.report.pipeline_class} encodes inside its own call; it has no conditioning to give"
            )
        chosen = self._replicas[replica]
        with chosen.lock:
            rows: list[dict[str, torch.Tensor]] = chosen.executor.call(
                "encode", list(texts), max_sequence_length, list(layers), limit_s=limit_s
            )
        return rows

    def cache_counters(self, replica: int = 0) -> dict[str, int]:
        """Return what the embedding cache of a replica's rank 0 has done; waits for a call that runs."""
        chosen = self._replicas[replica]
        with chosen.lock:
            counters: dict[str, int] = chosen.executor.call("cache_counters")
        return counters

    def rank_states(self) -> list[list[bool]]:
        """Return for each replica whether each of its ranks is there; asks no rank and waits for none."""
        return [replica.executor.rank_states for replica in self._replicas]

    def restart(self, replica: int) -> None:
        """End what is left of a replica's ranks, start them anew and load the pipeline again; the others go on.

        A call that runs on the replica raises LostRankError.
        """
        chosen = self._replicas[replica]
        chosen.executor.kill()
        with chosen.lock:
            chosen.executor.shutdown(graceful=False)
            self._load(replica)

    def check(self, request: GenerateRequest) -> None:
        """Raise InputError where the pipeline can't honour a request; asks no rank."""
        check_request(request, self.report, self.spec.layout)


def _own_embeds(request: GenerateRequest) -> dict[str, Any] | None:
    """Return what a request came with under the pipeline's own names; `encode` returns more than that."""
    return None if request.embeds is None else {name: x for name, x in request.embeds.items() if "." not in name}


def _found(path: str) -> str:
    """Return the local folder of a pipeline: a hub id is looked up once, not by every rank."""
    from enfold.diffusion.opening import find_pipeline

    return str(find_pipeline(path).resolve())
