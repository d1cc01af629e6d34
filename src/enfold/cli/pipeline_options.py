"""What `generate` and `serve` share: the options that say how a pipeline's ranks are used, checked before it loads."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enfold.cli.model_path import read_json
from enfold.cli.options import OPTIONS, Option, add_option, add_options, positive_int
from enfold.cli.plan import find_folder, plans_of_pipeline
from enfold.diffusion.layout import DENOISERS, PipelineLayout, resolve_pipeline_layout
from enfold.errors import ConfigError
from enfold.plan import Plan
from enfold.runtime.machine import rank_devices

if TYPE_CHECKING:
    from enfold.diffusion.requests import PipelineSpec

CACHE_MIB = 256
DTYPE_HELP = "precision of all weights (default: float32 on CPUs, that of the checkpoint on GPUs)"

SPLIT_OPTIONS: dict[str, Option] = {
    "--ulysses-degree": Option(
        "ranks that share each picture's tokens in the DiT, by attention heads (default: what the other sizes leave)",
        positive_int,
        metavar="N",
    ),
    "--ring-degree": Option(
        "ranks that share each picture's tokens in the DiT, keys passed around (default: 1)", positive_int, metavar="N"
    ),
    "--tp-size": Option("ranks that share the DiT's weights (default: 1)", positive_int, metavar="N"),
    "--dp-size": Option("replicas of the pipeline, each with its own requests (default: 1)", positive_int, metavar="N"),
    "--whole-dit": Option(
        "run the whole DiT on every rank of a replica: pictures have the bits of one rank",
        extra={"action": "store_true"},
    ),
    "--text-encoder-cpu-offload": Option(
        "keep encoders on the CPU and move them to the device for the encode alone", extra={"action": "store_true"}
    ),
    "--embedding-cache-mib": Option(
        "memory of each rank for embeddings of texts that were encoded before; 0: none", int, CACHE_MIB, metavar="MIB"
    ),
}
"""--tp-size and --dp-size are about DiT and pipeline here; the encoders' layout follows from --encoder-parallel."""


@dataclass(frozen=True)
class PipelinePlan:
    """What is known of a pipeline before it is loaded: its folder, the DiT's class, the layout, the encoders' plans."""

    folder: Path
    pipeline_class: str
    denoiser: str
    layout: PipelineLayout
    plans: Mapping[str, Plan]


def add_pipeline_options(parser: argparse.ArgumentParser, encoder_parallel: str, batching_max_size: int) -> None:
    """Add the options of a pipeline on ranks; the two arguments are the command's own defaults."""
    add_options(parser, "--model-path", "--num-gpus", "--encoder-parallel", encoder_parallel=encoder_parallel)
    for flag, option in SPLIT_OPTIONS.items():
        add_option(parser, flag, option)
    add_options(parser, "--batching-max-size", batching_max_size=batching_max_size)
    add_option(parser, "--dtype", replace(OPTIONS["--dtype"], help=DTYPE_HELP))
    add_options(parser, "--numerics", "--threads-per-rank", "--timeout")


def plan_pipeline_ranks(args: argparse.Namespace) -> PipelinePlan:
    """Check sizes and GPUs and read config files; nothing is loaded.

    Raises ConfigError or LayoutError with the remedy.
    """
    folder = find_folder(args.model_path, None)
    if args.embedding_cache_mib < 0:
        raise ConfigError(f"--embedding-cache-mib {args.embedding_cache_mib} is below 0; use 0 for no cache")
    index_file = folder / "model_index.json"
    if not index_file.is_file():
        raise ConfigError(f"{folder} has no model_index.json; give the folder of a Diffusers pipeline")
    try:
        index = read_json(index_file)
    except ConfigError as error:
        raise ConfigError(f"{index_file} {error}") from error
    component, denoiser = _find_denoiser(index_file, index)
    layout = _resolve(args, folder / component / "config.json", denoiser)
    options = {
        "mode": args.encoder_parallel,
        "replica_size": layout.replica_size,
        "batch_size": args.batching_max_size,
        "dtype": args.dtype or _usual_dtype(layout.num_ranks),
        "numerics": args.numerics,
    }
    plans = plans_of_pipeline(folder, index, options)
    return PipelinePlan(folder, str(index.get("_class_name", "?")), denoiser, layout, plans)


def _usual_dtype(num_ranks: int) -> str | None:
    """Return what opening.pipeline_dtype gives the ranks where none is asked for; None: that of the checkpoint."""
    return "float32" if rank_devices(num_ranks)[0] == "cpu" else None


def make_spec(args: argparse.Namespace, plan: PipelinePlan) -> PipelineSpec:
    """Return what the ranks are told to load; imports torch."""
    from enfold.diffusion.requests import PipelineSpec

    is_local = Path(args.model_path).expanduser().is_dir()  # of a hub id, plan.folder holds config files alone
    return PipelineSpec(
        path=str(plan.folder) if is_local else args.model_path,
        layout=plan.layout,
        mode=args.encoder_parallel,
        dtype=args.dtype,
        numerics=args.numerics,
        offload_encoders=args.text_encoder_cpu_offload,
        cache_bytes=args.embedding_cache_mib * 2**20,
        batch_size=args.batching_max_size,
        timeout_s=args.timeout,
    )


def _find_denoiser(file: Path, index: Mapping[str, Any]) -> tuple[str, str]:
    for component in DENOISERS:
        entry = index.get(component)
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str):
            return component, entry[1]
    raise ConfigError(f"{file} names no {', '.join(DENOISERS)}; this pipeline draws nothing that enfold knows")


def _resolve(args: argparse.Namespace, config_file: Path, denoiser: str) -> PipelineLayout:
    sizes = {"ulysses": args.ulysses_degree, "ring": args.ring_degree, "tp": args.tp_size, "dp": args.dp_size}
    asked: dict[str, Any] = {**sizes, "split_dit": not args.whole_dit, "transformer": denoiser}
    layout = resolve_pipeline_layout(args.num_gpus, **asked)  # refuses what is wrong whatever the DiT
    if not layout.is_split:
        return layout
    return resolve_pipeline_layout(args.num_gpus, **asked, **_split_facts(config_file, denoiser))


def _split_facts(config_file: Path, denoiser: str) -> dict[str, Any]:
    """Return what Diffusers says of the class, and its attention heads; no weight is read."""
    from enfold.diffusion.split import split_facts

    facts = split_facts(denoiser)
    try:
        heads = json.loads(config_file.read_text(encoding="utf-8")).get("num_attention_heads")
    except (OSError, ValueError, AttributeError):
        heads = None
    return {
        "can_split_sequence": facts.has_cp_plan,
        "can_split_weights": facts.has_tp_plan,
        "num_heads": heads if isinstance(heads, int) else None,
    }
