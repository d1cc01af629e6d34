"""The plans of one config.json that may hold a vision tower: the tower by its own sizes, and its blocks in pixels."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from enfold.cli.options import VISION_FLAGS
from enfold.encoders import Config, model_type_of, packs_patches, parts, tower_of
from enfold.encoders.family import Tower, TowerSizes
from enfold.encoders.qwen_vl import MODELS
from enfold.encoders.unknown import unknown_facts
from enfold.errors import ConfigError
from enfold.plan import Plan, plan_encoder
from enfold.vision.config import VisionParallelConfig

ROW_FLAGS = {"tp_size": "--tp-size", "dp_size": "--dp-size"}
"""Sizes of every encoder that is no tower."""


def plan_model(
    config: Mapping[str, Any],
    name: str,
    options: Mapping[str, Any],
    vision: VisionParallelConfig,
    args: argparse.Namespace,
) -> dict[str, Plan]:
    """Return the plan of every encoder in one config.json; `name` is that of a model that is one encoder.

    A tower takes the sizes of `vision`, the others take `options`, which are those of plan_encoder. SigLIP's tower is
    spread in blocks where a vision option is given, else by rows. Raises ConfigError for an option that nothing takes.
    """
    found, given = parts(config), given_flags(args, VISION_FLAGS)
    towers = {part: tower for part, inner in found.items() if (tower := _tower(inner, bool(given))) is not None}
    if given and not towers:
        raise ConfigError(
            f"{' and '.join(given)} can't be used: model_type={model_type_of(config)!r} has no vision tower that is "
            "spread in blocks; leave it out (--tp-size and --dp-size are for other encoders)"
        )
    idle = given_flags(args, ROW_FLAGS)
    if idle and len(towers) == len(found):
        raise ConfigError(
            f"{' and '.join(idle)} can't be used: this model's only encoder is a vision tower; use "
            f"{' and '.join(flag.replace('--', '--vision-') for flag in idle)}"
        )
    plans: dict[str, Plan] = {}
    for part, inner in found.items():
        tower = towers.get(part)
        plan = plan_encoder(inner, **options) if tower is None else _plan_tower(inner, tower, options, vision)
        plans[part or name] = replace(plan, notes=(*plan.notes, *_model_notes(config, part)))
    return plans


def given_flags(args: argparse.Namespace, flags: Mapping[str, str]) -> list[str]:
    """Return those of `flags` (by destination) that are on the command line."""
    return [flag for name, flag in flags.items() if getattr(args, name) is not None]


def _tower(config: Config, wanted: bool) -> Tower | None:
    model_type = model_type_of(config)
    return tower_of(model_type) if wanted or packs_patches(model_type) else None


def _plan_tower(config: Config, tower: Tower, options: Mapping[str, Any], vision: VisionParallelConfig) -> Plan:
    """Plan a tower by the vision sizes where some are given, else by its mode; say what a block holds."""
    is_sized = vision.tp_size is not None or vision.dp_size is not None
    by_blocks = is_sized or (tower.takes != "patches" and options["mode"] == "auto")
    sizes = tower.read(config)
    vision.check_merge_size(sizes.merge_size)
    plan = plan_encoder(
        config,
        options["mode"],
        options["replica_size"],
        layout=vision.layout(options["replica_size"]) if by_blocks else None,
        dtype=options["dtype"],
        numerics=options["numerics"],
    )
    return replace(plan, notes=(*plan.notes, *block_notes(sizes, vision)))


def _model_notes(config: Config, part: str) -> list[str]:
    """Say what happens to the language model of a vision-language model, which enfold does not spread."""
    model_type = model_type_of(config)
    if model_type not in MODELS or part == "":
        return []
    if part == "text":
        return ["this row is the model as the text encoder of a pipeline; as a vision-language model, see `vision`"]
    text = unknown_facts(model_type, config)
    hidden = f"hidden size {text.hidden_size}" if text.hidden_size else "hidden size not in the config"
    layers = f"{text.num_layers} layers" if text.num_layers else "number of layers not in the config"
    return [f"the language model ({hidden}, {layers}) is left as it is: its own tensor parallelism spreads it"]


# Blocks in pixels.


def block_notes(sizes: TowerSizes, vision: VisionParallelConfig) -> list[str]:
    """Say what a block holds and which is the largest image, in patches and in pixels."""
    block, most = vision.vision_attention_block_size, vision.max_vision_seq_len
    if sizes.fixed_grid is not None:
        rows, columns = sizes.fixed_grid
        count = block // (rows * columns)
        held = f"holds {count} of them" if count else "is too small for one: each gets a wider block of its own"
        return [f"every image is {rows} x {columns} = {rows * columns} patches; a block of {block} patches {held}"]
    return [
        f"a block holds {_in_pixels(block, sizes)} at {sizes.patch_size} pixels per patch; images share blocks, "
        "and a larger one gets a wider block of its own",
        f"the largest image admitted has {_in_pixels(most, sizes)}",
    ]


def _in_pixels(num_patches: int, sizes: TowerSizes) -> str:
    height, width = near_square(num_patches // sizes.merge_size**2)
    scale = sizes.merge_size * sizes.patch_size
    equal = " =" if height * width * sizes.merge_size**2 == num_patches else ", about"
    pixels = f"{equal} {width * scale} x {height * scale} pixels" if height * scale else ""
    return f"{num_patches} patches{pixels}"


def near_square(number: int) -> tuple[int, int]:
    """Return (height, width) of the largest rectangle of at most `number` cells, not wider than twice its height."""
    sides = [(height, min(number // height, 2 * height)) for height in range(1, isqrt(number) + 1)]
    return max(sides, key=lambda sides: (sides[0] * sides[1], sides[0]), default=(0, 0))
