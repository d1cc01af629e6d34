"""N ranks in N processes on this machine: gloo between CPU processes, NCCL where each rank has a GPU.

The parent owns every resource: the pipes, and the listening socket of the group's store (bound to loopback and handed
to rank 0, so that no other process can take the port in between). Ranks are started as fresh interpreters rather than
through multiprocessing: each gets its thread count in its environment before torch is imported, the user's main module
is not imported again, and no tracker process stays beside them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import enfold.errors
from enfold.errors import ConfigError, EnfoldError, LostRankError
from enfold.layout import check_size
from enfold.runtime.base import DEFAULT_WORKER, Executor, Notes, NoteTaker, rank_failed
from enfold.runtime.child import Command, Note, RankSettings, Reply
from enfold.runtime.machine import available_cores, describe_end, rank_devices

BOOTSTRAP = (
    "import json, os, sys; sys.path[:] = json.loads(os.environ.pop('ENFOLD_SYS_PATH')); "
    "from enfold.runtime.child import main; main()"
)
START_LIMIT_S = 300.0
"""Importing torch from a cold network disk has been seen to take minutes."""

GRACE_S = 10.0
"""What a rank needs, beyond the timeout of its collectives, to say that one timed out."""

LEAVE_LIMIT_S = 5.0
LOOK_S = 1.0
"""How often processes are looked at, beside their pipes."""


@dataclass
class Rank:
    """One started process and this end of its pipe."""

    number: int
    process: subprocess.Popen[bytes]
    pipe: Connection


class SpawnExecutor(Executor):
    """`num_ranks` processes with one worker each. Calls are serialised; any thread may make them.

    timeout_s: how long a rank waits for the others in a collective. threads_per_rank: default cores / ranks.
    first_gpu: the GPU of rank 0, where there are GPUs; the other ranks take the next ones.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        worker: str = DEFAULT_WORKER,
        threads_per_rank: int | None = None,
        timeout_s: float = 60.0,
        first_gpu: int = 0,
    ) -> None:
        self.num_ranks = check_size("num_ranks", num_ranks)
        self.threads_per_rank = threads_per_rank or max(1, available_cores() // num_ranks)
        self.timeout_s = timeout_s
        self.first_gpu = first_gpu
        self._worker = worker
        self._ranks: list[Rank] = []
        self._lock = threading.RLock()

    @property
    def alive(self) -> bool:
        """Whether all ranks are started and none has ended."""
        ranks = self._ranks
        return bool(ranks) and all(rank.process.poll() is None for rank in ranks)

    @property
    def rank_states(self) -> list[bool]:
        """Whether the process of each rank runs, in rank order."""
        running = {rank.number for rank in self._ranks if rank.process.poll() is None}
        return [number in running for number in range(self.num_ranks)]

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in rank order."""
        return [rank.process.pid for rank in self._ranks]

    def start(self) -> None:
        """Start the processes and wait until every rank has joined the group and made its worker."""
        devices = rank_devices(self.num_ranks, self.first_gpu)
        with self._lock:
            if self._ranks:
                raise ConfigError(f"the {self.num_ranks} ranks are already started; call shutdown() first")
            with self._ending_on_failure():
                self._start_all(devices)

    def _start_all(self, devices: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=max(128, self.num_ranks)) as store:
            for number, device in enumerate(devices):
                self._start_rank(number, device, store)
        self._raise_first(self._collect(patience_s=START_LIMIT_S, limit_s=START_LIMIT_S))

    def call(
        self,
        method: str,
        *args: Any,
        every_rank: bool = False,
        patience_s: float | None = None,
        limit_s: float | None = None,
        on_note: NoteTaker | None = None,
    ) -> Any:
        """Call `method(*args)` on every rank; see Executor.call. An interrupted call ends the ranks.

        An exception in `on_note` stops the notes and is raised here once the ranks have answered.
        """
        from enfold.runtime.wire import pack, unpack

        packed = pack(args)
        with self._lock:
            if not self._ranks:
                raise LostRankError(f"the {self.num_ranks} ranks are not running; start them first")
            with self._ending_on_failure():
                for rank in self._ranks:
                    is_first = rank.number == 0
                    self._send(rank, Command(method, packed, every_rank or is_first, is_first and on_note is not None))
                patience_s = 2 * self.timeout_s + GRACE_S if patience_s is None else patience_s
                notes = Notes(on_note)
                replies = self._collect(patience_s, limit_s, notes)
            self._raise_first(replies)
            notes.raise_failure()
        results = [unpack(reply.result) for reply in replies]
        return results if every_rank else results[0]

    def kill(self) -> None:
        """Kill the ranks, from any thread and without waiting: a call that runs raises LostRankError."""
        for rank in list(self._ranks):
            rank.process.kill()

    def shutdown(self, *, graceful: bool = True) -> None:
        """End the ranks: asked to, then SIGTERM, then SIGKILL; none is left when this returns."""
        with self._lock:
            ranks, self._ranks = self._ranks, []
            try:
                if graceful:
                    for rank in ranks:
                        with contextlib.suppress(OSError):
                            rank.pipe.send(None)
                    _wait_for(ranks, LEAVE_LIMIT_S)
                    for rank in ranks:
                        rank.process.terminate()
                    _wait_for(ranks, LOOK_S)
            finally:
                for rank in ranks:
                    rank.process.kill()
                for rank in ranks:
                    rank.process.wait()
                    rank.pipe.close()

    @contextlib.contextmanager
    def _ending_on_failure(self) -> Iterator[None]:
        """End the ranks if the block is left by any exception: replies on their way would answer the next call."""
        try:
            yield
        except BaseException:
            self.shutdown(graceful=False)
            raise

    def _start_rank(self, number: int, device: str, store: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        store_fd = store.fileno() if number == 0 else None
        settings = RankSettings(
            rank=number,
            world_size=self.num_ranks,
            device=device,
            worker=self._worker,
            num_threads=self.threads_per_rank,
            timeout_s=self.timeout_s,
            pipe_fd=theirs.fileno(),
            store_port=store.getsockname()[1],
            store_fd=store_fd,
            parent_pid=os.getpid(),
            # The kernel takes the end of the thread that started a process for the death of its parent.
            die_with_parent=threading.current_thread() is threading.main_thread(),
        )
        inherited = [theirs.fileno()] if store_fd is None else [theirs.fileno(), store_fd]
        with theirs, _sigint_blocked():
            process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, settings.to_json()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output belongs to the command's own answer
                pass_fds=inherited,
                env=self._environment(),
            )
            self._ranks.append(Rank(number, process, Connection(ours.detach())))

    def _environment(self) -> dict[str, str]:
        threads = str(self.threads_per_rank)
        loopback = "lo" if sys.platform.startswith("linux") else "lo0"
        return {
            "GLOO_SOCKET_IFNAME": loopback,
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "ENFOLD_SYS_PATH": json.dumps(sys.path),
        }

    def _send(self, rank: Rank, command: Command) -> None:
        try:
            rank.pipe.send(command)
        except OSError:
            raise self._lost(rank) from None

    def _collect(self, patience_s: float, limit_s: float | None = None, notes: Notes | None = None) -> list[Reply]:
        """Return one reply per rank; `patience_s` runs from the first reply, `limit_s` from now."""
        replies: dict[int, Reply] = {}
        deadline = time.monotonic() + limit_s if limit_s is not None else float("inf")
        while waiting := [rank for rank in self._ranks if rank.number not in replies]:
            now = time.monotonic()
            if now > deadline:
                raise self._silent(waiting, replies)
            ready = wait([rank.pipe for rank in waiting], timeout=min(LOOK_S, deadline - now))
            for rank in waiting:
                if rank.pipe in ready:
                    message = self._receive(rank)
                    if isinstance(message, Note):
                        (notes or Notes(None)).take(message.value)
                        continue
                    replies[rank.number] = message
                    deadline = min(deadline, time.monotonic() + patience_s)
                elif rank.process.poll() is not None and not rank.pipe.poll():
                    raise self._lost(rank)
        return [replies[rank.number] for rank in self._ranks]

    def _receive(self, rank: Rank) -> Reply | Note:
        try:
            message: Reply | Note = rank.pipe.recv()
        except (EOFError, OSError):
            raise self._lost(rank) from None
        return message

    def _lost(self, rank: Rank) -> LostRankError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(LOOK_S)
        end = describe_end(rank.process.poll())
        return LostRankError(
            f"rank {rank.number} of {self.num_ranks} (process {rank.process.pid}) {end}; the other ranks were ended"
        )

    def _silent(self, waiting: list[Rank], replies: dict[int, Reply]) -> LostRankError:
        missing = ", ".join(str(rank.number) for rank in waiting)
        failed = [f" (rank {number} failed: {reply.text})" for number, reply in replies.items() if reply.error]
        return LostRankError(
            f"rank {missing} of {self.num_ranks} did not answer in time{''.join(failed[:1])}; all ranks were ended "
            f"(a longer limit than {self.timeout_s:g} s: --timeout)"
        )

    def _raise_first(self, replies: list[Reply]) -> None:
        """Raise the error that tells most: a rank's own failure before one that only reports a lost peer."""
        failed = [(number, reply) for number, reply in enumerate(replies) if reply.error]
        if not failed:
            return
        number, reply = min(failed, key=lambda pair: (pair[1].error == LostRankError.__name__, pair[0]))
        kind = getattr(enfold.errors, reply.error or "", None)
        lost = isinstance(kind, type) and issubclass(kind, LostRankError)
        if lost:
            self.shutdown(graceful=False)
        if isinstance(kind, type) and issubclass(kind, EnfoldError):
            raise kind(reply.text)
        raise rank_failed(number, self.num_ranks, f"{reply.error}: {reply.text}", reply.trace)


def _wait_for(ranks: list[Rank], limit_s: float) -> None:
    """Wait until all ranks have ended, at most `limit_s`."""
    deadline = time.monotonic() + limit_s
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT in this thread; a process started meanwhile inherits that until it has chosen to ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
