"""The equivalence matrix of vision towers: layouts (tp, dp) x sets of images, bit for bit against (1, 1).

    python tests/dist/tower_matrix.py [--family Qwen3-VL] [--bf16]

Prints one row per set of images; the last column is how far (1, 1) is from Transformers' own forward, relative to the
largest value, in fp64 and fp32. Exits with 1 where bits differ or a gate (fp64 1e-10, fp32 1e-5) is missed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
import towers
from ranks import Ranks
from tower_cells import cell, spread

LAYOUTS = [(1, 2), (2, 1), (1, 4), (2, 2), (4, 1)]
"""(tp, dp)."""

GATES = {torch.float64: 1e-10, torch.float32: 1e-5}


def from_transformers(name: str, which: str, dtype: torch.dtype) -> float:
    """Return how far a tower on one rank is from the plain module: the worst output, relative to its largest value."""
    batch = towers.images(name, which, dtype)
    want, got = towers.plain(name, dtype)(**batch), spread(None, name, dtype, 1, 1)(**batch)
    pairs = [(towers.outputs(got)[key], value) for key, value in towers.outputs(want).items()]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--family", action="append", choices=list(towers.TOWERS), help="only this one (may be repeated)"
    )
    parser.add_argument("--bf16", action="store_true", help="bfloat16 too (slow on CPUs without instructions for it)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    ranks, bad, sets = Ranks(), 0, list(towers.IMAGES)
    print(f"torch {torch.__version__}, CPU {torch.backends.cpu.get_cpu_capability()}; (tp, dp); = : equal bits")
    print(f"{'tower':11s} {'images':22s} {'dtype':9s} {' '.join(f'{layout!s:8s}' for layout in LAYOUTS)} fp64     fp32")
    for name in args.family or towers.TOWERS:
        for dtype in (torch.float32, *([torch.bfloat16] if args.bf16 else [])):
            want = cell(None, name, dtype, (1, 1), sets)
            found = {layout: ranks.run(cell, layout[0] * layout[1], name, dtype, layout, sets) for layout in LAYOUTS}
            for which in sets:
                equal = {layout: all(answer[which] == want[which] for answer in found[layout]) for layout in LAYOUTS}
                gaps = {}
                if dtype == torch.float32 and towers.IMAGES[which]:  # the plain modules can't encode zero images
                    gaps = {each: from_transformers(name, which, each) for each in GATES}
                bad += sum(not same for same in equal.values()) + sum(gap > GATES[each] for each, gap in gaps.items())
                marks = " ".join(f"{'=' if equal[layout] else 'DIFFERS':8s}" for layout in LAYOUTS)
                print(
                    f"{name:11s} {which:22s} {str(dtype).removeprefix('torch.'):9s} {marks} "
                    f"{'  '.join(f'{gap:.1e}' for gap in gaps.values())}",
                    flush=True,
                )
    ranks.stop()
    print(f"{bad} differences")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
