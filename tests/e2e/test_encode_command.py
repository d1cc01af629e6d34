"""`enfold encode` as a user runs it: results, refused inputs, and what is left after Ctrl-C and killed processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_harness import Commands, check_a_killed_rank, check_interrupted, start_long_encode
from safetensors import safe_open

TEXTS = [
    "a red fox",
    "the blue whale sings above a small circle",
    "one",
    "two large green squares and the red circle below",
    "a fox jumps over the fox",
]


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def plain_states(model: Path, texts: list[str]) -> list[torch.Tensor]:
    """The hidden states of each text by itself, from Transformers alone."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    module = AutoModel.from_pretrained(model).eval()
    with torch.inference_mode():
        return [module(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in texts]


def test_hidden_states_of_two_ranks_are_those_of_one(commands: Commands, bert: Path) -> None:
    source = write_lines(commands.folder / "texts.txt", TEXTS)
    found = {}
    for name, options in {
        "one": ["1"],
        "dp": ["2", "--encoder-parallel", "dp"],
        "fold": ["2", "--tp-size", "2"],
    }.items():
        output = commands.folder / f"{name}.safetensors"
        arguments = ["--input", source, "--output", output, "--batch-size", 2, "--threads-per-rank", 1]
        done = commands.run("encode", "--model-path", bert, *arguments, "--num-gpus", *options)
        assert done.returncode == 0, done.stderr
        assert f"written to {output}" in done.stdout and "5 texts, 38 tokens" in done.stdout
        found[name], metadata = read(output)
        assert metadata["pooling"] == "none" and metadata["texts"] == "5" and metadata["dtype"] == "float32"
        commands.check_nothing_left()
    one = found["one"]
    assert set(one) == {"hidden_states", "offsets", "line", "num_tokens", "truncated", "inputs"}
    for other in (found["dp"], found["fold"]):
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name
    offsets = one["offsets"].tolist()
    for i, plain in enumerate(plain_states(bert, TEXTS)):
        torch.testing.assert_close(one["hidden_states"][offsets[i] : offsets[i + 1]], plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_pooled_vectors_from_jsonl(commands: Commands, bert: Path, pooling: str) -> None:
    rows: list[dict[str, Any]] = [{"text": text, "id": f"n{i}"} for i, text in enumerate(TEXTS)] + [{"text": ""}]
    source = write_lines(commands.folder / "texts.jsonl", [json.dumps(row) for row in rows])
    arguments = ["--input", source, "--output", "out.safetensors", "--pooling", pooling, "--batch-size", "4", "--json"]
    done = commands.run("encode", "--model-path", bert, *arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["texts"] == 6
    tensors, _ = read(commands.folder / "out.safetensors")
    pools = {"mean": lambda states: states.mean(0), "cls": lambda states: states[0], "last": lambda states: states[-1]}
    expected = torch.stack([pools[pooling](states) for states in plain_states(bert, [row["text"] for row in rows])])
    torch.testing.assert_close(tensors["embeddings"], expected, rtol=1e-5, atol=1e-5)
    assert [json.loads(line) for line in bytes(tensors["inputs"].tolist()).decode().splitlines()] == rows
    assert tensors["line"].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_huge_line_is_cut_off_and_counted(commands: Commands, bert: Path) -> None:
    text = "\n".join(["a red fox", "fox " * 25_000, "one"]) + "\n"
    arguments = ["--input", "-", "--output", "out.safetensors", "--json"]
    done = commands.run("encode", "--model-path", bert, *arguments, stdin=text)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["truncated"], answer["max_length"], answer["tokens"]) == (1, 128, 5 + 128 + 3)
    assert "1 of 3 texts are longer than 128 tokens and are cut off there (the first is line 2)" in done.stderr
    tensors, _ = read(commands.folder / "out.safetensors")
    assert tensors["truncated"].tolist() == [0, 1, 0] and tensors["num_tokens"].tolist() == [5, 128, 3]


def test_a_pipelines_encoder_finds_its_tokenizer(commands: Commands, t5_pipeline: Path) -> None:
    arguments = ["--subfolder", "text_encoder_2", "--input", "-", "--output", "out.safetensors", "--max-length", "4"]
    done = commands.run("encode", "--model-path", t5_pipeline, *arguments, stdin="a red fox\none two one two one\n")
    assert done.returncode == 0, done.stderr
    tensors, metadata = read(commands.folder / "out.safetensors")
    assert tensors["num_tokens"].tolist() == [4, 4] and tensors["truncated"].tolist() == [0, 1]
    assert metadata["subfolder"] == "text_encoder_2"


REFUSED: dict[str, tuple[list[str], str | bytes, str]] = {
    "empty input": ([], "", "is empty"),
    "empty lines": ([], "a\n\nb\n  \n", r"2 empty lines of 4 (line 2, 4)"),
    "invalid UTF-8": ([], b"fine\nbad \xff\n", "line 2: byte 5 of the line (0xff) is no valid UTF-8"),
    "unreadable input": (["--input", "missing.txt"], "", "can't read missing.txt: No such file"),
    "input is a folder": (["--input", "."], "", "is a folder"),
    "no such model": (["--model-path", "./nothing/here"], "a\n", "there is no such folder"),
    "no output folder": (["--output", "none/out.safetensors"], "a\n", "there is no folder none"),
    "output is a folder": (["--output", "."], "a\n", "is a folder"),
    "too long": (["--max-length", "129"], "a\n", "max_length=129 is more than the 128 positions"),
    "tp size": (
        ["--num-gpus", "4", "--tp-size", "3"],
        "a\n",
        "tp_size=3 does not divide the 4 ranks; use one of 1, 2, 4",
    ),
    "batch size": (["--batch-size", "0"], "a\n", "0 is smaller than 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_before_anything_starts(commands: Commands, bert: Path, case: str) -> None:
    options, text, message = REFUSED[case]
    base = ["--model-path", bert, "--input", "-", "--output", "out.safetensors"]
    done = commands.run("encode", *base, *options, stdin=text)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    assert "loading" not in done.stderr and done.stdout == ""
    assert not (commands.folder / "out.safetensors").exists()


def test_tokenizers_that_do_not_fit(commands: Commands, bert: Path) -> None:
    arguments = ["--input", "-", "--output", "out.safetensors"]
    bare, other = commands.folder / "bare", commands.folder / "other"
    for folder in (bare, other):
        folder.mkdir()
        shutil.copy(bert / "config.json", folder)
    done = commands.run("encode", "--model-path", bare, *arguments, stdin="a\n")
    assert done.returncode == 2 and "bare has no tokenizer files" in done.stderr
    for file in bert.glob("tokenizer*"):
        shutil.copy(file, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 20}))
    done = commands.run("encode", "--model-path", other, *arguments, stdin="fox\n")
    assert done.returncode == 2 and "and the model has 20; they do not belong together" in done.stderr


def test_models_that_take_no_text(commands: Commands, clip_vision: Path, t5_pipeline: Path) -> None:
    arguments = ["--input", "-", "--output", "out.safetensors"]
    done = commands.run("encode", "--model-path", clip_vision, *arguments, stdin="a\n")
    assert done.returncode == 2 and "is an image encoder (clip_vision_model) and takes no text" in done.stderr
    done = commands.run("encode", "--model-path", t5_pipeline, *arguments, stdin="a\n")
    assert done.returncode == 2 and "name one encoder with --subfolder (text_encoder_2)" in done.stderr


def start_long(commands: Commands, bert: Path) -> tuple[Any, Path]:
    """Start a job of minutes on two ranks, over an output that is there already; return once it writes."""
    source = write_lines(commands.folder / "many.txt", TEXTS * 8000)
    return start_long_encode(commands, bert, source, "--batch-size", 1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(commands: Commands, bert: Path, number: signal.Signals, code: int) -> None:
    job, output = start_long(commands, bert)
    check_interrupted(commands, job, output, number, code)


def test_a_killed_rank(commands: Commands, bert: Path) -> None:
    job, output = start_long(commands, bert)
    check_a_killed_rank(commands, job, output)


def test_a_killed_parent_takes_its_ranks_along(commands: Commands, bert: Path) -> None:
    job, _ = start_long(commands, bert)
    with job:
        job.kill()
        commands.check_nothing_left(5)


def test_a_reader_that_has_gone(commands: Commands, bert: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    source = write_lines(commands.folder / "texts.txt", TEXTS)
    arguments = ["--input", source, "--output", "out.safetensors", "--json"]
    job = commands.start("encode", "--model-path", bert, *arguments, stdout=writing)
    os.close(writing)
    with job:
        _, said = job.communicate(timeout=90)
    assert job.returncode == 141 and "Traceback" not in said
