"""A .safetensors file whose one long tensor is written row by row and whose index is known only at the end.

An image that turns out to be damaged after a long while is left out: the rows of the others stay where they are, and
the header is written again for what there is. In the file the index comes before the rows (int64 stands first, so that
everything is aligned): what it needs less, the header is padded with.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from enfold.cli.tensor_file import Slot, TensorFile
from enfold.errors import EnfoldError

ROOM = 4096
"""Bytes that the final header may be longer than the first: a few numbers with more digits, one tensor more."""


class FeatureFile(TensorFile):
    """A TensorFile with the rows of `name`, of which there may be fewer in the end; the rest is given by `complete`.

    rows: the shape that `name` has at most. index: shapes of what stands before it, as large as they may become.
    """

    def __init__(
        self, path: Path, name: str, rows: Slot, index: Mapping[str, Slot], metadata: Mapping[str, str]
    ) -> None:
        super().__init__(path, {name: rows, **index}, metadata, contents={})
        self._name = name
        self._num_rows = 0
        self._header = padded(self._header, ROOM)
        self._place = len(self._header) + self._starts[name]

    def append(self, rows: torch.Tensor) -> None:
        """Write `rows` behind those before."""
        self.write(self._name, rows, self._num_rows)
        self._num_rows += len(rows)

    def complete(self, contents: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Write everything beside the rows. Called once, at the end of the `with` block."""
        rows = self._slots[self._name]
        slots = {self._name: Slot(rows.dtype, (self._num_rows, *rows.shape[1:]))}
        slots |= {name: Slot(tensor.dtype, tuple(tensor.shape)) for name, tensor in contents.items()}
        final = TensorFile(self.path, slots, metadata, contents={})
        room = self._place - final._starts[self._name] - len(final._header)
        if room < 0:
            raise EnfoldError(f"can't write {self.path}: the index needs {-room} bytes more than were left for it")
        self._slots, self._starts = final._slots, final._starts
        self._header = padded(final._header, room)
        try:
            self._write(self._header, 0)
            os.truncate(self._file, len(self._header) + sum(slot.num_bytes for slot in self._slots.values()))
        except OSError as error:
            raise self._error(error) from error
        for name, tensor in contents.items():
            self.write(name, tensor)


def padded(header: bytes, room: int) -> bytes:
    """Return a header, which begins with its length, with `room` more spaces at its end."""
    return (len(header) - 8 + room).to_bytes(8, "little") + header[8:] + b" " * room
