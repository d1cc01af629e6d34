"""A worker that does what the runtime's tests need of a rank: answer, fail, hang."""

from __future__ import annotations

import atexit
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from enfold.errors import InputError, LostRankError


class EchoWorker:
    def __init__(self, *, rank: int, world_size: int, group: Any, device: torch.device) -> None:
        self.rank, self.world_size, self.group, self.device = rank, world_size, group, device
        self.num_calls = 0

    def about(self) -> dict[str, Any]:
        self.num_calls += 1
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "device": str(self.device),
            "threads": torch.get_num_threads(),
            "omp": os.environ.get("OMP_NUM_THREADS"),
            "pid": os.getpid(),
            "calls": self.num_calls,
        }

    def echo(self, value: Any) -> Any:
        return value

    def total(self) -> float:
        x = torch.ones(1) * (self.rank + 1)
        dist.all_reduce(x, group=self.group)
        return x.item()

    def fail(self, rank: int, kind: str) -> str:
        if self.rank == rank:
            raise {"input": InputError, "lost": LostRankError, "value": ValueError}[kind](f"no good on {rank}")
        return "fine"

    def sleep(self, rank: int, seconds: float) -> None:
        if self.rank == rank:
            time.sleep(seconds)

    def linger(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        atexit.register(time.sleep, 60)


class BrokenWorker:
    def __init__(self, *, rank: int, world_size: int, group: Any, device: torch.device) -> None:
        if rank == 1:
            raise RuntimeError("rank 1 has no place to stand")


class DyingWorker:
    def __init__(self, *, rank: int, world_size: int, group: Any, device: torch.device) -> None:
        if rank == 1:
            os._exit(7)
        time.sleep(60)
