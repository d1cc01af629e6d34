"""The calls of a spread vision tower: pack -> split -> forward -> all_gather -> unpack.

The tower keeps its call (`pixel_values, grid_thw=`) and its output class. Its text model plays no part: the tower has
its own mesh, and its collectives run there only.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from enfold.comm import Axis, Mesh
from enfold.encoders.family import Tower, TowerSizes
from enfold.errors import EncodeError, EnfoldError
from enfold.flow import describe, map_tensors
from enfold.vision.calls import check_images, check_patches
from enfold.vision.config import VisionParallelConfig, bucket_blocks, round_up
from enfold.vision.geometry import FrameTable, block_inputs, block_places, row_inputs
from enfold.vision.packing import ROW_TILE, Grid, ImagePacking, pack_images, unpack_indices
from enfold.vision.tower import Features, TowerInputs, padded_inputs, part, ragged_inputs, run_tower

logger = logging.getLogger("enfold")

IGNORED = (
    *("output_hidden_states", "output_attentions"),
    *("position_ids", "cu_seqlens", "window_index", "cu_window_seqlens", "interp_indices", "interp_weights"),
)
"""What the towers of Transformers take beside pixels and grids: outputs of layers, and inputs computed beforehand."""


@dataclass
class Counters:
    """What a tower has done so far. Tokens are patches before merging, on all dp ranks together.

    padded_tokens: those of all blocks. computed_tokens: rows that were run, with the padding that was not skipped.
    """

    calls: int = 0
    images: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    computed_tokens: int = 0


class TowerSpread:
    """A vision tower on one rank of its mesh. `last` is the packing of the latest call."""

    def __init__(
        self, module: PreTrainedModel, tower: Tower, sizes: TowerSizes, mesh: Mesh, config: VisionParallelConfig
    ) -> None:
        self.module, self.tower, self.sizes = module, tower, sizes
        self.mesh, self.config = mesh, config
        self.counters = Counters()
        self.last: ImagePacking | None = None
        self.output_class = _output_class(module, tower)
        self.said: set[str] = set()
        self.run = compiled(mesh.tp) if config.compile and _can_compile(module) else run_tower

    # The two calls that a tower may have.

    def encode_patches(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor, **kwargs: Any) -> Any:
        """Encode images and videos; every rank passes the same ones and gets the same output.

        hidden_states: [sum of t*h*w, F] patches in merge order, as the image processor makes them (pixel_values).
        grid_thw: int [n, 3], frames, rows and columns of each image or video, in patches.
        Returns the output class of the Transformers module, rows in the order of the inputs; last_hidden_state is None
        where dp > 1 unless config.gather_hidden_states. Raises InputError or EncodeError alike on every rank.
        """
        with self.mesh.watch.call():
            _, hidden, fat, places = self._encode_patches(hidden_states, grid_thw)
        self._ignored(kwargs)
        main, *levels = (level[places] for level in torch.split(fat, self.sizes.out_features, -1))
        fields: dict[str, Any] = {"last_hidden_state": hidden, "pooler_output": main}
        if "deepstack_features" in inspect.signature(self.output_class).parameters:
            fields["deepstack_features"] = levels
        return self._output(fields, kwargs)

    def encode_images(self, pixel_values: torch.Tensor, interpolate_pos_encoding: bool = False, **kwargs: Any) -> Any:
        """Encode images of the one size that the tower takes, [n, C, height, width]; otherwise as encode_patches."""
        with self.mesh.watch.call():
            conv = part(self.module, self.tower.patch_embed)
            grids, pixels = check_images(pixel_values, conv, self.sizes, bool(interpolate_pos_encoding))
            packing = self._pack(grids)
            self._agree(pixel_values=pixel_values)
            _, rows, places = self._encode(pixels, packing)
            hidden = rows[places].view(len(grids), prod(self.sizes.fixed_grid or ()), rows.shape[-1])
            head = getattr(self.module, self.tower.head, None)
            # A pooling head has one row per image. Every rank runs it on all images, on each by itself: what an image
            # is called with must not show in its bits, and products with one row and with several differ.
            pooled = None if head is None else hidden.new_zeros(0, hidden.shape[-1])
            if head is not None and len(grids):
                pooled = torch.cat([head(image[None]) for image in hidden])
        self._ignored(kwargs)
        return self._output({"last_hidden_state": hidden, "pooler_output": pooled}, kwargs)

    def encode_items(self, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> list[torch.Tensor]:
        """Return the fat rows `[main | ds0 | ...]` of each image or video: tensors [tokens, out * (1 + levels)]."""
        with self.mesh.watch.call():
            grids, _, fat, places = self._encode_patches(pixel_values, grid_thw)
        unit = self.sizes.merge_size**2
        return list(torch.split(self._detached(fat[places]), [t * h * w // unit for t, h, w in grids]))

    def _encode_patches(
        self, pixels: torch.Tensor, grid_thw: torch.Tensor
    ) -> tuple[list[Grid], torch.Tensor | None, torch.Tensor, torch.Tensor]:
        grids = check_patches(pixels, grid_thw, self.sizes)
        packing = self._pack(grids)
        self._agree(pixel_values=pixels, grid_thw=grid_thw)
        return grids, *self._encode(pixels, packing)

    def _agree(self, **call: torch.Tensor) -> None:
        self.mesh.watch.agree(partial(describe, call))

    def _pack(self, grids: Sequence[Grid]) -> ImagePacking:
        """Pack, which refuses what is above a limit: so before the first collective, alike on every rank."""
        return pack_images(grids, self.config, self.mesh.dp.size, self.sizes.frame_cost)

    # The flow. Pixels [P, F] are those of the whole call on every rank; from `split` on each has its own.

    def _encode(
        self, pixels: torch.Tensor, packing: ImagePacking
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Return the last hidden states in order, the gathered fat rows, and the place of each row in order there."""
        self._count(packing)
        table = FrameTable(self.sizes)
        mine = self._forward(packing, table, pixels)
        unit = self.sizes.merge_size**2
        fat = all_gather(mine.fat, [rows // unit for rows in packing.rows_per_share], self.mesh)
        places = unpack_indices(packing, self.sizes.merge_size, table.order).to(fat.device)
        if self.mesh.dp.size > 1 and not self.config.gather_hidden_states:
            return None, fat, places
        hidden = all_gather(mine.hidden, packing.rows_per_share, self.mesh)
        return hidden[unpack_indices(packing, 1, lambda *_: None).to(hidden.device)], fat, places

    def _forward(self, packing: ImagePacking, table: FrameTable, pixels: torch.Tensor) -> Features:
        """Return the features of this rank's rows, without padding, in the order of packing.frames_of."""
        weight = part(self.module, self.tower.patch_embed).weight
        share = packing.shares[self.mesh.dp.index]
        numbers = packing.frames_of(self.mesh.dp.index)
        if not numbers:
            return self._no_rows(table, pixels)
        if not self.config.has_fixed_shapes:
            rows = row_inputs(table, packing, numbers, pixels)
            features = self._run(ragged_inputs(rows, weight.device))
            num_rows = len(rows.pixels)
            return Features(features.hidden[:num_rows], features.fat[: num_rows // self.sizes.merge_size**2])
        return self._forward_blocks(packing, table, share, pixels)

    def _no_rows(self, table: FrameTable, pixels: torch.Tensor) -> Features:
        """Return no rows, in the width and precision in which rows come out; autocast has a say, so of a run."""
        grid = self.sizes.fixed_grid or (self.sizes.merge_size, self.sizes.merge_size)
        packing = pack_images([(1, *grid)], VisionParallelConfig(), 1, self.sizes.frame_cost)
        rows = row_inputs(table, packing, [0], pixels.new_zeros(grid[0] * grid[1], self.sizes.patch_features))
        made = self._run(ragged_inputs(rows, part(self.module, self.tower.patch_embed).weight.device))
        return Features(made.hidden[:0], made.fat[:0])

    def _forward_blocks(
        self, packing: ImagePacking, table: FrameTable, share: Sequence[int], pixels: torch.Tensor
    ) -> Features:
        """As _forward, with padding computed: a call per width of blocks, none for blocks that are all padding."""
        device, unit = part(self.module, self.tower.patch_embed).weight.device, self.sizes.merge_size**2
        parts: dict[int, Features] = {}
        for width in packing.widths():
            blocks = [block for block in share if packing.blocks[block].width == width]
            if not any(packing.blocks[block].frames for block in blocks):
                continue
            made = self._run(padded_inputs(block_inputs(table, packing, blocks, pixels), device))
            places = block_places(packing, blocks).to(device)
            valid = Features(made.hidden[places], made.fat[places[::unit] // unit])
            start = 0
            for block in blocks:
                size = sum(packing.frames[frame].num_tokens for frame in packing.blocks[block].frames)
                span = slice(start // unit, (start + size) // unit)
                parts[block] = Features(valid.hidden[start : start + size], valid.fat[span])
                start += size
        order = [parts[block] for block in share if block in parts]
        return Features(torch.cat([each.hidden for each in order]), torch.cat([each.fat for each in order]))

    def _run(self, inputs: TowerInputs) -> Features:
        return self.run(self.module, self.tower, self.sizes, inputs)

    def _count(self, packing: ImagePacking) -> None:
        self.last = packing
        self.counters.calls += 1
        self.counters.images += len({frame.item for frame in packing.frames})
        self.counters.tokens += packing.num_tokens
        self.counters.padded_tokens += packing.num_padded_tokens
        ragged = sum(round_up(rows, ROW_TILE) for rows in packing.rows_per_share)
        self.counters.computed_tokens += packing.num_padded_tokens if self.config.has_fixed_shapes else ragged

    def _output(self, fields: dict[str, Any], kwargs: Mapping[str, Any]) -> Any:
        output = self.output_class(**{name: self._detached(value) for name, value in fields.items()})
        return output.to_tuple() if kwargs.get("return_dict") is False else output

    def _detached(self, value: Any) -> Any:
        is_alone = self.mesh.dp.size == self.mesh.tp.size == 1
        return value if is_alone or not torch.is_grad_enabled() else map_tensors(value, torch.Tensor.detach)

    def _ignored(self, kwargs: Mapping[str, Any]) -> None:
        """Say once what a call asks for that a spread tower does not do: grids alone decide how it runs."""
        for name in IGNORED:
            value = kwargs.get(name)
            if value is not None and value is not False and name not in self.said:
                self.said.add(name)
                logger.warning("a spread vision tower takes no notice of %s: pixels and grids decide all", name)

    # Warm-up.

    def warm_up(self) -> list[int]:
        """Run every bucket once with images of zeros, smallest first; return the sizes in patches. Collective.

        Without buckets one block per dp rank is run. Raises EncodeError that names the bucket which failed.
        """
        size, dp = self.config.vision_attention_block_size, self.mesh.dp.size
        counts = [dp]
        if self.config.num_vision_tokens_buckets is not None:
            counts = [bucket_blocks(bucket, size, dp) for bucket in self.config.num_vision_tokens_buckets]
        counters, last = Counters(**vars(self.counters)), self.last
        counts, count = sorted(set(counts)), 0
        try:
            for count in counts:
                self._warm_up(count)
        except Exception as error:
            kind = type(error) if isinstance(error, EnfoldError) else EncodeError
            raise kind(f"warm-up of the bucket of {count} blocks of {size} patches failed: {error}") from error
        finally:
            self.counters, self.last = counters, last
        return [count * size for count in counts]

    def _warm_up(self, num_blocks: int) -> None:
        weight = part(self.module, self.tower.patch_embed).weight
        if self.tower.takes == "images":
            grid = self.sizes.fixed_grid or (1, 1)
            per_block = max(1, self.config.vision_attention_block_size // (grid[0] * grid[1]))
            sides = [number * stride for number, stride in zip(grid, weight.shape[2:], strict=True)]
            self.encode_images(weight.new_zeros(num_blocks * per_block, weight.shape[1], *sides))
            return
        side, size = self.sizes.merge_size, self.config.vision_attention_block_size
        width = max(1, min(size, self.config.max_vision_seq_len) // side**2) * side
        grid_thw = torch.tensor([[1, side, width]] * (size // (side * width) * num_blocks))
        self.encode_items(weight.new_zeros(len(grid_thw) * side * width, self.sizes.patch_features), grid_thw)


def all_gather(mine: torch.Tensor, counts: Sequence[int], mesh: Mesh) -> torch.Tensor:
    """Return the rows of all dp ranks, each padded to the most that one has: [dp * max(counts), features]."""
    if mesh.dp.size == 1:
        return mine
    most = max(counts, default=0)
    if len(mine) < most:
        mine = torch.cat([mine, mine.new_zeros(most - len(mine), mine.shape[1])])
    return mesh.dp.gather_rows(mine)


def compiled(tp: Axis) -> Callable[..., Features]:
    """Return run_tower as one graph per shape, cut where the tp ranks gather: collectives stay in plain Python."""
    tp.all_gather = torch.compiler.disable(tp.all_gather)  # type: ignore[method-assign,no-untyped-call]
    return cast(Callable[..., Features], torch.compile(run_tower, dynamic=False))


def _can_compile(module: PreTrainedModel) -> bool:
    is_cpu = str(module.device) == "cpu"
    if is_cpu:
        logger.info("compile=True has no effect on a CPU")
    return not is_cpu


def _output_class(module: nn.Module, tower: Tower) -> type[Any]:
    """Return what the tower's own forward returns: the class with deepstack features where its file has one."""
    found: Any = getattr(sys.modules[type(module).__module__], "BaseModelOutputWithDeepstackFeatures", None)
    has_levels = tower.deepstack and found is not None
    return cast(type[Any], found if has_levels else BaseModelOutputWithPooling)
