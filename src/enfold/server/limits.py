"""What one request may ask for. Each limit is checked before any work, and an error names it and its flag."""

from __future__ import annotations

from dataclasses import dataclass

from enfold.server.failures import RequestError


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for. Times are in seconds.

    request_s: from a request's arrival to its answer. call_s: one batch on the ranks; ranks that take longer count as
    hung and are started again. body_s: the pause between two pieces of a body.
    """

    body_bytes: int = 32 * 2**20
    body_s: float = 30.0
    prompt_chars: int = 8192
    images: int = 8
    pixels: int = 2048 * 2048
    frames: int = 257
    steps: int = 200
    inputs: int = 256
    tokens: int = 65_536
    pending: int = 128
    request_s: float = 600.0
    call_s: float = 300.0


FLAGS = {
    "body_bytes": "--max-body-mib",
    "prompt_chars": "--max-prompt-chars",
    "images": "--max-images",
    "pixels": "--max-pixels",
    "frames": "--max-frames",
    "steps": "--max-steps",
    "inputs": "--max-inputs",
    "request_s": "--request-timeout",
}
"""The flags of `enfold serve` that set limits, for errors."""


def check_at_most(limits: Limits, name: str, value: float | None, param: str, what: str | None = None) -> None:
    """Raise RequestError with both numbers where `value`, that of the field `param`, is above the limit `name`."""
    most = getattr(limits, name)
    if value is not None and value > most:
        flag = f" ({FLAGS[name]} of the server)" if name in FLAGS else ""
        told = f"{what or param} is {value}, and this server allows at most {most}{flag}"
        raise RequestError(400, "above_limit", told, param)


def check_text(limits: Limits, text: str | None, param: str) -> None:
    """Raise RequestError where a text is longer than it may be."""
    check_at_most(limits, "prompt_chars", len(text or ""), param, f"the number of characters of {param}")
