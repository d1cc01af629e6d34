"""A pipeline that is loaded on this rank, and what it takes to draw a batch: conditioning, cache, defaults, offload."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from enfold.comm import Groups, Mesh, build_mesh
from enfold.diffusion.capture import hidden_state_counts
from enfold.diffusion.conditioning import (
    Wanted,
    Way,
    different_texts,
    encode_options,
    encode_texts,
    to_arguments,
    wanted_of,
    way_of,
)
from enfold.diffusion.drawing import Timeline, call_arguments, draw, encoding_timed, no_texts
from enfold.diffusion.embedding_cache import EmbeddingCache, Row
from enfold.diffusion.facts import DEFAULT_NAMES, describe, embed_facts, merged_defaults
from enfold.diffusion.offload import Offload
from enfold.diffusion.opening import Opened, denoisers_of, find_pipeline
from enfold.diffusion.requests import GenerateRequest, PipelineReport, PipelineSpec
from enfold.errors import InputError
from enfold.layout import Layout

logger = logging.getLogger("enfold")

PROBE_TOKENS = 16
"""max_sequence_length of the one text that is encoded when a pipeline is loaded."""


class Loaded:
    """A pipeline on this rank with its mesh, its cache and its defaults."""

    def __init__(
        self, spec: PipelineSpec, opened: Opened, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self.opened = opened
        self.device = device
        self.pipeline = opened.pipeline
        self.way = way_of(opened.pipeline)
        self.said: set[str] = set()
        groups = Groups(group)
        self.mesh: Mesh = build_mesh(Layout(replicate=len(groups.ranks)), groups, spec.timeout_s)
        self.offload = Offload(opened.encoders, device, spec.offload_encoders)
        self.defaults = merged_defaults(opened.pipeline, find_pipeline(spec.path))
        self._encode_options = encode_options(opened.pipeline) if self.way else {}
        self.cache = EmbeddingCache(spec.cache_bytes, _salt(spec, opened, device))
        self.report = self._describe(spec)

    @property
    def denoisers(self) -> list[Any]:
        """The components that are split where the layout says so."""
        return denoisers_of(self.pipeline)

    def _describe(self, spec: PipelineSpec) -> PipelineReport:
        """Return the report; one short text is encoded, which shows what conditioning looks like here."""
        report = describe(self.opened, self.way, self.defaults, spec.layout)
        if self.way is None:
            kind = type(self.pipeline).__name__
            self._say(
                f"{kind} is not known to take prepared embeddings: it encodes inside its own call, without a cache"
            )
            return report
        length = None if self.defaults.get("max_sequence_length") is None else PROBE_TOKENS
        with self.call("load", "one text"), self.offload.on_device(), torch.no_grad():
            row = self.encode(["a"], self.options(length))[0]
        return replace(report, **embed_facts(self.way, row), num_layers=hidden_state_counts(self.opened.encoders))

    @contextmanager
    def call(self, what: str, content: Any) -> Iterator[None]:
        """Run one call that all ranks make with the same content: one outcome on every rank."""
        with self.mesh.watch.call(what), torch.no_grad():
            self.mesh.watch.agree(lambda: f"{what} {content!r}")
            yield

    def options(self, max_sequence_length: int | None) -> dict[str, Any]:
        """Return what encode_prompt is called with beside texts."""
        options = dict(self._encode_options)
        length = max_sequence_length or self.defaults.get("max_sequence_length")
        if "max_sequence_length" in options and length is not None:
            options["max_sequence_length"] = length
        return options

    def encode(self, texts: Sequence[str], options: Mapping[str, Any]) -> list[Row]:
        """Return one row per text, encoded together."""
        if self.way is None:
            raise InputError(
                f"{type(self.pipeline).__name__} is not known to take prepared conditioning; nothing to encode"
            )
        return encode_texts(self.pipeline, self.way, texts, options, self.device)

    def pictures(
        self, requests: Sequence[GenerateRequest], timeline: Timeline, output_type: str = "pt"
    ) -> tuple[torch.Tensor, int, int]:
        """Return the pictures of all requests, how many different texts they have, and how many were at hand."""
        values = {name: getattr(requests[0], name) for name in DEFAULT_NAMES}
        values |= {name: self.defaults.get(name) for name, value in values.items() if value is None}
        seeds = [request.seed + i for request in requests for i in range(request.num_images)]
        if self.way is None:
            return self._all_in_one_call(requests, values, seeds, timeline, output_type), 0, 0
        conditioning, num_texts, num_cached = self._condition(self.way, requests, values, timeline)
        arguments = {**call_arguments(self.pipeline, values), **no_texts(self.pipeline), **conditioning}
        with self.offload.hidden_from(self.pipeline):
            pictures = draw(self.pipeline, arguments, seeds, timeline, self.device, output_type)
        return pictures, num_texts, num_cached

    def _with_negative(self, request: GenerateRequest) -> GenerateRequest:
        """Return a request with the negative prompt that the model's folder says, where it has none itself."""
        default = self.defaults.get("negative_prompt")
        return request if request.negative_prompt is not None else replace(request, negative_prompt=default)

    def _condition(
        self, way: Way, requests: Sequence[GenerateRequest], values: Mapping[str, Any], timeline: Timeline
    ) -> tuple[Row, int, int]:
        scale = values.get(way.guidance) if way.guidance else None
        if scale is not None and scale > 1:
            requests = [self._with_negative(request) for request in requests]
        zeros = way.zeros_flag is not None and bool(self.pipeline.config.get(way.zeros_flag))
        wanted = [wanted_of(request, way, scale, zeros) for request in requests]
        self._say_unused(requests, wanted, way, scale)
        texts = different_texts(wanted)
        timeline.tell("encode", 0, len(texts))
        with timeline.span("encode", self.device):
            rows, num_cached = self._rows(texts, self.options(values["max_sequence_length"]))
        timeline.tell("encode", len(texts), len(texts))
        return to_arguments(way, wanted, rows, self.device), len(texts), num_cached

    def _rows(self, texts: Sequence[str], options: Mapping[str, Any]) -> tuple[dict[str, Row], int]:
        """Return the row of each text and how many of them came from the cache; the others are encoded in one call."""
        key = repr(sorted(options.items()))
        found = {text: self.cache.get(text, key) for text in texts}
        missing = [
            text for text, is_hit in zip(texts, self._everywhere(list(found.values())), strict=True) if not is_hit
        ]
        if missing:
            with self.offload.on_device():
                rows = self.encode(missing, options)
            for text, row in zip(missing, rows, strict=True):
                self.cache.put(text, key, row)
                found[text] = row
        return {text: row for text, row in found.items() if row is not None}, len(texts) - len(missing)

    def _everywhere(self, found: Sequence[Row | None]) -> list[bool]:
        """Return which rows are at hand on every rank: what one rank lacks all encode, since they do it together."""
        if not found:
            return []
        own = torch.tensor([row is not None for row in found], dtype=torch.uint8)
        return [bool(each) for each in self.mesh.replica.all_gather(own).amin(0)]

    def _all_in_one_call(
        self,
        requests: Sequence[GenerateRequest],
        values: Mapping[str, Any],
        seeds: Sequence[int],
        timeline: Timeline,
        output_type: str,
    ) -> torch.Tensor:
        """Draw with a pipeline that encodes by itself: prompts go in as texts, once for each picture."""
        texts: dict[str, Any] = {"prompt": [each.prompt for each in requests for _ in range(each.num_images)]}
        if requests[0].negative_prompt is not None:
            texts["negative_prompt"] = [each.negative_prompt for each in requests for _ in range(each.num_images)]
        arguments = call_arguments(self.pipeline, {**values, **texts})
        with self.offload.on_device(), encoding_timed(self.pipeline, timeline, self.device):
            return draw(self.pipeline, arguments, seeds, timeline, self.device, output_type)

    def _say_unused(
        self, requests: Sequence[GenerateRequest], wanted: Sequence[Wanted], way: Way, scale: float | None
    ) -> None:
        if requests[0].negative_prompt is not None and wanted[0].negative is None and way.guidance:
            self._say(f"a negative prompt has no effect at {way.guidance}={scale}; use more than 1")

    def _say(self, warning: str) -> None:
        if warning not in self.said and self.mesh.replica.index == 0:
            self.said.add(warning)
            logger.warning("%s", warning)


def _salt(spec: PipelineSpec, opened: Opened, device: torch.device) -> str:
    """Return all that an embedding hangs on beside its text and options."""
    plans = {name: encoder.plan.to_json() for name, encoder in opened.encoders.items()}
    folder = find_pipeline(spec.path).resolve()  # a hub's snapshot folder is named by its revision
    kind = type(opened.pipeline).__name__
    return repr((str(folder), kind, str(opened.dtype), spec.numerics, device.type, torch.__version__, plans))
