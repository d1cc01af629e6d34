"""What goes to a diffusion pipeline's ranks and what comes back: plain values and tensors, for commands and server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from enfold.config import Mode, Numerics
from enfold.diffusion.layout import PipelineLayout
from enfold.layout import Layout

Stage = Literal["encode", "denoise", "decode"]


@dataclass(frozen=True)
class PipelineSpec:
    """Which Diffusers pipeline to load on the ranks of one replica, and how to spread and split it.

    encoder_layout overrides what the mode would choose. offload_encoders: encoders live on the CPU and are moved to the
    device for the encode alone. cache_bytes bounds the embedding cache of each rank; 0 turns it off. batch_size:
    prompts that may come in one call (what `auto` plans for).
    """

    path: str
    layout: PipelineLayout
    mode: Mode = "auto"
    encoder_layout: Layout | None = None
    dtype: str | None = None
    numerics: Numerics = "exact"
    offload_encoders: bool = False
    cache_bytes: int = 256 * 2**20
    batch_size: int | None = None
    timeout_s: float = 60.0


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt and how to draw it. None leaves a value to the pipeline's own default.

    Picture i of a request has a generator of its own, seeded seed + i. embeds: what `encode` returned for a prompt (or
    a file of it), by the names of the pipeline's arguments ("prompt_embeds", "pooled_prompt_embeds", ...), one row
    each; then `prompt` is only a label.
    """

    prompt: str
    seed: int
    negative_prompt: str | None = None
    num_images: int = 1
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    max_sequence_length: int | None = None
    embeds: Mapping[str, torch.Tensor] | None = None

    def signature(self) -> tuple[Any, ...]:
        """Return what requests must agree in to be drawn in one batch: all but text, seed and number of pictures."""
        own = {"prompt", "seed", "num_images", "negative_prompt", "embeds"}
        same = tuple((each.name, getattr(self, each.name)) for each in fields(self) if each.name not in own)
        shapes = tuple(sorted((name, tuple(rows.shape), str(rows.dtype)) for name, rows in (self.embeds or {}).items()))
        return (*same, self.negative_prompt is None, shapes)


@dataclass(frozen=True)
class Progress:
    """How far a call is: `step` of `total` of a stage; sent by rank 0 while it works."""

    stage: Stage
    step: int
    total: int


@dataclass(frozen=True)
class RankTimes:
    """What one rank did in one call. spans: (stage, begin, end) in seconds since the call began on that rank."""

    rank: int
    spans: tuple[tuple[Stage, float, float], ...]


@dataclass(frozen=True)
class GenerateResult:
    """The pictures of one request: uint8 [num_images, frames, H, W, 3] (one frame where the pipeline makes pictures).

    times: one entry per rank, of the whole batch. cached_texts of num_texts different texts of the batch were not
    encoded, since their embeddings were at hand.
    """

    pictures: torch.Tensor
    seeds: list[int]
    batch_size: int
    times: list[RankTimes] = field(default_factory=list)
    num_texts: int = 0
    cached_texts: int = 0


@dataclass(frozen=True)
class EmbedFacts:
    """What one tensor of prepared conditioning looks like: its shape for one text, None where it has the tokens."""

    shape: tuple[int | None, ...]
    dtype: str


@dataclass(frozen=True)
class PipelineReport:
    """What a replica says of the pipeline it has loaded.

    plans: Plan.to_json() by encoder; summaries: its line of words. defaults: what the pipeline does where a request
    leaves a value out (height, width, num_inference_steps, ...). splits: why the DiT is or is not split, in words.
    multiple: what height and width must be multiples of.
    """

    pipeline_class: str
    is_video: bool
    dtype: str
    plans: dict[str, dict[str, Any]]
    summaries: dict[str, str]
    defaults: dict[str, Any]
    splits: str
    multiple: int
    accepts: tuple[str, ...]
    """The fields of GenerateRequest that this pipeline can honour (no num_frames for a picture pipeline, ...)."""

    frame_step: int = 1
    """num_frames must be 1 more than a multiple of this."""

    max_tokens: int | None = None
    """The largest max_sequence_length that the pipeline takes; None where it names none."""

    embeds: dict[str, EmbedFacts] = field(default_factory=dict)
    """What `GenerateRequest.embeds` may hold, by the pipeline's own names; empty where it takes none."""

    needed_embeds: tuple[str, ...] = ()
    """Of those, the names that must be there."""

    num_parameters: int = 0
    """Parameters of the DiT."""

    cuts_text: bool = False
    """Whether the ranks that split the DiT's tokens split those of the prompt too."""

    num_layers: dict[str, int] = field(default_factory=dict)
    """Hidden states that each text encoder has (its layers and the embedding), by component: what `encode` may pick."""
