"""The forward of every vision tower, over the rows of one rank, from a Transformers module and its family's table.

The module's layers are its own: linear layers (whole, or shares that gather over tp), norms, activations, mergers.
Written here is how rows attend: inside their frame or window and nowhere else.
Letters: T rows, F values of a patch, K taps, H heads of this rank, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from enfold.encoders.family import Tower, TowerSizes
from enfold.vision.config import round_up
from enfold.vision.geometry import BlockInputs, RowInputs
from enfold.vision.packing import ROW_TILE

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From query, key and value [T, H, D] to what each row attends to, [T, H * D]."""


@dataclass(frozen=True)
class TowerInputs:
    """What the forward takes, the same for ragged rows and for whole blocks.

    pixels [T, F]; tap_indices, tap_weights [K, T]; cos, sin [T, 1, D]. attend_frames and attend_windows say which rows
    see each other; a tower without windows has only the first.
    """

    pixels: torch.Tensor
    tap_indices: torch.Tensor | None
    tap_weights: torch.Tensor | None
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    attend_frames: Attend
    attend_windows: Attend | None


@dataclass(frozen=True)
class Features:
    """hidden [T, hidden]: after the last layer. fat [T / m^2, out * (1 + levels)]: `[main | ds0 | ...]`, merged."""

    hidden: torch.Tensor
    fat: torch.Tensor


def run_tower(module: nn.Module, tower: Tower, sizes: TowerSizes, inputs: TowerInputs) -> Features:
    """Encode the rows of one rank. Communicates only inside linear layers that are cut over tp."""
    x = embed(module, tower, inputs)
    levels: list[torch.Tensor] = []
    for number, layer in enumerate(part(module, tower.layers)):
        is_full = inputs.attend_windows is None or number in sizes.full_layers
        attend = inputs.attend_frames if is_full or inputs.attend_windows is None else inputs.attend_windows
        x = x + attention(part(layer, tower.attention), part(layer, tower.norm1)(x), inputs, attend, sizes.head_dim)
        x = x + layer.mlp(part(layer, tower.norm2)(x))
        if number in sizes.tap_layers:  # layers may be listed in any order: the list says which merger is whose
            levels.append(part(module, tower.deepstack)[sizes.tap_layers.index(number)](x))
    if tower.final_norm:
        x = part(module, tower.final_norm)(x)
    main = part(module, tower.merger)(x) if tower.merger else x
    return Features(x, torch.cat([main, *levels], -1) if levels else main)


def part(module: nn.Module, name: str) -> Any:
    """Return the part of a module that a table names."""
    return module.get_submodule(name)


def embed(module: nn.Module, tower: Tower, inputs: TowerInputs) -> torch.Tensor:
    """Return patch and position embeddings, [T, hidden]: the convolution as the matrix product that it is."""
    conv = part(module, tower.patch_embed)
    x = F.linear(inputs.pixels.to(conv.weight.dtype), conv.weight.flatten(1), conv.bias)
    if inputs.tap_indices is None or inputs.tap_weights is None:
        return x
    table = part(module, tower.pos_embed).weight
    taps = zip(inputs.tap_indices, inputs.tap_weights, strict=True)
    positions = torch.stack([table[indices] * weights[:, None] for indices, weights in taps]).sum(0)
    return x + positions.to(x.dtype)


def attention(layer: Any, x: torch.Tensor, inputs: TowerInputs, attend: Attend, head_dim: int) -> torch.Tensor:
    """Return a layer's attention over the heads of this rank, put together by its output projection."""
    if hasattr(layer, "qkv"):
        query, key, value = layer.qkv(x).view(len(x), 3, -1, head_dim).unbind(1)
        output = layer.proj
    else:
        query, key, value = (
            project(x).view(len(x), -1, head_dim) for project in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        output = layer.out_proj
    if inputs.cos is not None and inputs.sin is not None:
        query, key = rotate(query, inputs.cos, inputs.sin), rotate(key, inputs.cos, inputs.sin)
    return output(attend(query, key, value))  # type: ignore[no-any-return]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the features of each head by its row's angles, in fp32."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


# Ragged rows: attention runs segment by segment, so that no work is done between segments or on padding.


@dataclass(frozen=True)
class Group:
    """Segments of one length. rows: where they are, a slice where they stand together."""

    length: int
    rows: slice | torch.Tensor


def group_segments(lengths: Sequence[int], device: torch.device) -> list[Group]:
    """Return the segments of rows that stand one after another, those of one length together."""
    starts: dict[int, list[int]] = {}
    start = 0
    for length in lengths:
        starts.setdefault(length, []).append(start)
        start += length
    return [Group(length, _rows_of(length, firsts, device)) for length, firsts in starts.items()]


def _rows_of(length: int, firsts: list[int], device: torch.device) -> slice | torch.Tensor:
    if firsts[-1] - firsts[0] == (len(firsts) - 1) * length:
        return slice(firsts[0], firsts[-1] + length)
    return (torch.tensor(firsts)[:, None] + torch.arange(length)).flatten().to(device)


def attend_segments(lengths: Sequence[int], device: torch.device) -> Attend:
    """Return an attention in which each row sees its segment. Rows after the last segment get zeros."""
    groups = group_segments(lengths, device)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(query)
        for group in groups:
            q, k, v = (x[group.rows].view(-1, group.length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
            out[group.rows] = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
        return out.flatten(1)

    return attend


def ragged_inputs(rows: RowInputs, device: torch.device) -> TowerInputs:
    """Return the inputs of a rank's rows on `device`, padded with zeros to whole row tiles."""
    total = round_up(len(rows.pixels), ROW_TILE)

    def longer(x: torch.Tensor | None, dim: int = 0) -> torch.Tensor | None:
        if x is None:
            return None
        missing = [total - size if axis == dim else size for axis, size in enumerate(x.shape)]
        return torch.cat([x, x.new_zeros(missing)], dim).to(device) if missing[dim] else x.to(device)

    cos, sin = longer(rows.cos), longer(rows.sin)
    return TowerInputs(
        pixels=longer(rows.pixels),  # type: ignore[arg-type]
        tap_indices=longer(rows.tap_indices, 1),
        tap_weights=longer(rows.tap_weights, 1),
        cos=None if cos is None else cos[:, None],
        sin=None if sin is None else sin[:, None],
        attend_frames=attend_segments(rows.lengths, device),
        attend_windows=attend_segments(rows.window_lengths, device) if rows.window_lengths else None,
    )


# Whole blocks: every token is computed, bounds say what it sees, and shapes hang on nothing but N and B.


def attend_blocks(low: torch.Tensor, high: torch.Tensor) -> Attend:
    """Return an attention inside bounds [N, B, 1]. Padding sees only itself, so that it stays finite."""
    num_blocks, width, _ = low.shape
    places = torch.arange(width, device=low.device)
    seen = (low <= places) & (places < high) | (places[:, None] == places)
    mask = seen.unsqueeze(1)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.reshape(num_blocks, width, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2).flatten(0, 1)

    return attend


def padded_inputs(blocks: BlockInputs, device: torch.device) -> TowerInputs:
    """Return the inputs of whole blocks on `device`, flattened to rows; whatever stands in padding becomes zero."""
    low, high = blocks.bound_min.to(device), blocks.bound_max.to(device)
    valid = (high > 0).flatten()

    def clean(x: torch.Tensor | None, first: int = 0) -> torch.Tensor | None:
        if x is None:
            return None
        rows = x.to(device).flatten(first, first + 1)
        mask = valid.view(*[1] * first, -1, *[1] * (rows.dim() - first - 1))
        return torch.where(mask, rows, torch.zeros((), dtype=rows.dtype, device=device))

    cos, sin = clean(blocks.cos), clean(blocks.sin)
    windows = None
    if blocks.window_min is not None and blocks.window_max is not None:
        windows = attend_blocks(blocks.window_min.to(device), blocks.window_max.to(device))
    return TowerInputs(
        pixels=clean(blocks.pixels),  # type: ignore[arg-type]
        tap_indices=clean(blocks.pos_emb_idx, 1),
        tap_weights=clean(blocks.pos_emb_weight, 1),
        cos=None if cos is None else cos[:, None],
        sin=None if sin is None else sin[:, None],
        attend_frames=attend_blocks(low, high),
        attend_windows=windows,
    )
