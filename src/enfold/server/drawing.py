"""From a body to a GenerateRequest, checked against the limits; the same for pictures and clips."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from enfold.errors import InputError
from enfold.server.failures import RequestError
from enfold.server.limits import check_at_most, check_text
from enfold.server.schemas import Drawing

if TYPE_CHECKING:
    from enfold.diffusion.requests import GenerateRequest
    from enfold.server.service import Service

RANDOM_SEEDS = 2**31


def check_model(service: Service, model: str | None) -> None:
    """Raise a 404 where another model is asked for than is served."""
    if model not in (None, "", service.settings.model):
        told = f"model {model!r} is not served here; use {service.settings.model!r}, or leave `model` out"
        raise RequestError(404, "model_not_found", told, "model")


def make_request(
    service: Service, body: Drawing, *, num_images: int = 1, num_frames: int | None = None
) -> GenerateRequest:
    """Return the request for the engine; raise InputError or RequestError where a limit or a value is wrong."""
    from enfold.diffusion.requests import GenerateRequest
    from enfold.server.tensors import read_embeds

    check_model(service, body.model)
    limits = service.limits
    check_text(limits, body.prompt, "prompt")
    check_text(limits, body.negative_prompt, "negative_prompt")
    check_at_most(limits, "images", num_images, "n")
    check_at_most(limits, "steps", body.num_inference_steps, "num_inference_steps")
    check_at_most(limits, "frames", num_frames, "num_frames")
    check_at_most(limits, "tokens", body.max_sequence_length, "max_sequence_length")
    width, height = size_of(body.size)
    defaults = drawing_defaults(service)
    pixels = (width or defaults.get("width") or 0) * (height or defaults.get("height") or 0)
    check_at_most(limits, "pixels", pixels if width else None, "size", "width x height")
    if not body.prompt.strip() and body.prompt_embeds is None:
        raise RequestError(400, "invalid_request", "prompt is empty; say what to draw", "prompt")
    return GenerateRequest(
        prompt=body.prompt,
        seed=secrets.randbelow(RANDOM_SEEDS) if body.seed is None else body.seed,
        negative_prompt=body.negative_prompt,
        num_images=num_images,
        height=height,
        width=width,
        num_frames=num_frames,
        num_inference_steps=body.num_inference_steps,
        guidance_scale=body.guidance_scale,
        true_cfg_scale=body.true_cfg_scale,
        max_sequence_length=body.max_sequence_length,
        embeds=None if body.prompt_embeds is None else read_embeds(body.prompt_embeds, body.prompt_embeds_index),
    )


def drawing_defaults(service: Service) -> dict[str, Any]:
    """Return what the pipeline does where a request leaves a value out; raise InputError for an encoder."""
    report = getattr(service.backend, "report", None)
    if report is None:
        raise InputError(
            f"{service.settings.model} is an encoder and draws nothing; POST /v1/embeddings or /encode, or start the "
            "server with a diffusion pipeline"
        )
    defaults: dict[str, Any] = report.defaults
    return defaults


def size_of(size: str | None) -> tuple[int | None, int | None]:
    """Return (width, height) of WIDTHxHEIGHT; nothing for auto."""
    if size is None or size == "auto":
        return None, None
    width, _, height = size.partition("x")
    return int(width), int(height)
