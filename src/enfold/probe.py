"""What `enfold verify` measures: random inputs for any encoder, its outputs by name, and how two sets differ."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from enfold.encoders import tower_of
from enfold.errors import InputError

SEED = 20_117
BIT_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Comparison:
    """How one output differs from its reference.

    max_rel is the largest difference over the largest magnitude in the reference. `worst` names the entry with the
    largest difference where the row stands for several (hidden_states).
    """

    output: str
    shape: tuple[int, ...]
    dtype: str
    bits_equal: bool
    max_abs: float
    max_rel: float
    worst: str = ""


def probe_inputs(encoder: Any, batch_size: int, length: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return random arguments for `encoder`, the same on every rank: token ids with a mask, or pixel values.

    Texts have different lengths (1 or more, the first one all `length`), padded on the right.
    """
    generator = torch.Generator().manual_seed(SEED)
    if encoder.main_input_name == "input_ids":
        inputs = _text_inputs(encoder.config.get_text_config(), batch_size, length, generator)
    elif encoder.main_input_name == "pixel_values":
        inputs = _image_inputs(getattr(encoder.config, "vision_config", encoder.config), batch_size, generator)
        inputs = {name: _as_parameters(encoder, value) for name, value in inputs.items()}
    else:
        raise InputError(f"no random input is known for an encoder that takes {encoder.main_input_name}")
    return {name: value.to(device) for name, value in inputs.items()}


def _text_inputs(config: Any, batch_size: int, length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    limit = max_positions(config)
    if limit is not None and length > limit:
        raise InputError(f"--length {length} is more than the {limit} positions of the model; use at most {limit}")
    ids_NT = torch.randint(0, config.vocab_size, (batch_size, length), generator=generator)
    lengths_N = torch.randint(1, length + 1, (batch_size,), generator=generator)
    lengths_N[0] = length
    mask_NT = (torch.arange(length) < lengths_N.unsqueeze(1)).long()
    pad = config.pad_token_id
    if not isinstance(pad, int) or not 0 <= pad < config.vocab_size:
        pad = 0
    return {"input_ids": torch.where(mask_NT.bool(), ids_NT, pad), "attention_mask": mask_NT}


def _image_inputs(config: Any, batch_size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    size = getattr(config, "image_size", None) or config.patch_size * 4
    if config.model_type.startswith("siglip2"):
        # It takes patches that are cut already, each image with its own number of rows and columns.
        side = int(config.num_patches**0.5)
        width = config.num_channels * config.patch_size**2
        return {
            "pixel_values": torch.randn(batch_size, side * side, width, generator=generator),
            "pixel_attention_mask": torch.ones(batch_size, side * side, dtype=torch.long),
            "spatial_shapes": torch.full((batch_size, 2), side),
        }
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": torch.randn(batch_size, config.num_channels, height, width, generator=generator)}


def tower_inputs(config: Any, num_images: int) -> dict[str, torch.Tensor]:
    """Return random arguments for a vision tower, the same on every rank, on the CPU; images of different sizes.

    Sides are of 2 to 24 patches, the first image being the largest; or of the one size that the tower takes.
    """
    generator = torch.Generator().manual_seed(SEED)
    tower = tower_of(config.model_type)
    assert tower is not None
    if tower.takes == "images":
        return _image_inputs(config, num_images, generator)
    sizes = tower.read(config.to_dict())
    groups_N2 = torch.randint(1, 24 // sizes.merge_size + 1, (num_images, 2), generator=generator)
    groups_N2[0] = 24 // sizes.merge_size
    grid_thw = torch.cat([torch.ones_like(groups_N2[:, :1]), groups_N2 * sizes.merge_size], 1)
    num_patches = int(grid_thw.prod(1).sum())
    pixels_PF = torch.randn(num_patches, sizes.patch_features, generator=generator)
    return {"hidden_states": pixels_PF, "grid_thw": grid_thw}


def _as_parameters(encoder: Any, value: torch.Tensor) -> torch.Tensor:
    return value.to(encoder.dtype) if value.is_floating_point() else value


OFFSET_POSITIONS = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "data2vec-text")
"""Families whose positions start after the padding id: so many rows of the position table are never used."""


def max_positions(config: Any) -> int | None:
    """Return how many tokens a text may have by the model's position table; None where there is no such limit."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and config.model_type in OFFSET_POSITIONS:
        return int(limit) - (config.pad_token_id or 0) - 1
    return None if limit is None or limit < 1 else int(limit)


def named_outputs(output: Any) -> dict[str, torch.Tensor]:
    """Return every tensor of a module's output by name, in order; entries of a tuple as `name[i]`."""
    items = output.items() if isinstance(output, dict) else ((f"[{i}]", value) for i, value in enumerate(output))
    named: dict[str, torch.Tensor] = {}
    for name, value in items:
        if isinstance(value, torch.Tensor):
            named[name] = value
        elif isinstance(value, (tuple, list)):
            entries = {f"{name}[{i}]": entry for i, entry in enumerate(value) if isinstance(entry, torch.Tensor)}
            named.update(entries)
    return named


def digest_output(value: torch.Tensor) -> str:
    """Return a digest of a tensor's dtype, shape and bits."""
    flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    digest = hashlib.blake2b(f"{value.dtype}{tuple(value.shape)}".encode(), digest_size=16)
    digest.update(flat.numpy().data)
    return digest.hexdigest()


def compare_outputs(outputs: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> list[Comparison]:
    """Return one row per output; the entries of a tuple (hidden_states) are folded into one row.

    Raises InputError where the two do not have the same outputs.
    """
    if list(outputs) != list(reference):
        raise InputError(f"the outputs differ in kind: {', '.join(outputs)} against {', '.join(reference)}")
    groups: dict[str, list[Comparison]] = {}
    for name, value in outputs.items():
        groups.setdefault(name.partition("[")[0] or name, []).append(compare_tensors(name, value, reference[name]))
    return [_fold_rows(name, rows) for name, rows in groups.items()]


def compare_tensors(name: str, value: torch.Tensor, reference: torch.Tensor) -> Comparison:
    """Compare two tensors bit by bit and, where both are numbers, by size of the difference."""
    dtype = str(value.dtype).removeprefix("torch.")
    shape = tuple(value.shape)
    if value.dtype != reference.dtype or value.shape != reference.shape:
        return Comparison(name, shape, dtype, False, float("inf"), float("inf"))
    bits = BIT_TYPES[value.element_size()]
    equal = torch.equal(value.contiguous().view(bits), reference.contiguous().view(bits))
    if equal or not value.numel():
        return Comparison(name, shape, dtype, equal, 0.0, 0.0)
    difference = float((value.double() - reference.double()).abs().max())
    largest = float(reference.double().abs().max())
    return Comparison(name, shape, dtype, False, difference, difference / largest if largest else float("inf"))


def _fold_rows(name: str, rows: list[Comparison]) -> Comparison:
    if len(rows) == 1 and rows[0].output == name:
        return rows[0]
    # A NaN is the worst of all; max() alone would pass it by.
    worst = max(rows, key=lambda row: (row.max_abs != row.max_abs, row.max_abs, not row.bits_equal))
    return Comparison(
        f"{name} ({len(rows)})",
        worst.shape,
        worst.dtype,
        all(row.bits_equal for row in rows),
        worst.max_abs,
        worst.max_rel,
        "" if worst.bits_equal else worst.output,
    )
