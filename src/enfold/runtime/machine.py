"""What this machine has for ranks, its cores and its GPUs, and how a process on it ended."""

from __future__ import annotations

import os
import signal

from enfold.errors import ConfigError


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rank_devices(num_ranks: int, first: int = 0) -> list[str]:
    """Return the device of each rank: its own GPU where there are GPUs (from number `first` on), else the CPU."""
    import torch

    num_devices = torch.cuda.device_count()
    if num_devices == 0:
        return ["cpu"] * num_ranks
    if first + num_ranks > num_devices:
        raise ConfigError(
            f"num_gpus={first + num_ranks} is more than the {num_devices} GPUs of this machine; use at most "
            f"{num_devices}, or set CUDA_VISIBLE_DEVICES= (empty) to run the ranks as CPU processes"
        )
    return [f"cuda:{number}" for number in range(first, first + num_ranks)]


def describe_end(returncode: int | None) -> str:
    """Say in words how a process ended; `returncode` as subprocess has it."""
    if returncode is None:
        return "closed its pipe"
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    name = signal.Signals(-returncode).name if -returncode in set(signal.Signals) else "unknown"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was killed by signal {-returncode}, {name}{hint}"
