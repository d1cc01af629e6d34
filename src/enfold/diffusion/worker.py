"""One rank of a replica that draws: a pipeline whose encoders are spread, a cache of what they made, and their calls.

Every rank of a replica gets the same calls in the same order and does the same; rank 0 answers. A call runs inside a
watch of its own, so that what goes wrong on one rank becomes one error on all, and the next call works.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from math import isnan
from typing import Any

import torch
import torch.distributed as dist

from enfold.diffusion.capture import captured, split_captured
from enfold.diffusion.drawing import STAGES, Timeline, to_bytes
from enfold.diffusion.embedding_cache import Row
from enfold.diffusion.loaded import Loaded
from enfold.diffusion.opening import open_pipeline
from enfold.diffusion.requests import GenerateRequest, GenerateResult, PipelineReport, PipelineSpec, Progress, RankTimes
from enfold.diffusion.split import whole
from enfold.errors import EncodeError, InputError


class PipelineWorker:
    """One rank of `world_size`; `group` is None where it is the only one. `note` hears of rank 0's progress."""

    def __init__(self, *, rank: int, world_size: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.group = group
        self.device = device
        self.note: Callable[[Progress], None] = lambda progress: None
        self._loaded: Loaded | None = None

    @property
    def loaded(self) -> Loaded:
        """The pipeline and what belongs to it; raises EncodeError before `load`."""
        if self._loaded is None:
            raise EncodeError("no pipeline is loaded on this rank; call load first")
        return self._loaded

    @property
    def plans(self) -> dict[str, Any]:
        """The Plan of each encoder, by component."""
        return {name: encoder.plan for name, encoder in self.loaded.opened.encoders.items()}

    def load(self, spec: PipelineSpec) -> PipelineReport:
        """Load the pipeline, in place of the one before; collective."""
        self._loaded = None
        gc.collect()
        opened = open_pipeline(spec, group=self.group, device=self.device)
        self._loaded = Loaded(spec, opened, self.group, self.device)
        return self.loaded.report

    def cache_counters(self) -> dict[str, int]:
        """Return what the embedding cache of this rank has done since the pipeline was loaded."""
        return dict(vars(self.loaded.cache.counters))

    def generate(self, requests: list[GenerateRequest], whole_dit: bool = False) -> list[GenerateResult]:
        """Draw requests of one signature in one call of the pipeline; collective.

        whole_dit: run a split DiT unsplit, to compare. Raises InputError where the requests can't be one batch.
        """
        signatures = {request.signature() for request in requests}
        if len(signatures) != 1:
            raise InputError(
                f"{len(requests)} requests of {len(signatures)} signatures can't be one batch; send one each"
            )
        timeline = Timeline(self.note if self.rank == 0 else lambda progress: None)
        loaded = self.loaded
        with loaded.call("generate", requests), ExitStack() as stack:
            if whole_dit:
                for denoiser in loaded.denoisers:
                    stack.enter_context(whole(denoiser))
            pictures, num_texts, num_cached = loaded.pictures(requests, timeline)
            frames = to_bytes(pictures)
            times = _times(loaded.mesh.replica.all_gather(timeline.table()))
        results = []
        counts = [request.num_images for request in requests]
        for request, own in zip(requests, torch.split(frames, counts), strict=True):
            seeds = [request.seed + i for i in range(request.num_images)]
            results.append(GenerateResult(own.clone(), seeds, len(requests), times, num_texts, num_cached))
        return results

    def generate_plain(self, rows: list[dict[str, Any]], whole_dit: bool = False) -> list[dict[str, Any]]:
        """As `generate`, with the fields of requests and results as dicts: tensors in dicts cross a pipe as bytes."""
        return [vars(result) for result in self.generate([GenerateRequest(**row) for row in rows], whole_dit)]

    def encode(self, texts: list[str], max_sequence_length: int | None, layers: list[int]) -> list[Row]:
        """Return the whole conditioning set of each text; collective. The embedding cache is not asked.

        By the names of the pipeline's arguments, and for each text encoder "<component>.hidden_states.<layer>" for the
        chosen layers (negative ones count from the end), "<component>.attention_mask", "<component>.pooler_output" and
        "<component>.text_embeds" as far as it has them: [1, ...] tensors on the CPU.
        """
        loaded = self.loaded
        with loaded.call("encode", (texts, max_sequence_length, layers)), loaded.offload.on_device():
            with captured(loaded.opened.encoders, layers) as calls:
                rows = loaded.encode(texts, loaded.options(max_sequence_length))
            extra = split_captured(calls, len(texts), layers)
        return [{name: x.cpu() for name, x in {**row, **more}.items()} for row, more in zip(rows, extra, strict=True)]


def _times(tables: torch.Tensor) -> list[RankTimes]:
    """Return the spans of every rank from fp64 [ranks, number of STAGES, 2]."""
    return [
        RankTimes(
            rank,
            tuple((stage, begin, end) for stage, (begin, end) in zip(STAGES, table, strict=True) if not isnan(begin)),
        )
        for rank, table in enumerate(tables.tolist())
    ]
