"""`enfold encode` for images: every image through a vision tower on N ranks, into one .safetensors file.

The file holds, for the n images in input order:

    features    [tokens of all images, D]   rows after merging, `[main | ds0 | ds1 | ...]` of a tower with deepstack
    offsets     int64 [n + 1]               image i has rows offsets[i] to offsets[i + 1]
    grid_thw    int64 [n, 3]                frames, rows and columns of patches, before merging
    image_hw    int64 [n, 2]                height and width of the upright image in its file, in pixels
    embeddings  [n, D]                      one vector per image, where the tower has a pooling head (SigLIP)
    inputs      uint8 [bytes]               the images as UTF-8 JSON lines: {"id"?, "image": path}
    skipped     uint8 [bytes]               only where images were left out: {"id"?, "image", "error"}

and as metadata, all strings: enfold (version), model, subfolder, model_type, processor, dtype, layout, numerics, plan
(JSON), images, tokens, skipped, out_features, num_levels (D is out_features x (1 + num_levels)), merge_size.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enfold.cli.images import Measured, Refused, check_images, list_refused, refuse
from enfold.cli.options import vision_config
from enfold.cli.report import say, stage
from enfold.errors import ConfigError, InputError
from enfold.vision.finding import ImageFile, find_images

if TYPE_CHECKING:
    import torch

    from enfold.cli.feature_file import FeatureFile
    from enfold.image_engine import ImageEngine, ImageFeatures

EXIT_LEFT_OUT = 1
"""Images turned out to be damaged after encoding had begun: the output holds the others."""


TIMEOUT_S = 600.0
"""One rank may encode a huge image for minutes, on a CPU, while the others have nothing to do and wait."""


@dataclass
class Done:
    """What is encoded so far, beside the features, which are in the file."""

    files: list[ImageFile] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    grids: list[tuple[int, ...]] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    pooled: list[torch.Tensor] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


def run_images(args: argparse.Namespace, folder: Path, output: Path) -> int:
    """Check every image, then load, encode and write. `folder` holds config.json and the processor's settings."""
    check_pillow()
    files = find_images(args.input)
    say(f"{len(files)} images from {', '.join(args.input[:3])}{', ...' if len(args.input) > 3 else ''}")
    engine = _make_engine(args, folder)
    images, refused = _check(args, files, engine)
    started = time.monotonic()
    with ExitStack() as stack:
        with stage(f"loading {args.model_path}, ranks: {args.num_gpus}"):
            stack.enter_context(engine)
        loaded = time.monotonic()
        say(engine.plan_summary)
        done = _encode(args, engine, images, refused, output)
        encoded = time.monotonic()
        counters = engine.counters()
    answer = _summary(args, engine, done, counters, load_s=loaded - started, encode_s=encoded - loaded)
    print(json.dumps(answer, indent=2) if args.json else _in_words(answer))
    return EXIT_LEFT_OUT if len(done.refused) > len(refused) and not args.skip_bad else 0


def check_pillow() -> None:
    """Raise ConfigError, with the remedy, where Pillow is not installed."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise ConfigError("images are read with Pillow, which is not installed: pip install 'enfold[vision]'") from None


def _make_engine(args: argparse.Namespace, folder: Path) -> ImageEngine:
    from enfold.image_engine import ImageEngine
    from enfold.worker import TowerSpec

    spec = TowerSpec(
        path=args.model_path,
        subfolder=args.subfolder,
        vision=vision_config(args),
        dtype=args.dtype,
        numerics=args.numerics,
        timeout_s=args.timeout or TIMEOUT_S,
    )
    return ImageEngine(
        spec,
        num_ranks=args.num_gpus,
        max_tokens_per_call=args.max_tokens_per_call,
        max_pixels=args.max_pixels,
        first_frame=args.first_frame,
        settings=folder,
        threads_per_rank=args.threads_per_rank,
    )


def _check(
    args: argparse.Namespace, files: list[ImageFile], engine: ImageEngine
) -> tuple[list[Measured], list[Refused]]:
    images, refused = check_images(files, engine)
    if refused and (not args.skip_bad or not images):
        remedy = "" if args.skip_bad else "\nrepair or remove them, or leave them out with --skip-bad"
        raise InputError(f"{list_refused(refused, len(files))}{remedy}")
    if refused:
        say(f"{list_refused(refused, len(files))}\nenfold: they are left out (--skip-bad)")
    return images, refused


def _encode(
    args: argparse.Namespace,
    engine: ImageEngine,
    images: Sequence[Measured],
    refused: Sequence[Refused],
    output: Path,
) -> Done:
    """Encode all images; the features of each go into the file at once, the index of all of them at the end."""
    from enfold.image_engine import ImageFeatures

    done = Done(refused=list(refused))
    files, counts = [image.file for image in images], [image.num_patches for image in images]
    with ExitStack() as stack, stage("encoding", len(images), "images") as advance:
        file = stack.enter_context(_open_file(args, engine, counts, output))
        outcomes = stack.enter_context(closing(engine.encode_each([each.path for each in files], counts)))
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, ImageFeatures):
                outcome = _check_size(files[index], counts[index], outcome)
            if isinstance(outcome, ImageFeatures):
                _keep(done, files[index], outcome, file)
            else:
                done.refused.append(refuse(files[index], outcome))
                say(f"left out: {done.refused[-1].reason}")
            advance(1)
        if not done.files:
            raise InputError(list_refused(done.refused, len(images) + len(refused)))
        file.complete(_index(done), _metadata(args, engine, done))
    return done


def _check_size(file: ImageFile, num_patches: int, image: ImageFeatures) -> ImageFeatures | InputError:
    _, rows, columns = image.grid
    if rows * columns == num_patches:
        return image
    return InputError(f"{file.path} came to {num_patches} patches, and now to {rows * columns}: it was changed")


def _keep(done: Done, file: ImageFile, image: ImageFeatures, output: FeatureFile) -> None:
    output.append(image.features)
    done.files.append(file)
    done.num_tokens.append(len(image.features))
    done.grids.append(image.grid)
    done.sizes.append(image.size)
    if image.pooled is not None:
        done.pooled.append(image.pooled)


# The output file.


def _open_file(args: argparse.Namespace, engine: ImageEngine, counts: Sequence[int], output: Path) -> FeatureFile:
    import torch

    from enfold.cli.feature_file import FeatureFile
    from enfold.cli.tensor_file import Slot

    num_rows = sum(counts) // engine.sizes.merge_size**2
    index = {"offsets": (len(counts) + 1,), "grid_thw": (len(counts), 3), "image_hw": (len(counts), 2)}
    return FeatureFile(
        output,
        "features",
        Slot(getattr(torch, engine.loaded.dtype), (num_rows, engine.width)),
        {name: Slot(torch.int64, shape) for name, shape in index.items()},
        _metadata(args, engine, Done()),
    )


def _index(done: Done) -> dict[str, torch.Tensor]:
    """Return everything of the output but the features."""
    import torch

    from enfold.cli.tensor_file import as_bytes

    lengths = torch.tensor(done.num_tokens)
    index = {
        "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        "grid_thw": torch.tensor(done.grids),
        "image_hw": torch.tensor(done.sizes),
        "inputs": as_bytes([file.to_json() for file in done.files]),
    }
    if done.pooled:
        index["embeddings"] = torch.stack(done.pooled)
    if done.refused:
        index["skipped"] = as_bytes([refused.to_json() for refused in done.refused])
    return index


def _metadata(args: argparse.Namespace, engine: ImageEngine, done: Done) -> dict[str, str]:
    return {
        "enfold": version("enfold"),
        "model": args.model_path,
        "subfolder": args.subfolder or "",
        "model_type": engine.model_type,
        "processor": engine.processor.name,
        "dtype": engine.loaded.dtype,
        "layout": str(engine.plan.layout),
        "numerics": args.numerics,
        "plan": json.dumps(engine.loaded.plan),
        "images": str(len(done.files)),
        "tokens": str(sum(done.num_tokens)),
        "skipped": str(len(done.refused)),
        "out_features": str(engine.sizes.out_features),
        "num_levels": str(engine.num_levels),
        "merge_size": str(engine.sizes.merge_size),
    }


# What is printed.


def _summary(
    args: argparse.Namespace,
    engine: ImageEngine,
    done: Done,
    counters: dict[str, int],
    *,
    load_s: float,
    encode_s: float,
) -> dict[str, Any]:
    return {
        "output": args.output,
        "images": len(done.files),
        "tokens": sum(done.num_tokens),
        "skipped": len(done.refused),
        **counters,
        "out_features": engine.sizes.out_features,
        "num_levels": engine.num_levels,
        "dtype": engine.loaded.dtype,
        "num_ranks": args.num_gpus,
        "load_s": round(load_s, 3),
        "encode_s": round(encode_s, 3),
        "images_per_s": round(len(done.files) / encode_s, 2),
        "tokens_per_s": round(sum(done.num_tokens) / encode_s, 2),
        "plan": engine.loaded.plan,
        "plan_summary": engine.plan_summary,
    }


def _in_words(answer: dict[str, Any]) -> str:
    levels = f" x {1 + answer['num_levels']}" if answer["num_levels"] else ""
    skipped = f", {answer['skipped']} left out" if answer["skipped"] else ""
    again = f" ({answer['duplicates']} came again and took no work)" if answer["duplicates"] else ""
    useful = answer["patches"] / max(1, answer["padded_patches"])
    return (
        f"{answer['images']} images{again}, {answer['tokens']} tokens of {answer['out_features']}{levels}{skipped}\n"
        f"load {answer['load_s']:.1f} s, encode {answer['encode_s']:.1f} s, {answer['images_per_s']:.1f} images/s, "
        f"{answer['tokens_per_s']:.0f} tokens/s\n"
        f"{answer['calls']} calls of the tower, {answer['patches']} patches; their blocks hold "
        f"{answer['padded_patches']} ({useful:.0%} full; the rest is skipped)\n"
        f"plan: {answer['plan_summary']}\n"
        f"written to {answer['output']}"
    )
