"""The prompts of `enfold generate`: where they come from, and what is refused with the line that is wrong."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from enfold.cli.prompts import Prompt, read_prompts
from enfold.errors import InputError


def test_command_line_before_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffone\r\n\n  two  \n".encode())
    assert read_prompts(["zero"], str(file), 5, "blur") == [Prompt(text, 5, "blur") for text in ("zero", "one", "two")]


def test_json_lines_may_say_seed_and_negative_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "seed": 7}\n{"prompt": "b", "negative_prompt": "c"}\n')
    assert read_prompts([], str(file), 1, None) == [Prompt("a", 7), Prompt("b", 1, "c")]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"one\ntwo\n")))
    assert [prompt.text for prompt in read_prompts([], "-", 0, None)] == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n\n", "holds none"),
        (b"{", ":1 is not JSON"),
        (b'{"prompt": "a"}\n["b"]', ":2 is no object"),
        (b'{"prompt": 3}', "prompt is a int, and a str is needed"),
        (b'{"prompt": "a", "seed": true}', "seed is a bool"),
        (b'{"prompt": "a", "seed": -1}', "seed -1 is outside"),
        (b'{"prompt": "a", "size": 3}', "'size' is not known; use prompt, seed"),
        (b"\xff", "is not UTF-8: byte 0"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_prompts([], str(file), 0, None)


def test_no_prompt_and_no_file_are_refused() -> None:
    with pytest.raises(InputError, match="no prompt: none was given"):
        read_prompts([], None, 0, None)
    with pytest.raises(InputError, match="No such file"):
        read_prompts([], "/nowhere/prompts.txt", 0, None)
    with pytest.raises(InputError, match="--seed: seed"):
        read_prompts(["a"], None, 2**63, None)
