"""Encoders that live on the CPU and visit the device for the encode alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

HOME = torch.device("cpu")


class Offload:
    """Moves the encoders of one pipeline. Folded shards move as whole weights do: a rank moves what it holds.

    device: where they compute. `is_on=False` leaves them where they were loaded.
    """

    def __init__(self, encoders: Mapping[str, nn.Module], device: torch.device, is_on: bool) -> None:
        self.encoders = dict(encoders)
        self.device = device
        self.is_on = is_on

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the encoders on the device within the block, and on the CPU after it, whatever happens in between."""
        try:
            self._move(self.device)
            yield
        finally:
            self._move(HOME)
            if self.is_on and self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _move(self, device: torch.device) -> None:
        if self.is_on:
            for encoder in self.encoders.values():
                encoder.to(device)

    @contextmanager
    def hidden_from(self, pipeline: Any) -> Iterator[None]:
        """Take the encoders out of the pipeline within the block: it would compute where the first of them is."""
        if not self.is_on:
            yield
            return
        try:
            for name in self.encoders:
                setattr(pipeline, name, None)
            yield
        finally:
            for name, encoder in self.encoders.items():
                setattr(pipeline, name, encoder)
