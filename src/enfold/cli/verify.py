"""`enfold verify`: does a model, spread over ranks on this machine, return the bits of the plain module?

Random input goes through Transformers' own module on one rank and through every layout of the ranks. Each output is
compared bit by bit with the plain module's and with that of `replicate` (which shows apart what comes from the plain
module's own dependence on threads and what from a layout). Every rank must return the same bits. Vision towers:
enfold.cli.verify_tower.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_args

from enfold.cli.kinds import kinds_of_model, packs_only_images, read_config, settings_folder
from enfold.cli.model_path import check_model_path
from enfold.cli.options import add_options, positive_int
from enfold.cli.outcome import FP32_ROUNDING, Outcome, bits_cell, notes_on, page, shape_cell
from enfold.cli.report import say, stage
from enfold.cli.verify_tower import TowerResult, to_text, verify_tower
from enfold.config import Mode
from enfold.errors import ConfigError
from enfold.layout import Layout, divisors

if TYPE_CHECKING:
    from enfold.probe import Comparison
    from enfold.runtime.base import Executor
    from enfold.worker import EncoderSpec

FIRST = "replicate"
"""The layout that runs first: the plain module is loaded after it, and the others are compared with it too."""

PLAIN = "plain module"
DEFAULT_LENGTH = 77
DEFAULT_BATCH_SIZE = 5
"""Odd, and no multiple of the usual numbers of ranks: an even share hides mistakes."""

EXAMPLE = """\
exit code 1 where an exact mode is not exact; numerics=fast is measured and never fails.

examples:
  enfold verify --model-path ./my-encoder --num-gpus 2 --dtype bfloat16
  enfold verify --model-path ./qwen2.5-vl --vision --num-gpus 4
"""


@dataclass
class ModeResult(Outcome):
    """What one layout gave: comparisons with the plain module and with replicate, or why it can't run."""

    plain: list[Comparison] = field(default_factory=list)
    replicate: list[Comparison] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether every output of every rank has the bits of `replicate`, and those are the plain module's.

        Where the plain module's own bits hang on how a vector loop or threads cut the work (an fp32 activation over a
        width like 4304), `replicate` is the reference: it may be off the plain module by rounding, and no more.
        """
        same = all(row.bits_equal for row in self.replicate)
        return self.ranks_agree and not self.failed and same and all(is_rounding(row) for row in self.plain)


def is_rounding(row: Comparison) -> bool:
    """Return whether two outputs are equal, or off by the rounding of fp32 alone."""
    return row.bits_equal or (row.dtype == "float32" and row.max_rel <= FP32_ROUNDING)


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `verify` to the command line."""
    parser = subparsers.add_parser(
        "verify",
        help="compare every mode with one rank, bit by bit",
        description="Run every layout of the ranks on random input and compare its outputs with the plain module's;\n"
        "those of a vision tower with the tower on one rank, and with Transformers' own.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, "--model-path", "--subfolder", "--num-gpus", "--dtype", "--numerics", num_gpus=2)
    parser.add_argument(
        "--batch-size",
        type=positive_int,
        default=DEFAULT_BATCH_SIZE,
        metavar="N",
        help=f"texts or images per call (default: {DEFAULT_BATCH_SIZE})",
    )
    parser.add_argument(
        "--length", type=positive_int, metavar="N", help=f"tokens per text (default: {DEFAULT_LENGTH}, or what fits)"
    )
    parser.add_argument(
        "--vision",
        action="store_true",
        help="verify the vision tower, spread in blocks, of a model that is a text encoder too (Qwen2.5-VL) or that is "
        "spread by whole images without it (SigLIP); of other vision-language models the tower is verified anyway",
    )
    add_options(parser, "--threads-per-rank", "--timeout", "--json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run every layout and print the table; 1 if an exact one is not exact."""
    check_model_path(args.model_path, args.subfolder)
    config = read_config(settings_folder(args.model_path, args.subfolder))
    is_tower = args.vision or packs_only_images(config)
    if is_tower and "images" not in kinds_of_model(config):
        raise ConfigError(
            f"--vision can't be used: model_type={config.get('model_type')!r} has no vision tower that enfold packs "
            "(those of Qwen-VL, SigLIP vision); leave it out"
        )
    if is_tower and args.length is not None:
        raise ConfigError("--length is for texts, and this model is verified by its vision tower; leave it out")
    about, results, text = _verify_tower(args) if is_tower else _verify_encoder(args)
    failed = [result.name for result in results if not result.exact]
    code = 1 if failed and args.numerics == "exact" else 0
    print(_to_json(about, results, code) if args.json else text)
    if failed:
        reference = "one rank, or not what Transformers computes" if is_tower else "the plain module"
        say(f"not the bits of {reference}: {', '.join(failed)}" + (" (numerics=fast)" if code == 0 else ""))
    return code


def _verify_encoder(args: argparse.Namespace) -> tuple[dict[str, Any], Sequence[ModeResult], str]:
    from enfold.engine import local_or_hub, make_executor
    from enfold.worker import EncoderSpec

    spec = EncoderSpec(
        path=local_or_hub(args.model_path),
        subfolder=args.subfolder,
        dtype=args.dtype,
        numerics=args.numerics,
        timeout_s=args.timeout,
        batch_size=args.batch_size,
    )
    with make_executor(args.num_gpus, args.threads_per_rank, args.timeout) as executor:
        about, results = verify(executor, spec, args.batch_size, args.length)
    return about, results, _to_text(about, results)


def _verify_tower(args: argparse.Namespace) -> tuple[dict[str, Any], Sequence[TowerResult], str]:
    from enfold.engine import local_or_hub, make_executor
    from enfold.worker import TowerSpec

    spec = TowerSpec(
        path=local_or_hub(args.model_path),
        subfolder=args.subfolder,
        dtype=args.dtype,
        numerics=args.numerics,
        timeout_s=args.timeout,
    )
    with make_executor(args.num_gpus, args.threads_per_rank, args.timeout) as executor:
        about, results = verify_tower(executor, spec, args.batch_size)
    return about, results, to_text(about, results)


def verify(
    executor: Executor, spec: EncoderSpec, batch_size: int, length: int | None
) -> tuple[dict[str, Any], list[ModeResult]]:
    """Return facts about the machine, and one result per layout, `replicate` first.

    At any time a rank holds one encoder; rank 0 holds the outputs of the plain module and of replicate beside it.
    """
    layouts = list_layouts(executor.num_ranks)
    about = executor.call("describe")
    results: list[ModeResult] = []
    with stage("verifying", len(layouts), "layouts") as advance:
        for name, layout in layouts.items():
            result = ModeResult(name, str(layout))
            results.append(result)
            with result.noting():
                about |= _run_layout(executor, _spread(spec, name, layout), result, batch_size, length)
            advance(1)
    return about, results


def _run_layout(
    executor: Executor, spec: EncoderSpec, result: ModeResult, batch_size: int, length: int | None
) -> dict[str, Any]:
    """Load, run and compare one layout; return what the first of them (replicate) tells of the model."""
    from enfold.engine import LOAD_PATIENCE_S

    about: dict[str, Any] = {}
    loaded = executor.call("load", spec, patience_s=LOAD_PATIENCE_S)
    length = length or executor.call("fitting_length", DEFAULT_LENGTH)
    digests = executor.call("probe", result.name, batch_size, length, every_rank=True)
    result.ranks_agree = all(digest == digests[0] for digest in digests)
    if result.name == FIRST:
        plain_class = executor.call("probe_plain", spec, batch_size, length, patience_s=LOAD_PATIENCE_S)
        about = {"model_class": plain_class, "dtype": loaded.dtype, "batch_size": batch_size}
        about |= {"length": length} if loaded.input_name == "input_ids" else {}
    result.plain = executor.call("compare", result.name, PLAIN)
    result.replicate = executor.call("compare", result.name, FIRST)
    if result.name != FIRST:
        executor.call("forget", result.name)
    return about


def list_layouts(num_ranks: int) -> dict[str, Layout]:
    """Return every factorisation of the ranks by name: replicate first, then dp, fold, and the combined ones."""
    layouts = {FIRST: Layout(num_ranks, 1, 1)}
    if num_ranks == 1:
        return layouts
    layouts |= {"dp": Layout(1, num_ranks, 1), "fold": Layout(1, 1, num_ranks)}
    for tp in divisors(num_ranks):
        for dp in divisors(num_ranks // tp):
            layout = Layout(num_ranks // (tp * dp), dp, tp)
            if layout not in layouts.values():
                layouts[str(layout)] = layout
    return layouts


def _spread(spec: EncoderSpec, name: str, layout: Layout) -> EncoderSpec:
    if name in get_args(Mode):
        return replace(spec, mode=name)  # type: ignore[arg-type]
    return replace(spec, layout=layout)


def _to_json(about: dict[str, Any], results: Sequence[ModeResult | TowerResult], code: int) -> str:
    modes = [{**asdict(result), "exact": result.exact if not result.skipped else None} for result in results]
    answer = json.dumps({"exact": code == 0, "about": about, "modes": modes})
    # JSON has no number for infinity and NaN: they become the strings "Infinity" and "NaN".
    return json.dumps(json.loads(answer, parse_constant=str), indent=2)


def _to_text(about: dict[str, Any], results: list[ModeResult]) -> str:
    headers = ("mode", "output", "shape", "bits", "max abs", "max rel", "bits of replicate", "max abs", "worst entry")
    rows = [
        (result.name, *_cells(plain, replicated))
        for result in results
        for plain, replicated in zip(result.plain, result.replicate, strict=True)
    ]
    notes = notes_on(results)
    if any(result.exact and not all(row.bits_equal for row in result.plain) for result in results):
        notes.append(
            "the plain module is off every mode here by the rounding of fp32: its own bits hang on how the work is cut "
            "(see docs/numerics.md); replicate is the reference"
        )
    against = "bits, max abs, max rel: against the plain module on one rank; max rel is over its largest magnitude"
    return page(about, against, headers, rows, notes)


def _cells(plain: Comparison, replicated: Comparison) -> tuple[str, ...]:
    return (
        plain.output,
        shape_cell(plain),
        bits_cell(plain),
        f"{plain.max_abs:.3g}",
        f"{plain.max_rel:.3g}",
        bits_cell(replicated),
        f"{replicated.max_abs:.3g}",
        plain.worst or replicated.worst,
    )
