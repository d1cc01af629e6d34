"""fold and dp against one rank, on a T5 encoder of width 4096 (2 layers, random weights, bf16), 512 tokens.

    python benchmarks/t5_width_4096.py [--rounds 5] [--json]
    python benchmarks/t5_width_4096.py --save DIR      # then: enfold verify --model-path DIR --num-gpus 2

Two ranks with one thread each. In every round each form runs once, in turn, so that a slower moment of the machine
meets all of them; the ratio of a round is taken within it. "one rank" is the plain Transformers module on rank 0 with
one thread while rank 1 waits. Prints minimum and median of each time and ratio, and whether the bits were equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist

import enfold
from enfold.runtime.spawn import SpawnExecutor

LENGTH = 512
NUM_RANKS = 2
FORMS = ("one rank", "fold", "dp")


class Bench:
    """One rank: the plain module and its two spread forms, from the same random weights."""

    def __init__(self, *, rank: int, world_size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, self.group = rank, group
        torch.set_grad_enabled(False)
        self.forms: dict[str, Any] = {"one rank": build()}
        self.forms["fold"] = enfold.parallelize(build(), "fold", group=group)
        self.forms["dp"] = enfold.parallelize(build(), "dp", group=group)

    def time(self, form: str, batch_size: int) -> tuple[float, bool]:
        """Return seconds of one call, and whether its bits are those of the plain module's last call."""
        generator = torch.Generator().manual_seed(batch_size)
        ids = torch.randint(3, 1000, (batch_size, LENGTH), generator=generator)
        dist.barrier(self.group)
        if form == "one rank" and self.rank:
            dist.barrier(self.group)
            return 0.0, True
        start = time.perf_counter()
        output = self.forms[form](input_ids=ids).last_hidden_state
        seconds = time.perf_counter() - start
        if form == "one rank":
            self.reference = output
            dist.barrier(self.group)
        equal = self.rank > 0 or torch.equal(output.view(torch.int16), self.reference.view(torch.int16))
        return seconds, equal


def build() -> torch.nn.Module:
    """Return a T5-XXL encoder cut to 2 layers."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(
        d_model=4096, d_ff=10240, num_heads=64, d_kv=64, num_layers=2, vocab_size=1024, feed_forward_proj="gated-gelu"
    )
    torch.set_default_dtype(torch.bfloat16)
    module = T5EncoderModel(config).eval()
    torch.set_default_dtype(torch.float32)
    return module


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", metavar="DIR", help="only save the encoder there, for enfold verify and plan")
    args = parser.parse_args()
    if args.save:
        build().save_pretrained(args.save)
        return
    batches = {"fold": 1, "dp": 2}
    goals = {"fold": 0.60, "dp": 0.56}
    times: dict[str, list[float]] = {f"{form} at batch {size}": [] for size in (1, 2) for form in FORMS}
    equal = True
    with SpawnExecutor(NUM_RANKS, worker="t5_width_4096:Bench", threads_per_rank=1, timeout_s=300) as ranks:
        for number in range(args.rounds + 1):
            for size in (1, 2):
                for form in FORMS:
                    seconds, same = ranks.call("time", form, size, patience_s=300)
                    equal &= same
                    if number:  # the first round warms up
                        times[f"{form} at batch {size}"].append(seconds)
    ratios = {}
    for form, size in batches.items():
        pairs = zip(times[f"{form} at batch {size}"], times[f"one rank at batch {size}"], strict=True)
        ratios[form] = [spread / alone for spread, alone in pairs]
    if args.json:
        print(json.dumps({"seconds": times, "ratio": ratios, "bits equal": equal}))
        return
    cpu = torch.backends.cpu.get_cpu_capability()
    print(f"torch {torch.__version__}, {cpu}, {NUM_RANKS} ranks x 1 thread, {args.rounds} rounds")
    for name, values in times.items():
        print(f"{name:22s} min {min(values):7.3f} s   median {statistics.median(values):7.3f} s")
    for form, values in ratios.items():
        median = statistics.median(values)
        print(f"{form} at batch {batches[form]} / one rank: min {min(values):.3f}, median {median:.3f}", end="")
        print(f" (goal: at most {goals[form]:.2f})")
    print(f"bits equal to one rank in every call: {'yes' if equal else 'NO'}")


if __name__ == "__main__":
    main()
