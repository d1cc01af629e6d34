"""Generate from images with a vision-language model whose vision tower is spread over the ranks that torchrun starts.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/vision_language.py --vision-tp-size 2

Without --model-path the model is a tiny random Qwen3-VL (tiny_qwen3_vl.py); any folder or hub id of a Qwen-VL will do.
The images are random patches of several sizes: what counts here is that the tokens are those of the plain model.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import transformers
from ranks import is_first, join_ranks, leave_ranks
from tiny_qwen3_vl import tiny_qwen3_vl

import enfold

GRIDS = [(1, 16, 24), (1, 8, 8), (1, 20, 12), (1, 4, 30)]
"""(frames, rows, columns) of four images, in patches."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", help="folder or hub id of a Qwen-VL model (default: a tiny random Qwen3-VL)")
    parser.add_argument("--vision-tp-size", type=int, help="ranks that share the tower's weights (default: 1)")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    device = join_ranks()
    load = transformers.AutoModelForImageTextToText.from_pretrained
    model = (load(args.model_path) if args.model_path else tiny_qwen3_vl()).to(device).eval()
    inputs = {name: value.to(device) for name, value in prompt(model.config).items()}

    plain = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    vision = enfold.VisionParallelConfig(tp_size=args.vision_tp_size)
    enfold.parallelize(model, vision=vision)  # in place: from here on the model is used as before
    spread = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    is_equal = torch.equal(plain, spread)

    if is_first():
        tower = model.model.visual
        print(f"plan: {tower.plan.summary()}")
        print(f"{tower.spread.counters.images} images in {tower.spread.counters.calls} call of the tower")
        print(f"tokens equal to the plain model's: {'yes' if is_equal else 'no'}")
    leave_ranks()
    return 0 if is_equal else 1


def prompt(config: Any) -> dict[str, torch.Tensor]:
    """Return the arguments of generate() for one prompt with all images, as the model's processor makes them."""
    vision = config.vision_config
    ids, kinds = [3, 4, 5], [0, 0, 0]
    for frames, height, width in GRIDS:
        count = frames * height * width // vision.spatial_merge_size**2
        ids += [config.vision_start_token_id, *[config.image_token_id] * count, config.vision_end_token_id]
        kinds += [0, *[1] * count, 0]
    patch = (
        config.vision_config.in_channels * config.vision_config.temporal_patch_size * config.vision_config.patch_size**2
    )
    pixels = torch.randn(sum(t * h * w for t, h, w in GRIDS), patch, generator=torch.Generator().manual_seed(1))
    return {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.int64),
        "mm_token_type_ids": torch.tensor([kinds]),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor(GRIDS),
    }


if __name__ == "__main__":
    sys.exit(main())
