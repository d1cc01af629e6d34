"""The equivalence matrix: every family x layout x precision against the plain module on one rank, bit for bit.

    python tests/dist/matrix.py [--family T5] [--full]

Prints one row per family and layout; exits with 1 where bits differ. The quick form is what the tests run.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
from cells import cell
from models import BY_NAME
from ranks import Ranks

LAYOUTS = {
    2: {"replicate": (2, 1, 1), "dp": (1, 2, 1), "fold": (1, 1, 2)},
    4: {"dp": (1, 4, 1), "fold": (1, 1, 4), "combined": (1, 2, 2), "partial fold": (2, 1, 2), "partial dp": (2, 2, 1)},
}
ODD_WIDTHS = ("DINOv2 (odd width)",)
"""fp32 activations at such widths have other bits in plain torch: the reference is `replicate` (test_numerics.py)."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def cases(world: int, full: bool) -> list[tuple[int, int]]:
    """Return (rows of the batch, threads) to try on `world` ranks."""
    sizes = sorted({0, 1, world - 1, world, world + 1})
    if full:
        return [(size, threads) for threads in (1, 2) for size in sizes]
    return [(0, 1), (1, 1), (world - 1, 1), (world + 1, 1), (world + 1, 2)]


def run(ranks: Ranks, name: str, full: bool = False) -> list[tuple[int, str, str, int, list[str]]]:
    """Return one row per layout and precision: ranks, layout, precision, number of cases, differences."""
    rows = []
    for world, layouts in LAYOUTS.items():
        for label, layout in layouts.items():
            for dtype_name, dtype in DTYPES.items():
                todo = cases(world, full)
                answers = ranks.run(cell, world, name, dtype, layout, todo)
                found = [
                    f"rank {rank}, {size} rows, {threads} threads: {text}"
                    for rank, answer in enumerate(answers)
                    for (size, threads), texts in answer.items()
                    for text in texts
                ]
                rows.append((world, f"{label} {'x'.join(map(str, layout))}", dtype_name, len(todo), found))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", action="append", choices=list(BY_NAME), help="only this one (may be repeated)")
    parser.add_argument("--full", action="store_true", help="0, 1, R-1, R, R+1 rows with 1 and 2 threads each")
    args = parser.parse_args()
    ranks, bad, total = Ranks(), 0, 0
    print(
        f"torch {torch.__version__}, CPU {torch.backends.cpu.get_cpu_capability()}; equal bits: =, else how many differ"
    )
    heads = [f"{world}: {label}" for world, layouts in LAYOUTS.items() for label in layouts]
    print(f"{'family':26s} {'dtype':9s} " + " ".join(f"{head:15s}" for head in heads) + " seconds")
    for name in args.family or [name for name in BY_NAME if name not in ODD_WIDTHS]:
        start = time.perf_counter()
        rows = run(ranks, name, args.full)
        for dtype in DTYPES:
            line = [row for row in rows if row[2] == dtype]
            marks = [f"{f'= ({row[3]})' if not row[4] else f'DIFFERS ({len(row[4])})':15s}" for row in line]
            print(f"{name:26s} {dtype:9s} {' '.join(marks)} {time.perf_counter() - start:7.1f}", flush=True)
        for row in rows:
            total += row[3] * row[0]
            bad += len(row[4])
            for text in row[4][:4]:
                print(f"    {row[1]} {row[2]}: {text}", flush=True)
    ranks.stop()
    print(f"{total} outputs compared on their ranks, {bad} differences")
    if not args.family:
        print(f"not in the table: {', '.join(ODD_WIDTHS)}, where plain torch is no reference (docs/numerics.md)")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
