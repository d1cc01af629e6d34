"""`enfold verify`: every layout in its table, and exit code 1 where bits differ."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import towers
import vlms
from e2e_harness import Commands

from enfold import checkpoint
from enfold.cli.main import main
from enfold.cli.verify_tower import TowerResult, list_sizes
from enfold.probe import Comparison


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


# Vision towers


@pytest.fixture(scope="module")
def qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_vl")
    vlms.build("Qwen3-VL").save_pretrained(folder)
    return folder


def test_every_layout_of_a_vision_tower(commands: Commands, qwen3_vl: Path) -> None:
    arguments = ["--num-gpus", 2, "--batch-size", 4, "--threads-per-rank", 1, "--json"]
    done = commands.run("verify", "--model-path", qwen3_vl, *arguments)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["exact"] is True
    about = answer["about"]
    assert (about["model_class"], about["dtype"], about["images"]) == ("Qwen3VLVisionModel", "float32", 4)
    layouts = [(mode["name"], mode["layout"]) for mode in answer["modes"]]
    assert layouts == [("one rank", "1x1x1"), ("dp 2", "1x2x1"), ("tp 2", "1x1x2")]
    for mode in answer["modes"]:
        names = ["last_hidden_state", "pooler_output", "deepstack_features (2)"]
        assert [row["output"] for row in mode["one_rank"]] == [row["output"] for row in mode["plain"]] == names
        assert mode["exact"] and mode["ranks_agree"] and all(row["bits_equal"] for row in mode["one_rank"])
        assert all(row["max_rel"] < 1e-5 for row in mode["plain"])
    commands.check_nothing_left()


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("name", ["Qwen2.5-VL", "SigLIP"])
def test_the_tower_of_a_model_that_is_verified_otherwise_without_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    model = vlms.build(name) if name in vlms.VLMS else towers.plain(name, torch.float32)
    model.save_pretrained(tmp_path)
    arguments = ["verify", "--model-path", str(tmp_path), "--num-gpus", "1"]
    assert main([*arguments, "--vision", "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    shape = ["1448x256", "bfloat16"] if name == "Qwen2.5-VL" else ["5x25x544", "bfloat16"]
    row = next(line for line in lines if line[:3] == ["one", "rank", "last_hidden_state"])
    assert row[3:7] == [*shape, "equal", "0"] and float(row[-1]) < 0.05
    assert "bfloat16 is only shown against Transformers" in said
    assert main([*arguments, "--vision", "--length", "7"]) == 2
    assert "--length is for texts" in capsys.readouterr().err


@pytest.mark.usefixtures("signals")
def test_a_model_without_a_tower(bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model-path", str(bert), "--vision"]) == 2
    assert "--vision can't be used: model_type='bert' has no vision tower" in capsys.readouterr().err


@pytest.mark.usefixtures("signals")
def test_other_maths_of_a_tower_is_found(
    qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = checkpoint.load_encoder

    def load_spoilt(*arguments: Any, **keywords: Any) -> Any:
        module = load(*arguments, **keywords)
        for block in module.blocks:
            block.mlp.act_fn = torch.nn.GELU()  # erf for tanh
        return module

    monkeypatch.setattr(checkpoint, "load_encoder", load_spoilt)
    assert main(["verify", "--model-path", str(qwen3_vl), "--num-gpus", "1", "--dtype", "float32", "--json"]) == 1
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert answer["exact"] is False and all(row["max_rel"] > 1e-5 for row in answer["modes"][0]["plain"])
    assert "not what Transformers computes: one rank" in said.err


def test_a_layout_is_exact_only_with_the_bits_of_one_rank() -> None:
    equal, off = (Comparison("x", (1,), "float32", same, 1e-7, 1e-7) for same in (True, False))
    wrong, low = (Comparison("x", (1,), dtype, False, 0.1, 0.1) for dtype in ("float32", "bfloat16"))
    assert TowerResult("dp 2", "1x2x1", one_rank=[equal], plain=[off]).exact
    assert TowerResult("dp 2", "1x2x1", one_rank=[equal], plain=[low]).exact
    assert not TowerResult("dp 2", "1x2x1", one_rank=[off], plain=[equal]).exact
    assert not TowerResult("dp 2", "1x2x1", one_rank=[equal], plain=[wrong]).exact
    assert not TowerResult("dp 2", "1x2x1", one_rank=[equal], ranks_agree=False).exact
    assert not TowerResult("dp 2", "1x2x1", failed="out of memory").exact
    assert list_sizes(1) == {"one rank": (1, 1)}
    assert list_sizes(4) == {"one rank": (1, 1), "dp 4": (1, 4), "dp 2 x tp 2": (2, 2), "tp 4": (4, 1)}
