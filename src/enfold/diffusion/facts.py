"""What a loaded pipeline says of itself: its defaults, what sizes it takes, which fields of a request it honours."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from enfold.diffusion.conditioning import NEGATIVE, Way
from enfold.diffusion.embedding_cache import Row
from enfold.diffusion.layout import PipelineLayout
from enfold.diffusion.opening import Opened, denoisers_of, read_defaults
from enfold.diffusion.requests import EmbedFacts, PipelineReport

SIZES = ("height", "width", "num_frames")
DEFAULT_NAMES = (*SIZES, "num_inference_steps", "guidance_scale", "true_cfg_scale", "max_sequence_length")
"""The fields of a request that a pipeline has defaults for; by these names its call takes them."""


def merged_defaults(pipeline: Any, folder: Path) -> dict[str, Any]:
    """Return what the pipeline does where a request says nothing: its own defaults under those of its folder."""
    parameters = inspect.signature(type(pipeline).__call__).parameters
    own = {name: parameters[name].default for name in DEFAULT_NAMES if name in parameters}
    side = _default_side(pipeline)
    for name in ("height", "width"):
        if name in own and own[name] is None:
            own[name] = side
    given = read_defaults(folder, frozenset({*DEFAULT_NAMES, "negative_prompt"}))
    return own | {name: value for name, value in given.items() if name in parameters}


def _default_side(pipeline: Any) -> int | None:
    """Return the pixels of a side where the pipeline's call would work them out: latents times the VAE's factor."""
    latents = getattr(pipeline, "default_sample_size", None) or getattr(
        denoisers_of(pipeline)[0].config, "sample_size", None
    )
    return latents * _vae_factor(pipeline) if isinstance(latents, int) else None


def _vae_factor(pipeline: Any) -> int:
    names = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio")
    return next((int(value) for name in names if isinstance(value := getattr(pipeline, name, None), int | float)), 8)


def side_multiple(pipeline: Any, way: Way | None) -> int:
    """Return what height and width must be multiples of: the VAE's factor times the latents along a side of a token."""
    patch = getattr(denoisers_of(pipeline)[0].config, "patch_size", None) or 1
    patch = patch[-1] if isinstance(patch, list | tuple) else patch
    return _vae_factor(pipeline) * max(int(patch), way.packs if way else 1)


def frame_step(pipeline: Any) -> int:
    """Return the frames that one latent frame stands for: num_frames must be 1 more than a multiple of it."""
    names = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
    return next((int(value) for name in names if isinstance(value := getattr(pipeline, name, None), int | float)), 1)


def describe(opened: Opened, way: Way | None, defaults: dict[str, Any], layout: PipelineLayout) -> PipelineReport:
    """Return what can be said of a pipeline without running it."""
    pipeline = opened.pipeline
    parameters = inspect.signature(type(pipeline).__call__).parameters
    is_video = "num_frames" in parameters
    accepts = [name for name in DEFAULT_NAMES if name in parameters]
    if way.guidance if way else NEGATIVE + "prompt" in parameters:
        accepts.append(NEGATIVE + "prompt")
    denoiser = denoisers_of(pipeline)[0]
    is_cut = layout.ring * layout.ulysses > 1
    return PipelineReport(
        pipeline_class=type(pipeline).__name__,
        is_video=is_video,
        dtype=str(opened.dtype).removeprefix("torch."),
        plans={name: encoder.plan.to_json() for name, encoder in opened.encoders.items()},
        summaries={name: encoder.plan.summary() for name, encoder in opened.encoders.items()},
        defaults=defaults,
        splits=opened.split,
        multiple=side_multiple(pipeline, way),
        accepts=("prompt", "seed", "num_images", *accepts, *(("embeds",) if way else ())),
        num_parameters=sum(parameter.numel() for parameter in denoiser.parameters()),
        frame_step=frame_step(pipeline) if is_video else 1,
        max_tokens=way.max_tokens if way else None,
        cuts_text=is_cut and way is not None and way.mask is None and _cuts_text(denoiser),
    )


def _cuts_text(denoiser: Any) -> bool:
    """Return whether a split of the DiT's tokens cuts its prompt too, on its way in."""
    plan = getattr(denoiser, "_cp_plan", None) or {}
    return "encoder_hidden_states" in plan.get("", {})


def embed_facts(way: Way, row: Row) -> dict[str, Any]:
    """Return the report's entries about `GenerateRequest.embeds`, from the row of one text."""
    facts = {}
    for name in way.names:
        if "mask" in name:
            facts[name] = EmbedFacts((1, None), _name(row[name]) if name in row else "int64")
        else:  # [1, tokens, features], or [1, features] where pooled
            shape = row[name].shape
            facts[name] = EmbedFacts((1, *(None for _ in shape[1:-1]), shape[-1]), _name(row[name]))
    guided = {NEGATIVE + name: each for name, each in facts.items()} if way.guidance else {}
    return {"embeds": facts | guided, "needed_embeds": way.needed}


def _name(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
