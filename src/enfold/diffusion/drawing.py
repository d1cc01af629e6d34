"""One call of a Diffusers pipeline for a batch of pictures: watched from outside, stage by stage, and made bytes of."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, get_args

import torch

from enfold.diffusion.requests import Progress, Stage
from enfold.errors import EncodeError

STAGES: tuple[Stage, ...] = get_args(Stage)


class Timeline:
    """When the stages of one call ran on this rank, and where their progress is told.

    Times are seconds since this was made; of a stage that runs in parts, the first begin and the last end count.
    """

    def __init__(self, note: Callable[[Progress], None]) -> None:
        self.note = note
        self.spans: dict[Stage, tuple[float, float]] = {}
        self._origin = time.perf_counter()

    @contextmanager
    def span(self, stage: Stage, device: torch.device) -> Iterator[None]:
        """Time a block as (a part of) a stage; waits for the device, whose work runs behind."""
        begin = self._now(device)
        try:
            yield
        finally:
            first = self.spans.get(stage, (begin, begin))[0]
            self.spans[stage] = (first, self._now(device))

    def tell(self, stage: Stage, step: int, total: int) -> None:
        """Say how far a stage is."""
        self.note(Progress(stage, step, total))

    def table(self) -> torch.Tensor:
        """Return the spans as fp64 [number of STAGES, 2]; NaN for a stage that did not run."""
        nowhere = (float("nan"), float("nan"))
        return torch.tensor([self.spans.get(stage, nowhere) for stage in STAGES], dtype=torch.float64)

    def _now(self, device: torch.device) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - self._origin


class _Bar:
    """Stands in for the progress bar of a pipeline: its extent is the denoising, its updates are the steps."""

    def __init__(
        self, timeline: Timeline, device: torch.device, steps: Iterable[Any] | None, total: int | None
    ) -> None:
        self._timeline = timeline
        self._steps = steps
        self._span = timeline.span("denoise", device)
        self._done = 0
        self._total = total if total is not None else len(list(steps or ()))

    def __enter__(self) -> _Bar:
        self._span.__enter__()
        self._timeline.tell("denoise", 0, self._total)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._span.__exit__(*raised)

    def __iter__(self) -> Iterator[Any]:
        with self:
            for step in self._steps or ():
                yield step
                self.update()

    def update(self, num_steps: int = 1) -> None:
        self._done += num_steps
        self._timeline.tell("denoise", min(self._done, self._total), self._total)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("set_"):  # tqdm's set_description, set_postfix: words for a terminal
            return lambda *_, **__: None
        raise AttributeError(name)


@contextmanager
def watched(pipeline: Any, timeline: Timeline, device: torch.device) -> Iterator[None]:
    """Have a pipeline tell `timeline` of its denoising and of its decoding within the block."""
    pipeline.progress_bar = lambda iterable=None, total=None: _Bar(timeline, device, iterable, total)
    try:
        with _timed(getattr(pipeline, "vae", None), "decode", "decode", timeline, device):
            yield
    finally:
        del pipeline.progress_bar


@contextmanager
def encoding_timed(pipeline: Any, timeline: Timeline, device: torch.device) -> Iterator[None]:
    """Have a pipeline that encodes inside its own call tell `timeline` of that within the block."""
    with _timed(pipeline, "encode_prompt", "encode", timeline, device):
        yield


@contextmanager
def _timed(owner: Any, method: str, stage: Stage, timeline: Timeline, device: torch.device) -> Iterator[None]:
    if not hasattr(owner, method):
        yield
        return
    plain = getattr(owner, method)
    is_own = method in vars(owner)  # somebody has put it there in place of the class's

    @wraps(plain)
    def timed(*args: Any, **kwargs: Any) -> Any:
        timeline.tell(stage, 0, 1)
        with timeline.span(stage, device):
            result = plain(*args, **kwargs)
        timeline.tell(stage, 1, 1)
        return result

    setattr(owner, method, timed)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, method, plain)
        else:
            delattr(owner, method)


def draw(
    pipeline: Any,
    arguments: Mapping[str, Any],
    seeds: Sequence[int],
    timeline: Timeline,
    device: torch.device,
    output_type: str = "pt",
) -> torch.Tensor:
    """Call a pipeline once for a batch; picture i starts from the noise of a CPU generator seeded seeds[i].

    Returns what the pipeline returns first: [N, 3, H, W] in 0..1, a video [N, frames, 3, H, W], or (output_type
    "latent") latents as the pipeline has them. Arguments that the pipeline has no name for must not be passed.
    """
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    with watched(pipeline, timeline, device):
        output = pipeline(**arguments, generator=generators, output_type=output_type, return_dict=False)
    found = output[0]
    pictures = torch.stack(list(found)) if isinstance(found, list | tuple) else found
    if not isinstance(pictures, torch.Tensor) or pictures.shape[0] != len(seeds):
        shape = list(pictures.shape) if isinstance(pictures, torch.Tensor) else type(pictures).__name__
        raise EncodeError(f"{type(pipeline).__name__} returned {shape} for {len(seeds)} pictures")
    return pictures


def to_bytes(pictures: torch.Tensor) -> torch.Tensor:
    """Return pictures in 0..1 as uint8 [N, frames, H, W, 3] on the CPU, rounded as Diffusers' own images are."""
    if broken := int(pictures.isnan().flatten(1).any(1).sum()):
        raise EncodeError(
            f"{broken} of {len(pictures)} pictures hold NaN: {pictures.dtype} was not wide enough; use dtype "
            "bfloat16 or float32"
        )
    videos = pictures.unsqueeze(1) if pictures.dim() == 4 else pictures
    rounded = (videos.float().clamp(0, 1) * 255).round().to(torch.uint8)
    return rounded.movedim(2, -1).contiguous().cpu()


def call_arguments(pipeline: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `values` that are given and that the pipeline's call has a name for."""
    names = inspect.signature(type(pipeline).__call__).parameters
    return {name: value for name, value in values.items() if value is not None and name in names}


def no_texts(pipeline: Any) -> dict[str, None]:
    """Return the call's text arguments as None: some are "" by default, which is refused beside embeddings."""
    names = inspect.signature(type(pipeline).__call__).parameters
    return dict.fromkeys(name for name in ("prompt", "negative_prompt") if name in names)
