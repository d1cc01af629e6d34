"""One cell of the matrix for vision towers: a family, a precision and a layout, over sets of images."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
import torch.distributed as dist
import towers
from cells import groups_of

from enfold import VisionParallelConfig
from enfold.comm import Groups
from enfold.vision.spread import prepare_tower, spread_tower


def spread(group: dist.ProcessGroup | None, name: str, dtype: torch.dtype, tp: int, dp: int, **options: Any) -> Any:
    numerics = options.pop("numerics", "exact")
    options.setdefault("vision_attention_block_size", towers.BLOCK_SIZE)
    config = VisionParallelConfig(tp_size=tp, dp_size=dp, gather_hidden_states=True, **options)
    groups = groups_of(group) if group is not None else Groups(None)
    return spread_tower(prepare_tower(copy.deepcopy(towers.plain(name, dtype)), config, groups, numerics), groups)


def digest(x: torch.Tensor) -> str:
    """Return a digest of a tensor's shape, dtype and bits."""
    content = x.detach().contiguous().view(-1).view(torch.uint8) if x.numel() else torch.zeros(0, dtype=torch.uint8)
    return f"{list(x.shape)} {x.dtype} {hashlib.blake2b(content.numpy().data, digest_size=8).hexdigest()}"


def cell(
    group: dist.ProcessGroup | None,
    name: str,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    which: list[str],
    options: dict[str, Any] | None = None,
) -> dict[str, dict[str, str]]:
    """Return a digest of each output for each set of images."""
    module = spread(group, name, dtype, *sizes, **(options or {}))
    found = {}
    for each in which:
        output = module(**towers.images(name, each, dtype))
        found[each] = {key: digest(value) for key, value in towers.outputs(output).items()}
    return found
