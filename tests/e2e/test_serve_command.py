"""`enfold serve` as users start it: real ranks, a real port, signals, and nothing left behind."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest
from e2e_harness import Commands, marked, wait_until
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))

LOAD_LIMIT_S = 150
DRAW = "/v1/images/generations"


@pytest.fixture(scope="session")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import whole_pipelines

    return whole_pipelines.save("Flux", tmp_path_factory.mktemp("served") / "tiny-flux")


@dataclass
class Served:
    """A running `enfold serve` and what it has said."""

    process: subprocess.Popen[str]
    url: str = ""
    said: list[str] = field(default_factory=list)
    lines: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)

    def listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            self.lines.put(line)

    def wait_for(self, pattern: str, limit_s: float = LOAD_LIMIT_S) -> re.Match[str]:
        ends = time.monotonic() + limit_s
        while time.monotonic() < ends and (self.process.poll() is None or not self.lines.empty()):
            try:
                line = self.lines.get(timeout=0.2)
            except queue.Empty:
                continue
            if found := re.search(pattern, line):
                return found
        pytest.fail(f"no {pattern!r} in what the server said:\n{''.join(self.said)}")

    def health(self) -> dict[str, Any]:
        told: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=30).json()
        return told

    def end(self, limit_s: float = 10) -> float:
        """Send SIGTERM; return how long the server took to end."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(limit_s) == 0, "".join(self.said)
        return time.monotonic() - began


@contextlib.contextmanager
def started(commands: Commands, *options: object) -> Iterator[Served]:
    """Start a server on a free port; the block begins as soon as it listens."""
    options = ("--port", 0, "--timeout", 30, "--threads-per-rank", 1, *options)
    served = Served(commands.start("serve", *options, stdout=subprocess.DEVNULL))
    listener = threading.Thread(target=served.listen, daemon=True)
    listener.start()
    try:
        served.url = served.wait_for(r"listening on (http://\S+)/ ").group(1)
        yield served
    finally:
        served.process.kill()
        served.process.wait()
        listener.join(10)
        assert served.process.stderr is not None
        served.process.stderr.close()


def pixels(picture: str | None) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture or ""))).convert("RGB"), dtype=int)


def draw(served: Served, **body: Any) -> httpx.Response:
    return httpx.post(served.url + DRAW, json=body, timeout=120)


def ranks_of(commands: Commands, served: Served) -> list[int]:
    return [pid for pid in marked(commands.marker) if pid != served.process.pid]


@pytest.fixture(scope="module")
def kept_commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    commands = Commands(tmp_path_factory.mktemp("serve"))
    yield commands
    for pid in marked(commands.marker):
        os.kill(pid, 9)


@pytest.fixture(scope="module")
def served(kept_commands: Commands, flux: Path) -> Iterator[Served]:
    options = ["--encoder-parallel", "dp", "--batching-max-size", 2, "--batching-delay-ms", 50]
    with started(kept_commands, "--model-path", flux, "--num-gpus", 2, *options) as served:
        assert served.health()["status"] == "loading"
        served.wait_for("ready: tiny-flux on 1 replica")
        yield served


def test_plans_are_said_at_the_start(served: Served) -> None:
    said = "".join(served.said)
    assert "text_encoder: CLIP text: dp" in said or "text_encoder: CLIP" in said, said
    assert "text_encoder_2: T5: dp" in said and "transformer:" in said
    assert "dp stays idle" not in said


def test_openai_client_draws(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        options: dict[str, Any] = {"prompt": "a red fox", "n": 2, "extra_body": {"seed": 5}}
        drawn = client.images.generate(response_format="b64_json", **options)
        linked = client.images.generate(response_format="url", **options)
    assert drawn.data is not None and linked.data is not None
    first, second = (pixels(each.b64_json) for each in drawn.data)
    assert first.shape == (32, 32, 3) and (first != second).any()
    fetched = httpx.get(linked.data[0].url or "", timeout=30).content
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(fetched)).convert("RGB"), dtype=int), first)
    about = linked.model_dump()["enfold"]
    assert about["texts"]["from_cache"] == about["texts"]["different"] == 1  # it was encoded for the first call
    assert [rank["rank"] for rank in about["timeline"]["ranks"]] == [0, 1]


def test_a_picture_hangs_on_its_seed_and_not_on_its_batch(served: Served) -> None:
    bodies = [{"prompt": "one green circle", "seed": 1}, {"prompt": "two blue squares", "seed": 2}]
    alone = [draw(served, **body).json() for body in bodies]
    with ThreadPoolExecutor(2) as threads:
        together = [each.json() for each in threads.map(lambda body: draw(served, **body), bodies)]
    assert {each["enfold"]["timeline"]["batch_size"] for each in together} == {2}
    for one, other in zip(alone, together, strict=True):
        difference = abs(pixels(one["data"][0]["b64_json"]) - pixels(other["data"][0]["b64_json"]))
        assert difference.max() <= 2
    assert abs(pixels(alone[0]["data"][0]["b64_json"]) - pixels(alone[1]["data"][0]["b64_json"])).max() > 2


def test_what_encode_gives_draws_the_same_picture(served: Served) -> None:
    content = httpx.post(f"{served.url}/encode", json={"input": "a red fox", "layers": [1]}, timeout=120).content
    embeds = base64.b64encode(content).decode()
    by_text = draw(served, prompt="a red fox", seed=3).json()["data"][0]["b64_json"]
    by_embeds = draw(served, prompt_embeds=embeds, seed=3).json()["data"][0]["b64_json"]
    other = draw(served, prompt="a whale", seed=3).json()["data"][0]["b64_json"]
    assert abs(pixels(by_text) - pixels(by_embeds)).max() <= 1
    assert abs(pixels(by_text) - pixels(other)).max() > 1


def test_what_the_pipeline_can_not_do_is_a_400(served: Served) -> None:
    for body in ({"size": "33x33"}, {"num_inference_steps": 10**6}, {"max_sequence_length": 10**5}):
        answer = draw(served, prompt="a red fox", **body)
        assert answer.status_code == 400, answer.text


def test_a_killed_rank_costs_what_ran_and_no_more(served: Served, kept_commands: Commands) -> None:
    victims = ranks_of(kept_commands, served)
    assert len(victims) == 2
    with ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(draw, served, prompt=f"fox {i}", num_inference_steps=40) for i in range(6)]
        wait_until(lambda: served.health()["replicas"][0]["running"], 30, "something runs")
        os.kill(victims[1], signal.SIGKILL)
        wait_until(lambda: not served.health()["ready"], 10, "health tells of it")
        answers = [each.result() for each in asked]
    statuses = sorted(answer.status_code for answer in answers)
    assert set(statuses) == {200, 503} and statuses.count(503) <= 2, [answer.text[:200] for answer in answers]
    lost = next(answer for answer in answers if answer.status_code == 503)
    assert lost.json()["error"]["code"] == "ranks_lost" and "retry-after" in lost.headers
    assert served.health()["replicas"][0]["restarts"] == 1
    assert not set(victims) & set(ranks_of(kept_commands, served))


def test_sigterm_finishes_what_runs_and_leaves_nothing(served: Served, kept_commands: Commands) -> None:
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(draw, served, prompt="one last fox", num_inference_steps=10)
        wait_until(lambda: served.health()["replicas"][0]["running"], 30, "something runs")
        seconds = served.end()
        assert running.result().status_code == 200
    assert seconds < 10
    kept_commands.check_nothing_left()


# Starts that go wrong, and an early end.


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded(commands: Commands, bert: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = commands.run("serve", "--model-path", bert, "--port", port)
    assert done.returncode == 2
    assert f"can't listen on 127.0.0.1 port {port}" in done.stderr and "--port" in done.stderr
    assert "loading" not in done.stderr
    commands.check_nothing_left()


def test_a_model_that_can_not_be_loaded_ends_the_server(commands: Commands, bert: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in bert.iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    done = commands.run("serve", "--model-path", broken, "--port", 0)
    assert done.returncode == 2 and "enfold: error:" in done.stderr, done.stderr
    commands.check_nothing_left()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model-path", "{bert}", "--ulysses-degree", "2"], "--ulysses-degree: for diffusion pipelines only"),
        (["--model-path", "{bert}", "--num-gpus", "4", "--dp-size", "3"], "does not divide"),
        (["--model-path", "/nowhere/at/all"], "no such folder"),
        (["--model-path", "{bert}", "--port", "99999"], "no port"),
        (["--model-path", "{bert}", "--batching-delay-ms", "-1"], "above 0"),
    ],
)
def test_options_that_can_not_be(commands: Commands, bert: Path, options: list[str], words: str) -> None:
    done = commands.run("serve", *[option.format(bert=bert) for option in options])
    assert done.returncode == 2 and words in done.stderr, done.stderr


def test_an_encoder_is_detected_warned_about_and_ended_while_it_loads(commands: Commands, bert: Path) -> None:
    with started(commands, "--model-path", bert, "--num-gpus", 2) as served:
        assert "dp stays idle" in "".join(served.said) and "--batching-max-size" in "".join(served.said)
        wait_until(lambda: len(ranks_of(commands, served)) == 2, 120, "ranks are being started")
        assert served.health()["status"] == "loading"
        assert served.end() < 10
    commands.check_nothing_left()
