"""PipelineEngine: pictures from ranks in processes, progress on the way, and replicas that end and come back."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_harness import wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import pipelines
import whole_pipelines

from enfold.diffusion.engine import PipelineEngine
from enfold.diffusion.layout import PipelineLayout
from enfold.diffusion.requests import GenerateRequest, PipelineSpec, Progress
from enfold.errors import CheckpointError, ConfigError, EncodeError, InputError, LostRankError
from enfold.runtime.base import Executor
from enfold.runtime.local import LocalExecutor
from enfold.runtime.spawn import SpawnExecutor

ONE = GenerateRequest(pipelines.PROMPT, seed=3)


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(whole_pipelines.save("Flux", tmp_path_factory.mktemp("flux")))


def spec(folder: str, layout: PipelineLayout, **fields: Any) -> PipelineSpec:
    return PipelineSpec(folder, layout, **{"mode": "dp", "timeout_s": 20, **fields})


@pytest.fixture(scope="module")
def alone(flux: str) -> torch.Tensor:
    """What one rank in this process draws for ONE."""
    with PipelineEngine(spec(flux, PipelineLayout()), threads_per_rank=1, in_process=True) as engine:
        notes: list[Progress] = []
        pictures = engine.generate([ONE], on_progress=notes.append)[0].pictures
        assert notes[0] == Progress("encode", 0, 1) and notes[-1] == Progress("decode", 1, 1)
        assert engine.rank_states() == [[True]]
    assert engine.rank_states() == [[False]]
    return pictures


@pytest.fixture(scope="module")
def pair(flux: str) -> Iterator[PipelineEngine]:
    """One replica of two ranks that each run the whole DiT."""
    with PipelineEngine(spec(flux, PipelineLayout(copies=2)), threads_per_rank=1) as engine:
        yield engine


def pids(engine: PipelineEngine, replica: int = 0) -> list[int]:
    executor = engine._replicas[replica].executor
    assert isinstance(executor, SpawnExecutor)
    return executor.pids


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_two_ranks_draw_the_picture_of_one(pair: PipelineEngine, alone: torch.Tensor) -> None:
    notes: list[Progress] = []
    (result,) = pair.generate([ONE], on_progress=notes.append)
    assert torch.equal(result.pictures, alone)
    assert result.pictures.shape == (1, 1, 32, 32, 3) and result.pictures.dtype == torch.uint8
    assert (result.seeds, result.batch_size, result.num_texts, result.cached_texts) == ([3], 1, 1, 0)
    assert [note.stage for note in notes] == ["encode"] * 2 + ["denoise"] * 3 + ["decode"] * 2
    assert [note.step for note in notes if note.stage == "denoise"] == [0, 1, 2]
    assert [times.rank for times in result.times] == [0, 1]
    for times in result.times:
        assert [span[0] for span in times.spans] == ["encode", "denoise", "decode"]
        edges = [edge for _, *span in times.spans for edge in span]
        assert edges == sorted(edges) and edges[0] >= 0
    hits = pair.cache_counters()["hits"]
    assert torch.equal(pair.generate([ONE])[0].pictures, alone)
    assert pair.cache_counters()["hits"] == hits + 1


def test_what_the_ranks_say_of_the_pipeline(pair: PipelineEngine) -> None:
    report = pair.report
    assert (report.pipeline_class, report.is_video, report.dtype, report.multiple) == (
        "FluxPipeline",
        False,
        "float32",
        2,
    )
    assert report.defaults["height"] == 32 and report.defaults["num_inference_steps"] == 2
    assert {name: plan["resolved"] for name, plan in report.plans.items()} == {
        "text_encoder": "dp",
        "text_encoder_2": "dp",
    }
    assert "runs whole on every rank of 2" in report.splits
    assert report.num_layers == {"text_encoder": 3, "text_encoder_2": 2}
    assert (pair.num_replicas, pair.rank_states()) == (1, [[True, True]])


def test_a_batch_of_requests_and_embeds(pair: PipelineEngine) -> None:
    scale = {"true_cfg_scale": 3.0, "negative_prompt": "blurry"}
    requests = [
        GenerateRequest(text, seed=i, num_images=i + 1, **scale)  # type: ignore[arg-type]
        for i, text in enumerate(pipelines.PROMPTS[:2])
    ]
    results = pair.generate(requests)
    assert [len(result.pictures) for result in results] == [1, 2]
    assert [result.seeds for result in results] == [[0], [1, 2]]
    assert all(result.batch_size == 2 for result in results)
    rows = pair.encode([ONE.prompt], layers=[0])
    assert {"prompt_embeds", "text_encoder.hidden_states.0"} <= set(rows[0])
    by_rows = pair.generate([replace(ONE, prompt="a label", embeds=rows[0])])
    assert torch.equal(by_rows[0].pictures, pair.generate([ONE])[0].pictures)
    assert pair.encode([]) == []


def test_what_can_not_be_drawn_never_reaches_the_ranks(pair: PipelineEngine) -> None:
    before = pair.cache_counters()
    for request, message in (
        (replace(ONE, height=31), "height=31 is no multiple of 2"),
        (replace(ONE, num_frames=3), "takes no num_frames"),
        (replace(ONE, embeds={"prompt_embeds": torch.ones(1, 4, 1088)}), "lack pooled_prompt_embeds"),
    ):
        with pytest.raises(InputError, match=message):
            pair.generate([request])
    with pytest.raises(InputError, match="2 requests don't agree"):
        pair.generate([ONE, replace(ONE, num_inference_steps=3)])
    with pytest.raises(InputError, match="0 requests"):
        pair.generate([])
    with pytest.raises(InputError, match="hidden states \\[9\\]"):
        pair.encode(["a"], layers=[9])
    assert pair.cache_counters() == before
    assert pair.rank_states() == [[True, True]]


def test_a_listener_that_raises_does_no_harm(pair: PipelineEngine, alone: torch.Tensor) -> None:
    heard: list[Progress] = []

    def listen(note: Progress) -> None:
        heard.append(note)
        raise RuntimeError("I can't hear")

    with pytest.raises(RuntimeError, match="I can't hear"):
        pair.generate([ONE], on_progress=listen)
    assert len(heard) == 1
    assert torch.equal(pair.generate([ONE])[0].pictures, alone)


def test_a_killed_rank_is_an_error_and_restart_works(flux: str, alone: torch.Tensor) -> None:
    """Two replicas: the end of a rank of one is seen, leaves the other, and is repaired."""
    with PipelineEngine(spec(flux, PipelineLayout(dp=2)), threads_per_rank=1) as engine:
        assert engine.num_replicas == 2
        for replica in (0, 1):
            assert torch.equal(engine.generate([ONE], replica=replica)[0].pictures, alone)
        long = replace(ONE, num_inference_steps=100_000)
        victim = pids(engine, 1)[0]
        threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
        with pytest.raises(LostRankError, match="signal 9, SIGKILL"):
            engine.generate([long], replica=1)
        assert engine.rank_states() == [[True], [False]]
        assert torch.equal(engine.generate([ONE], replica=0)[0].pictures, alone)
        with pytest.raises(LostRankError, match="not running"):
            engine.generate([ONE], replica=1)
        engine.restart(1)
        assert engine.rank_states() == [[True], [True]] and pids(engine, 1) != [victim]
        assert torch.equal(engine.generate([ONE], replica=1)[0].pictures, alone)
        os.kill(pids(engine, 0)[0], signal.SIGKILL)  # between calls
        wait_until(lambda: engine.rank_states() == [[False], [True]], 5, "the death is seen")
        with pytest.raises(LostRankError, match="did not answer in time"):
            engine.generate([long], replica=1, limit_s=0.5)
        everyone = pids(engine, 0)
    assert not any(map(exists, everyone))


def test_close_does_not_wait_for_a_call(flux: str) -> None:
    engine = PipelineEngine(spec(flux, PipelineLayout()), threads_per_rank=1)
    engine.start()
    everyone = pids(engine)
    started = threading.Event()
    errors: list[Exception] = []

    def work() -> None:
        try:
            engine.generate([replace(ONE, num_inference_steps=100_000)], on_progress=lambda note: started.set())
        except LostRankError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(30)
    begin = time.monotonic()
    engine.close(graceful=False)
    thread.join(10)
    assert time.monotonic() - begin < 5
    assert len(errors) == 1
    assert not any(map(exists, everyone))


def test_a_start_that_fails_leaves_nothing(flux: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no model_index\.json"):
        PipelineEngine(spec(str(tmp_path), PipelineLayout())).start()
    with pytest.raises(ConfigError, match="in_process runs one rank, the layout has 2"):
        PipelineEngine(spec(flux, PipelineLayout(dp=2)), in_process=True)
    broken = tmp_path / "broken"
    broken.mkdir()
    for part in Path(flux).iterdir():
        if part.name != "text_encoder_2":
            (broken / part.name).symlink_to(part)
    (broken / "text_encoder_2").mkdir()
    engine = PipelineEngine(spec(str(broken), PipelineLayout()), threads_per_rank=1)
    with pytest.raises(CheckpointError, match=r"text_encoder_2: .* has no config\.json"):
        engine.start()
    assert engine.rank_states() == [[False]]
    with pytest.raises(EncodeError, match="not loaded yet"):
        engine.check(ONE)


# The channel for notes, by itself.


@pytest.fixture(params=["local", "spawn"])
def noting(request: pytest.FixtureRequest) -> Iterator[Executor]:
    worker = "note_worker:NotingWorker"
    executor = (
        LocalExecutor(worker) if request.param == "local" else SpawnExecutor(2, worker=worker, threads_per_rank=1)
    )
    with executor:
        yield executor


def test_notes_come_from_rank_0_in_order_and_are_no_replies(noting: Executor) -> None:
    notes: list[Any] = []
    assert noting.call("count", 500, on_note=notes.append) == "counted to 500"
    assert notes == [(0, i) for i in range(500)]
    assert noting.call("count", 3) == "counted to 3"  # nobody listens: nothing is sent
    assert len(notes) == 500
    everyone = noting.call("count", 2, every_rank=True, on_note=notes.append)
    assert everyone == ["counted to 2"] * noting.num_ranks
    assert notes[500:] == [(0, 0), (0, 1)]
    with pytest.raises(EncodeError, match="lost count"):
        noting.call("count_and_fail", 2, on_note=notes.append)
    assert notes[502:] == [(0, 0), (0, 1)]
    with pytest.raises(ZeroDivisionError):
        noting.call("count", 2, on_note=lambda note: 1 / 0)
    assert noting.call("count", 1) == "counted to 1"
