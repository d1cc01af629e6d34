"""A Qwen3-VL-like vision tower (1152 wide, 4 layers, random weights, fp32) on 2 ranks with one thread each.

    python benchmarks/vision.py [--rounds 5] [--json] [--memory-only]

Every round runs each form once, in turn, so that a slower moment of the machine meets all of them; ratios are taken
within a round. "one rank" is enfold's own (tp 1, dp 1) on rank 0 while rank 1 waits. "Transformers" is the plain module
on the same two cores: one process with two threads (and, beside it, with one thread). "padded to the largest" computes
every image in a row as long as the largest one's, on one rank. Prints minimum and median of each, whether the bits of
dp and tp are those of one rank, how full the blocks are, and the peak memory of a call beyond what was there before it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist

from enfold.comm import Groups
from enfold.encoders.qwen_vl import qwen3_sizes
from enfold.runtime.spawn import SpawnExecutor
from enfold.vision.config import VisionParallelConfig, round_up
from enfold.vision.geometry import FrameTable, block_inputs
from enfold.vision.packing import ROW_TILE, Block, ImagePacking, frames_of_grids, pack_images
from enfold.vision.spread import prepare_tower, spread_tower
from enfold.vision.tower import padded_inputs, run_tower

NUM_RANKS = 2
PATCH = 16
FEATURES = 3 * 2 * PATCH * PATCH

PHOTOS = (
    *((640, 480), (640, 427), (500, 375), (480, 640), (612, 612), (640, 360), (375, 500), (640, 425)),
    *((428, 640), (333, 500), (640, 640), (500, 333), (640, 512), (427, 640), (640, 478), (576, 768)),
    *((640, 424), (500, 334), (612, 408), (640, 361), (480, 360), (640, 523), (457, 640), (500, 400)),
)
"""Width and height in pixels of photos as they are common in public collections (COCO, Flickr)."""

IMAGES = {
    "equal": [(1, 16, 16)] * 4,
    "one image": [(1, 24, 24)],
    "one large, three small": [(1, 28, 28), *[(1, 16, 16)] * 3],
    "mixed photos": [(1, height // 64 * 2, width // 64 * 2) for width, height in PHOTOS[:4]],
}
GOALS = {("equal", "dp"): 1.9, ("one image", "tp"): 1.7, ("one large, three small", "best"): 1.7}
SPREAD = ("one rank", "dp", "tp")
OTHERS = ("Transformers, 1 thread", "Transformers, 2 threads", "padded to the largest")


class Bench:
    """One rank: the plain tower and its spread forms, from the same random weights."""

    def __init__(self, *, rank: int, world_size: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, self.group = rank, group
        torch.set_grad_enabled(False)
        groups = Groups(group)
        self.plain = build()
        self.forms: dict[str, Any] = {}
        for form, sizes in (("dp", (1, world_size)), ("tp", (world_size, 1))):
            config = VisionParallelConfig(*sizes)
            self.forms[form] = spread_tower(prepare_tower(deepcopy(self.plain), config, groups), groups, timeout=300)
        if rank == 0:
            self.forms["one rank"] = alone(deepcopy(self.plain))
        self.reference: torch.Tensor | None = None

    def time(self, form: str, which: str) -> tuple[float, bool]:
        """Return seconds of one call on rank 0, and whether its bits are those of the last call of "one rank"."""
        grids = IMAGES[which]
        call = {"hidden_states": pixels(grids), "grid_thw": torch.tensor(grids)}
        dist.barrier(self.group)
        if self.rank and form not in ("dp", "tp"):
            dist.barrier(self.group)
            return 0.0, True
        run = self._runner(form, grids, call)
        start = time.perf_counter()
        output = run()
        seconds = time.perf_counter() - start
        torch.set_num_threads(1)
        if form not in ("dp", "tp"):
            dist.barrier(self.group)
        if form == "one rank":
            self.reference = output.pooler_output
        if form not in SPREAD or self.reference is None:
            return seconds, True
        return seconds, torch.equal(output.pooler_output, self.reference) and bool(self.reference.isfinite().all())

    def _runner(self, form: str, grids: list[tuple[int, int, int]], call: dict[str, torch.Tensor]) -> Callable[[], Any]:
        if form == "padded to the largest":
            return lambda: run_padded(self.forms["one rank"], grids, call["hidden_states"])
        if form.startswith("Transformers"):
            torch.set_num_threads(2 if "2" in form else 1)
            return lambda: self.plain(**call)
        return lambda: self.forms[form](**call)

    def peak_bytes(self, form: str, grids: list[tuple[int, int, int]]) -> int:
        """Return how far the resident memory of this rank rises in a call beyond what it holds before."""
        call = {"hidden_states": pixels(grids), "grid_thw": torch.tensor(grids)}
        if self.rank and form == "one rank":
            return 0
        self.forms[form](**call)
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps of the last call would hide this one's
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        self.forms[form](**call)
        return resident("VmHWM") - before


def resident(name: str) -> int:
    """Return a size from /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def tower_config() -> Any:
    """Return the config of a Qwen3-VL's tower, cut to 4 layers with one deepstack level."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

    return Qwen3VLVisionConfig(
        depth=4, hidden_size=1152, intermediate_size=4304, num_heads=16, out_hidden_size=1024,
        deepstack_visual_indexes=[1],
    )  # fmt: skip


def build() -> Any:
    """Return the tower with random weights, the same on every rank."""
    from transformers import Qwen3VLVisionModel
    from transformers.initialization import no_init_weights

    with no_init_weights():
        tower = Qwen3VLVisionModel(tower_config())
    generator = torch.Generator().manual_seed(0)
    for name, parameter in tower.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
        else:
            parameter.data.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return tower.eval()


def alone(tower: Any) -> Any:
    """Spread a tower over one rank: enfold's own forward, no process group."""
    groups = Groups(None)
    groups.parent, groups.made = None, {}
    return spread_tower(prepare_tower(tower, VisionParallelConfig(), groups), groups)


def pixels(grids: list[tuple[int, int, int]]) -> torch.Tensor:
    """Return random patches, the same on every rank."""
    num_patches = sum(frames * height * width for frames, height, width in grids)
    return torch.randn(num_patches, FEATURES, generator=torch.Generator().manual_seed(num_patches))


def run_padded(module: Any, grids: list[tuple[int, int, int]], patches: torch.Tensor) -> Any:
    """Encode every image in a block of its own that is as wide as the largest image."""
    spread = module.spread
    frames = frames_of_grids(grids)
    widest = max(frame.num_tokens for frame in frames)
    blocks = tuple(Block(widest, (number,)) for number in range(len(frames)))
    packing = ImagePacking(frames, blocks, (tuple(range(len(blocks))),), (1.0,))
    inputs = block_inputs(FrameTable(spread.sizes), packing, range(len(blocks)), patches)
    return run_tower(module, spread.tower, spread.sizes, padded_inputs(inputs, patches.device))


def fill_rates() -> list[str]:
    """Return lines on how full blocks are for photos of mixed sizes: useful over padded patches, and the balance."""
    sizes = qwen3_sizes(tower_config().to_dict())
    lines = []
    for times in (1, 4):
        grids = [(1, round(height / 32) * 2, round(width / 32) * 2) for width, height in PHOTOS * times]
        total = sum(height * width for _, height, width in grids)
        largest = max(height * width for _, height, width in grids)
        padded = total / (largest * len(grids))
        lines.append(
            f"  {len(grids)} photos, {total} patches; useful where each is padded to the largest: {padded:.3f}"
        )
        for block_size in (1024, 2048, 4096, 8192):
            config = VisionParallelConfig(vision_attention_block_size=block_size)
            packing = pack_images(grids, config, NUM_RANKS, sizes.frame_cost)
            computed = sum(round_up(rows, ROW_TILE) for rows in packing.rows_per_share)
            lines.append(
                f"    {len(packing.blocks)} blocks of {block_size}: useful {total / packing.num_padded_tokens:.3f}, "
                f"{total / computed:.3f} of what is computed by default; balance {packing.balance:.3f}"
            )
    return lines


def measure_memory(ranks: SpawnExecutor) -> dict[str, dict[str, list[int]]]:
    """Return the peak bytes of each rank by number of images and form."""
    found: dict[str, dict[str, list[int]]] = {}
    for count in (4, 8, 16):
        grids = [(1, 20, 20)] * count
        found[f"{count} images"] = {
            form: ranks.call("peak_bytes", form, grids, every_rank=True, patience_s=300) for form in ("one rank", "dp")
        }
    return found


def print_memory(memory: dict[str, dict[str, list[int]]]) -> None:
    """Print the peaks, and what further images add, which leaves out what a call takes whatever its size."""
    print("peak memory of a call beyond what is there before it, MiB per rank:")
    peaks = [(which, forms["one rank"][0], max(forms["dp"])) for which, forms in memory.items()]
    for which, alone_bytes, shared in peaks:
        ratio = shared / alone_bytes
        print(f"  {which:9s} one rank {alone_bytes / 2**20:4.0f}, dp {NUM_RANKS} {shared / 2**20:4.0f} = {ratio:.2f}")
    (_, first_alone, first_shared), (_, last_alone, last_shared) = peaks[0], peaks[-1]
    more_alone, more_shared = last_alone - first_alone, last_shared - first_shared
    print(
        f"  from {peaks[0][0]} to {peaks[-1][0]}: one rank {more_alone / 2**20:.0f} more, dp {NUM_RANKS} "
        f"{more_shared / 2**20:.0f} more = {more_shared / more_alone:.2f} (1/dp = {1 / NUM_RANKS:.2f})"
    )


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--memory-only", action="store_true")
    args = parser.parse_args()
    forms = (*SPREAD, *OTHERS)
    times: dict[str, dict[str, list[float]]] = {which: {form: [] for form in forms} for which in IMAGES}
    equal = True
    with SpawnExecutor(NUM_RANKS, worker="vision:Bench", threads_per_rank=1, timeout_s=300) as ranks:
        memory = measure_memory(ranks)
        for number in range(0 if args.memory_only else args.rounds + 1):
            for which in IMAGES:
                for form in forms:
                    seconds, same = ranks.call("time", form, which, patience_s=300)
                    equal &= same
                    if number:  # the first round warms up
                        times[which][form].append(seconds)
    if args.json:
        print(json.dumps({"seconds": times, "bits equal": equal, "peak_bytes": memory}))
        return
    cpu = torch.backends.cpu.get_cpu_capability()
    print(f"torch {torch.__version__}, {cpu}, {NUM_RANKS} ranks x 1 thread, {args.rounds} rounds")
    if not args.memory_only:
        print_times(times)
        print(f"bits equal to one rank in every call: {'yes' if equal else 'NO'}")
    print("blocks:", *fill_rates(), sep="\n")
    print_memory(memory)


def print_times(times: dict[str, dict[str, list[float]]]) -> None:
    """Print times, and the ratios within each round: time of one rank (or of another form) over that of two ranks."""
    for which, forms in times.items():
        tokens = sum(frames * height * width for frames, height, width in IMAGES[which])
        print(f"{which} ({len(IMAGES[which])} images, {tokens} patches)")
        for form, values in forms.items():
            print(f"  {form:24s} min {min(values):6.3f} s   median {statistics.median(values):6.3f} s")
        for form in ("dp", "tp"):
            goal = GOALS.get((which, form), GOALS.get((which, "best")))
            for against in ("one rank", *OTHERS):
                ratios = [other / mine for other, mine in zip(forms[against], forms[form], strict=True)]
                text = f"  {against} / {form}: median {statistics.median(ratios):.2f}, max {max(ratios):.2f}"
                print(text + (f" (goal: {goal})" if goal and against == "one rank" else ""))


if __name__ == "__main__":
    main()
