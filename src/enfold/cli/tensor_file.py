"""Write a .safetensors file piece by piece, so that the results of a large job never have to fit in memory at once.

The file grows under a temporary name in the folder of the final one and takes that name only when it is complete and
on disk; a job that fails or is interrupted leaves nothing. Format: https://github.com/huggingface/safetensors#format
(an 8-byte little-endian header length, a JSON header, then the tensors without gaps).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from enfold.errors import EnfoldError

CODES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}
"""Names of dtypes in the format, widest first: tensors stand in this order, so that each one is aligned."""

MODE = 0o666
HEADER_ALIGNMENT = 8


@dataclass(frozen=True)
class Slot:
    """The dtype and shape of one tensor of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensor takes."""
        return math.prod(self.shape) * self.dtype.itemsize


def as_bytes(lines: Iterable[str]) -> torch.Tensor:
    """Return lines of text as UTF-8, uint8 [bytes]."""
    return torch.frombuffer(bytearray("".join(f"{line}\n" for line in lines).encode()), dtype=torch.uint8)


class TensorFile:
    """A file whose tensors are known by shape before their contents are; use it in a `with` block.

    `contents` are tensors that are known already; they are written at the start.
    """

    def __init__(
        self, path: Path, slots: Mapping[str, Slot], metadata: Mapping[str, str], contents: Mapping[str, torch.Tensor]
    ) -> None:
        self.path = path
        self._contents = contents
        self._slots = dict(sorted(slots.items(), key=lambda item: list(CODES).index(item[1].dtype)))
        self._starts: dict[str, int] = {}
        self._header = self._make_header(metadata)
        self._temporary: Path | None = None
        self._file = -1

    def _make_header(self, metadata: Mapping[str, str]) -> bytes:
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        start = 0
        for name, slot in self._slots.items():
            end = start + slot.num_bytes
            header[name] = {"dtype": CODES[slot.dtype], "shape": list(slot.shape), "data_offsets": [start, end]}
            self._starts[name] = start
            start = end
        text = json.dumps(header, ensure_ascii=False).encode()
        text += b" " * (-len(text) % HEADER_ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    def __enter__(self) -> Self:
        try:
            self._file, name = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".tmp", dir=self.path.parent)
            self._temporary = Path(name)
            self._write(self._header, 0)
            os.truncate(self._file, len(self._header) + sum(slot.num_bytes for slot in self._slots.values()))
            for name, tensor in self._contents.items():
                self.write(name, tensor)
        except OSError as error:
            self._discard()
            raise self._error(error) from error
        except BaseException:
            self._discard()
            raise
        return self

    def write(self, name: str, tensor: torch.Tensor, row: int = 0) -> None:
        """Write `tensor` as the rows of `name` from `row` on."""
        slot = self._slots[name]
        if tensor.dtype != slot.dtype or tensor.shape[1:] != slot.shape[1:] or row + len(tensor) > slot.shape[0]:
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} at row {row} does not fit {slot}")
        start = len(self._header) + self._starts[name] + row * slot.num_bytes // max(1, slot.shape[0])
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        try:
            self._write(content, start)
        except OSError as error:
            raise self._error(error) from error

    def _write(self, content: object, start: int) -> None:
        view = memoryview(content).cast("B")  # type: ignore[arg-type]
        while view:
            written = os.pwrite(self._file, view, start)
            view, start = view[written:], start + written

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        except OSError as failure:
            raise self._error(failure) from failure
        finally:
            self._discard()

    def _finish(self) -> None:
        assert self._temporary is not None
        # mkstemp makes a private file; the result gets the permissions of any other new file.
        mask = os.umask(0)
        os.umask(mask)
        os.fchmod(self._file, MODE & ~mask)
        os.fsync(self._file)
        self._temporary.replace(self.path)
        self._temporary = None
        with contextlib.suppress(OSError):
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _discard(self) -> None:
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _error(self, error: OSError) -> EnfoldError:
        return EnfoldError(f"can't write {self.path}: {error.strerror or error}")
