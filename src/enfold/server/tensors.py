"""Conditioning sets as safetensors: what POST /encode sends, and what the generation routes take back.

A file holds one set per text: tensor `3.prompt_embeds` is the prompt_embeds of text 3. pack and unpack are inverse.
Nothing here reads pickle: safetensors is a length, a JSON header and plain bytes, and its own parser checks all three.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from enfold.errors import InputError

MEDIA_TYPE = "application/vnd.safetensors"
FORMAT = "enfold conditioning 1"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool)


def pack(sets: Sequence[Mapping[str, torch.Tensor]], model: str) -> bytes:
    """Return one file with the sets of several texts."""
    tensors = {f"{place}.{name}": x.contiguous().clone() for place, each in enumerate(sets) for name, x in each.items()}
    # Clones: a row may be a view of a batch, and the format refuses tensors that share memory.
    content: bytes = save(tensors, {"format": FORMAT, "model": model, "num_texts": str(len(sets))})
    return content


def unpack(content: bytes) -> list[dict[str, torch.Tensor]]:
    """Return the sets of a file, text by text. Names without a number belong to text 0.

    Raises InputError for what is no safetensors file, and for tensors that no conditioning can have.
    """
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise InputError(f"prompt_embeds is no safetensors file ({error}); POST /encode gives one") from None
    sets: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        head, _, rest = name.partition(".")
        numbered = bool(rest) and head.isascii() and head.isdigit() and len(head) < 7
        place, plain = (int(head), rest) if numbered else (0, name)
        _check(name, tensor)
        sets.setdefault(place, {})[plain] = tensor
    return [sets.get(place, {}) for place in range(max(sets, default=-1) + 1)]


def _check(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise InputError(f"tensor {name!r} of prompt_embeds is {tensor.dtype}; {', '.join(map(str, DTYPES))} are taken")
    if tensor.numel() == 0:
        raise InputError(f"tensor {name!r} of prompt_embeds is empty: its shape is {tuple(tensor.shape)}")
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        bad = int((~tensor.isfinite()).sum())
        raise InputError(f"tensor {name!r} of prompt_embeds: {bad} of {tensor.numel()} values are NaN or infinite")


def read_embeds(text: str, index: int) -> dict[str, torch.Tensor]:
    """Return what a pipeline takes of text `index` of a file in base64; each tensor has one row. Raises InputError."""
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"prompt_embeds is no base64 ({error}); send a file of POST /encode in base64") from None
    sets = unpack(content)
    if index >= len(sets):
        raise InputError(f"prompt_embeds_index={index}, and the file holds {len(sets)} texts; use 0 to {len(sets) - 1}")
    # Names with a dot (text_encoder.hidden_states.2) are for other readers; the engine checks names and shapes.
    found = {name: tensor for name, tensor in sets[index].items() if "." not in name}
    if "prompt_embeds" not in found:
        there = ", ".join(json.dumps(name) for name in sorted(sets[index])[:8]) or "nothing"
        raise InputError(f"text {index} of the file has no prompt_embeds (it has {there}); use a file of POST /encode")
    for name, tensor in found.items():
        if len(tensor.shape) < 2 or tensor.shape[0] != 1:
            raise InputError(f"tensor {name!r} of prompt_embeds has shape {tuple(tensor.shape)}; [1, ...] is needed")
    return found
