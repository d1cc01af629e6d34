"""From pictures to what a vision tower takes, by the model's own image processor and without torchvision.

Transformers has each processor twice, on torchvision and on Pillow, and the two don't resize to the same bits. The
result must not hang on what is installed, so here it is always the one on Pillow.

    family           pixel_values                                          grid_thw
    Qwen2/2.5/3-VL   [sum of t*h*w, channels * temporal * patch * patch]   int64 [n, 3], in patches before merging
    SigLIP, CLIP     [n, channels, height, width]                          None: every picture is brought to one size
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from enfold.errors import ConfigError, InputError
from enfold.vision.images import MAX_PIXELS, image_size

logger = logging.getLogger("enfold")

STORED = "preprocessor_config.json"
NESTED = "processor_config.json"
"""The same settings under "image_processor", as AutoProcessor saves them."""

GRID_CLASS = "Qwen2VLImageProcessorPil"
FIXED_CLASSES = ("SiglipImageProcessorPil", "CLIPImageProcessorPil", "ViTImageProcessorPil", "BitImageProcessorPil")
FORMER_NAMES = {"Qwen2_5_VLImageProcessor": "Qwen2VLImageProcessor"}  # in early checkpoints of Qwen2.5-VL
CHANNELS = 3

CLIP_COLOURS = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF_COLOURS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
QWEN2 = {"size": {"shortest_edge": 56 * 56, "longest_edge": 16384 * 28 * 28}, "patch_size": 14, **CLIP_COLOURS}
QWEN3 = {"size": {"shortest_edge": 64 * 32 * 32, "longest_edge": 16384 * 32 * 32}, "patch_size": 16, **HALF_COLOURS}

DEFAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": (GRID_CLASS, QWEN2),
    "qwen2_5_vl": (GRID_CLASS, QWEN2),
    "qwen3_vl": (GRID_CLASS, QWEN3),
    "qwen3_vl_moe": (GRID_CLASS, QWEN3),
    "siglip": ("SiglipImageProcessorPil", HALF_COLOURS),
}
"""model_type -> class and settings where the folder stores none: those of the published checkpoints."""


@dataclass(frozen=True)
class Pixels:
    """What a vision tower takes for n pictures; the shapes are at the top of this file. On the CPU, float32."""

    pixel_values: torch.Tensor
    grid_thw: torch.Tensor | None


def load_processor(folder: str | Path) -> Preprocessor:
    """Return the image processor of a model's folder, from preprocessor_config.json or processor_config.json.

    Where neither is there, the defaults of the config.json's model_type are used, and a log line says so. Raises
    ConfigError for a file that can't be read, a processor that is not known here, and one that is another model's:
    its patch, merge or picture size is not that of config.json.
    """
    import transformers

    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the folder of the model, with {STORED}")
    config = _read_config(folder)
    stored = _stored(folder)
    name, settings = _defaults(folder, config) if stored is None else (_class_name(folder, stored, config), stored)
    try:
        processor = getattr(transformers, name).from_dict(settings)
    except Exception as error:  # ValueError, TypeError, ...: it hangs on what is wrong
        raise ConfigError(f"{folder}: the settings of {name} can't be used: {error}") from error
    return Preprocessor(processor, config, folder)


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file, or None where there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"can't read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def _stored(folder: Path) -> dict[str, Any] | None:
    """Return the settings that the folder holds; those under "image_processor" come first, as in Transformers."""
    nested = (_read_json(folder / NESTED) or {}).get("image_processor")
    if nested is not None and not isinstance(nested, dict):
        raise ConfigError(f'{folder / NESTED}: "image_processor" is a {type(nested).__name__}, not an object')
    return nested if nested is not None else _read_json(folder / STORED)


def _read_config(folder: Path) -> dict[str, Any]:
    """Return config.json with the defaults of its class, without them where Transformers can't read it, or {}."""
    from transformers import AutoConfig

    config = _read_json(folder / "config.json") or {}
    try:
        full = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False) if config else None
    except Exception:  # an unknown model_type, say: the encoder's own loader reports that better
        full = None
    return full.to_dict() if full is not None else config


def _class_name(folder: Path, stored: dict[str, Any], config: dict[str, Any]) -> str:
    """Return the class on Pillow of the one that is stored, which may be named with `Fast` or be one on torchvision.

    So does AutoImageProcessor with backend="pil". No code of the checkpoint (auto_map) is run.
    """
    kind = str(stored.get("image_processor_type") or stored.get("feature_extractor_type") or "")
    base = kind.removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    name = f"{FORMER_NAMES.get(base, base)}Pil" if base else DEFAULTS.get(_family(config), ("",))[0]
    if name != GRID_CLASS and name not in FIXED_CLASSES:
        known = ", ".join(each.removesuffix("Pil") for each in (GRID_CLASS, *FIXED_CLASSES))
        raise ConfigError(f"{folder}: image_processor_type={kind!r} is not known here; known are {known}")
    return name


def _family(config: dict[str, Any]) -> str:
    """Return the model_type, of a tower that of its model: qwen3_vl_vision and siglip_vision_model lose their end."""
    return str(config.get("model_type", "")).removesuffix("_model").removesuffix("_vision")


def _defaults(folder: Path, config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    family = _family(config)
    if family not in DEFAULTS:
        known = ", ".join(DEFAULTS)
        raise ConfigError(
            f"{folder} has no {STORED}, and there is no default for model_type={family!r} (only for {known}); "
            f"copy the file from the checkpoint"
        )
    name, settings = DEFAULTS[family]
    settings = settings | _sizes_in(config, fixed=name != GRID_CLASS)
    logger.warning("%s has no %s; using the defaults of %s: %s", folder, STORED, family, settings)
    return name, settings


def _sizes_in(config: dict[str, Any], *, fixed: bool) -> dict[str, Any]:
    """Return the sizes of a config.json, in the words of a processor, as far as the file names them."""
    vision = config.get("vision_config") or config
    names = {
        "patch_size": "patch_size",
        "temporal_patch_size": "temporal_patch_size",
        "spatial_merge_size": "merge_size",
    }
    if fixed:
        side = vision.get("image_size")
        return {"size": {"height": side, "width": side}} if isinstance(side, int) else {}
    return {to: vision[name] for name, to in names.items() if isinstance(vision.get(name), int)}


class Preprocessor:
    """The image processor of one model: how large a picture comes out, and its pixels."""

    def __init__(self, processor: Any, config: dict[str, Any], folder: str | Path) -> None:
        """Check that a processor of a known class fits the model of `config` (a config.json, or {})."""
        self.name = type(processor).__name__
        self._processor = processor
        self._folder = folder
        self.has_grid = self.name == GRID_CLASS
        if self.has_grid:
            self._read_grid_sizes(config)
        else:
            self._read_fixed_size(config)

    def _read_grid_sizes(self, config: dict[str, Any]) -> None:
        processor, size = self._processor, self._processor.size
        low, high = size.shortest_edge or 0, size.longest_edge or 0
        if not 0 < low <= high or not processor.do_resize:
            raise ConfigError(
                f"{self._folder}: size needs 0 < shortest_edge <= longest_edge (pixels of a picture) and do_resize, "
                f"not {low}, {high} and do_resize={processor.do_resize}"
            )
        for name, value in _sizes_in(config, fixed=False).items():
            if getattr(processor, name) != value:
                raise ConfigError(
                    f"{self._folder}: the image processor has {name}={getattr(processor, name)}, but config.json has "
                    f"{value}; the {STORED} is that of another model"
                )
        self.patch_size: int = processor.patch_size
        self.merge_size: int = processor.merge_size
        row = CHANNELS * processor.temporal_patch_size * self.patch_size**2
        self._shape: tuple[int, ...] = (row,)

    def _read_fixed_size(self, config: dict[str, Any]) -> None:
        try:
            tall, wide = (self._run(Image.new("RGB", size)).shape[1:] for size in ((8, 16), (16, 8)))
        except InputError as error:
            raise ConfigError(f"{self._folder}: {error}; look at its {STORED}") from error
        if tall != wide:
            raise ConfigError(f"{self._folder}: {self.name} does not bring every picture to one size; its {STORED}")
        self._shape = shape = tuple(tall)
        size = _sizes_in(config, fixed=True).get("size")
        if size and shape[1:] != (size["height"], size["width"]):
            raise ConfigError(
                f"{self._folder}: the image processor makes {shape[1]} x {shape[2]} pictures, but config.json has "
                f"image_size={size['height']}; the {STORED} is that of another model"
            )
        self.patch_size = _sizes_in(config, fixed=False).get("patch_size", 0)
        self.merge_size = 1

    def processed_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the grid (h, w), in patches, that a picture of this size is brought to.

        Raises InputError for a picture with a side above 200 times the other (Qwen's smart_resize).
        """
        if not self.has_grid:
            if not self.patch_size:
                raise ConfigError(f"{self._folder}: config.json names no patch_size, so patches can't be counted")
            return self._shape[1] // self.patch_size, self._shape[2] // self.patch_size
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        size = self._processor.size
        try:
            rows, columns = smart_resize(
                height, width, self.patch_size * self.merge_size, size.shortest_edge, size.longest_edge
            )
        except (ValueError, ZeroDivisionError) as error:
            raise InputError(f"{width} x {height} pixels: {error}; crop or pad it") from None
        return rows // self.patch_size, columns // self.patch_size

    def tokens_of(self, path: str | Path, max_pixels: int = MAX_PIXELS) -> int:
        """Return how many patches (before merging) the picture in a file becomes, from its header alone.

        Raises InputError that names the file, as read_image does for what the header shows, and processed_size.
        """
        width, height = image_size(path, max_pixels)
        try:
            rows, columns = self.processed_size(width, height)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        return rows * columns

    def preprocess(self, images: Sequence[Image.Image], names: Sequence[str] | None = None) -> Pixels:
        """Return the pixels of RGB pictures (read_image), one after another into one tensor; no picture is fine.

        `names` are for the messages. The bits of a picture don't hang on what it is preprocessed with.
        """
        labels = names or [f"image {number}" for number in range(1, len(images) + 1)]
        grids = [self._checked_grid(image, label) for image, label in zip(images, labels, strict=True)]
        counts = [rows * columns for rows, columns in grids]
        pixel_values = torch.empty(sum(counts), *self._shape, dtype=torch.float32)
        for image, label, count, end in zip(images, labels, counts, accumulate(counts), strict=True):
            rows = pixel_values[end - count : end]
            pixels = self._run(image, label)
            if pixels.shape != rows.shape:  # copy_ would broadcast a single row
                raise InputError(f"{label}: {self.name} made {tuple(pixels.shape)}, not {tuple(rows.shape)}")
            rows.copy_(pixels)
        grid_thw = torch.tensor([(1, *grid) for grid in grids], dtype=torch.int64).reshape(-1, 3)
        return Pixels(pixel_values, grid_thw if self.has_grid else None)

    def _checked_grid(self, image: Image.Image, label: str) -> tuple[int, int]:
        if not isinstance(image, Image.Image) or image.mode != "RGB":
            what = f"mode {image.mode}" if isinstance(image, Image.Image) else f"a {type(image).__name__}"
            raise InputError(f"{label} is {what}, not an RGB picture; read it with read_image")
        try:
            return self.processed_size(*image.size) if self.has_grid else (1, 1)
        except InputError as error:
            raise InputError(f"{label}: {error}") from None

    def _run(self, image: Image.Image, label: str = "a test image") -> torch.Tensor:
        """Return the pixel values of one picture; every processor here works picture by picture anyway."""
        try:
            pixels: torch.Tensor = self._processor(image, return_tensors="pt")["pixel_values"]
        except Exception as error:  # ValueError, TypeError, ...: it hangs on the settings
            raise InputError(f"{label}: {self.name} can't process it: {error}") from error
        return pixels
