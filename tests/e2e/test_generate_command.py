"""`enfold generate` on the shipped model: files, metadata, seeds, bits across modes, and what is refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_harness import Commands, marked, wait_until
from PIL import Image

PROMPTS = ("a red circle above a blue square", "a green triangle left of a purple circle")
FEW_STEPS = ("--num-inference-steps", "3", "--threads-per-rank", "1")


def generate(commands: Commands, folder: str, *options: object) -> dict[str, Any]:
    """Run the command on both prompts, return its JSON document with the pixels of each picture."""
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    done = commands.run("generate", *prompts, *FEW_STEPS, "--output-path", folder, "--json", *options)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    document["pixels"] = [np.asarray(Image.open(commands.folder / each["file"])) for each in document["pictures"]]
    return document


def test_the_bits_do_not_hang_on_ranks_and_modes(commands: Commands) -> None:
    one = generate(commands, "one")
    assert [pixels.shape for pixels in one["pixels"]] == [(64, 64, 3)] * 2
    assert not np.array_equal(*one["pixels"])
    ways = {
        "fold": ("--encoder-parallel", "fold", "--whole-dit"),
        "replicas": ("--dp-size", 2),
    }
    for name, options in ways.items():
        other = generate(commands, name, "--num-gpus", 2, *options)
        for wanted, pixels in zip(one["pixels"], other["pixels"], strict=True):
            assert np.array_equal(wanted, pixels), name
        if name != "replicas":
            assert other["encoders"]["text_encoder_2"]["resolved"] == name
    commands.check_nothing_left()


def test_a_split_dit_is_measured_against_the_whole_one(commands: Commands) -> None:
    document = generate(commands, "split", "--num-gpus", 2, "--measure-split")
    assert document["layout"] == "dp 1 x tp 1 x ring 1 x ulysses 2"
    assert "split over 2 ranks" in document["dit"]
    assert document["difference_from_unsplit"]["max_abs"] <= 2
    assert set(document["stage_seconds"]) == {"encode", "denoise", "decode"}
    assert all(seconds > 0 for seconds in document["stage_seconds"].values())


def test_pictures_carry_prompt_and_seed_and_none_is_lost(commands: Commands) -> None:
    options = ("--num-images-per-prompt", 2, "--seed", 5)
    first, second = (generate(commands, "same", *options) for _ in range(2))
    files = [each["file"] for each in first["pictures"] + second["pictures"]]
    assert len(set(files)) == 8
    assert [Path(file).name[:4] for file in files] == [f"{number:04d}" for number in range(8)]
    assert [each["seed"] for each in first["pictures"]] == [5, 6, 5, 6]
    for file, number in zip(files[:4], (0, 0, 1, 1), strict=True):
        with Image.open(commands.folder / file) as picture:
            assert picture.text["prompt"] == PROMPTS[number]
            assert picture.text["seed"] == file.removesuffix(".png")[-1]
    for one, other in zip(first["pixels"], second["pixels"], strict=True):
        assert np.array_equal(one, other)
    assert not np.array_equal(first["pixels"][0], first["pixels"][1]), "two seeds gave one picture"


def test_the_plan_stands_before_the_pictures(commands: Commands) -> None:
    done = commands.run("generate", "--prompt", PROMPTS[0], *FEW_STEPS, "--output-path", "pictures")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("FluxPipeline from ")
    assert any(line.startswith("text_encoder_2  T5") for line in lines)
    assert any(line.startswith("text_encoder_2 (float32): ") for line in lines), (
        "what ranks load in, not what is stored"
    )
    assert lines[-3].endswith(PROMPTS[0]) or PROMPTS[0] in done.stdout
    assert "1 picture in" in done.stdout
    assert "enfold: denoise (3 steps)" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "no prompt: none was given"),
        (("--prompt-file", "nowhere.txt"), "--prompt-file nowhere.txt: No such file"),
        (("--prompt", "a", "--num-gpus", 3, "--ulysses-degree", 2), "--num-gpus is 3"),
        (("--prompt", "a", "--num-gpus", 3), "does not divide the 4 attention heads"),
        (("--prompt", "a", "--num-gpus", 2, "--whole-dit", "--tp-size", 2), "--whole-dit keeps it whole"),
        (("--prompt", "a", "--num-gpus", 2, "--dp-size", 3), "--dp-size 3"),
        (("--prompt", "a", "--model-path", "nowhere/at/all"), "there is no such folder"),
        (("--prompt", "a", "--seed", -1), "--seed: seed -1 is outside"),
        (("--prompt", "a", "--embedding-cache-mib", -1), "is below 0"),
        (("--prompt", "a", "--height", 65), "65"),
        (("--prompt", "a", "--num-frames", 8), "num_frames"),
        (("--prompt", "a", "--encoder-parallel", "sideways"), "invalid choice"),
    ],
)
def test_wrong_input_is_refused_in_one_line(commands: Commands, options: tuple[object, ...], message: str) -> None:
    done = commands.run("generate", "--output-path", "pictures", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr and "loading" not in done.stderr
    assert not (commands.folder / "pictures").exists()
    commands.check_nothing_left()


@pytest.mark.parametrize("how", ["ctrl-c", "rank"])
def test_nothing_is_left_of_a_run_that_is_cut(commands: Commands, how: str) -> None:
    endless = ("--num-inference-steps", 100_000, "--threads-per-rank", 1, "--num-gpus", 2, "--timeout", 20)
    process = commands.start("generate", "--prompt", PROMPTS[0], *endless, "--output-path", "pictures")
    assert process.stderr is not None
    for line in process.stderr:
        if "denoise" in line:
            break
    if how == "ctrl-c":
        process.send_signal(signal.SIGINT)
    else:
        ranks = [pid for pid in marked(commands.marker) if pid != process.pid]
        os.kill(max(ranks), signal.SIGKILL)
    rest = process.stderr.read()
    wait_until(lambda: process.poll() is not None, 60, "the end of the command")
    assert process.returncode == (130 if how == "ctrl-c" else 2), rest
    assert ("interrupted" if how == "ctrl-c" else "rank") in rest
    assert list((commands.folder / "pictures").iterdir()) == []
    commands.check_nothing_left()
    assert process.stdout is not None
    process.stdout.close()
    process.stderr.close()
