"""What is wrong with a request to draw, said before any rank works on it: the numbers and the remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from enfold.config import SEED_LIMIT
from enfold.diffusion.layout import PipelineLayout, check_lengths
from enfold.diffusion.requests import EmbedFacts, GenerateRequest, PipelineReport
from enfold.errors import InputError

COUNTS = ("num_images", "height", "width", "num_frames", "num_inference_steps", "max_sequence_length")
SCALES = ("guidance_scale", "true_cfg_scale")


def check_request(request: GenerateRequest, report: PipelineReport, layout: PipelineLayout) -> None:
    """Raise InputError where a pipeline that says `report` of itself can't honour a request."""
    _check_text("prompt", request.prompt)
    if request.negative_prompt is not None:
        _check_text("negative_prompt", request.negative_prompt)
    _check_fields(request, report)
    _check_numbers(request)
    _check_sizes(request, report, layout)
    if request.embeds is not None:
        check_embeds(request.embeds, report)


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise InputError(f"{name} is a {type(text).__name__}; it must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} holds half of a surrogate pair at place {error.start}; send whole characters"
        ) from None


def _check_fields(request: GenerateRequest, report: PipelineReport) -> None:
    for name in ("negative_prompt", "embeds", *COUNTS, *SCALES):
        if getattr(request, name) is not None and name not in report.accepts:
            known = ", ".join(report.accepts)
            raise InputError(f"{report.pipeline_class} takes no {name}; leave it out (it takes {known})")


def _check_numbers(request: GenerateRequest) -> None:
    for name in COUNTS:
        value = getattr(request, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{name}={value!r} must be a whole number of at least 1")
    for name in SCALES:
        value = getattr(request, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and math.isfinite(value) and value >= 0):
            raise InputError(f"{name}={value!r} must be a finite number of at least 0")
    seed, last = request.seed, SEED_LIMIT - request.num_images
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= last:
        raise InputError(f"seed={seed!r} must be a whole number from 0 to {last} for {request.num_images} pictures")


def _check_sizes(request: GenerateRequest, report: PipelineReport, layout: PipelineLayout) -> None:
    values: dict[str, Any] = {name: getattr(request, name) or report.defaults.get(name) for name in COUNTS}
    for name in ("height", "width"):
        if values[name] is not None and values[name] % report.multiple:
            below = values[name] - values[name] % report.multiple
            near = [size for size in (below, below + report.multiple) if size]
            raise InputError(
                f"{name}={values[name]} is no multiple of {report.multiple}; use {' or '.join(map(str, near))}"
            )
    frames = values["num_frames"]
    if request.num_frames is not None and (frames - 1) % report.frame_step:
        below = frames - (frames - 1) % report.frame_step
        raise InputError(
            f"num_frames={frames} must be 1 more than a multiple of {report.frame_step}; use {below} or "
            f"{below + report.frame_step}"
        )
    length = values["max_sequence_length"]
    if report.max_tokens is not None and length is not None and length > report.max_tokens:
        raise InputError(
            f"max_sequence_length={length} is more than {report.pipeline_class} takes: {report.max_tokens}"
        )
    _check_shares(values, report, layout)


def _check_shares(values: Mapping[str, Any], report: PipelineReport, layout: PipelineLayout) -> None:
    """Raise InputError where the ranks that split the DiT's tokens can't have equal shares."""
    if values["height"] is None or values["width"] is None:
        return
    rows, columns = values["height"] // report.multiple, values["width"] // report.multiple
    latent_frames = ((values["num_frames"] or 1) - 1) // report.frame_step + 1
    lengths = {f"picture tokens of {values['height']} x {values['width']}": rows * columns * latent_frames}
    if report.cuts_text and values["max_sequence_length"] is not None:
        lengths["prompt tokens (max_sequence_length)"] = values["max_sequence_length"]
    check_lengths(layout, lengths)


def check_embeds(embeds: Mapping[str, torch.Tensor], report: PipelineReport) -> None:
    """Raise InputError where tensors are not the conditioning of one text for this pipeline.

    Names with a dot ("text_encoder.hidden_states.2") are what `encode` returns beside it, and are not looked at.
    """
    given = {name: x for name, x in embeds.items() if "." not in name}
    if unknown := sorted(set(given) - set(report.embeds)):
        raise InputError(
            f"{report.pipeline_class} takes no {', '.join(unknown)}; it takes {', '.join(report.embeds) or 'none'}"
        )
    if missing := [name for name in report.needed_embeds if name not in given]:
        raise InputError(
            f"embeds lack {', '.join(missing)}; {report.pipeline_class} needs {', '.join(report.needed_embeds)}"
        )
    for name, x in given.items():
        _check_tensor(name, x, report.embeds[name])
    for prefix in ("", "negative_"):
        _check_together(given, report, prefix)


def _check_tensor(name: str, x: Any, facts: EmbedFacts) -> None:
    if not isinstance(x, torch.Tensor):
        raise InputError(f"{name} is a {type(x).__name__}; it must be a tensor")
    shape = ["tokens" if size is None else size for size in facts.shape]
    fits = x.dim() == len(facts.shape) and all(
        have > 0 if want is None else have == want for have, want in zip(x.shape, facts.shape, strict=True)
    )
    if not fits:
        raise InputError(f"{name} has shape {list(x.shape)}; it must be {shape}")
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype != facts.dtype and not ("mask" in name and dtype in ("bool", "int64")):
        raise InputError(f"{name} is {dtype}; it must be {facts.dtype}")
    if x.is_floating_point() and not bool(x.isfinite().all()):
        raise InputError(f"{name} holds {int((~x.isfinite()).sum())} numbers that are NaN or infinite")


def _check_together(given: Mapping[str, torch.Tensor], report: PipelineReport, prefix: str) -> None:
    """Raise InputError where the tensors of a prompt, or of a negative prompt, don't belong together."""
    wanted = [prefix + name for name in report.needed_embeds]
    some = [name for name in given if name.startswith("negative_") == bool(prefix)]
    if some and (missing := [name for name in wanted if name not in given]):
        raise InputError(f"embeds have {', '.join(some)} and lack {', '.join(missing)}")
    lengths = {name: given[name].shape[1] for name in some if None in report.embeds[name].shape}
    if len(set(lengths.values())) > 1:
        raise InputError(f"embeds have different numbers of tokens: {lengths}")
    for name in some:
        if "mask" in name and (given[name].long().diff(dim=1) > 0).any():
            raise InputError(f"{name} has tokens behind its padding; padding must come last")
