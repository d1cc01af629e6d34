"""The loop of a training: steps under a progress bar, saved every few and resumed; the learning rate; one update."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

__all__ = ["DECAY_SHARE", "SAVE_EVERY", "learn", "set_rate", "steps"]

SAVE_EVERY = 250
DECAY_SHARE = 0.25  # of the steps, at the end: the learning rate falls to nothing


def steps(name: str, num_steps: int, checkpoint: Path, states: dict[str, Any]) -> Iterator[int]:
    """Yield the steps that are left, under a progress bar; save every few, and load what an earlier run saved."""
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        for key, state in states.items():
            state.load_state_dict(saved[key])
        first = saved["step"]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(name, total=num_steps, completed=first)
        for step in range(first, num_steps):
            yield step
            progress.advance(task)
            if (step + 1) % SAVE_EVERY == 0 or step + 1 == num_steps:
                _save({"step": step + 1, **{key: state.state_dict() for key, state in states.items()}}, checkpoint)


def set_rate(optimizer: torch.optim.Optimizer, peak: float, step: int, num_steps: int, warm_up: int) -> None:
    """Warm up, hold, and fall to nothing over the last steps."""
    left = (num_steps - step) / (num_steps * DECAY_SHARE)
    for group in optimizer.param_groups:
        group["lr"] = peak * group.get("faster", 1.0) * min(1.0, (step + 1) / warm_up, left)


def learn(loss: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make one update, with the gradient cut to length 1."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _save(state: dict[str, Any], file: Path) -> None:
    """Write beside the file and rename: a run that is cut while it saves keeps the one before."""
    partial = file.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(file)
