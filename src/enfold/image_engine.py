"""What a user of many images holds: the model's image processor, a scheduler with a cache, the ranks with the tower.

with ImageEngine(TowerSpec("path/to/model"), num_ranks=2) as engine:
    for image in engine.encode(["a.jpg", "b.png"]):
        print(image.features.shape)
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image

from enfold.checkpoint import find_folder, read_config, tower_config
from enfold.encoders import tower_of
from enfold.engine import OnRanks, local_or_hub, make_executor
from enfold.errors import ConfigError, EncodeError, EnfoldError, InputError, LostRankError, MismatchError
from enfold.plan import plan_encoder
from enfold.runtime.base import Executor
from enfold.runtime.machine import available_cores
from enfold.vision.batching import VisionScheduler, make_micro_batches
from enfold.vision.cache import OutputCache
from enfold.vision.calls import cut_patches
from enfold.vision.images import MAX_PIXELS, image_size, read_image
from enfold.vision.packing import Grid
from enfold.vision.pooled import detach_pooled
from enfold.vision.processor import load_processor
from enfold.vision.requests import VisionItem, VisionRequest
from enfold.worker import TowerSpec

DEFAULT_MAX_TOKENS = 16384
CACHE_BYTES = 256 * 2**20
NUM_READERS = 4
"""Threads that decode images; Pillow and NumPy let others run meanwhile."""


@dataclass(frozen=True)
class ImageFeatures:
    """The output of one image.

    features: [tokens, D], `[main | ds0 | ds1 | ...]` of a tower with deepstack. pooled: [D] where the tower has a
    pooling head. grid: frames, rows and columns in patches. size: height and width of the upright image, in pixels.
    """

    index: int
    features: torch.Tensor
    pooled: torch.Tensor | None
    grid: Grid
    size: tuple[int, int]


@dataclass(frozen=True)
class _Picture:
    item: VisionItem
    size: tuple[int, int]


class ImageEngine(OnRanks[TowerSpec]):
    """One vision tower over `num_ranks` ranks. Opening it reads the settings; `start` starts ranks and loads weights.

    max_tokens_per_call: patches that one call of the tower takes; a larger image is encoded by itself.
    cache_bytes: outputs that are kept for images that come again. max_pixels: larger images are refused undecoded.
    first_frame: take the first frame of an animation, which is refused else.
    settings: the local folder with config.json and the image processor; default: that of the spec.

    Raises ConfigError or LayoutError for a model without a tower, settings of another model, sizes that do not fit.
    """

    load_method = "load_tower"

    def __init__(
        self,
        spec: TowerSpec,
        *,
        num_ranks: int = 1,
        max_tokens_per_call: int = DEFAULT_MAX_TOKENS,
        cache_bytes: int = CACHE_BYTES,
        max_pixels: int = MAX_PIXELS,
        first_frame: bool = False,
        settings: Path | None = None,
        threads_per_rank: int | None = None,
        executor: Executor | None = None,
    ) -> None:
        spec = replace(spec, path=local_or_hub(spec.path))
        super().__init__(spec, executor or make_executor(num_ranks, threads_per_rank, spec.timeout_s))
        self.max_tokens_per_call = max_tokens_per_call
        self.max_pixels, self.first_frame = max_pixels, first_frame
        self._read_settings(settings or find_folder(spec.path, spec.subfolder), num_ranks)
        self.scheduler = VisionScheduler(
            self._call,
            token_budget=max_tokens_per_call,
            max_item_tokens=spec.vision.max_vision_seq_len,
            merge_size=self.sizes.merge_size,
            patch_features=self.sizes.patch_features,
            cache=OutputCache(cache_bytes),
        )

    def _read_settings(self, folder: Path, num_ranks: int) -> None:
        config = tower_config(read_config(folder))
        tower, values, vision = tower_of(config.model_type), config.to_dict(), replace(self.spec.vision)
        assert tower is not None
        self.model_type: str = config.model_type
        self.sizes = tower.read(values)
        vision.check_merge_size(self.sizes.merge_size)
        # What can't be planned is refused here, before any rank is started.
        self.plan = plan_encoder(
            values,
            replica_size=num_ranks,
            layout=vision.layout(num_ranks),
            dtype=self.spec.dtype,
            numerics=self.spec.numerics,
        )
        self.processor = load_processor(folder)
        if self.processor.has_grid != (tower.takes == "patches"):
            raise ConfigError(f"{folder}: {self.processor.name} is no image processor of {self.model_type}")

    @property
    def num_levels(self) -> int:
        """Number of deepstack levels beside the main features."""
        return sum(layer < self.sizes.num_layers for layer in self.sizes.tap_layers)

    @property
    def width(self) -> int:
        """D, the columns of the features: out_features of the main ones and of each level."""
        return self.sizes.out_features * (1 + self.num_levels)

    # One image.

    def measure(self, path: Path) -> Grid:
        """Return the grid that the image in a file comes to, from its header alone.

        Raises InputError that names the file, for what the header shows: see enfold.vision.images.
        """
        width, height = image_size(path, self.max_pixels)
        try:
            grid = (1, *self.processor.processed_size(width, height))
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        limit = self.spec.vision.max_vision_seq_len
        if grid[1] * grid[2] > limit:
            raise InputError(f"{path} comes to {grid[1]} x {grid[2]} patches, the limit is {limit}; scale it down")
        return grid

    def read(self, path: Path) -> Image.Image:
        """Return the image in a file; raise InputError for what `measure` does not see."""
        return read_image(path, self.max_pixels, first_frame=self.first_frame)

    def _prepare(self, path: Path) -> _Picture | InputError:
        try:
            image = self.read(path)
            pixels = self.processor.preprocess([image], [str(path)])
        except InputError as error:
            return error
        size = (image.height, image.width)
        if pixels.grid_thw is not None:
            return _Picture(VisionItem(pixels.pixel_values, tuple(pixels.grid_thw[0].tolist())), size)
        rows, columns = self.processor.processed_size(image.width, image.height)
        patch = (self.processor.patch_size, self.processor.patch_size)
        patches = cut_patches(pixels.pixel_values, (rows, columns), patch)
        return _Picture(VisionItem(patches, (1, rows, columns)), size)

    # Many images.

    def encode(self, paths: Sequence[str | Path]) -> list[ImageFeatures]:
        """Return the features of each image, in the order of `paths`; raise the first error."""
        files = [Path(path) for path in paths]
        outcomes = list(self.encode_each(files, [grid[1] * grid[2] for grid in map(self.measure, files)]))
        for outcome in outcomes:
            if isinstance(outcome, EnfoldError):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, ImageFeatures)]

    def encode_each(
        self, paths: Sequence[Path], num_patches: Sequence[int]
    ) -> Generator[ImageFeatures | EnfoldError, None, None]:
        """Yield, in the order of `paths`, the features of each image, or the error that names it.

        num_patches: of each image, as measured. While the ranks encode one batch, the next one is read and
        preprocessed. Raises what ends the job: LostRankError, MismatchError, or that the very first batch fails.
        """
        batches = make_micro_batches(num_patches, self.max_tokens_per_call)
        num_encoded = 0
        with reading_threads() as threads:
            coming = self._submit(threads, paths, batches[:1])
            for number, batch in enumerate(batches, 1):
                pictures = [future.result() for future in coming]
                coming = self._submit(threads, paths, batches[number : number + 1])
                outcomes = self._encode(batch, pictures, paths)
                num_encoded += sum(isinstance(outcome, ImageFeatures) for outcome in outcomes)
                if not num_encoded and (failed := [each for each in outcomes if isinstance(each, EncodeError)]):
                    raise failed[0]
                yield from outcomes

    def _submit(
        self, threads: ThreadPoolExecutor, paths: Sequence[Path], batches: Sequence[Sequence[int]]
    ) -> list[Future[_Picture | InputError]]:
        return [threads.submit(self._prepare, paths[place]) for batch in batches for place in batch]

    def _encode(
        self, batch: Sequence[int], pictures: Sequence[_Picture | InputError], paths: Sequence[Path]
    ) -> list[ImageFeatures | EnfoldError]:
        """Encode the images of one batch that could be read, each as a request of its own, so that it fails alone."""
        good = {index: each for index, each in zip(batch, pictures, strict=True) if isinstance(each, _Picture)}
        results = self.scheduler.run([VisionRequest([each.item], index) for index, each in good.items()])
        outcomes: dict[int, ImageFeatures | EnfoldError] = {
            index: each for index, each in zip(batch, pictures, strict=True) if isinstance(each, InputError)
        }
        for (index, picture), result in zip(good.items(), results, strict=True):
            if result.error is None:
                rows, pooled = detach_pooled(result.outputs[0], self.width)
                outcomes[index] = ImageFeatures(index, rows, pooled, picture.item.grid, picture.size)
            else:
                outcomes[index] = _named(paths[index], result.error)
        return [outcomes[index] for index in batch]

    def _call(self, pixels_PF: torch.Tensor, grid_thw: torch.Tensor) -> list[torch.Tensor]:
        rows: list[torch.Tensor] = self.executor.call("encode_images", pixels_PF, grid_thw)
        return [each.cpu() for each in rows]

    def counters(self) -> dict[str, int]:
        """Return what was done so far: images that came twice, calls of the tower, patches in them, and in blocks."""
        done, tower = self.scheduler.counters, self.executor.call("tower_counters")
        return {
            "duplicates": done.duplicates + self.scheduler.cache.counters.hits,
            "calls": tower["calls"],
            "patches": tower["tokens"],
            "padded_patches": tower["padded_tokens"],
        }


@contextmanager
def reading_threads() -> Iterator[ThreadPoolExecutor]:
    """Give threads that read images; at the end of the block, what they have not begun is dropped."""
    threads = ThreadPoolExecutor(min(NUM_READERS, available_cores()), "enfold-images")
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _named(path: Path, error: EnfoldError) -> EnfoldError:
    """Return the error of one image under the name of its file; raise one that ends the job."""
    cause = error.__cause__ if isinstance(error.__cause__, EnfoldError) else error
    if isinstance(cause, LostRankError | MismatchError):
        raise cause
    named = type(cause)(f"{path} was not encoded: {cause}")
    for note in getattr(cause, "__notes__", ()):  # the traceback of a rank
        named.add_note(note)
    return named
