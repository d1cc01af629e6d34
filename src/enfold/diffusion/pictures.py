"""Pictures and clips as files: PNG with what drew them in its text, GIF or MP4 for several frames."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

__all__ = ["encode_picture", "extension_of", "save_picture"]


def extension_of(frames_FHWC: torch.Tensor) -> str:
    """Return the ending of the file that these frames are written to."""
    return ".png" if len(frames_FHWC) == 1 else ".gif"


def encode_picture(frames_FHWC: torch.Tensor, about: Mapping[str, Any], fps: float = 8.0) -> bytes:
    """Return a PNG of one frame, or a GIF of several, from uint8 [frames, H, W, 3].

    `about` goes into the PNG as one text chunk per key, into the GIF as a comment in JSON.
    """
    images = [Image.fromarray(frame.numpy()) for frame in frames_FHWC]
    buffer = BytesIO()
    if len(images) == 1:
        text = PngInfo()
        for key, value in about.items():
            text.add_itxt(key, str(value))
        images[0].save(buffer, "PNG", pnginfo=text)
    else:
        comment = json.dumps(dict(about)).encode()
        duration_ms = max(20, round(1000 / fps))  # browsers slow down anything faster
        images[0].save(
            buffer, "GIF", save_all=True, append_images=images[1:], duration=duration_ms, loop=0, comment=comment
        )
    return buffer.getvalue()


def save_picture(file: Path, frames_FHWC: torch.Tensor, about: Mapping[str, Any], fps: float = 8.0) -> None:
    """Write the file beside its place and rename it: there is never half a picture. Raises OSError."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.write_bytes(encode_picture(frames_FHWC, about, fps))
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
