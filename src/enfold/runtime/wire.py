"""Values on their way through a pipe between two processes: tensors travel as bytes, all else as pickle has it.

pack and unpack are inverse. A tensor arrives on the CPU; nothing is shared, so no file descriptor and no file in
/dev/shm can be left behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class PackedTensor:
    """A tensor's dtype by name, its shape, and its elements as bytes."""

    dtype: str
    shape: tuple[int, ...]
    elements: np.ndarray[Any, np.dtype[np.uint8]]


def pack(value: Any) -> Any:
    """Return `value` with every tensor in its tuples, lists and dicts replaced by a PackedTensor."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().view(-1)
        return PackedTensor(str(value.dtype).removeprefix("torch."), tuple(value.shape), flat.view(torch.uint8).numpy())
    if isinstance(value, (tuple, list)):
        return tuple(map(pack, value)) if isinstance(value, tuple) else list(map(pack, value))
    if isinstance(value, dict):
        return {key: pack(item) for key, item in value.items()}
    return value


def unpack(value: Any) -> Any:
    """Return `value` with every PackedTensor replaced by the tensor it was made from."""
    if isinstance(value, PackedTensor):
        elements = np.require(value.elements, requirements="W")
        return torch.from_numpy(elements).view(getattr(torch, value.dtype)).view(value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(map(unpack, value)) if isinstance(value, tuple) else list(map(unpack, value))
    if isinstance(value, dict):
        return {key: unpack(item) for key, item in value.items()}
    return value
