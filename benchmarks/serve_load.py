"""200 requests to `enfold serve`, 32 at once, a rank killed in the middle: does each end, and when is it ready again?

python benchmarks/serve_load.py [--model-path FOLDER] [--num-gpus 2] [--requests 200] [--at-once 32] [--no-kill]

It starts the server itself, on a free port. Exit code 1: a request was lost (no answer, or one that is no clear error),
the server was not ready again in time, or a process was left. The last line is one JSON document. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_LIMIT_S = 600
REQUEST_LIMIT_S = 300
READY_LIMIT_S = 30
END_LIMIT_S = 10
CLEAR_ERRORS = {429, 503}
PROMPTS = ["a red circle above a blue square", "a small green triangle left of a large yellow circle"]


@dataclass
class Server:
    """The running command."""

    process: subprocess.Popen[str]
    url: str = ""
    said: list[str] = field(default_factory=list)

    def ranks(self) -> list[int]:
        """Return the processes that the server has started."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, parent = stat.read_text().rpartition(")")[2].split()[:2]
                if int(parent) == self.process.pid and state != "Z":
                    found.append(int(stat.parent.name))
        return sorted(found)


@dataclass
class Outcome:
    """One request: status (0: no answer at all), when it ended (seconds since the start), and how long it took."""

    status: int
    ended_s: float
    seconds: float
    batch_size: int = 0
    message: str = ""


@contextlib.contextmanager
def server(args: argparse.Namespace) -> Iterator[Server]:
    command = [sys.executable, "-m", "enfold", "serve", "--port", "0", "--num-gpus", str(args.num_gpus)]
    command += ["--encoder-parallel", "dp", "--batching-max-size", str(args.batching_max_size)]
    command += ["--batching-delay-ms", "20", "--max-queue", str(max(128, args.at_once)), *args.serve_options]
    command += ["--model-path", args.model_path] if args.model_path else []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    running, listening = Server(process), threading.Event()
    assert process.stderr is not None
    stderr = process.stderr

    def listen() -> None:
        for line in stderr:
            running.said.append(line)
            if found := re.search(r"listening on (http://\S+)/ ", line):
                running.url = found.group(1)
                listening.set()
        listening.set()

    threading.Thread(target=listen, daemon=True).start()
    try:
        listening.wait(START_LIMIT_S)
        if not running.url:
            sys.exit("the server did not start:\n" + "".join(running.said))
        wait_ready(running, START_LIMIT_S)
        yield running
    finally:
        process.kill()
        process.wait()


def is_ready(running: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{running.url}/health", timeout=10) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def wait_ready(running: Server, limit_s: float) -> float:
    """Return the seconds until the server is ready, or infinity."""
    began = time.monotonic()
    while not is_ready(running):
        if running.process.poll() is not None:
            sys.exit("the server ended:\n" + "".join(running.said))
        if time.monotonic() - began > limit_s:
            return float("inf")
        time.sleep(0.1)
    return time.monotonic() - began


def ask(running: Server, number: int, began: float) -> Outcome:
    body = {"prompt": PROMPTS[number % len(PROMPTS)], "seed": number}
    request = urllib.request.Request(
        f"{running.url}/v1/images/generations", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    sent = time.monotonic()

    def outcome(status: int, batch_size: int = 0, message: str = "") -> Outcome:
        now = time.monotonic()
        return Outcome(status, now - began, now - sent, batch_size, message)

    try:
        with urllib.request.urlopen(request, timeout=REQUEST_LIMIT_S) as response:
            answer = json.load(response)
            assert answer["data"][0]["b64_json"]
            return outcome(response.status, answer["enfold"]["timeline"]["batch_size"])
    except urllib.error.HTTPError as error:
        with error:
            return outcome(error.code, message=str(json.load(error)["error"]["message"]))
    except (OSError, ValueError, KeyError, AssertionError) as error:
        return outcome(0, message=f"{type(error).__name__}: {error}")


def load(running: Server, args: argparse.Namespace) -> tuple[list[Outcome], float | None]:
    """Send all requests; in the middle kill a rank. Return the outcomes, and seconds from the kill to ready again."""
    began, done = time.monotonic(), threading.Semaphore(0)

    def one(number: int) -> Outcome:
        try:
            return ask(running, number, began)
        finally:
            done.release()

    ready_s = None
    with ThreadPoolExecutor(args.at_once) as threads:
        asked = [threads.submit(one, number) for number in range(args.requests)]
        if args.kill:
            for _ in range(args.requests // 2):
                done.acquire()
            victim = running.ranks()[-1]
            print(f"killing rank process {victim} after {args.requests // 2} answers", flush=True)
            os.kill(victim, signal.SIGKILL)
            killed = time.monotonic()
            while is_ready(running) and time.monotonic() - killed < END_LIMIT_S:
                time.sleep(0.02)
            wait_ready(running, 10 * READY_LIMIT_S)
            ready_s = time.monotonic() - killed
        return [each.result() for each in asked], ready_s


def end(running: Server) -> tuple[float, list[int]]:
    """Send SIGTERM; return how long the end took, and which ranks are left after it."""
    ranks, began = running.ranks(), time.monotonic()
    running.process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.process.wait(3 * END_LIMIT_S)
    seconds = time.monotonic() - began
    time.sleep(1)
    return seconds, [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


def problems(outcomes: list[Outcome], ready_s: float | None, end_s: float, left: list[int]) -> list[str]:
    unclear = [each for each in outcomes if each.status != 200 and each.status not in CLEAR_ERRORS]
    found = [f"no clear answer: {each.status} {each.message}" for each in unclear[:5]]
    if ready_s is not None and ready_s > READY_LIMIT_S:
        found.append(f"ready again after {ready_s:.1f} s, more than {READY_LIMIT_S} s")
    if end_s > END_LIMIT_S:
        found.append(f"ended {end_s:.1f} s after SIGTERM, more than {END_LIMIT_S} s")
    return found + ([f"processes left: {left}"] if left else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path")
    parser.add_argument("--num-gpus", type=int, default=2)
    parser.add_argument("--batching-max-size", type=int, default=4)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--no-kill", dest="kill", action="store_false")
    parser.add_argument("serve_options", nargs="*", metavar="-- OPTION", help="further options of enfold serve")
    args = parser.parse_args()
    with server(args) as running:
        began = time.monotonic()
        outcomes, ready_s = load(running, args)
        seconds = time.monotonic() - began
        end_s, left = end(running)
    good = [each for each in outcomes if each.status == 200]
    times = sorted(each.seconds for each in good)
    found = problems(outcomes, ready_s, end_s, left)
    figures: dict[str, Any] = {
        "requests": len(outcomes),
        "statuses": dict(Counter(str(each.status) for each in outcomes)),
        "seconds": round(seconds, 2),
        "pictures_per_s": round(len(good) / seconds, 2),
        "latency_p50_s": round(statistics.median(times), 3) if times else None,
        "latency_p95_s": round(times[int(0.95 * (len(times) - 1))], 3) if times else None,
        "mean_batch_size": round(statistics.mean(each.batch_size for each in good), 2) if good else None,
        "ready_again_s": None if ready_s is None else round(ready_s, 1),
        "end_after_sigterm_s": round(end_s, 2),
        "problems": found,
    }
    for name, value in figures.items():
        print(f"{name:20} {value}")
    print(json.dumps(figures))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
