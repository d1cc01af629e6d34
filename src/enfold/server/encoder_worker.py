"""What a served encoder needs beyond `enfold encode`: a worker that returns all an encoder gives, and time limits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from enfold.errors import InputError
from enfold.runtime.spawn import SpawnExecutor
from enfold.worker import Worker

WORKER = "enfold.server.encoder_worker:EncoderWorker"


class EncoderWorker(Worker):
    """One rank of a served encoder."""

    @torch.inference_mode()
    def conditioning(
        self, ids_NT: torch.Tensor, use_mask: bool, lengths: Sequence[int], layers: Sequence[int]
    ) -> list[dict[str, torch.Tensor]]:
        """Return, per text, last_hidden_state [1, T, F], attention_mask [1, T], pooler_output and chosen hidden states.

        Each text is cut to its own tokens, unless the encoder was trained on padding (use_mask=False). Layer 0 is the
        token embedding, -1 the last. Raises InputError for a layer that is not there.
        """
        ids_NT = ids_NT.to(self.device)
        ends_N1 = torch.tensor(list(lengths), device=self.device).unsqueeze(1)
        mask_NT = (torch.arange(ids_NT.shape[1], device=self.device) < ends_N1).long()
        keywords = {"attention_mask": mask_NT} if use_mask else {}
        output = self.encoder(input_ids=ids_NT, output_hidden_states=True, **keywords)
        found = {"last_hidden_state": output.last_hidden_state, "attention_mask": mask_NT}
        found |= {f"hidden_states.{layer}": _layer(output.hidden_states, layer) for layer in layers}
        cut = [length if use_mask else ids_NT.shape[1] for length in lengths]
        sets = [
            {f"encoder.{name}": rows[place : place + 1, :length].cpu() for name, rows in found.items()}
            for place, length in enumerate(cut)
        ]
        pooled = getattr(output, "pooler_output", None)
        if isinstance(pooled, torch.Tensor):
            for place, each in enumerate(sets):
                each["encoder.pooler_output"] = pooled[place : place + 1].cpu()
        return sets


def _layer(hidden_states: Sequence[torch.Tensor], layer: int) -> torch.Tensor:
    if not -len(hidden_states) <= layer < len(hidden_states):
        raise InputError(
            f"layer {layer}: this encoder has 0 (the token embedding) to {len(hidden_states) - 1}, or -1 for the last"
        )
    return hidden_states[layer]


class BoundedExecutor(SpawnExecutor):
    """Ranks of one replica, in processes of their own even where there is one; every call can be bounded in time."""

    def __init__(self, num_ranks: int, threads_per_rank: int | None, timeout_s: float, replica: int) -> None:
        super().__init__(
            num_ranks,
            worker=WORKER,
            threads_per_rank=threads_per_rank,
            timeout_s=timeout_s,
            first_gpu=replica * num_ranks,
        )
        self._limit_s: float | None = None

    @contextlib.contextmanager
    def within(self, limit_s: float) -> Iterator[None]:
        """Bound each call in the block, which one thread enters at a time; ranks that take longer are ended."""
        self._limit_s = limit_s
        try:
            yield
        finally:
            self._limit_s = None

    def call(self, method: str, *args: Any, limit_s: float | None = None, **keywords: Any) -> Any:
        """Call every rank; see Executor.call."""
        return super().call(method, *args, limit_s=self._limit_s if limit_s is None else limit_s, **keywords)
