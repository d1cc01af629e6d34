"""What waits in the queue, and what comes back from a replica: the same shape for pictures, features and vectors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from enfold.diffusion.requests import GenerateRequest, Progress, RankTimes

Kind = Literal["generate", "encode", "embed"]
"""generate: pictures of a pipeline.  encode: all that encoders give for texts.  embed: one vector per text."""


@dataclass(frozen=True)
class EncodeRequest:
    """Texts whose whole conditioning set is wanted; layers count as Transformers' hidden_states do."""

    texts: tuple[str, ...]
    max_sequence_length: int | None = None
    layers: tuple[int, ...] = ()

    def signature(self) -> Hashable:
        """Return what requests must agree in to be encoded in one call."""
        return (self.max_sequence_length, self.layers)


@dataclass(frozen=True)
class EmbedRequest:
    """Texts as token ids, and how each text's hidden states become one vector."""

    ids: tuple[tuple[int, ...], ...]
    pooling: Literal["mean", "cls", "last"]

    def signature(self) -> Hashable:
        """Return what requests must agree in to be encoded in one call."""
        return self.pooling


@dataclass(frozen=True)
class Job:
    """One request to a replica. on_progress is called with Progress from the replica's thread; on_start once before."""

    kind: Kind
    payload: GenerateRequest | EncodeRequest | EmbedRequest
    on_start: Callable[[], None] = lambda: None
    on_progress: Callable[[Progress], None] = lambda note: None

    def signature(self) -> Hashable:
        """Return what jobs must agree in to share a batch."""
        return (self.kind, self.payload.signature())


@dataclass(frozen=True)
class Done:
    """The result of a job, and how it came about; times in seconds. `times`: what each rank did, where it is known."""

    result: Any
    replica: int
    batch_size: int
    waited_s: float
    ran_s: float
    times: list[RankTimes] = field(default_factory=list)

    def timeline(self) -> dict[str, Any]:
        """Return the times as JSON; the spans of the ranks count from the start of the batch."""
        ranks = [
            {
                "rank": each.rank,
                "spans": [
                    {"stage": stage, "begin_s": round(begin, 6), "end_s": round(end, 6)}
                    for stage, begin, end in each.spans
                ],
            }
            for each in self.times
        ]
        return {
            "queue_s": round(self.waited_s, 6),
            "run_s": round(self.ran_s, 6),
            "replica": self.replica,
            "batch_size": self.batch_size,
            "ranks": ranks,
        }
