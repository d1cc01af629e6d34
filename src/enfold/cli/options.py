"""Every command-line option that more than one place needs, defined once: flag, type, default and help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from enfold.config import DTYPE_BYTES, Mode, Numerics
from enfold.vision.config import DEFAULT_BLOCK_SIZE, VisionParallelConfig


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1, for argparse."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; use 1, 2, 4, ...") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is smaller than 1; use 1, 2, 4, ...")
    return value


def positive_float(text: str) -> float:
    """Parse a number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; use 60 or 0.5") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0; use 60 or 0.5")
    return value


@dataclass(frozen=True)
class Option:
    """One flag: what argparse needs to add it."""

    help: str
    type: Callable[[str], Any] | None = None
    default: Any = None
    choices: tuple[str, ...] | None = None
    required: bool = False
    metavar: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


OPTIONS: dict[str, Option] = {
    "--model-path": Option(
        "a local folder or a Hugging Face hub id, of one encoder or of a Diffusers pipeline (default: the small model "
        "that comes with enfold)",
        metavar="PATH",
    ),
    "--subfolder": Option("the folder inside --model-path that holds the encoder", metavar="NAME"),
    "--num-gpus": Option("number of ranks; without GPUs they are CPU processes", positive_int, default=1, metavar="N"),
    "--encoder-parallel": Option(
        "how each encoder is spread over the ranks (auto decides and says why)",
        default="auto",
        choices=get_args(Mode),
    ),
    "--tp-size": Option("ranks that share one copy of the weights", positive_int, metavar="N"),
    "--dp-size": Option("copies that share one batch", positive_int, metavar="N"),
    "--vision-tp-size": Option(
        "ranks that share one copy of a vision tower's weights (default: 1)", positive_int, metavar="N"
    ),
    "--vision-dp-size": Option(
        "copies of a vision tower that share the images of a call (default: the ranks that remain)",
        positive_int,
        metavar="N",
    ),
    "--vision-block-size": Option(
        f"patches of a vision tower's blocks, into which images are packed (default: {DEFAULT_BLOCK_SIZE})",
        positive_int,
        metavar="N",
    ),
    "--numerics": Option(
        "exact returns the bits of one rank; fast sums partial results with all-reduce",
        default="exact",
        choices=get_args(Numerics),
    ),
    "--batching-max-size": Option(
        "prompts that may come in one call (what auto plans for)", positive_int, default=1, metavar="N"
    ),
    "--dtype": Option("precision of the weights (default: that of the checkpoint)", choices=tuple(DTYPE_BYTES)),
    "--threads-per-rank": Option(
        "CPU threads of each rank (default: cores divided by ranks)", positive_int, metavar="N"
    ),
    "--timeout": Option("seconds that a rank waits for the others", positive_float, default=60.0, metavar="SECONDS"),
    "--json": Option("print one JSON document instead of a table", extra={"action": "store_true"}),
}


VISION_FLAGS = {
    "vision_tp_size": "--vision-tp-size",
    "vision_dp_size": "--vision-dp-size",
    "vision_block_size": "--vision-block-size",
}
"""The options of vision towers: from the attribute of the parsed arguments to the flag."""


def vision_config(args: argparse.Namespace) -> VisionParallelConfig:
    """Return how vision towers are to be spread, from VISION_FLAGS; what was not given keeps its default."""
    block_size = {} if args.vision_block_size is None else {"vision_attention_block_size": args.vision_block_size}
    return VisionParallelConfig(tp_size=args.vision_tp_size, dp_size=args.vision_dp_size, **block_size)


def add_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup, *flags: str, **defaults: Any) -> None:
    """Add the named options to `parser` or a group of it; a keyword such as `encoder_parallel="dp"` sets a default."""
    for flag in flags:
        option = OPTIONS[flag]
        name = flag.lstrip("-").replace("-", "_")
        add_option(parser, flag, replace(option, default=defaults[name]) if name in defaults else option)


def add_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup, flag: str, option: Option) -> None:
    """Add one option; its help ends with the default, where there is one."""
    keywords: dict[str, Any] = {"help": option.help, "default": option.default, **option.extra}
    if "action" not in option.extra:
        keywords.update(type=option.type, choices=option.choices, required=option.required, metavar=option.metavar)
        if option.default is not None:
            keywords["help"] += f" (default: {option.default})"
    parser.add_argument(flag, **keywords)
