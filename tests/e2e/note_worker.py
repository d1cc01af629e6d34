"""Workers that say something while they work."""

from __future__ import annotations

from typing import Any

import torch


class NotingWorker:
    def __init__(self, *, rank: int, world_size: int, group: Any, device: torch.device) -> None:
        self.rank = rank
        self.note: Any = lambda value: None

    def count(self, number: int) -> str:
        for i in range(number):
            self.note((self.rank, i))
        return f"counted to {number}"

    def count_and_fail(self, number: int) -> None:
        self.count(number)
        raise ValueError("lost count")
