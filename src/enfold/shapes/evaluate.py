"""Count how many held-out prompts the pictures of a pipeline show: `python -m enfold.shapes.evaluate`.

The pipeline is plain Diffusers on one rank, with the values of its generation_defaults.json; the check is checker.py.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FluxPipeline
from rich.progress import track

from enfold.shapes import model_folder
from enfold.shapes.checker import check_picture
from enfold.shapes.scenes import Scene, held_out_scenes, write_prompt

__all__ = ["main"]


def main() -> int:
    """Draw, check, print; exit 1 where fewer prompts are shown than `--at-least` asks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model-path", type=Path, default=model_folder(), help="default: the shipped model")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the noise; the prompts are the same for every seed")
    parser.add_argument("--num-inference-steps", type=int, help="default: the model's own")
    parser.add_argument("--true-cfg-scale", type=float, help="default: the model's own")
    parser.add_argument("--at-least", type=float, default=85.0, metavar="PERCENT")
    parser.add_argument("--save", type=Path, help="folder for the pictures, wrong ones first by name")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not (options.model_path / "generation_defaults.json").is_file():
        parser.error(
            f"--model-path {options.model_path} has no generation_defaults.json; give a folder that train.py wrote"
        )
    if options.num_prompts < 1 or options.batch_size < 1:
        parser.error(f"--num-prompts {options.num_prompts}, --batch-size {options.batch_size}: use at least 1 of each")
    scenes = held_out_scenes(options.num_prompts)
    pictures = _draw(options, scenes)
    faults = [check_picture(picture, scene) for picture, scene in zip(pictures, scenes, strict=True)]
    if options.save:
        _save(options.save, pictures, scenes, faults)
    shown = sum(not each for each in faults)
    percent = 100 * shown / len(scenes)
    if options.json:
        failed = {write_prompt(scene): each for scene, each in zip(scenes, faults, strict=True) if each}
        print(json.dumps({"num_prompts": len(scenes), "shown": shown, "percent": percent, "failed": failed}))
    else:
        for scene, each in zip(scenes, faults, strict=True):
            if each:
                print(f"{write_prompt(scene)}: {'; '.join(each)}")
        print(f"{shown} of {len(scenes)} held-out prompts are shown by their picture: {percent:.1f} %")
    return int(percent < options.at_least)


@torch.no_grad()
def _draw(options: argparse.Namespace, scenes: list[Scene]) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Return one RGB picture [64, 64, 3] per scene; each has a generator of its own."""
    pipeline = FluxPipeline.from_pretrained(options.model_path, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": options.num_inference_steps, "true_cfg_scale": options.true_cfg_scale}
    defaults = json.loads((options.model_path / "generation_defaults.json").read_text(encoding="utf-8"))
    values = defaults | {name: value for name, value in given.items() if value is not None}
    negative = values.pop("negative_prompt", "")
    pictures: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    starts = range(0, len(scenes), options.batch_size)
    for start in track(starts, "drawing", disable=not sys.stderr.isatty()):
        prompts = [write_prompt(scene) for scene in scenes[start : start + options.batch_size]]
        generators = [torch.Generator().manual_seed(options.seed * 1_000_003 + start + i) for i in range(len(prompts))]
        images = pipeline(
            prompts, negative_prompt=[negative] * len(prompts), generator=generators, output_type="np", **values
        ).images
        pictures += list((images * 255).round().astype(np.uint8))
    return pictures


def _save(folder: Path, pictures: list[Any], scenes: list[Scene], faults: list[list[str]]) -> None:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    for picture, scene, each in zip(pictures, scenes, faults, strict=True):
        verdict = "wrong" if each else "shown"
        counts[verdict] += 1
        name = f"{'0' if each else '1'}-{verdict}-{counts[verdict]:03d}-{write_prompt(scene).replace(' ', '-')}.png"
        Image.fromarray(picture).save(folder / name)


if __name__ == "__main__":
    sys.exit(main())
