"""Encode prompts with a Diffusers pipeline whose encoders are spread over the ranks that torchrun starts.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/diffusers_pipeline.py --mode fold

Without --model-path the pipeline is a tiny random Flux (tiny_flux.py); any folder or hub id of a pipeline will do.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from typing import Any

import diffusers
import torch
import transformers
from ranks import bits, is_first, join_ranks, leave_ranks
from tiny_flux import tiny_flux

import enfold

PROMPTS = ["A small red fox jumps over the blue whale", "Two green circles", "One large square above the sea"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", help="folder or hub id of a pipeline (default: a tiny random Flux)")
    parser.add_argument("--mode", default="auto", choices=["auto", "fold", "dp", "replicate"])
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    device = join_ranks()

    parts = {"transformer": None, "vae": None, "torch_dtype": torch.bfloat16}  # encoding needs neither of the two
    load = diffusers.DiffusionPipeline.from_pretrained
    pipe = (load(args.model_path, **parts) if args.model_path else tiny_flux()).to(device)
    with torch.inference_mode():
        plain = encode(pipe, device)
        enfold.parallelize(pipe, args.mode)  # in place: from here on the pipeline is used as before
        spread = encode(pipe, device)
    is_equal = all(torch.equal(bits(a), bits(b)) for a, b in zip(plain, spread, strict=True))

    if is_first():
        for name, component in pipe.components.items():
            if hasattr(component, "plan"):
                print(f"{name}: {component.plan.summary()}")
        print(f"encode_prompt: {', '.join(str(list(x.shape)) for x in spread)}")
        print(f"bits equal to the plain pipeline: {'yes' if is_equal else 'no'}")
    leave_ranks()
    return 0 if is_equal else 1


def encode(pipe: Any, device: torch.device) -> list[torch.Tensor]:
    """Return the tensors that encode_prompt gives; the older pipelines want some arguments spelled out."""
    values = {"prompt": PROMPTS, "device": device, "num_images_per_prompt": 1, "max_sequence_length": 128}
    values["do_classifier_free_guidance"] = False
    parameters = inspect.signature(pipe.encode_prompt).parameters.values()
    wanted = {p.name: values.get(p.name) for p in parameters if p.default is p.empty or p.name in values}
    found = pipe.encode_prompt(**wanted)
    return [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, torch.Tensor)]


if __name__ == "__main__":
    sys.exit(main())
