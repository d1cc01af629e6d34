"""Four real ranks over gloo, started once and kept for all tests: `Ranks.run(function, world, ...)` calls an importable
function on ranks 0..world-1 as function(group, ...) and returns what each returned. A hang is a failure."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

NUM_RANKS = 4
TESTS = str(Path(__file__).resolve().parents[1])


class RankFailed(AssertionError):
    """A function raised on a rank, or a rank did not answer in time."""


class Ranks:
    def __init__(self, num_ranks: int = NUM_RANKS) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name) / "store")
        self.pipes, self.processes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, num_ranks, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], world: int, *args: Any, limit_s: float = 240) -> list[Any]:
        for pipe in self.pipes[:world]:
            pipe.send((function, world, args))
        answers = []
        for rank, pipe in enumerate(self.pipes[:world]):
            if not pipe.poll(limit_s):
                self.stop()
                raise RankFailed(f"rank {rank} did not answer {function.__name__} within {limit_s} s")
            try:
                answers.append(pipe.recv())
            except (EOFError, ConnectionError):
                raise RankFailed(f"rank {rank} died in {function.__name__}") from None
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failed:
            raise RankFailed("\n".join(failed))
        return [value for _, value in answers]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(rank: int, num_ranks: int, store: str, pipe: Any) -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    sys.path.insert(0, TESTS)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks, timeout=timedelta(seconds=600)
    )
    groups: dict[int, Any] = {num_ranks: dist.group.WORLD}
    for world in range(1, num_ranks):  # the first ranks; where they divide, every rank has such a group
        starts = range(0, num_ranks, world) if num_ranks % world == 0 else (0,)
        made = [dist.new_group(list(range(start, start + world))) for start in starts]
        groups[world] = made[min(rank // world, len(made) - 1)]
    while True:
        try:
            function, world, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(groups[world], *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        torch.set_num_threads(1)
        gc.collect()  # a spread module is part of reference cycles
