"""What the examples share: joining the ranks that torchrun started, and comparing bits."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def join_ranks() -> torch.device:
    """Join the other ranks, if torchrun started any, and return this rank's device."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device


def is_first() -> bool:
    """Return whether this is the rank that prints."""
    return not dist.is_initialized() or dist.get_rank() == 0


def leave_ranks() -> None:
    """Leave together with the other ranks."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
