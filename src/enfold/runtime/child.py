"""The process of one rank: joins the process group, makes its worker, and does what comes through the pipe.

A rank must never outlive the process that started it. It ends when the pipe closes, which the kernel does for a parent
that was killed; a thread of its own watches the pipe, so that this works in the middle of a collective. On Linux the
kernel is asked for the same a second time (a forked copy of the parent could hold the pipe open).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

PR_SET_PDEATHSIG = 1
PARENT_IS_GONE = 3


@dataclass(frozen=True)
class RankSettings:
    """All that a rank's process is told at its start; it travels as JSON in the arguments."""

    rank: int
    world_size: int
    device: str
    worker: str
    num_threads: int
    timeout_s: float
    pipe_fd: int
    store_port: int
    store_fd: int | None
    parent_pid: int
    die_with_parent: bool

    def to_json(self) -> str:
        """Return the settings as JSON."""
        return json.dumps(asdict(self))


class Command(NamedTuple):
    """One call: `reply` says whether this rank's result is wanted, `notes` whether what it says on the way is."""

    method: str
    args: Any
    reply: bool
    notes: bool = False


class Note(NamedTuple):
    """What a worker says while it works; any number of them come before the reply."""

    value: Any


class Reply(NamedTuple):
    """One rank's answer: its result, or the class, text and traceback of what it raised."""

    result: Any = None
    error: str | None = None
    text: str = ""
    trace: str = ""


def main() -> None:
    """Run one rank; `sys.argv[1]` holds its settings."""
    settings = RankSettings(**json.loads(sys.argv[1]))
    _let_parent_handle_ctrl_c()
    if settings.die_with_parent:
        _die_with(settings.parent_pid)
    pipe = Connection(settings.pipe_fd)
    commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, commands), daemon=True).start()
    try:
        worker = _make_worker(settings)
    except Exception as error:
        pipe.send(_failure(error))
        return
    pipe.send(Reply())
    while (command := commands.get()) is not None:
        pipe.send(_run(worker, command, pipe))
    _leave_group()


def _listen(pipe: Connection, commands: queue.SimpleQueue[Command | None]) -> None:
    """Queue commands until None comes. A pipe that ends without it means that the parent is gone."""
    while True:
        try:
            command = pipe.recv()
        except (EOFError, OSError):
            os._exit(PARENT_IS_GONE)
        commands.put(command)
        if command is None:
            return


def _let_parent_handle_ctrl_c() -> None:
    """Ignore SIGINT: a terminal sends it to every process in front, and the parent ends the ranks.

    The parent starts this process with SIGINT blocked, so that there is no moment in which it would act.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _die_with(parent_pid: int) -> None:
    """Ask Linux for SIGKILL when the parent dies."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(PARENT_IS_GONE)


def _make_worker(settings: RankSettings) -> Any:
    import torch

    from enfold.runtime.base import find_worker

    torch.set_num_threads(settings.num_threads)
    device = torch.device(settings.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = _join_group(settings, device)
    return find_worker(settings.worker)(rank=settings.rank, world_size=settings.world_size, group=group, device=device)


def _join_group(settings: RankSettings, device: torch.device) -> dist.ProcessGroup | None:
    """Make the process group. Its store listens on the socket that the parent has bound, so no port can be lost."""
    import torch.distributed as dist

    timeout = timedelta(seconds=settings.timeout_s)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        settings.store_port,
        settings.world_size,
        is_master=settings.store_fd is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=settings.store_fd,
    )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    keywords: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(
        backend, store=store, rank=settings.rank, world_size=settings.world_size, timeout=timeout, **keywords
    )
    return dist.group.WORLD


def _run(worker: Any, command: Command, pipe: Connection) -> Reply:
    from enfold.runtime.base import ignore_note
    from enfold.runtime.wire import pack, unpack

    def send(note: Any) -> None:
        pipe.send(Note(note))

    hears = command.notes and hasattr(worker, "note")
    try:
        if hears:
            worker.note = send
        result = getattr(worker, command.method)(*unpack(command.args))
        return Reply(pack(result)) if command.reply else Reply()
    except Exception as error:
        return _failure(error)
    finally:
        if hears:
            worker.note = ignore_note


def _failure(error: Exception) -> Reply:
    return Reply(error=type(error).__name__, text=str(error), trace=traceback.format_exc())


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
