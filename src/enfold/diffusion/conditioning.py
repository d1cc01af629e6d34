"""How each pipeline takes prepared conditioning, and a batch of requests made of it: each different text encoded once.

A Row is what the encoders made of one text: [1, ...] tensors by the names that the pipeline's call has for them. Rows
don't know whether they stand for a prompt or a negative prompt; that shows only when they become arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from enfold.diffusion.embedding_cache import Row
from enfold.diffusion.requests import GenerateRequest
from enfold.errors import EncodeError

NEGATIVE = "negative_"
ZEROS = object()
"""Stands for a negative prompt whose conditioning is zeros."""


@dataclass(frozen=True)
class Way:
    """How one pipeline class takes its conditioning; read from Diffusers' own encode_prompt and __call__.

    returns: by which names the call takes what encode_prompt returns for prompts alone, in order; None: not needed.
    guidance: the argument that turns guidance on above 1; None where there are no negative prompts.
    default_negative: the text that stands for a negative prompt that was not given; None: then nothing is guided.
    zeros_flag: an entry of the pipeline's config; where it is true, a negative prompt not given is zeros.
    mask: of the tensors, the one that says which tokens are a text's own. Rows are kept without padding, and the mask
    is made anew for each batch; Diffusers leaves it out where all rows are as long.
    max_tokens: the largest max_sequence_length that the call accepts.
    packs: how many latents along each side become one token, beside the transformer's own patch_size.
    """

    returns: tuple[str | None, ...]
    guidance: str | None = "guidance_scale"
    default_negative: str | None = ""
    zeros_flag: str | None = None
    mask: str | None = None
    max_tokens: int | None = None
    packs: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names of one text's tensors."""
        return tuple(name for name in self.returns if name is not None)

    @property
    def needed(self) -> tuple[str, ...]:
        """The names that a row can't do without."""
        return tuple(name for name in self.names if name != self.mask)


EMBEDS, POOLED, MASK = "prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask"
_FLUX = partial(Way, guidance="true_cfg_scale", default_negative=None, packs=2)
_FOUR = (EMBEDS, None, POOLED, None)
_MASKED = (EMBEDS, MASK, None, None)

WAYS: Mapping[str, Way] = {
    "FluxPipeline": _FLUX((EMBEDS, POOLED, None), max_tokens=512),
    "Flux2Pipeline": Way((EMBEDS, None), guidance=None, default_negative=None, packs=2),
    "Flux2KleinPipeline": Way((EMBEDS, None), packs=2),
    "QwenImagePipeline": _FLUX((EMBEDS, "prompt_embeds_mask"), mask="prompt_embeds_mask", max_tokens=1024),
    "ChromaPipeline": Way((EMBEDS, None, MASK, None, None, None), max_tokens=512, packs=2),
    "StableDiffusion3Pipeline": Way(_FOUR, max_tokens=512),
    "StableDiffusionXLPipeline": Way(_FOUR, zeros_flag="force_zeros_for_empty_prompt"),
    "StableDiffusionPipeline": Way((EMBEDS, None)),
    "PixArtAlphaPipeline": Way(_MASKED),
    "PixArtSigmaPipeline": Way(_MASKED),
    "WanPipeline": Way((EMBEDS, None)),
    "LTXPipeline": Way(_MASKED),
    "CogVideoXPipeline": Way((EMBEDS, None)),
    "HunyuanVideoPipeline": Way((EMBEDS, POOLED, MASK), guidance="true_cfg_scale", default_negative=None),
}
"""Not here, and so encoded inside Diffusers' own call: Sana (prompts and negative prompts are encoded in two ways),
Mochi (an empty text changes its whole batch), CogView4 and Z-Image (rows of uneven length), AuraFlow (its mask has an
entry for each feature).
"""


def way_of(pipeline: Any) -> Way | None:
    """Return how a pipeline takes prepared conditioning; None where that is not known."""
    return WAYS.get(type(pipeline).__name__)


# One call of the pipeline's own encode_prompt for many texts.


def encode_options(pipeline: Any) -> dict[str, Any]:
    """Return what the pipeline's call would pass to encode_prompt beside texts: its own defaults (clip_skip, ...)."""
    call = inspect.signature(type(pipeline).__call__).parameters
    return {
        name: call[name].default
        for name in inspect.signature(pipeline.encode_prompt).parameters
        if name in call and call[name].default is not inspect.Parameter.empty and not _is_content(name)
    }


def _is_content(name: str) -> bool:
    """Return whether an argument is a text, or the tensor of one."""
    plain = name.removeprefix(NEGATIVE)
    return plain == "prompt" or plain[:-1] == "prompt_" or "embeds" in name or "mask" in name


def encode_texts(pipeline: Any, way: Way, texts: Sequence[str], options: Mapping[str, Any], device: Any) -> list[Row]:
    """Return one row per text, all encoded in one call of encode_prompt; collective where the encoders are spread."""
    parameters = inspect.signature(pipeline.encode_prompt).parameters
    required = {name: None for name, each in parameters.items() if each.default is inspect.Parameter.empty}
    wanted = {**options, "prompt": list(texts), "device": device, "do_classifier_free_guidance": False}
    wanted |= {"num_images_per_prompt": 1, "num_videos_per_prompt": 1}
    arguments = {**required, **{name: value for name, value in wanted.items() if name in parameters}}
    found = pipeline.encode_prompt(**arguments)
    found = found if isinstance(found, tuple) else (found,)
    if len(found) != len(way.returns):
        raise EncodeError(
            f"encode_prompt of {type(pipeline).__name__} returned {len(found)} values and not {len(way.returns)}; this "
            "version of diffusers is not known yet"
        )
    tensors = {name: value for name, value in zip(way.returns, found, strict=True) if name and value is not None}
    for name, value in tensors.items():
        if value.shape[0] != len(texts):
            raise EncodeError(f"{name} has {value.shape[0]} rows for {len(texts)} texts")
    return [trim(way, {name: value[i : i + 1] for name, value in tensors.items()}) for i in range(len(texts))]


def trim(way: Way, row: Row) -> Row:
    """Return a row without padding and without its mask; the inverse, for a batch, is `stack`."""
    if way.mask is None:
        return row
    mask = row.get(way.mask)
    length = None if mask is None else int(mask.sum())
    return {name: row[name][:, :length] for name in way.needed}


def stack(way: Way, rows: Sequence[Row]) -> Row:
    """Return rows as one batch, padded with zeros to the longest where the pipeline has a mask for that."""
    if way.mask is None:
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    lengths = [row[way.needed[0]].shape[1] for row in rows]
    longest = max(lengths)
    batch = {name: torch.cat([_padded(row[name], longest) for row in rows]) for name in way.needed}
    if min(lengths) < longest:
        device = batch[way.needed[0]].device
        places = torch.arange(longest, device=device)
        batch[way.mask] = (places < torch.tensor(lengths, device=device).unsqueeze(1)).long()
    return batch


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    missing = length - x.shape[1]
    return torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1) if missing else x


# Requests and their texts.


@dataclass(frozen=True)
class Wanted:
    """What one request is drawn from: the text of its prompt and of its negative prompt, or rows that it came with.

    negative is None where nothing is guided.
    """

    positive: str | Row
    negative: str | Row | object | None
    num_images: int


def wanted_of(request: GenerateRequest, way: Way, scale: float | None, zeros: bool) -> Wanted:
    """Return what a request is drawn from, at a guidance scale of `scale`; zeros: see Way.zeros_flag."""
    embeds = dict(request.embeds or {})
    positive: str | Row = request.prompt
    if way.needed[0] in embeds:
        positive = trim(way, {name: embeds[name] for name in way.names if name in embeds})
    negative: str | Row | object | None = None
    if way.guidance is not None and scale is not None and scale > 1:
        if NEGATIVE + way.needed[0] in embeds:
            negative = trim(way, {name: embeds[NEGATIVE + name] for name in way.names if NEGATIVE + name in embeds})
        elif request.negative_prompt is not None:
            negative = request.negative_prompt
        else:
            negative = ZEROS if zeros else way.default_negative
    return Wanted(positive, negative, request.num_images)


def different_texts(wanted: Sequence[Wanted]) -> list[str]:
    """Return every text that has to be encoded, once, in the order of its first use; prompts come first."""
    texts = [each.positive for each in wanted] + [each.negative for each in wanted]
    return list(dict.fromkeys(text for text in texts if isinstance(text, str)))


def to_arguments(way: Way, wanted: Sequence[Wanted], rows: Mapping[str, Row], device: torch.device) -> Row:
    """Return the arguments of one call for all pictures of all requests: a request's pictures stand together.

    rows: the row of each different text. Rows that a request came with are moved to `device`.
    """

    def row_of(source: Any, beside: Row) -> Row:
        if source is ZEROS:
            return {name: torch.zeros_like(value) for name, value in beside.items()}
        row = rows[source] if isinstance(source, str) else source
        return {name: value.to(device) for name, value in row.items()}

    positive = [(row_of(each.positive, {}), each) for each in wanted]
    arguments = stack(way, [row for row, each in positive for _ in range(each.num_images)])
    if wanted[0].negative is None:
        return arguments
    negative = [(row_of(each.negative, row), each) for row, each in positive]
    guided = stack(way, [row for row, each in negative for _ in range(each.num_images)])
    return arguments | {NEGATIVE + name: value for name, value in guided.items()}
