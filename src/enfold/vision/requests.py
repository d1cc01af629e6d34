"""What callers give a vision scheduler and get from it, and the checks that fail before anything is encoded."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from enfold.errors import ConfigError, EnfoldError, InputError
from enfold.vision.packing import Grid

PIXEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, eq=False)
class VisionItem:
    """One image or video: `pixel_values` [t*h*w, F], floating point, any device, and its grid (t, h, w) in patches.

    It is copied when its batch is run. Until the result is there it must not be written to.
    """

    pixel_values: torch.Tensor
    grid: Grid


@dataclass(frozen=True, eq=False)
class VisionRequest:
    """The items of one request, in the order in which it wants their rows; `request_id` names it in errors."""

    items: Sequence[VisionItem]
    request_id: Hashable = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "items", tuple(self.items))


@dataclass(frozen=True, eq=False)
class VisionResult:
    """One output [t*h*w // merge_size**2, D] per item of the request, in its order, or the error; never both.

    No output shares memory with another, with the cache, or with what the encoder returned.
    """

    request_id: Hashable
    outputs: list[torch.Tensor] = field(default_factory=list)
    error: EnfoldError | None = None

    def get(self) -> list[torch.Tensor]:
        """Return the outputs, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.outputs


def check_item(item: VisionItem, merge_size: int, patch_features: int, max_item_tokens: int) -> None:
    """Raise InputError, with the numbers, for an item that can't be encoded; looks at everything but its pixels."""
    if not isinstance(item, VisionItem) or not isinstance(item.pixel_values, torch.Tensor):
        raise InputError(f"{type(item).__name__} is no item with a tensor; use VisionItem(pixel_values, grid)")
    check_grid(item.grid, merge_size)
    x, num_tokens = item.pixel_values, math.prod(item.grid)
    if x.dtype not in PIXEL_DTYPES or x.layout != torch.strided or x.is_meta:
        raise InputError(
            f"pixel_values are {x.dtype}, {x.layout}, on {x.device}; give a dense tensor of float32, float16, "
            "bfloat16 or float64"
        )
    expected = (num_tokens, patch_features)
    if tuple(x.shape) != expected:
        raise InputError(
            f"pixel_values are {list(x.shape)} and the grid {item.grid} needs {list(expected)} (t*h*w patches of "
            f"patch_features={patch_features}); give each item its own rows and grid"
        )
    if num_tokens > max_item_tokens:
        raise InputError(
            f"the grid {item.grid} has {num_tokens} patches, the limit is max_item_tokens={max_item_tokens}; "
            "resize it (or take fewer frames), or raise the limit"
        )


def check_request(request: VisionRequest) -> VisionRequest:
    """Return `request`; raise InputError for anything else."""
    if not isinstance(request, VisionRequest):
        raise InputError(f"{type(request).__name__} is no VisionRequest; use VisionRequest(items, request_id)")
    return request


def check_grid(grid: Grid, merge_size: int) -> None:
    """Raise InputError for what is no (t, h, w) of whole merge groups."""
    whole = isinstance(grid, tuple) and len(grid) == 3 and all(type(size) is int and size >= 1 for size in grid)
    if not whole:
        raise InputError(f"grid={grid!r} must be a tuple of three ints >= 1; use tuple(grid_thw[i].tolist())")
    if grid[1] % merge_size or grid[2] % merge_size:
        raise InputError(f"h and w of the grid {grid} must be multiples of merge_size={merge_size}; resize it")


def check_count(name: str, count: int) -> int:
    """Return `count`; raise ConfigError where it is no whole number of at least 1."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"{name}={count!r} must be a whole number, at least 1")
    return count
