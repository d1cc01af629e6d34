"""The two kinds of models behind the server: a Diffusers pipeline, and one text encoder. Each has one or more replicas.

Both are made and called from threads; neither knows of HTTP.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from enfold.diffusion.engine import PipelineEngine
from enfold.diffusion.requests import PipelineReport, PipelineSpec
from enfold.engine import Engine, Tokens
from enfold.errors import InputError
from enfold.runtime.machine import available_cores
from enfold.server.encoder_worker import BoundedExecutor
from enfold.server.jobs import EmbedRequest, EncodeRequest, Job
from enfold.worker import EncoderSpec

Note = Callable[[Any], None]
ModelType = Literal["diffusion", "encoder"]


class Backend(Protocol):
    """All replicas of one model. `start` loads them; each replica takes one batch at a time."""

    kind: ModelType
    num_replicas: int

    def start(self) -> None:
        """Start the ranks of all replicas and load the model on them."""

    def run(self, jobs: Sequence[Job], replica: int, limit_s: float) -> list[Any]:
        """Run jobs of one signature on a replica and return one result per job; LostRankError after `limit_s`."""

    def check(self, job: Job) -> None:
        """Raise InputError where the job can't be run, before any work."""

    def rank_states(self) -> list[list[bool]]:
        """Return, per replica and rank, whether its process is there."""

    def restart(self, replica: int) -> None:
        """Start the ranks of one replica anew, and load the model on them."""

    def kill(self) -> None:
        """End all ranks at once, from any thread, and wait for their ends; a call that runs gets a LostRankError."""

    def plans(self) -> dict[str, dict[str, Any]]:
        """Return Plan.to_json() of each encoder."""

    def words(self) -> dict[str, str]:
        """Return the plan of each encoder in one line, and what else the ranks do."""


class DiffusionBackend:
    """A Diffusers pipeline. `report` is what a replica said of it once it was loaded."""

    kind: ModelType = "diffusion"

    def __init__(self, spec: PipelineSpec, threads_per_rank: int | None = None) -> None:
        self.engine = PipelineEngine(spec, threads_per_rank=threads_per_rank)
        self.num_replicas = self.engine.num_replicas

    @property
    def report(self) -> PipelineReport:
        """What a replica said of the pipeline."""
        return self.engine.report

    def start(self) -> None:
        """Start all replicas and load the pipeline on them."""
        self.engine.start()

    def run(self, jobs: Sequence[Job], replica: int, limit_s: float) -> list[Any]:
        """Draw pictures, or encode texts."""
        if jobs[0].kind == "encode":
            return self._encode(
                [job.payload for job in jobs if isinstance(job.payload, EncodeRequest)], replica, limit_s
            )

        def tell(note: Any) -> None:
            for job in jobs:
                job.on_progress(note)

        requests: list[Any] = [job.payload for job in jobs]
        return self.engine.generate(requests, replica=replica, on_progress=tell, limit_s=limit_s)

    def _encode(self, requests: Sequence[EncodeRequest], replica: int, limit_s: float) -> list[Any]:
        first = requests[0]
        texts = [text for request in requests for text in request.texts]
        sets = self.engine.encode(
            texts,
            replica=replica,
            max_sequence_length=first.max_sequence_length,
            layers=first.layers,
            limit_s=limit_s,
        )
        return split_by([len(request.texts) for request in requests], sets)

    def check(self, job: Job) -> None:
        """Ask the engine whether it can draw this."""
        if job.kind == "embed":
            raise InputError(
                "a diffusion pipeline gives no single vector per text; POST /encode gives what its encoders make of one"
            )
        if job.kind == "generate":
            self.engine.check(job.payload)  # type: ignore[arg-type]

    def rank_states(self) -> list[list[bool]]:
        """Return, per replica and rank, whether its process is there."""
        return self.engine.rank_states()

    def restart(self, replica: int) -> None:
        """Start one replica anew."""
        self.engine.restart(replica)

    def kill(self) -> None:
        """End all ranks at once."""
        self.engine.close(graceful=False)

    def plans(self) -> dict[str, dict[str, Any]]:
        """Return the plan of each encoder."""
        return self.report.plans

    def words(self) -> dict[str, str]:
        """Return the plan of each encoder in words, and why the DiT is or is not split."""
        return {**self.report.summaries, "transformer": self.report.splits}


@dataclass(frozen=True)
class EncoderOptions:
    """How one text encoder is served: replicas, ranks of each, texts per call and tokens per text."""

    num_replicas: int = 1
    replica_size: int = 1
    batch_size: int = 32
    max_length: int | None = None
    threads_per_rank: int | None = None


class ServedEngine(Engine):
    """An engine whose ranks also return whole conditioning sets."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model knows."""
        return self._vocab_size

    def conditioning(self, ids: Sequence[list[int]], layers: tuple[int, ...]) -> list[Any]:
        """Return one set of tensors per text; see EncoderWorker.conditioning."""
        sets: list[Any] = []
        for start in range(0, len(ids), self.batch_size):
            rows = list(ids[start : start + self.batch_size])
            lengths = [len(row) for row in rows]
            sets += self.executor.call("conditioning", self._pad(rows), self._use_mask, lengths, layers)
        return sets


class EncoderBackend:
    """One text encoder; every replica has processes of its own, so that a crash ends none but its ranks."""

    kind: ModelType = "encoder"

    def __init__(self, spec: EncoderSpec, options: EncoderOptions) -> None:
        self.num_replicas = options.num_replicas
        num_ranks = options.num_replicas * options.replica_size
        threads = options.threads_per_rank or max(1, available_cores() // num_ranks)
        self.executors = [
            BoundedExecutor(options.replica_size, threads, spec.timeout_s, replica)
            for replica in range(options.num_replicas)
        ]
        self.engines = [
            ServedEngine(
                spec,
                num_ranks=options.replica_size,
                batch_size=options.batch_size,
                max_length=options.max_length,
                executor=executor,
            )
            for executor in self.executors
        ]
        self._tokenizer_lock = threading.Lock()  # fast tokenizers keep truncation settings, and refuse two at once

    def start(self) -> None:
        """Start all replicas at the same time."""
        with ThreadPoolExecutor(self.num_replicas) as threads:
            list(threads.map(lambda engine: engine.start(), self.engines))

    def tokenize(self, texts: Sequence[str]) -> Tokens:
        """Return token ids; needs no rank. Raises InputError as Engine.tokenize does."""
        with self._tokenizer_lock:
            return self.engines[0].tokenize(texts)

    @property
    def max_length(self) -> int:
        """Tokens that a text may have."""
        return self.engines[0].max_length

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model knows."""
        return self.engines[0].vocab_size

    @property
    def hidden_size(self) -> int:
        """Numbers in a vector."""
        return self.engines[0].plan.hidden_size

    def run(self, jobs: Sequence[Job], replica: int, limit_s: float) -> list[Any]:
        """Encode the texts of all jobs in as few calls as the batch size allows."""
        engine = self.engines[replica]
        with self.executors[replica].within(limit_s):
            if jobs[0].kind == "encode":
                return self._encode_sets(engine, [job.payload for job in jobs])
            requests = [job.payload for job in jobs if isinstance(job.payload, EmbedRequest)]
            ids = [list(row) for request in requests for row in request.ids]
            found: dict[int, Any] = {}
            for batch in engine.encode_batches(Tokens(ids, [False] * len(ids)), requests[0].pooling):
                found.update(zip(batch.indices, batch.tensors, strict=True))
            return split_by([len(request.ids) for request in requests], [found[place] for place in range(len(ids))])

    def _encode_sets(self, engine: ServedEngine, requests: Sequence[Any]) -> list[Any]:
        texts = [text for request in requests for text in request.texts]
        tokens, layers = self.tokenize(texts), requests[0].layers
        most = requests[0].max_sequence_length or self.max_length
        ids = [row[:most] for row in tokens.ids]
        return split_by([len(request.texts) for request in requests], engine.conditioning(ids, layers))

    def check(self, job: Job) -> None:
        """Refuse what needs a pipeline, and texts and token ids that the model can't take."""
        payload = job.payload
        if isinstance(payload, EmbedRequest):
            self._check_ids(payload)
        elif isinstance(payload, EncodeRequest):
            wanted = payload.max_sequence_length
            if wanted is not None and wanted > self.max_length:
                raise InputError(
                    f"max_sequence_length={wanted} is more than the {self.max_length} tokens of this model"
                )
            self.tokenize(payload.texts)
        else:
            raise InputError("this model is an encoder and draws nothing; start the server with a diffusion pipeline")

    def _check_ids(self, request: EmbedRequest) -> None:
        for place, row in enumerate(request.ids):
            if not 1 <= len(row) <= self.max_length:
                raise InputError(f"input {place} has {len(row)} tokens; this model takes 1 to {self.max_length}")
            if not 0 <= min(row) <= max(row) < self.vocab_size:
                last = self.vocab_size - 1
                raise InputError(f"input {place} has token ids from {min(row)} to {max(row)}; they go from 0 to {last}")

    def rank_states(self) -> list[list[bool]]:
        """Return, per replica and rank, whether its process is there."""
        return [executor.rank_states for executor in self.executors]

    def restart(self, replica: int) -> None:
        """End what is left of a replica's ranks, start them, and load the encoder."""
        self.engines[replica].close(graceful=False)
        self.engines[replica].start()

    def kill(self) -> None:
        """End all ranks at once."""
        for executor in self.executors:
            executor.kill()

    def plans(self) -> dict[str, dict[str, Any]]:
        """Return the plan of the encoder."""
        return {"encoder": self.engines[0].loaded.plan}

    def words(self) -> dict[str, str]:
        """Return the plan of the encoder in words."""
        return {"encoder": self.engines[0].plan_summary}


def split_by(counts: Sequence[int], rows: Sequence[Any]) -> list[list[Any]]:
    """Return `rows` cut into runs of the given lengths."""
    runs, start = [], 0
    for count in counts:
        runs.append(list(rows[start : start + count]))
        start += count
    return runs
