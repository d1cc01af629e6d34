"""`enfold verify`: every layout in its table, and exit code 1 where bits differ."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_harness import Commands

from enfold import checkpoint
from enfold.cli.main import main


@pytest.fixture
def signals() -> Iterator[None]:
    """main() installs handlers: put pytest's own back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_every_layout_of_a_text_encoder(commands: Commands, bert: Path) -> None:
    done = commands.run("verify", "--model-path", bert, "--num-gpus", 2, "--threads-per-rank", 1, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["exact"] is True
    assert answer["about"]["model_class"] == "BertModel" and answer["about"]["threads"] == 1
    assert [(mode["name"], mode["layout"]) for mode in answer["modes"]] == [
        ("replicate", "2x1x1"),
        ("dp", "1x2x1"),
        ("fold", "1x1x2"),
    ]
    for mode in answer["modes"]:
        assert [row["output"] for row in mode["plain"]] == ["last_hidden_state", "pooler_output", "hidden_states (3)"]
        assert mode["exact"] and mode["ranks_agree"] and all(row["bits_equal"] for row in mode["replicate"])
    commands.check_nothing_left()


def test_an_image_encoder_as_a_table(commands: Commands, clip_vision: Path) -> None:
    arguments = ["--num-gpus", 2, "--batch-size", 3, "--dtype", "bfloat16", "--threads-per-rank", 1]
    done = commands.run("verify", "--model-path", clip_vision, *arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["fold", "last_hidden_state", "3x17x128", "bfloat16", "equal", "0", "0", "equal", "0"] in lines


def test_a_pipelines_encoder(commands: Commands, t5_pipeline: Path) -> None:
    arguments = ["--subfolder", "text_encoder_2", "--num-gpus", 2, "--threads-per-rank", 1]
    done = commands.run("verify", "--model-path", t5_pipeline, *arguments)
    assert done.returncode == 0, done.stderr + done.stdout


def test_more_tokens_than_positions(commands: Commands, bert: Path) -> None:
    done = commands.run("verify", "--model-path", bert, "--num-gpus", 1, "--length", 500)
    assert done.returncode == 2 and "--length 500 is more than the 128 positions" in done.stderr


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(("numerics", "code"), [("exact", 1), ("fast", 0)])
def test_other_bits_are_found(
    bert: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], numerics: str, code: int
) -> None:
    load = checkpoint.load_encoder

    def load_spoilt(*arguments: Any, **keywords: Any) -> Any:
        module = load(*arguments, **keywords)
        with torch.no_grad():
            module.encoder.layer[1].output.dense.weight[5, 5] += 1e-3
        return module

    monkeypatch.setattr(checkpoint, "load_encoder", load_spoilt)
    arguments = ["--num-gpus", "1", "--numerics", numerics, "--json"]
    assert main(["verify", "--model-path", str(bert), *arguments]) == code
    modes = json.loads(capsys.readouterr().out)["modes"]
    rows = {row["output"]: row for row in modes[0]["plain"]}
    assert not rows["last_hidden_state"]["bits_equal"] and 0 < rows["last_hidden_state"]["max_abs"] < 1
    assert rows["hidden_states (3)"]["worst"] == "hidden_states[2]"
