"""`enfold generate`: pictures (or clips) of prompts, drawn by a Diffusers pipeline on N ranks, into a folder.

Batches are formed from the prompts alone, in their order, and dealt to the replicas: how many ranks there are changes
neither what is drawn together nor the seeds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enfold.cli.options import positive_float, positive_int
from enfold.cli.pipeline_options import PipelinePlan, add_pipeline_options, make_spec, plan_pipeline_ranks
from enfold.cli.plan import render
from enfold.cli.prompts import Prompt, read_prompts
from enfold.cli.report import stage, stages
from enfold.errors import InputError

if TYPE_CHECKING:
    from enfold.diffusion.engine import PipelineEngine
    from enfold.diffusion.requests import GenerateRequest, GenerateResult, Progress

BATCHING_MAX_SIZE = 4
STAGES = ("encode", "denoise", "decode")
CHOSEN = ("height", "width", "num_frames", "max_sequence_length", "guidance_scale", "true_cfg_scale", "negative_prompt")
"""Options that not every pipeline takes, or not at every value."""

EXAMPLE = """\
examples:
  enfold generate --prompt "a red circle above a blue square"
  enfold generate --prompt-file prompts.txt --num-gpus 2 --encoder-parallel auto --output-path pictures
  enfold generate --model-path ./flux --prompt "a red fox" --num-gpus 4 --ulysses-degree 2 --dp-size 2

ranks = ulysses x ring x tp x dp. With --whole-dit (or --dp-size alone) pictures have the bits of one rank.
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `generate` to the command line."""
    parser = subparsers.add_parser(
        "generate",
        help="draw pictures of prompts with a diffusion pipeline",
        description="Draw pictures of prompts with a Diffusers pipeline on N ranks: the DiT is split over them,\n"
        "and the encoders are spread over the same ranks in their own way.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument(
        "--prompt-file", metavar="FILE", help='.txt with one prompt per line, or .jsonl with "prompt" (and "seed", '
        '"negative_prompt"); - for standard input'
    )  # fmt: skip
    parser.add_argument("--output-path", default="enfold-pictures", metavar="DIR", help="(default: enfold-pictures)")
    _add_picture_options(parser.add_argument_group("pictures", "what is left out is the model's own default"))
    add_pipeline_options(parser, encoder_parallel="auto", batching_max_size=BATCHING_MAX_SIZE)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def _add_picture_options(group: argparse._ArgumentGroup) -> None:
    for flag in ("--height", "--width", "--num-frames", "--num-inference-steps", "--max-sequence-length"):
        group.add_argument(flag, type=positive_int, metavar="N")
    group.add_argument("--num-images-per-prompt", type=positive_int, default=1, metavar="N", help="(default: 1)")
    group.add_argument("--guidance-scale", type=float, metavar="X")
    group.add_argument(
        "--true-cfg-scale",
        type=float,
        metavar="X",
        help="guidance by the negative prompt, where the model has both kinds",
    )
    group.add_argument("--negative-prompt", metavar="TEXT")
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="picture i of each prompt has seed N + i (default: 0)"
    )
    group.add_argument("--fps", type=positive_float, default=8.0, metavar="X", help="of clips (default: 8)")
    group.add_argument(
        "--measure-split",
        action="store_true",
        help="where the DiT is split, draw everything a second time unsplit and print the difference",
    )


def run(args: argparse.Namespace) -> int:
    """Check everything, print the plan, draw, write the pictures, print where they are and what took how long."""
    measured = args.measure_split
    prompts = read_prompts(args.prompt, args.prompt_file, args.seed, args.negative_prompt)
    output = Path(args.output_path).expanduser()
    if output.exists() and not output.is_dir():
        raise InputError(f"--output-path {output} is a file; give a folder")
    plan = plan_pipeline_ranks(args)
    if not args.json:
        print(f"{plan.pipeline_class} from {plan.folder}, DiT {plan.layout}\n\n{render(plan.plans, args.num_gpus)}\n")

    from enfold.diffusion.engine import PipelineEngine

    alone = plan.layout.num_ranks == 1
    engine = PipelineEngine(make_spec(args, plan), threads_per_rank=args.threads_per_rank, in_process=alone)
    requests = [make_request(prompt, args) for prompt in prompts]
    check_before_loading(args, plan, requests)
    with stage("loading"):
        report = engine.start()
    try:
        for request in requests:
            engine.check(request)
        output.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        results = draw(engine, requests, args.batching_max_size)
        seconds = time.perf_counter() - begin
        difference = measure_split(engine, requests, results, args.batching_max_size) if measured else None
    except BaseException:
        engine.close(graceful=False)
        raise
    engine.close()
    files = write_pictures(output, plan, requests, results, args.fps)
    document = {
        "model_path": str(plan.folder),
        "pipeline": plan.pipeline_class,
        "num_gpus": args.num_gpus,
        "layout": str(plan.layout),
        "dit": report.splits,
        "difference_from_unsplit": difference,
        "seconds": seconds,
        "stage_seconds": stage_seconds(results),
        "dtype": report.dtype,
        "encoders": report.plans,
        "pictures": files,
    }
    print(json.dumps(document, indent=2) if args.json else words(document))
    return 0


def check_before_loading(args: argparse.Namespace, plan: PipelinePlan, requests: Sequence[GenerateRequest]) -> None:
    """Raise InputError where config files show already that the pipeline can't honour the options that were given."""
    if all(getattr(args, name) is None for name in CHOSEN):
        return  # nothing that could be wrong, so this process need not import Diffusers
    from enfold.diffusion.checks import check_request
    from enfold.diffusion.outline import outline

    report = outline(plan.folder, plan.layout)
    if report is not None:
        for request in requests:
            check_request(request, report, plan.layout)


def make_request(prompt: Prompt, args: argparse.Namespace) -> GenerateRequest:
    """Return the request of one prompt."""
    from enfold.diffusion.requests import GenerateRequest

    return GenerateRequest(
        prompt=prompt.text,
        seed=prompt.seed,
        negative_prompt=prompt.negative,
        num_images=args.num_images_per_prompt,
        height=args.height,
        width=args.width,
        num_frames=args.num_frames,
        num_inference_steps=args.num_inference_steps,
        guidance_scale=args.guidance_scale,
        true_cfg_scale=args.true_cfg_scale,
        max_sequence_length=args.max_sequence_length,
    )


def draw(
    engine: PipelineEngine, requests: Sequence[GenerateRequest], max_size: int, *, whole_dit: bool = False
) -> list[GenerateResult]:
    """Return one result per request; batches go to the replicas as these get free."""
    batches = make_batches(requests, max_size)
    free = list(range(engine.num_replicas))
    results: dict[int, GenerateResult] = {}
    with stages(STAGES) as show, ThreadPoolExecutor(engine.num_replicas) as pool:
        shown = _Shown(len(batches), show)

        def one(number: int) -> None:
            places, replica = batches[number], free.pop()
            try:
                drawn = engine.generate(
                    [requests[place] for place in places],
                    replica=replica,
                    on_progress=lambda progress: shown.note(number, progress),
                    whole_dit=whole_dit,
                )
            finally:
                free.append(replica)
            results.update(zip(places, drawn, strict=True))

        futures = [pool.submit(one, number) for number in range(len(batches))]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            engine.close(graceful=False)  # ends the calls that the threads of the pool wait in
            raise
    return [results[place] for place in range(len(requests))]


class _Shown:
    """Adds up the progress of several batches, some of them at the same time."""

    def __init__(self, num_batches: int, show: Callable[[str, int, int], None]) -> None:
        self._num_batches = num_batches
        self._show = show
        self._seen: dict[str, dict[int, tuple[int, int]]] = {stage: {} for stage in STAGES}

    def note(self, batch: int, progress: Progress) -> None:
        """Take one rank's word of one batch; batches that have not begun count as large as the largest."""
        seen = self._seen[progress.stage]
        seen[batch] = (progress.step, progress.total)
        steps, totals = zip(*seen.values(), strict=True)
        waiting = self._num_batches - len(seen)
        self._show(progress.stage, sum(steps), sum(totals) + waiting * max(totals))


def make_batches(requests: Sequence[GenerateRequest], max_size: int) -> list[list[int]]:
    """Return the places of requests that are drawn together: neighbours of one kind, at most `max_size`."""
    batches: list[list[int]] = []
    for place, request in enumerate(requests):
        fits = batches and len(batches[-1]) < max_size
        if fits and requests[batches[-1][0]].signature() == request.signature():
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def measure_split(
    engine: PipelineEngine, requests: Sequence[GenerateRequest], results: Sequence[GenerateResult], max_size: int
) -> dict[str, Any]:
    """Draw again with the DiT whole on every rank; return how far the pictures are from those of the split DiT."""
    whole = draw(engine, requests, max_size, whole_dit=True)
    away = [(one.pictures.short() - other.pictures.short()).abs() for one, other in zip(results, whole, strict=True)]
    return {
        "max_abs": max(int(each.max()) for each in away),
        "mean_abs": sum(float(each.float().mean()) for each in away) / len(away),
        "unit": "1/255 of a colour channel",
    }


def stage_seconds(results: Sequence[GenerateResult]) -> dict[str, float]:
    """Return the seconds of each stage on the slowest rank, added up over batches (whose results share their times)."""
    total = dict.fromkeys(STAGES, 0.0)
    for ranks in {tuple(result.times) for result in results}:
        for name in STAGES:
            spans = [[end - begin for what, begin, end in each.spans if what == name] for each in ranks]
            total[name] += max(map(sum, spans), default=0.0)
    return total


def write_pictures(
    folder: Path, plan: PipelinePlan, requests: Sequence[GenerateRequest], results: Sequence[GenerateResult], fps: float
) -> list[dict[str, Any]]:
    """Write every picture with its prompt and seed in the file; never over a file that is there."""
    from enfold.diffusion.pictures import extension_of, save_picture

    number = next_number(folder)
    files = []
    for request, result in zip(requests, results, strict=True):
        for frames, seed in zip(result.pictures, result.seeds, strict=True):
            about = {"prompt": request.prompt, "seed": seed, "negative_prompt": request.negative_prompt or ""}
            about |= {"pipeline": plan.pipeline_class, "model": plan.folder.name, "dit": str(plan.layout)}
            file = folder / f"{number:04d}-{slug(request.prompt)}-{seed}{extension_of(frames)}"
            save_picture(file, frames, about, fps)
            files.append({"file": str(file), "prompt": request.prompt, "seed": seed})
            number += 1
    return files


def next_number(folder: Path) -> int:
    """Return the number after the highest that a file's name in the folder begins with."""
    numbers = [int(path.name[:4]) for path in folder.iterdir() if path.name[:4].isdecimal()]
    return max(numbers, default=-1) + 1


def slug(prompt: str) -> str:
    """Return the letters and digits of a prompt's first 40 characters, for a file's name."""
    kept = "".join(letter if letter.isascii() and letter.isalnum() else " " for letter in prompt[:40].lower())
    return "-".join(kept.split()) or "picture"


def words(document: dict[str, Any]) -> str:
    """Return what is printed at the end: files, times, and what to expect of the bits."""
    lines = [f"{each['file']}  (seed {each['seed']}) {each['prompt']}" for each in document["pictures"]]
    times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in document["stage_seconds"].items())
    count = f"{len(lines)} picture{'' if len(lines) == 1 else 's'}"
    lines += ["", f"{count} in {document['seconds']:.2f} s: {times}", f"DiT: {document['dit']}"]
    if difference := document["difference_from_unsplit"]:
        lines.append(
            f"difference from the unsplit DiT: at most {difference['max_abs']}, "
            f"{difference['mean_abs']:.4f} on average ({difference['unit']})"
        )
    return "\n".join(lines)
