"""`enfold plan`: how each encoder of a model would be spread over the ranks, and why, from config.json alone."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enfold.cli.model_path import HUB_ID, read_json
from enfold.cli.options import VISION_FLAGS, add_options, vision_config
from enfold.cli.report import table
from enfold.cli.towers import given_flags, plan_model
from enfold.errors import ConfigError
from enfold.plan import Plan, plan_pipeline

WIDTH = 100
"""Columns of a terminal that the table and the reasons fit into."""

HEADERS = ("encoder", "family", "hidden", "heads", "layers", "params", "mode", "layout", "GiB/rank", "whole")

CONFIG_FILES = ["model_index.json", "config.json", "*/config.json"]

EXAMPLE = """\
layout is replicate x dp x tp; GiB/rank is what the fullest rank holds, whole is one full copy.

examples:
  enfold plan --model-path ./flux --num-gpus 4
  enfold plan --model-path ./flux --num-gpus 4 --encoder-parallel dp --batching-max-size 8 --json
  enfold plan --model-path ./flux --subfolder text_encoder_2 --num-gpus 4 --tp-size 2
  enfold plan --model-path ./qwen3-vl --num-gpus 4 --vision-tp-size 2
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `plan` to the command line."""
    parser = subparsers.add_parser(
        "plan",
        help="show how each encoder would be spread over the ranks, and why",
        description="Show how each encoder of a pipeline or a model would be spread over the ranks, what each\n"
        "rank would hold, and why. Reads config.json files only: no weights, no GPU.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, "--model-path", "--subfolder", "--num-gpus", "--encoder-parallel", "--batching-max-size")
    add_options(parser, "--tp-size", "--dp-size", *VISION_FLAGS.values(), "--dtype", "--numerics", "--json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan of every encoder as a table with reasons, or as one JSON document."""
    plans = _plans(find_folder(args.model_path, args.subfolder), args)
    if args.json:
        encoders = {name: plan.to_json() for name, plan in plans.items()}
        document = {"model_path": args.model_path, "num_gpus": args.num_gpus, "encoders": encoders}
        print(json.dumps(document, indent=2))
    else:
        print(render(plans, args.num_gpus))
    return 0


def find_folder(model_path: str, subfolder: str | None) -> Path:
    """Return the local folder of a model; of a hub id, its config files are fetched or found in the cache."""
    root = Path(model_path).expanduser()
    if not root.exists():
        if not HUB_ID.fullmatch(model_path) or model_path.startswith("."):
            raise ConfigError(f"--model-path {model_path}: there is no such folder, and it is no hub id (owner/name)")
        root = _fetch_configs(model_path)
    folder = root / subfolder if subfolder else root
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the one that holds config.json or model_index.json")
    return folder


def _fetch_configs(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=CONFIG_FILES))
    except Exception as error:  # the hub client raises errors of its HTTP library, too, when there is no network
        raise ConfigError(
            f"--model-path {hub_id} is no local folder, and the hub did not give its config files "
            f"({str(error).strip().partition(chr(10))[0]}); download the model and give its folder"
        ) from error


def _plans(folder: Path, args: argparse.Namespace) -> dict[str, Plan]:
    """Return the plans of a pipeline folder or of a folder with one config.json; an error names the file."""
    options: dict[str, Any] = {
        "mode": args.encoder_parallel,
        "replica_size": args.num_gpus,
        "batch_size": args.batching_max_size,
        "tp_size": args.tp_size,
        "dp_size": args.dp_size,
        "dtype": args.dtype,
        "numerics": args.numerics,
    }
    vision = vision_config(args)
    is_pipeline = (folder / "model_index.json").is_file()
    name = "model_index.json" if is_pipeline else "config.json"
    try:
        config = read_json(folder / name)
        if not is_pipeline:
            return plan_model(config, folder.resolve().name, options, vision, args)
    except ConfigError as error:
        raise type(error)(f"{folder / name}: {error}") from error
    if given := given_flags(args, VISION_FLAGS):
        raise ConfigError(
            f"{' and '.join(given)} can't be used: {folder} is a pipeline, whose encoders are spread by "
            "--encoder-parallel, --tp-size and --dp-size; leave it out, or give one vision tower with --subfolder"
        )
    return plans_of_pipeline(folder, config, options)


def plans_of_pipeline(folder: Path, model_index: Mapping[str, Any], options: dict[str, Any]) -> dict[str, Plan]:
    """Return the plan of every encoder of a pipeline's folder; an error names the file."""
    try:
        plans = plan_pipeline(model_index, lambda name: read_json(folder / name / "config.json"), **options)
    except ConfigError as error:
        raise type(error)(f"{folder}/{error}") from error
    if not plans:
        raise ConfigError(f"{folder / 'model_index.json'} names no text or image encoder of Transformers")
    return plans


# The table and the words below it.


def render(plans: Mapping[str, Plan], num_gpus: int) -> str:
    """Return one row per encoder and, below, the reasons of each."""
    ranks = "1 rank" if num_gpus == 1 else f"{num_gpus} ranks"
    family_width = max(15, 30 - max(map(len, plans)))  # what short names leave of two columns of 15
    rows = [_row(name, plan, family_width) for name, plan in plans.items()]
    words = [line for name, plan in plans.items() for line in _words(name, plan)]
    title = f"{ranks}; layout is replicate x dp x tp"
    return "\n".join([title, "", table(HEADERS, rows), "", *words])


def _row(name: str, plan: Plan, family_width: int) -> tuple[str, ...]:
    heads = str(plan.num_heads or "?")
    if plan.num_kv_heads != plan.num_heads:
        heads += f"/{plan.num_kv_heads}"
    share = _gib(plan.bytes_per_rank)
    if plan.bytes_per_rank is not None and plan.replicate_bytes:
        share += f" ({plan.bytes_per_rank / plan.replicate_bytes:.0%})"
    return (
        _shorten(name, 15),
        _shorten(plan.family, family_width),
        str(plan.hidden_size or "?"),
        heads,
        str(plan.num_layers or "?"),
        _parameters(plan.num_parameters),
        plan.resolved,
        str(plan.layout),
        share,
        _gib(plan.replicate_bytes),
    )


def _words(name: str, plan: Plan) -> list[str]:
    lines = [f"{name} ({plan.dtype}): {'; '.join(plan.reasons)}"]
    if plan.whole_parts:
        lines.append(f"  stays whole: {'; '.join(plan.whole_parts)}")
    lines += [f"  {note}" for note in plan.notes]
    return [part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="    ")]


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}~"


def _parameters(count: int | None) -> str:
    if count is None:
        return "?"
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _gib(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / 2**30:.2f}"
