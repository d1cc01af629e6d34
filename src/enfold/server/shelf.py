"""Pictures that can be fetched for a while: bounded in bytes and in time, under ids that can't be guessed."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

KEPT_S = 3600.0
ID_BYTES = 18


def new_id(prefix: str) -> str:
    """Return an id with 144 random bits."""
    return f"{prefix}_{secrets.token_urlsafe(ID_BYTES)}"


@dataclass(frozen=True)
class Content:
    """A file's bytes, what they are, and when (time.monotonic) they are forgotten."""

    content: bytes
    media_type: str
    expires_at: float


class Shelf:
    """At most `max_bytes` of contents, each for `kept_s` seconds; the oldest make room for new ones."""

    def __init__(self, max_bytes: int, kept_s: float = KEPT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes, self.kept_s, self.clock = max_bytes, kept_s, clock
        self._kept: OrderedDict[str, Content] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept now."""
        with self._lock:
            return sum(len(each.content) for each in self._kept.values())

    def put(self, key: str, content: bytes, media_type: str) -> bool:
        """Keep a content under a key; return False where it alone is larger than the shelf."""
        with self._lock:
            self._drop_old()
            if len(content) > self.max_bytes:
                return False
            used = sum(len(each.content) for each in self._kept.values()) + len(content)
            while used > self.max_bytes:
                _, oldest = self._kept.popitem(last=False)
                used -= len(oldest.content)
            self._kept[key] = Content(content, media_type, self.clock() + self.kept_s)
            return True

    def get(self, key: str) -> Content | None:
        """Return what is kept under a key, if it is still there."""
        with self._lock:
            self._drop_old()
            return self._kept.get(key)

    def drop(self, key: str) -> None:
        """Forget a content."""
        with self._lock:
            self._kept.pop(key, None)

    def _drop_old(self) -> None:
        now = self.clock()
        while self._kept and next(iter(self._kept.values())).expires_at <= now:
            self._kept.popitem(last=False)
