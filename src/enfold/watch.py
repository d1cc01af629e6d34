"""How the ranks of a replica keep together through one call, and come back together when one of them fails.

In a call that goes well this costs two collectives of a few bytes: at its start the ranks compare what they were
called with, at its end whether all of them came through. Everything else here happens only after a failure.

A rank whose peers are stuck in a collective can't be told so by a collective. So a rank that fails writes a note to
the process group's store; a rank that waits longer than a moment looks there. From then on:

1. Each rank publishes which collectives it has started in this call ("state").
2. A rank that has stopped starts, with zeros, each collective that a peer has started and it has not ("answer"): the
   peer gets out of its wait, sees the note, and stops too.
3. When every rank has stopped and every axis has seen the same collectives, the group is as good as before. All ranks
   read the same notes, raise the same error, and the next call works.

A rank that never comes (it died, or was not called) ends in LostRankError on the others after `timeout_s`; the group
can't be used after that.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from enfold.errors import EncodeError, LostRankError, MismatchError

SLICE_S = 0.5
"""How long a rank waits before it looks for a note from a failed peer."""

POLL_S = 0.01
DIGEST_BYTES = 16
DESCRIPTION_BYTES = 1024


class Op(NamedTuple):
    """One collective as a peer must start it to match: `num_bytes` is what each rank puts in."""

    kind: str
    num_bytes: int
    device: str


class Line(Protocol):
    """What a watch needs of an axis of the mesh: who is on it, and its collectives."""

    ranks: tuple[int, ...]

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return [size, *x.shape]: the tensors of all ranks of this axis."""

    def answer(self, op: Op) -> dist.Work:
        """Join a collective that a peer waits in with zeros."""


class PeerFailedError(Exception):
    """Raised inside a call to leave it, because a peer has failed; never seen by a caller."""


class Watch:
    """One rank's side of the agreement between the ranks of a replica. `axes` is filled in by the mesh."""

    def __init__(self, rank: int, ranks: tuple[int, ...], control: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.axes: dict[str, Line] = {}
        self.num_calls = 0
        self.lost: str | None = None
        self.noticed = False
        self.started: dict[str, list[Op]] = {}
        self.store: Any = None  # a torch.distributed Store
        if control is not None:
            store = control.get_group_store()
            # The ranks of a replica make their meshes in the same order, so this number is the same on all of them.
            number = store.add(f"enfold/meshes/{rank}", 1)
            self.store = PrefixStore(f"enfold/mesh{number}", store)

    @contextmanager
    def call(self, what: str = "encode") -> Iterator[None]:
        """Run one call of the replica, which starts with `agree`: one outcome on every rank.

        Where every rank fails alike each raises its own error. Where only some fail all raise EncodeError, which names
        a rank and its error; where one does not answer the others raise LostRankError.
        """
        if self.store is None:
            yield
            return
        if self.lost:
            raise LostRankError(f"{self.lost}; start the ranks again")
        self.num_calls += 1
        self.noticed = False
        self.started = {name: [] for name in self.axes}
        try:
            yield
            self._finish()
        except (MismatchError, LostRankError):
            raise
        except Exception as error:
            self._stop(error)
            verdict = self._verdict(what)
            if verdict is None:
                raise
            raise EncodeError(verdict) from (None if isinstance(error, PeerFailedError) else error)

    def wait(self, work: dist.Work | None, axis: str, op: Op) -> None:
        """Wait for a collective that this rank has started on `axis`; raise PeerFailedError if a peer has failed."""
        if work is None:
            return
        self.started.setdefault(axis, []).append(op)  # a submodule may be called by itself, outside of any call
        if op.device != "cpu":
            work.wait()  # orders the stream only; a failed peer shows at the end of the call
            return
        deadline = time.monotonic() + self.timeout_s
        while not self._done(work, axis):
            self._noted()
            self._publish(stopped=False)  # so that a rank which never comes can be told from one that waits
            if time.monotonic() > deadline:
                raise self._timed_out(op)
        if self.noticed:
            raise PeerFailedError

    def _done(self, work: dist.Work, axis: str) -> bool:
        try:
            work.wait(timedelta(seconds=min(SLICE_S, self.timeout_s)))
        except RuntimeError:
            if not work.is_completed():
                return False
            try:
                work.wait()  # it has ended since the time ran out: well, or with the error that ended it
            except RuntimeError as error:
                raise self._broken(f"a rank of {self.axes[axis].ranks} died in a collective ({error})") from error
        return True

    # The start and the end of a call: two small collectives on the replica axis.

    def agree(self, signature: str | Callable[[], str]) -> None:
        """Compare what the ranks were called with; raise MismatchError that shows each where they differ.

        A function is asked for the signature only where there is another rank to compare with.
        """
        if self.store is None:
            return
        signature = signature if isinstance(signature, str) else signature()
        digest = hashlib.blake2b(signature.encode(), digest_size=DIGEST_BYTES).digest()
        seen = self._exchange(digest)
        if len(set(seen)) > 1:
            shown = (signature or "no arguments").encode()[:DESCRIPTION_BYTES]
            texts = self._exchange(shown.ljust(DESCRIPTION_BYTES, b"\0"))
            lines = [
                f"  rank {rank}: {text.rstrip(bytes(1)).decode(errors='replace')}"
                for rank, text in zip(self.ranks, texts, strict=True)
            ]
            raise MismatchError(
                "the ranks of a replica must be called with the same inputs, and were not:\n" + "\n".join(lines)
            )

    def _finish(self) -> None:
        self._exchange(b"\1")

    def _exchange(self, mine: bytes) -> list[bytes]:
        gathered = self.axes["replica"].all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        seen = [bytes(row.tolist()) for row in gathered]
        if any(not any(each) for each in seen):  # zeros: the answer of a rank that has failed
            raise PeerFailedError
        return seen

    # After a failure. Notes and states live in the store under the number of the call.

    def _key(self, name: str) -> str:
        return f"{self.num_calls}/{name}"

    def _set(self, name: str, text: str) -> None:
        assert self.store is not None
        try:
            self.store.set(self._key(name), text)
        except RuntimeError as error:
            raise self._broken(f"the store of the process group is gone ({error})") from error

    def _get(self, name: str) -> str | None:
        assert self.store is not None
        try:
            key = self._key(name)
            return self.store.get(key).decode() if self.store.check([key]) else None
        except RuntimeError as error:
            raise self._broken(f"the store of the process group is gone ({error})") from error

    def _noted(self) -> bool:
        if (reason := self._get("lost")) is not None:
            self.lost = reason
            raise LostRankError(reason)
        self.noticed = self._get("failed") is not None
        return self.noticed

    def _publish(self, *, stopped: bool) -> None:
        self._set(f"state/{self.rank}", json.dumps({"stopped": stopped, "started": self.started}))

    def _states(self) -> dict[int, dict[str, Any]]:
        texts = {rank: self._get(f"state/{rank}") for rank in self.ranks}
        return {rank: json.loads(text) for rank, text in texts.items() if text is not None}

    def _stop(self, error: Exception) -> None:
        """Leave the call: note the error, answer what peers wait in, return once every rank has stopped."""
        self.noticed = False
        if not isinstance(error, PeerFailedError):
            self._set(f"error/{self.rank}", f"{type(error).__name__}: {error}")
        self._set("failed", "1")
        self._publish(stopped=True)
        deadline = time.monotonic() + self.timeout_s
        answers: list[tuple[dist.Work, str]] = []
        while not self._all_stopped(states := self._states()):
            answers += self._answer(states)
            self._noted()
            if time.monotonic() > deadline:
                raise self._timed_out(None) from error
            time.sleep(POLL_S)
        for work, axis in answers:
            while not self._done(work, axis):
                if time.monotonic() > deadline:
                    raise self._timed_out(None) from error

    def _all_stopped(self, states: dict[int, dict[str, Any]]) -> bool:
        if len(states) < len(self.ranks) or not all(state["stopped"] for state in states.values()):
            return False
        return all(
            len({len(states[rank]["started"][name]) for rank in axis.ranks}) == 1 for name, axis in self.axes.items()
        )

    def _answer(self, states: dict[int, dict[str, Any]]) -> list[tuple[dist.Work, str]]:
        """Start what a peer has started and this rank has not, on every axis, without waiting for any of it.

        Peers may wait on different axes, and one may be released only by what another waits for.
        """
        works: list[tuple[dist.Work, str]] = []
        for name, axis in self.axes.items():
            peers = [states[rank]["started"][name] for rank in axis.ranks if rank in states]
            for op in (Op(*each) for each in max(peers, key=len)[len(self.started[name]) :]):
                works.append((axis.answer(op), name))
                self.started[name].append(op)
        if works:
            self._publish(stopped=True)
        return works

    def _verdict(self, what: str) -> str | None:
        """Return what went wrong, in the same words on every rank; None where every rank failed in the same way."""
        texts = {rank: self._get(f"error/{rank}") for rank in self.ranks}
        errors = {rank: text for rank, text in texts.items() if text is not None}
        if len(errors) == len(self.ranks) and len(set(errors.values())) == 1:
            return None
        if not errors:
            return f"a rank left {what} without saying why"
        first = min(errors)
        others = f" (and {len(errors) - 1} more ranks)" if len(errors) > 1 else ""
        return f"rank {first} failed in {what}{others}: {errors[first]}"

    def _timed_out(self, op: Op | None) -> LostRankError:
        self._publish(stopped=False)
        time.sleep(SLICE_S)  # the others time out about now, and publish too
        absent = [rank for rank in self.ranks if rank not in self._states()]
        where = f"in {op.kind} of {op.num_bytes} bytes" if op else "while leaving a failed call"
        return self._broken(
            f"rank {self.rank} waited {self.timeout_s:g} s {where} for ranks {absent or 'that are busy'}; every rank "
            f"of {self.ranks} must make the same calls (a longer limit: timeout=)"
        )

    def _broken(self, reason: str) -> LostRankError:
        self.lost = reason
        if self.store is not None:
            with suppress(RuntimeError):  # the store may have died with its rank
                self.store.set(self._key("lost"), reason)
        return LostRankError(reason)
