"""The command line without ranks: parsing, exit codes, the output file, batches, comparisons."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from enfold.cli import encode, report
from enfold.cli.main import build_parser, main
from enfold.cli.model_path import check_model_path
from enfold.cli.tensor_file import Slot, TensorFile
from enfold.cli.verify import ModeResult, list_layouts
from enfold.engine import choose_max_length, make_batches, tokenizer_place
from enfold.errors import ConfigError, EncodeError, EnfoldError, InputError
from enfold.probe import Comparison, compare_outputs, compare_tensors, named_outputs
from enfold.worker import EncoderSpec

COMMANDS = ["generate", "serve", "encode", "plan", "verify"]


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert f"  enfold {command} --model-path" in said and "%(" not in said


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(f"    {command} " in said for command in COMMANDS)
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("enfold 0.")
    with pytest.raises(SystemExit, match="2"):
        main([])


def test_the_parser_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from enfold.cli.main import build_parser; build_parser(); "
        "print([name for name in ('torch', 'transformers', 'rich', 'numpy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("no good"), 2, "enfold: error: no good\n"),
        (KeyboardInterrupt(), 130, "enfold: interrupted\n"),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, said: str
) -> None:
    assert run_raising(monkeypatch, error) == code
    assert capsys.readouterr().err == said


def run_raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def run(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(encode, "run", run)
    return main(["encode", "--model-path", "x", "--input", "y", "--output", "z"])


def test_a_ranks_traceback_comes_before_the_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = EncodeError("rank 1 failed")
    error.add_note("Traceback of rank 1")
    assert run_raising(monkeypatch, error) == 2
    assert capsys.readouterr().err == "Traceback of rank 1\nenfold: error: rank 1 failed\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        run_raising(monkeypatch, ZeroDivisionError())


def test_defaults_of_encode() -> None:
    args = build_parser().parse_args(["encode", "--model-path", "x", "--input", "y", "--output", "z"])
    assert (args.encoder_parallel, args.pooling, args.batch_size, args.num_gpus) == ("auto", "none", 32, 1)


# --model-path and --subfolder


def test_model_paths(tmp_path: Path) -> None:
    check_model_path("google/t5-v1_1-xxl", None)
    check_model_path("bert-base-uncased", None)
    for name in ("text_encoder", "text_encoder_2", "transformer"):
        (tmp_path / name).mkdir()
        kind = "_class_name" if name == "transformer" else "model_type"
        (tmp_path / name / "config.json").write_text(json.dumps({kind: "x"}))
    check_model_path(str(tmp_path), "text_encoder_2")
    check_model_path(str(tmp_path / "text_encoder"), None)
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is a pipeline; .* --subfolder \(text_encoder, text_encoder_2\)"):
        check_model_path(str(tmp_path), None)
    with pytest.raises(ConfigError, match=r"--subfolder vae: .* has no such folder"):
        check_model_path(str(tmp_path), "vae")
    with pytest.raises(ConfigError, match="is a file"):
        check_model_path(str(tmp_path / "model_index.json"), None)
    for path in ("/no/such", "./none", "a/b/c"):
        with pytest.raises(ConfigError, match="there is no such folder"):
            check_model_path(path, None)


def test_where_the_tokenizer_is(tmp_path: Path) -> None:
    for name in ("text_encoder_2", "tokenizer_2", "text_encoder_3"):
        (tmp_path / name).mkdir()
    root = str(tmp_path)
    assert tokenizer_place(EncoderSpec(root)) == (root, "")
    assert tokenizer_place(EncoderSpec(root, "text_encoder_2")) == (root, "tokenizer_2")
    assert tokenizer_place(EncoderSpec(f"{root}/text_encoder_2")) == (root, "tokenizer_2")
    assert tokenizer_place(EncoderSpec(root, "text_encoder_3")) == (root, "text_encoder_3")
    assert tokenizer_place(EncoderSpec("owner/name", "text_encoder")) == ("owner/name", "tokenizer")
    (tmp_path / "text_encoder_2" / "tokenizer_config.json").write_text("{}")
    assert tokenizer_place(EncoderSpec(root, "text_encoder_2")) == (root, "text_encoder_2")


# Batches and lengths


def test_batches_are_sorted_by_length_and_stable() -> None:
    assert make_batches([3, 9, 3, 1, 9, 3], 2) == [[1, 4], [0, 2], [5, 3]]
    assert make_batches([], 4) == []


def test_the_token_limit() -> None:
    huge = 10**30
    assert choose_max_length(None, 77, 77) == 77
    assert choose_max_length(None, huge, 514) == 514
    assert choose_max_length(None, huge, None) == 512
    assert choose_max_length(None, 8192, 512) == 512
    assert choose_max_length(300, 77, None) == 300
    with pytest.raises(ConfigError, match="max_length=78 is more than the 77 positions of the model; use at most 77"):
        choose_max_length(78, 77, 77)


# The output file


SLOTS = {"bytes": Slot(torch.uint8, (3,)), "rows": Slot(torch.bfloat16, (4, 2)), "line": Slot(torch.int64, (2,))}


def test_a_tensor_file_is_read_by_safetensors(tmp_path: Path) -> None:
    rows = torch.randn(4, 2).bfloat16()
    path = tmp_path / "out.safetensors"
    path.write_text("old")
    contents = {"line": torch.tensor([1, 2]), "bytes": torch.tensor([7, 8, 9], dtype=torch.uint8)}
    with TensorFile(path, SLOTS, {"näme": "wért"}, contents) as file:
        file.write("rows", rows[2:], 2)
        file.write("rows", rows[:2])
        assert path.read_text() == "old"
        assert len(list(tmp_path.iterdir())) == 2
    with safe_open(path, "pt") as read:
        assert read.metadata() == {"näme": "wért"}
        assert torch.equal(read.get_tensor("rows"), rows)
        assert torch.equal(read.get_tensor("line"), contents["line"])
        assert torch.equal(read.get_tensor("bytes"), contents["bytes"])
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    import os

    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_tensor_file_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    with pytest.raises(KeyboardInterrupt), TensorFile(path, SLOTS, {}, {}):
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="does not fit"), TensorFile(path, SLOTS, {}, {}) as file:
        file.write("rows", torch.zeros(4, 2).bfloat16(), 1)
    with pytest.raises(ValueError, match="does not fit"), TensorFile(path, SLOTS, {}, {"line": torch.zeros(2)}):
        pass
    assert list(tmp_path.iterdir()) == []
    missing = tmp_path / "none" / "out"
    with pytest.raises(EnfoldError, match=r"can't write .*No such file"), TensorFile(missing, SLOTS, {}, {}):
        pass


# Comparisons and tables


def test_layouts_are_all_factorisations() -> None:
    assert list(list_layouts(1)) == ["replicate"]
    assert list(list_layouts(4)) == ["replicate", "dp", "fold", "2x2x1", "2x1x2", "1x2x2"]
    assert len(list_layouts(12)) == 18
    assert all(layout.size == 12 for layout in list_layouts(12).values())


def test_comparisons_see_single_bits() -> None:
    x = torch.tensor([1.0, -2.0, float("nan")])
    assert compare_tensors("x", x.clone(), x).bits_equal
    assert not compare_tensors("x", torch.tensor([0.0]), torch.tensor([-0.0])).bits_equal
    y = torch.tensor([1.0, -2.5])
    row = compare_tensors("y", y, torch.tensor([1.0, -2.0]))
    assert (row.bits_equal, row.max_abs, row.max_rel) == (False, 0.5, 0.25)
    assert compare_tensors("z", y.bfloat16(), y).max_abs == float("inf")
    assert compare_tensors("e", torch.zeros(0, 3), torch.zeros(0, 3)).bits_equal


def test_entries_of_a_tuple_become_one_row() -> None:
    states = tuple(torch.full((2,), float(i)) for i in range(3))
    outputs = named_outputs({"last": states[0], "hidden_states": states, "cache": None})
    assert list(outputs) == ["last", "hidden_states[0]", "hidden_states[1]", "hidden_states[2]"]
    other = {**outputs, "hidden_states[1]": torch.tensor([1.0, 3.0])}
    last, hidden = compare_outputs(other, outputs)
    assert last.bits_equal
    assert (hidden.output, hidden.bits_equal, hidden.max_abs, hidden.worst) == (
        "hidden_states (3)",
        False,
        2.0,
        "hidden_states[1]",
    )
    spoilt = {**other, "hidden_states[0]": torch.tensor([float("nan"), 0.0])}
    assert compare_outputs(spoilt, outputs)[1].worst == "hidden_states[0]"
    with pytest.raises(InputError, match="the outputs differ in kind"):
        compare_outputs({"last": states[0]}, outputs)


def test_a_mode_is_exact_only_if_ranks_agree_and_all_bits_are_equal() -> None:
    equal = Comparison("x", (1,), "float32", True, 0.0, 0.0)
    differ = Comparison("x", (1,), "float32", False, 1e-4, 1e-4)
    rounding = Comparison("x", (1,), "float32", False, 1e-7, 1e-7)
    coarse = Comparison("x", (1,), "bfloat16", False, 1e-7, 1e-7)
    assert ModeResult("dp", "1x2x1", plain=[equal]).exact
    assert not ModeResult("dp", "1x2x1", plain=[equal, differ]).exact
    assert not ModeResult("dp", "1x2x1", plain=[coarse]).exact
    assert ModeResult("dp", "1x2x1", plain=[rounding], replicate=[equal]).exact, "replicate is the reference then"
    assert not ModeResult("dp", "1x2x1", plain=[equal], replicate=[rounding]).exact
    assert not ModeResult("dp", "1x2x1", plain=[equal], ranks_agree=False).exact
    assert not ModeResult("dp", "1x2x1", failed="out of memory").exact


def test_progress_in_a_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "LINE_EVERY_S", 0.0)
    with report.stage("encoding", 3, "texts") as advance:
        advance(2)
    assert capsys.readouterr().err == "enfold: encoding (3 texts)\nenfold: encoding: 2 of 3 texts\n"


def test_a_table_is_aligned() -> None:
    assert report.table(("a", "bb"), [("long", "x")]) == "a     bb\n----  --\nlong  x"
