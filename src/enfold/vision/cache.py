"""Outputs of vision items, kept for the next request that shows the same image or video.

An entry is its finished output: nothing is reserved or visible before it is written, so an encode that failed leaves
nothing behind. The bound counts what is stored: bytes of the copies that the cache owns, not tokens or blocks.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from enfold.errors import ConfigError, InputError
from enfold.vision.packing import Grid


@dataclass(frozen=True)
class CacheKey:
    """What an output was computed from. Keys are equal only where every field is, so a lookup compares them all.

    Two digests of unlike functions each cover all the rest: items whose `digest` collides keep an entry each.
    """

    digest: bytes
    check: int
    dtype: str
    shape: tuple[int, ...]
    grid: Grid
    salt: str


@dataclass(frozen=True)
class CacheCounters:
    """What a cache has done since it was made (`num_bytes`, `num_entries`, `num_held`: what it holds now).

    `rejected` outputs did not fit beside the entries in use; `corrupted` entries were not what was once stored.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    rejected: int = 0
    corrupted: int = 0
    num_bytes: int = 0
    num_entries: int = 0
    num_held: int = 0


@dataclass(frozen=True)
class _Entry:
    output: torch.Tensor
    num_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    checksum: int


def cache_key(pixel_values: torch.Tensor, grid: Grid, salt: str) -> CacheKey:
    """Return the key of one item: digests of its bytes, dtype, shape, grid and `salt` (which model, which settings).

    Reads all of `pixel_values`; a tensor on a device is copied to the CPU for that.
    """
    dtype, shape = str(pixel_values.dtype).removeprefix("torch."), tuple(pixel_values.shape)
    # A text from repr holds no NUL, so the header can't run into the content.
    header = repr((dtype, shape, grid, salt)).encode() + b"\0"
    content = _content(pixel_values)
    # CPUs have instructions for sha256: 1.4 GB/s per core, where blake2b takes in 0.5 GB/s (crc32: 2 GB/s).
    digest = hashlib.sha256(header)
    digest.update(content)
    return CacheKey(digest.digest(), zlib.crc32(content, zlib.crc32(header)), dtype, shape, grid, salt)


def own_copy(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy with a storage of its own size, outside of autograd and of inference mode."""
    with torch.inference_mode(False):
        return x.detach().clone(memory_format=torch.contiguous_format)


def _content(x: torch.Tensor) -> memoryview:
    return x.detach().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class OutputCache:
    """Outputs by CacheKey, at most `max_bytes` of them at any time; 0 turns the cache off. Safe between threads.

    Both ways are copies: a caller may write into what it gave or got. Where room is needed the least recently used
    entries go, except those whose keys are held. Raises ConfigError where max_bytes is no whole number >= 0.
    """

    def __init__(self, max_bytes: int) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
            raise ConfigError(f"max_bytes={max_bytes!r} must be a whole number of bytes; use 0 for no cache")
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[CacheKey, _Entry] = OrderedDict()  # the least recently used first
        self._holds: Counter[CacheKey] = Counter()
        self._events: Counter[str] = Counter()
        self._num_bytes = 0

    @property
    def counters(self) -> CacheCounters:
        """A snapshot of the counters, taken at one moment."""
        with self._lock:
            num_held = sum(key in self._holds for key in self._entries)
            return CacheCounters(
                **self._events, num_bytes=self._num_bytes, num_entries=len(self._entries), num_held=num_held
            )

    def get(self, key: CacheKey, num_rows: int | None = None) -> torch.Tensor | None:
        """Return a copy of the output stored under `key`, verified; None where there is none.

        An entry without its dtype, shape and checksum of old, or without `num_rows` rows, is dropped: a miss.
        """
        if not self.max_bytes:
            return None
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._events["misses"] += 1
                return None
            self._entries.move_to_end(key)
        # Entries are never written to, so the slow part needs no lock. The copy is what is verified and returned.
        output = own_copy(entry.output)
        intact = _is_intact(entry, output) and (num_rows is None or output.shape[:1] == (num_rows,))
        with self._lock:
            self._events["hits" if intact else "misses"] += 1
            if not intact:
                self._events["corrupted"] += 1
                if self._entries.get(key) is entry:
                    self._remove(key)
        return output if intact else None

    def put(self, key: CacheKey, output: torch.Tensor) -> bool:
        """Store a copy of a finished `output` ([rows, D], any dtype and device); return whether it is stored.

        It is not where it can't fit beside the entries in use. One stored before under the same key is replaced.
        """
        if not self.max_bytes:
            return False
        num_bytes = output.numel() * output.element_size()
        checksum = zlib.crc32(_content(output))
        with self._lock:
            stored = self._make_room(key, num_bytes) and self._store(key, output, num_bytes, checksum)
            if not stored:
                self._events["rejected"] += 1
            return stored

    def _make_room(self, key: CacheKey, num_bytes: int) -> bool:
        """Evict what is needed for `num_bytes`, or nothing where that would not be enough."""
        if not 0 < num_bytes <= self.max_bytes:
            return False
        if key in self._entries:
            self._remove(key)
        free = [each for each in self._entries if each not in self._holds]
        missing = self._num_bytes + num_bytes - self.max_bytes
        if missing > sum(self._entries[each].num_bytes for each in free):
            return False
        for each in free:
            if missing <= 0:
                break
            missing -= self._entries[each].num_bytes
            self._remove(each)
            self._events["evictions"] += 1
        return True

    def _store(self, key: CacheKey, output: torch.Tensor, num_bytes: int, checksum: int) -> bool:
        try:
            copy = own_copy(output)
        except (MemoryError, RuntimeError):  # torch's words for no memory; the request has its output all the same
            return False
        self._entries[key] = _Entry(copy, num_bytes, copy.dtype, copy.shape, checksum)
        self._num_bytes += num_bytes
        return True

    def _remove(self, key: CacheKey) -> None:
        self._num_bytes -= self._entries.pop(key).num_bytes

    def acquire(self, keys: Iterable[CacheKey]) -> None:
        """Hold `keys`, stored already or not: their entries are not evicted before as many calls of `release`."""
        with self._lock:
            self._holds.update(list(keys))  # Counter takes the values of a dict for numbers

    def release(self, keys: Iterable[CacheKey]) -> None:
        """Undo one `acquire` of the same keys; raise InputError, and release none, where one is not held."""
        returned = Counter(list(keys))
        with self._lock:
            if not returned <= self._holds:
                raise InputError(
                    f"{(returned - self._holds).total()} keys are not held; release what acquire was given"
                )
            self._holds -= returned

    @contextmanager
    def hold(self, keys: Iterable[CacheKey]) -> Iterator[None]:
        """Hold `keys` for the length of a with block; see `acquire`."""
        kept = list(keys)
        self.acquire(kept)
        try:
            yield
        finally:
            self.release(kept)


def _is_intact(entry: _Entry, output: torch.Tensor) -> bool:
    same_kind = (output.dtype, output.shape) == (entry.dtype, entry.shape)
    return same_kind and zlib.crc32(_content(output)) == entry.checksum
