"""What the encoders made of a text, kept for the next request with the same text.

One entry holds the whole conditioning of one text: a few named tensors, stored as the bytes of one safetensors file, so
that they come and go together. Bound, eviction and verification are those of enfold.vision.cache.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors.torch import load, save

from enfold.vision.cache import CacheCounters, CacheKey, OutputCache, cache_key

Row = dict[str, torch.Tensor]
"""The conditioning of one text: [1, ...] tensors by the names of the pipeline's arguments."""

_ONE_TEXT = (1, 1, 1)


class EmbeddingCache:
    """Conditioning by text, at most `max_bytes` of it; 0 turns the cache off. Safe between threads.

    salt: all that the result hangs on beside the text (model, precision, numerics, sequence length, ...) and that stays
    the same for the life of the cache. Both ways are copies: a caller may write into what it gave or got.
    """

    def __init__(self, max_bytes: int, salt: str) -> None:
        self._outputs = OutputCache(max_bytes)
        self._salt = salt

    @property
    def counters(self) -> CacheCounters:
        """What the cache has done since it was made, and what it holds now."""
        return self._outputs.counters

    def get(self, text: str, options: str) -> Row | None:
        """Return the row stored for a text encoded with `options`, on the CPU; None where there is none."""
        content = self._outputs.get(self._key(text, options))
        return None if content is None else load(content.numpy().tobytes())

    def put(self, text: str, options: str, row: Mapping[str, torch.Tensor]) -> bool:
        """Store a copy of a finished row; return whether it fits."""
        if not self._outputs.max_bytes:
            return False
        tensors = {name: value.detach().cpu().contiguous() for name, value in row.items()}
        return self._outputs.put(
            self._key(text, options), torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)
        )

    def _key(self, text: str, options: str) -> CacheKey:
        # The options end at a NUL, so they can't run into the text; and an empty text still has a byte.
        content = torch.frombuffer(bytearray(options.encode() + b"\0" + text.encode()), dtype=torch.uint8)
        return cache_key(content, _ONE_TEXT, self._salt)
