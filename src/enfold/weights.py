"""The tensors of a checkpoint on disk: which there are, and how a slice of one gets into memory without the rest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from enfold.errors import CheckpointError
from enfold.layout import Cut

CHUNK_BYTES = 32 * 2**20
"""A file is mapped for at most this much at a time: pages that were read count as resident until it is closed."""

PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")


class SafetensorsSource:
    """A checkpoint in one or more safetensors files; `where` gives each tensor's file."""

    def __init__(self, where: Mapping[str, Path]) -> None:
        self.where = dict(where)
        self.names: Iterable[str] = self.where.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        with safe_open(self.where[name], "pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def rows(self, name: str, start: int, stop: int, columns: Cut | None) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, of these columns only where given."""
        with safe_open(self.where[name], "pt") as file:
            part = file.get_slice(name)
            if not part.get_shape():
                return cast(torch.Tensor, file.get_tensor(name)).reshape(1)
            rows = part[start:stop] if columns is None else part[start:stop, columns[0] : columns[1]]
            return cast(torch.Tensor, rows)


class PickleSource:
    """A checkpoint in pickle files, mapped into memory; read only where the caller has allowed it."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        for path in paths:
            self.tensors.update(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        self.names: Iterable[str] = self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self.tensors[name].shape)

    def rows(self, name: str, start: int, stop: int, columns: Cut | None) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, of these columns only where given."""
        tensor = self.tensors[name]
        if not tensor.dim():
            return tensor.reshape(1)
        return tensor[start:stop] if columns is None else tensor[start:stop, columns[0] : columns[1]]


class BranchSource:
    """The tensors of one part of a model, under the names that they have inside it."""

    def __init__(self, whole: SafetensorsSource | PickleSource, prefix: str) -> None:
        self.whole, self.prefix = whole, prefix
        self.names: Iterable[str] = [name.removeprefix(prefix) for name in whole.names if name.startswith(prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return self.whole.shape(self.prefix + name)

    def rows(self, name: str, start: int, stop: int, columns: Cut | None) -> torch.Tensor:
        """Return rows [start, stop) of a tensor, of these columns only where given."""
        return self.whole.rows(self.prefix + name, start, stop, columns)


Source = SafetensorsSource | PickleSource | BranchSource


def open_branch(source: SafetensorsSource | PickleSource, prefixes: Sequence[str]) -> Source:
    """Return the part of a checkpoint whose names begin with one of `prefixes`; all of it where none does."""
    found = next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in source.names)), None)
    return source if found is None else BranchSource(source, found)


def open_source(folder: Path, allow_pickle: bool) -> SafetensorsSource | PickleSource:
    """Return the checkpoint in `folder`: safetensors, one file or an index of several; pickle only where allowed."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return SafetensorsSource(_indexed(index))
    files = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors") in files:
        files = [folder / "model.safetensors"]
    if len(files) == 1:
        try:
            with safe_open(files[0], "pt") as file:
                return SafetensorsSource(dict.fromkeys(file.keys(), files[0]))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{files[0]} is no whole safetensors file: {error}") from error
    if files:
        raise CheckpointError(
            f"{folder} holds {len(files)} safetensors files and no model.safetensors.index.json that says which "
            f"tensor is where ({', '.join(file.name for file in files[:4])})"
        )
    pickles = sorted(path for path in folder.iterdir() if path.suffix in PICKLE_ENDINGS)
    if not pickles:
        raise CheckpointError(f"{folder} holds no *.safetensors file")
    if not allow_pickle:
        raise CheckpointError(
            f"{folder} holds only pickle files ({pickles[0].name}), and unpickling a file runs code that is in it; "
            "convert it to safetensors, or pass allow_pickle=True if you trust where it comes from"
        )
    return PickleSource(pickles)


def _indexed(index: Path) -> dict[str, Path]:
    try:
        names: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is no index of safetensors files: {error!r}") from error
    where: dict[str, Path] = {}
    for name, file in names.items():
        # An index must not lead out of its folder.
        path = index.parent / Path(str(file)).name
        if not path.is_file():
            raise CheckpointError(f"{index.name} names {file} for {name}, and {index.parent} has no such file")
        where[name] = path
    return where


def stored_dtype(source: Source) -> torch.dtype:
    """Return the precision of the first floating-point tensor of a checkpoint."""
    for name in source.names:
        shape = source.shape(name)
        dtype = source.rows(name, 0, 1, (0, 1) if len(shape) > 1 else None).dtype
        if dtype.is_floating_point:
            return dtype
    return torch.float32


def read_slice(source: Source, name: str, ranges: Sequence[Cut] | None, dim: int, out: torch.Tensor) -> None:
    """Fill `out` with the ranges of a tensor along `dim` (None: all of it), a chunk of rows at a time."""
    shape = source.shape(name)
    rows = list(ranges) if ranges is not None and dim == 0 else [(0, shape[0] if shape else 1)]
    columns = ranges[0] if ranges is not None and dim == 1 else None
    target = out if out.dim() else out.reshape(1)
    row_bytes = max(1, target[:1].numel() * target.element_size())
    step = max(1, CHUNK_BYTES // row_bytes)
    done = 0
    for first, last in rows:
        for start in range(first, last, step):
            stop = min(start + step, last)
            target[done : done + stop - start].copy_(source.rows(name, start, stop, columns))
            done += stop - start
