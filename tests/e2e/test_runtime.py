"""Ranks in processes: calls and errors, and that nothing hangs or is left behind when a process dies."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from e2e_harness import Commands, marked, wait_until

from enfold.errors import ConfigError, EncodeError, InputError, LostRankError
from enfold.runtime import spawn
from enfold.runtime.base import Executor
from enfold.runtime.local import LocalExecutor
from enfold.runtime.machine import describe_end, rank_devices
from enfold.runtime.spawn import SpawnExecutor

ECHO = "e2e_worker:EchoWorker"


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ranks(**keywords: Any) -> SpawnExecutor:
    return SpawnExecutor(2, **{"worker": ECHO, "threads_per_rank": 1, "timeout_s": 20, **keywords})


@pytest.fixture(scope="module")
def pair() -> Iterator[SpawnExecutor]:
    with ranks() as executor:
        yield executor


@pytest.fixture(params=["local", "spawn"])
def either(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "spawn":
        yield request.getfixturevalue("pair")
    else:
        with LocalExecutor(ECHO) as executor:
            yield executor


def test_every_rank_is_called_and_rank_0_answers(pair: SpawnExecutor) -> None:
    seen = pair.call("about", every_rank=True)
    assert [about["rank"] for about in seen] == [0, 1]
    assert {(about["world_size"], about["threads"], about["omp"]) for about in seen} == {(2, 1, "1")}
    assert [about["pid"] for about in seen] == pair.pids
    assert pair.call("about")["rank"] == 0
    assert pair.call("total") == 3.0


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
def test_tensors_arrive_bit_by_bit(pair: SpawnExecutor, dtype: torch.dtype) -> None:
    values = torch.randn(5, 3).mul(2).to(dtype)
    sent = {"t": values.t(), "list": [torch.zeros(0, 4, dtype=dtype), torch.ones((), dtype=dtype)], "tuple": (1, "a")}
    got = pair.call("echo", sent)
    assert got["tuple"] == (1, "a")
    for mine, back in [(sent["t"], got["t"]), *zip(sent["list"], got["list"], strict=True)]:  # type: ignore[arg-type]
        assert back.dtype == mine.dtype and back.shape == mine.shape and torch.equal(back, mine)
    got["t"].zero_()


def test_an_error_comes_back_as_its_class_and_the_next_call_works(either: Executor) -> None:
    last = either.num_ranks - 1
    with pytest.raises(InputError, match=f"^no good on {last}$"):
        either.call("fail", last, "input")
    with pytest.raises(EncodeError, match=f"ValueError: no good on {last}") as caught:
        either.call("fail", last, "value")
    assert "Traceback" in caught.value.__notes__[0]
    assert either.call("echo", 3) == 3
    assert either.alive


def test_a_lost_peer_reported_by_a_rank_ends_the_executor() -> None:
    with ranks() as executor:
        with pytest.raises(LostRankError, match="no good on 1"):
            executor.call("fail", 1, "lost")
        assert not executor.alive
        with pytest.raises(LostRankError, match="not running"):
            executor.call("echo", 1)


def test_a_killed_rank_is_named_at_once_and_restart_works() -> None:
    with ranks() as executor:
        pids = executor.pids
        threading.Timer(0.5, os.kill, (pids[1], signal.SIGKILL)).start()
        started = time.monotonic()
        with pytest.raises(LostRankError, match=r"rank 1 of 2 .* signal 9, SIGKILL"):
            executor.call("sleep", 1, 60.0)
        assert time.monotonic() - started < 5
        assert not executor.alive and not any(map(exists, pids))
        executor.restart()
        assert executor.call("total") == 3.0
        os.kill(executor.pids[0], signal.SIGKILL)
        wait_until(lambda: not executor.alive, 5, "the death is noticed between calls")
        with pytest.raises(LostRankError, match="rank 0 of 2"):
            executor.call("echo", 1)


def test_a_rank_that_hangs_runs_into_the_limits() -> None:
    with ranks() as executor:
        with pytest.raises(LostRankError, match="rank 1 of 2 did not answer in time"):
            executor.call("sleep", 1, 60.0, patience_s=0.5)
        executor.restart()
        with pytest.raises(LostRankError, match="rank 0 of 2 did not answer in time"):
            executor.call("sleep", 0, 60.0, patience_s=60, limit_s=0.5)


def test_shutdown_is_bounded_and_reaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "LEAVE_LIMIT_S", 0.5)
    executor = ranks()
    executor.start()
    executor.call("linger")
    pids = executor.pids
    started = time.monotonic()
    executor.shutdown()
    executor.shutdown()
    assert time.monotonic() - started < 4
    assert not any(map(exists, pids))


def test_starting_twice_is_refused() -> None:
    with ranks() as executor:
        pids = executor.pids
        with pytest.raises(ConfigError, match="already started"):
            executor.start()
        assert pids == executor.pids and executor.alive


@pytest.mark.parametrize(
    ("worker", "error", "message"),
    [
        ("e2e_worker:BrokenWorker", EncodeError, "rank 1 of 2 failed: RuntimeError: rank 1 has no place to stand"),
        ("e2e_worker:DyingWorker", LostRankError, "rank 1 of 2 .* ended with exit code 7"),
    ],
)
def test_a_rank_that_fails_at_its_start(worker: str, error: type[Exception], message: str) -> None:
    executor = ranks(worker=worker)
    with pytest.raises(error, match=message):
        executor.start()
    assert not executor.alive and executor.pids == []


def test_ranks_outlive_the_thread_that_started_them() -> None:
    executor = ranks()
    thread = threading.Thread(target=executor.start)
    thread.start()
    thread.join()
    time.sleep(0.5)
    try:
        assert executor.call("echo", "still here") == "still here"
    finally:
        executor.shutdown()


PARENT = f"""
import sys
from enfold.runtime.spawn import SpawnExecutor
with SpawnExecutor(2, worker={ECHO!r}, threads_per_rank=1) as executor:
    print("started", flush=True)
    executor.call({{method}})
"""


def start_parent(commands: Commands, method: str) -> subprocess.Popen[str]:
    # No __main__ guard in the script: ranks must not import the caller's main module.
    parent = commands.start_python("-c", PARENT.format(method=method), start_new_session=True)
    assert parent.stdout is not None and parent.stdout.readline() == "started\n"
    assert len(marked(commands.marker)) == 3
    return parent


@pytest.mark.parametrize("method", ["'sleep', 0, 300.0", "'total'); sys.stdin.read(); __import__('time').sleep(300"])
def test_ranks_end_when_their_parent_is_killed(commands: Commands, method: str) -> None:
    with start_parent(commands, method) as parent:
        parent.kill()
        commands.check_nothing_left(5)


def test_ctrl_c_of_the_whole_process_group(commands: Commands) -> None:
    with start_parent(commands, "'sleep', 0, 300.0") as parent:
        time.sleep(0.3)
        os.killpg(parent.pid, signal.SIGINT)
        _, said = parent.communicate(timeout=15)
        assert said.count("Traceback") == 1 and "KeyboardInterrupt" in said  # the parent's, not one of each rank
        commands.check_nothing_left()


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (None, "closed its pipe"),
        (3, "ended with exit code 3"),
        (-9, "was killed by signal 9, SIGKILL (out of memory?)"),
        (-11, "was killed by signal 11, SIGSEGV"),
        (-99, "was killed by signal 99, unknown"),
    ],
)
def test_the_end_of_a_process_in_words(returncode: int | None, words: str) -> None:
    assert describe_end(returncode) == words


def test_more_ranks_than_gpus_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    count: Callable[[], int] = lambda: 2  # noqa: E731
    monkeypatch.setattr(torch.cuda, "device_count", count)
    assert rank_devices(2) == ["cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match="num_gpus=3 is more than the 2 GPUs"):
        rank_devices(3)
