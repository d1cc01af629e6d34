"""Look at every image before the model is loaded, so that one broken file among ten thousand costs seconds, not hours.

The header gives size and kind. Of JPEG, PNG and WebP the end of the file tells a download that stopped; where it does
not look whole, and in all other formats, the image is decoded once to know. What only decoding shows (damage in the
middle of a file that ends well) is found while encoding: that image is left out of the output, and named.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from enfold.cli.report import stage
from enfold.errors import InputError
from enfold.vision.finding import ImageFile

if TYPE_CHECKING:
    from enfold.image_engine import ImageEngine

NAMED_IMAGES = 10
"""How many images that can't be used a message names before it only counts."""

FLAGS = {"first_frame=True": "--first-frame", "max_pixels=": "--max-pixels ", "max_pixels": "--max-pixels"}
"""How this command calls what the library's messages advise."""

PNG_START = b"\x89PNG\r\n\x1a\n"
PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
PNG_DEPTH = 24
"""Where a PNG says how many bits a sample has."""

WEBP_ANIMATION = 0x02
HEAD_BYTES, TAIL_BYTES = 32, 4096


@dataclass(frozen=True)
class Measured:
    """An image that looks fine, and its patches before merging."""

    file: ImageFile
    num_patches: int


@dataclass(frozen=True)
class Refused:
    """An image that can't be used, and why; the reason names the file."""

    file: ImageFile
    reason: str

    def to_json(self) -> str:
        """Return it as one line of JSON: {"id"?, "image", "error"}."""
        fields: dict[str, Any] = json.loads(self.file.to_json())
        return json.dumps({**fields, "error": self.reason}, ensure_ascii=False)


def check_images(files: Sequence[ImageFile], engine: ImageEngine) -> tuple[list[Measured], list[Refused]]:
    """Return the images that can be encoded and those that can't, each in the order of `files`."""
    from enfold.image_engine import reading_threads

    measured: list[Measured] = []
    refused: list[Refused] = []
    with stage("checking", len(files), "images") as advance, reading_threads() as threads:
        for found in threads.map(lambda file: _check(file, engine), files):
            if isinstance(found, Measured):
                measured.append(found)
            else:
                refused.append(found)
            advance(1)
    return measured, refused


def _check(file: ImageFile, engine: ImageEngine) -> Measured | Refused:
    try:
        frames, rows, columns = engine.measure(file.path)
        if not looks_whole(file.path):
            engine.read(file.path)
    except InputError as error:
        return refuse(file, error)
    return Measured(file, frames * rows * columns)


def refuse(file: ImageFile, error: Exception) -> Refused:
    """Return an image that can't be used, with the reason in the words of the command line."""
    reason = str(error)
    for word, flag in FLAGS.items():
        reason = reason.replace(word, flag)
    return Refused(file, reason)


def list_refused(refused: Sequence[Refused], num_images: int) -> str:
    """Return a message that names the first of the images that can't be used."""
    lines = [f"{len(refused)} of {num_images} images can't be used:"]
    for each in refused[:NAMED_IMAGES]:
        line = f" ({each.file.where})" if ", line " in each.file.where else ""
        lines.append(f"{each.reason}{line}")
    if len(refused) > NAMED_IMAGES:
        lines.append(f"and {len(refused) - NAMED_IMAGES} more")
    return "\n  ".join(lines)


def looks_whole(path: Path) -> bool:
    """Return whether a JPEG, PNG or WebP file ends as it should and holds one picture of 8-bit samples.

    False does not mean that it is broken (a camera may write more behind a JPEG): then only decoding tells.
    """
    try:
        with path.open("rb") as file:
            start = file.read(HEAD_BYTES)
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            tail = file.read()
            if len(start) < HEAD_BYTES:
                return False
            if start.startswith(b"\xff\xd8"):
                return tail.rstrip(b"\0\r\n ").endswith(b"\xff\xd9")
            if start.startswith(PNG_START):
                return start[PNG_DEPTH] <= 8 and tail.endswith(PNG_END) and not _is_animated_png(file)
            if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
                return _is_whole_webp(start, size)
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}") from None
    return False


def _is_animated_png(file: BinaryIO) -> bool:
    """Return whether there is an animation's chunk before the pixels, or no pixels are found."""
    place = len(PNG_START)
    while True:
        file.seek(place)
        header = file.read(8)
        if len(header) < 8 or header[4:] == b"acTL":
            return True
        if header[4:] == b"IDAT":
            return False
        place += 12 + int(struct.unpack(">I", header[:4])[0])


def _is_whole_webp(start: bytes, size: int) -> bool:
    announced = 8 + int(struct.unpack("<I", start[4:8])[0])
    is_animated = start[12:16] == b"VP8X" and bool(start[20] & WEBP_ANIMATION)
    return size >= announced and not is_animated
