"""Read each image as upright 8-bit RGB, or refuse it with a message that names the file.

What read_image does with what a file may hold:

    transparency     composited onto white, which is what transformers' convert_to_rgb does for every model here
    16-bit grey      scaled to 8 bits (Pillow's own convert clips at 255)
    16-bit colour    the upper byte, which is all that Pillow's decoders return
    float grey       0 to 1, as in a TIFF from a photo program; any other range is refused
    CMYK, palette    Pillow's conversion, as in the models' own processors
    EXIF orientation applied; EXIF that can't be read counts as upright
    ICC profiles     not applied: no processor of these models does
    several frames   refused, or the first one where the caller says so; of a camera's MPO always the main picture
    damage           refused where the format shows it. BMP, WebP and AVIF hold no checksums: a download whose end
                     was filled with zeros passes

Nothing is decoded before its size is known from the header, and no setting of Pillow is changed: those are global.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin
from PIL import ImageFile as PillowFile

from enfold.errors import InputError

logger = logging.getLogger("enfold")

MAX_PIXELS = 89_478_485
"""Pixels of one image, unless the caller says otherwise: where Pillow itself begins to warn (a quarter GiB as RGB)."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
"""What is read, told by content and not by suffix. Others that Pillow knows are rare, or start programs (EPS)."""

UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> what turns the picture upright (PIL.ImageOps.exif_transpose)."""

SIDEWAYS = (5, 6, 7, 8)
ORIENTATION, BITS_PER_SAMPLE, PHOTOMETRIC = 0x0112, 0x0102, 0x0106  # tags of TIFF and EXIF
WHITE_IS_ZERO = 0

LOOKS_LIKE = (
    (b"<!doctype html", "a web page, as a failed download leaves"),
    (b"<html", "a web page, as a failed download leaves"),
    (b"version https://", "a Git LFS pointer: fetch the real file with `git lfs pull`"),
    (b"<svg", "an SVG drawing; render it to PNG first"),
    (b"<?xml", "XML, perhaps an SVG drawing; render it to PNG first"),
    (b"%pdf", "a PDF; render its pages first"),
    (b"pk\x03\x04", "a zip archive; unpack it first"),
    (b"8bps", "a Photoshop file; export it first"),
    (b"jxl ", "JPEG XL; convert it first"),
    (b"jp  ", "JPEG 2000; convert it first"),
    (b"ftyphe", "HEIC; convert it to JPEG or PNG first"),
    (b"ftyp", "a video; extract its frames first"),
    (b"\x1a\x45\xdf\xa3", "a video; extract its frames first"),
)
"""What stands in the first 16 bytes, in lower case, of files that are no image -> what such a file is."""


def read_image(path: str | Path, max_pixels: int = MAX_PIXELS, *, first_frame: bool = False) -> Image.Image:
    """Return the picture in a file, upright, as 8-bit RGB that hangs on no open file.

    Raises InputError that names the file: more than `max_pixels` by its header (it is never decoded), truncated or
    damaged, no image, an empty file, several frames without `first_frame`, samples whose white is not known.
    """
    if PillowFile.LOAD_TRUNCATED_IMAGES:
        raise InputError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is on in this process: a truncated file would come out partly grey; "
            "set it to False"
        )
    with _opened(Path(path), max_pixels) as image:
        frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
        if frames > 1 and not first_frame:
            raise InputError(
                f"{path} has {frames} frames ({image.format}), and one picture is expected; "
                f"take the first with first_frame=True, or extract the frames"
            )
        _check_colour_key(image, path)
        _check_sums(image)
        image.load()
        turn = UPRIGHT.get(_orientation(image, path))  # after load: a PNG may hold its EXIF behind the pixels
        rgb = _to_rgb(image, path)
        return rgb if turn is None else rgb.transpose(turn)


def image_size(path: str | Path, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return (width, height) of the upright picture from the header alone; refuse what read_image refuses there.

    Where a PNG holds its EXIF behind the pixels, width and height of a picture on its side come out swapped.
    """
    with _opened(Path(path), max_pixels) as image:
        width, height = image.size
        # Pillow's TIFF reader has turned the size already.
        swap = image.format != "TIFF" and _orientation(image, path) in SIDEWAYS
        return (height, width) if swap else (width, height)


@contextmanager
def _opened(path: Path, max_pixels: int) -> Iterator[PillowFile.ImageFile]:
    """Open an image whose size is within the limit; what Pillow raises, then or in the block, becomes InputError."""
    if max_pixels < 1:
        raise InputError(f"max_pixels={max_pixels} lets no image through; give at least 1")
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is a folder or a device, not an image file")
        with path.open("rb") as file:
            image = _identify(path, file)
            width, height = image.size
            if width * height > max_pixels:
                raise InputError(
                    f"{path} has {width} x {height} = {width * height} pixels by its header, more than "
                    f"max_pixels={max_pixels}, and was not decoded; scale it down or raise max_pixels"
                )
            yield image
    except InputError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(f"{path} was not decoded: {error}; scale it down") from None
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, struct.error, EOFError, ...
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(f"{path} can't be read: {error.strerror}") from None
        reason = str(error) or type(error).__name__
        raise InputError(f"{path} can't be decoded, it is truncated or damaged: {reason}") from error


def _identify(path: Path, file: Any) -> PillowFile.ImageFile:
    """Return the image behind an open file, not decoded.

    Image.open would do, but it raises or warns at a number of pixels that only a global setting changes.
    """
    Image.init()
    start = file.read(64)
    for name in FORMATS:
        if name not in Image.OPEN:
            continue
        factory, accepts = Image.OPEN[name]
        answer = accepts(start[:16]) if accepts else False
        if isinstance(answer, str):
            raise InputError(f"{path}: {answer} in this build of Pillow")
        if answer:
            file.seek(0)
            try:
                return factory(file, "")
            except (SyntaxError, IndexError, TypeError, ValueError) as error:
                raise InputError(f"{path} begins like {name}, but its header is damaged or unknown: {error}") from error
    raise InputError(f"{path} is no image that is read here ({', '.join(FORMATS)}){_looks_like(start)}")


def _looks_like(start: bytes) -> str:
    if not start:
        return "; the file is empty"
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:16].lower()
    for magic, meaning in LOOKS_LIKE:
        if magic in text:
            return f"; it looks like {meaning}"
    return f"; it begins with the bytes {start[:8].hex(' ')}"


def _orientation(image: PillowFile.ImageFile, path: str | Path) -> int:
    """Return the EXIF (or XMP) orientation, 1 to 8, and 1 where there is none or it can't be read."""
    try:
        # The base class's method: that of PNG would decode the picture to look behind its pixels.
        value = Image.Image.getexif(image).get(ORIENTATION, 1)
    except Exception as error:
        logger.info("EXIF of %s can't be read, so it is taken as upright: %s", path, error)
        return 1
    return value if value in UPRIGHT else 1


def _check_sums(image: PillowFile.ImageFile) -> None:
    """Compare the checksums of a PNG. Its decoder does not, and shows noise where a download's end is zeros."""
    if image.format == "PNG" and image.fp is not None:
        position = image.fp.tell()
        image.fp.seek(0)
        PngImagePlugin.PngImageFile(image.fp).verify()
        image.fp.seek(position)


def _to_rgb(image: Image.Image, path: str | Path) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        image = _to_8_bits(image, path)
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _to_8_bits(image: Image.Image, path: str | Path) -> Image.Image:
    """Scale grey of more than 8 bits, or floats, to 8 bits: rounded, black to 0 and white to 255."""
    samples = np.asarray(image)
    if image.mode == "F":
        low, high = float(samples.min()), float(samples.max())
        if not (low >= 0 and high <= 1):  # also refuses NaN
            raise InputError(
                f"{path} has floats from {low:g} to {high:g}; only 0 (black) to 1 (white) is known, scale it first"
            )
        grey = np.rint(samples * np.float32(255)).astype(np.uint8)
    else:
        white = _white(image, path)
        scaled = samples.astype(np.uint32)
        scaled *= 255
        scaled += white // 2
        scaled //= white
        grey = scaled.astype(np.uint8)
    if getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == WHITE_IS_ZERO:
        grey = 255 - grey
    key = image.info.get("transparency")
    if key is None:
        return Image.fromarray(grey)
    alpha = np.where(samples == key, 0, 255).astype(np.uint8)
    return Image.merge("LA", (Image.fromarray(grey), Image.fromarray(alpha)))


def _white(image: Image.Image, path: str | Path) -> int:
    """Return the sample that stands for white: 65535, or what the bits of a TIFF say (12: 4095)."""
    if image.format != "TIFF":
        return 65535
    if image.mode == "I":
        raise InputError(
            f"{path} has 32-bit or signed samples, which don't say what is white; save it with 8 or 16 bits, unsigned"
        )
    bits: int = image.tag_v2.get(BITS_PER_SAMPLE, (16,))[0]  # type: ignore[attr-defined]
    return (1 << bits) - 1


def _check_colour_key(image: PillowFile.ImageFile, path: str | Path) -> None:
    """Refuse a 16-bit colour that stands for transparent: Pillow cuts pixels to 8 bits, and others would match it."""
    deep = any("16" in str(tile.args) for tile in image.tile)
    if deep and image.mode == "RGB" and "transparency" in image.info:
        raise InputError(
            f"{path} is a 16-bit RGB PNG with one transparent colour; save it with an alpha channel instead"
        )
