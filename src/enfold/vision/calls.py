"""What a caller passes to a tower, checked before any work and any collective, and brought into one form: patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from enfold.encoders.family import TowerSizes
from enfold.errors import InputError
from enfold.vision.packing import Grid


def check_patches(pixels: Any, grid_thw: Any, sizes: TowerSizes) -> list[Grid]:
    """Return the grids as numbers; raise InputError with the numbers where they don't describe the pixels."""
    for name, value in (("pixel_values", pixels), ("grid_thw", grid_thw)):
        if not isinstance(value, torch.Tensor):
            raise InputError(f"{name} is a {type(value).__name__}; a tensor is needed")
    if grid_thw.dim() != 2 or grid_thw.shape[1] != 3 or not _is_whole(grid_thw.dtype):
        raise InputError(
            f"grid_thw is {list(grid_thw.shape)} {grid_thw.dtype}; it must be whole numbers [images, 3]: frames, rows, "
            "columns in patches"
        )
    if not pixels.is_floating_point() or pixels.dim() != 2 or pixels.shape[1] != sizes.patch_features:
        raise InputError(
            f"pixel_values is {list(pixels.shape)} {pixels.dtype}; it must be floating-point "
            f"[patches, {sizes.patch_features}]"
        )
    grids = [tuple(row) for row in grid_thw.tolist()]
    merge = sizes.merge_size
    for number, (frames, height, width) in enumerate(grids):
        if min(frames, height, width) < 1 or height % merge or width % merge:
            raise InputError(
                f"image {number} has grid {frames} x {height} x {width}; frames are at least 1, rows and columns "
                f"multiples of merge_size={merge}"
            )
    total = sum(frames * height * width for frames, height, width in grids)
    if total != len(pixels):
        raise InputError(f"grid_thw describes {total} patches, pixel_values has {len(pixels)}")
    return grids


def _is_whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def check_images(pixels: Any, conv: Any, sizes: TowerSizes, interpolate: bool) -> tuple[list[Grid], torch.Tensor]:
    """Return the grids and the patches [n * h * w, F] of images of the tower's one size."""
    if sizes.fixed_grid is None or interpolate:
        raise InputError("interpolate_pos_encoding is not supported in blocks; resize the images to the tower's size")
    height, width = sizes.fixed_grid
    patch = conv.kernel_size
    wanted = [conv.in_channels, height * patch[0], width * patch[1]]
    if (
        not isinstance(pixels, torch.Tensor)
        or not pixels.is_floating_point()
        or _whole_patches(pixels, patch) != wanted
    ):
        shape = f"{list(pixels.shape)} {pixels.dtype}" if isinstance(pixels, torch.Tensor) else type(pixels).__name__
        raise InputError(
            f"pixel_values is {shape}; it must be floating-point [images, {', '.join(map(str, wanted))}], or less than "
            "a patch larger"
        )
    return [(1, height, width)] * len(pixels), cut_patches(pixels, (height, width), (patch[0], patch[1]))


def cut_patches(pixels_NCHW: torch.Tensor, grid: tuple[int, int], patch: tuple[int, int]) -> torch.Tensor:
    """Return [N * rows * columns, C * p * p]: images as the patches that the tower's convolution sees.

    Pixels beyond the last whole patch are left out, as the convolution does (384 pixels in patches of 14).
    """
    (rows, columns), (height, width) = grid, patch
    num_images, channels = pixels_NCHW.shape[:2]
    whole = pixels_NCHW[:, :, : rows * height, : columns * width]
    cut = whole.reshape(num_images, channels, rows, height, columns, width)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(num_images * rows * columns, channels * height * width)


def _whole_patches(pixels: torch.Tensor, patch: Sequence[int]) -> list[int]:
    """Return channels, rows and columns of images without what is left beyond the last whole patch."""
    if pixels.dim() != 4:
        return []
    channels, height, width = pixels.shape[1:]
    return [channels, height // patch[0] * patch[0], width // patch[1] * patch[1]]
