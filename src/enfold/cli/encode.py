"""`enfold encode`: a file of texts, or a folder of images, through an encoder on N ranks, into one .safetensors file.

Model and inputs say which of the two it is (enfold.cli.kinds). What the file holds: enfold.cli.encode_texts and
enfold.cli.encode_images.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enfold.cli.kinds import Kind, decide_kind, settings_folder
from enfold.cli.model_path import check_model_path
from enfold.cli.options import VISION_FLAGS, add_options, positive_int
from enfold.errors import ConfigError, InputError

POOLINGS = ("none", "mean", "cls", "last")
DEFAULT_MAX_TOKENS = 16384
DEFAULT_MAX_PIXELS = 89_478_485

ONLY_FOR: Mapping[Kind, Mapping[str, Any]] = {
    "texts": {
        "encoder_parallel": "auto",
        "tp_size": None,
        "dp_size": None,
        "pooling": "none",
        "max_length": None,
        "batch_size": 32,
    },
    "images": {
        **dict.fromkeys(VISION_FLAGS),
        "max_tokens_per_call": DEFAULT_MAX_TOKENS,
        "max_pixels": DEFAULT_MAX_PIXELS,
        "first_frame": False,
        "skip_bad": False,
    },
}
"""The options that mean something for one kind of input, and their defaults."""

EXAMPLE = """\
examples, on two ranks that share the work:
  enfold encode --model-path ./my-encoder --input captions.txt --output captions.safetensors \\
      --num-gpus 2 --encoder-parallel dp --pooling mean
  enfold encode --model-path ./qwen3-vl --input photos/ more.jsonl --output photos.safetensors --num-gpus 2
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `encode` to the command line."""
    parser = subparsers.add_parser(
        "encode",
        help="encode the texts of a file, or images, into a .safetensors file",
        description="Encode texts with a text encoder, or images with the vision tower of a model, on N ranks. Write\n"
        "hidden states or pooled vectors of texts, features of images.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, "--model-path", "--subfolder")
    parser.add_argument(
        "--input",
        required=True,
        nargs="+",
        action="extend",
        metavar="PATH",
        help="texts: .txt (one per line), .jsonl, or - for standard input; images: files, folders, .jsonl lists",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the .safetensors file to write")
    add_options(parser, "--num-gpus")
    _add_text_options(parser.add_argument_group("texts"))
    _add_image_options(parser.add_argument_group("images", "--timeout is 600 seconds for images and 60 for texts"))
    add_options(parser, "--dtype", "--numerics", "--threads-per-rank", "--timeout", "--json", timeout=None)
    parser.set_defaults(run=run)


def _add_text_options(group: argparse._ArgumentGroup) -> None:
    defaults = ONLY_FOR["texts"]
    add_options(group, "--encoder-parallel", "--tp-size", "--dp-size")
    group.add_argument(
        "--pooling",
        choices=POOLINGS,
        default=defaults["pooling"],
        help="one vector per text, or none: the hidden states of all its tokens (default: none)",
    )
    group.add_argument(
        "--max-length", type=positive_int, metavar="N", help="tokens per text; longer ones are cut off and counted"
    )
    group.add_argument(
        "--batch-size",
        type=positive_int,
        default=defaults["batch_size"],
        metavar="N",
        help="texts per batch (default: 32)",
    )


def _add_image_options(group: argparse._ArgumentGroup) -> None:
    add_options(group, *VISION_FLAGS.values())
    group.add_argument(
        "--max-tokens-per-call",
        type=positive_int,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help="patches that the ranks encode together; a larger image is encoded by itself (default: "
        f"{DEFAULT_MAX_TOKENS})",
    )
    group.add_argument(
        "--max-pixels",
        type=positive_int,
        default=DEFAULT_MAX_PIXELS,
        metavar="N",
        help="an image with more pixels in its file is refused, undecoded; others are resized as the model's image "
        f"processor says (default: {DEFAULT_MAX_PIXELS})",
    )
    group.add_argument(
        "--first-frame", action="store_true", help="take the first frame of an animated image, which is refused else"
    )
    group.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out images that can't be used, and record them; without it nothing is encoded if there is one",
    )


def run(args: argparse.Namespace) -> int:
    """Check paths, find out what is to be encoded, and encode it."""
    check_model_path(args.model_path, args.subfolder)
    output = Path(args.output).expanduser()
    _check_output(output)
    folder = settings_folder(args.model_path, args.subfolder)
    kind = decide_kind(folder, args.input)
    _check_options(args, kind)
    if kind == "texts":
        from enfold.cli.encode_texts import run_texts

        return run_texts(args, output)
    from enfold.cli.encode_images import run_images

    return run_images(args, folder, output)


def _check_options(args: argparse.Namespace, kind: Kind) -> None:
    """Raise ConfigError where an option is given that is for the other kind of input."""
    other: Kind = "images" if kind == "texts" else "texts"
    given = [
        f"--{name.replace('_', '-')}" for name, default in ONLY_FOR[other].items() if getattr(args, name) != default
    ]
    if given:
        raise ConfigError(f"{' and '.join(given)}: for {other} only, and the input holds {kind}; leave it out")


def _check_output(output: Path) -> None:
    folder = output.parent
    if output.is_dir():
        raise InputError(
            f"--output {output} is a folder; give the name of a file in it, such as {output}/out.safetensors"
        )
    if not folder.is_dir():
        raise InputError(f"--output {output}: there is no folder {folder}; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"--output {output}: can't write into the folder {folder}; choose another one")
