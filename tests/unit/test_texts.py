"""Reading texts: what counts as a line, and messages that name the lines at fault."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from enfold.cli.texts import Text, read_texts
from enfold.errors import InputError


def written(folder: Path, content: bytes, name: str = "texts.txt") -> str:
    path = folder / name
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\ntwo", ["one", "two"]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"\xef\xbb\xbfone\n", ["one"]),
        ("a\u2028b\x0bc\x85d\n".encode(), ["a\u2028b\x0bc\x85d"]),
        (b" padded \n", [" padded "]),
        ("日本語\n😀\n".encode(), ["日本語", "😀"]),
        (b"x" * 100_000 + b"\n", ["x" * 100_000]),
    ],
)
def test_lines_of_plain_text(tmp_path: Path, content: bytes, texts: list[str]) -> None:
    read = read_texts(written(tmp_path, content))
    assert [text.text for text in read] == texts
    assert [text.line for text in read] == list(range(1, len(texts) + 1))


def test_json_lines(tmp_path: Path) -> None:
    lines = ['{"text": "a", "id": "x"}', '{"id": 7, "text": "b\\u2028"}', '{"text": ""}', '{"text": "c", "more": [1]}']
    read = read_texts(written(tmp_path, "\n".join(lines).encode(), "texts.jsonl"))
    assert read == [Text("a", 1, "x"), Text("b\u2028", 2, 7), Text("", 3), Text("c", 4)]
    assert [json.loads(text.to_json()) for text in read[:2]] == [{"id": "x", "text": "a"}, {"id": 7, "text": "b\u2028"}]
    assert read[2].to_json() == '{"text": ""}'


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"one\ntwo\n")))
    assert [text.text for text in read_texts("-")] == ["one", "two"]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"")))
    with pytest.raises(InputError, match=r"^standard input is empty"):
        read_texts("-")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; give one text per line"),
        (b"\n \n\t\n", "is empty; give one text per line"),
        (b"a\n\nb\n", r"1 empty line of 3 \(line 2\); remove them"),
        (b"a\n" + b"\n" * 8, r"8 empty lines of 9 \(line 2, 3, 4, 5, 6 and 3 more\)"),
        (b"ok\nab\xc3(\n", r"line 2: byte 3 of the line \(0xc3\) is no valid UTF-8"),
        ("ä".encode("latin-1"), "line 1: byte 1 of the line"),
    ],
)
def test_plain_text_that_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_texts(written(tmp_path, content))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the line is empty"),
        ("{", "no valid JSON"),
        ("[" * 100_000, "no valid JSON"),
        ('"text"', "a str, not an object"),
        ('{"caption": "a"}', r"no \"text\" \(it has 'caption'\)"),
        ("{}", r"no \"text\" \(it has nothing\)"),
        ('{"text": 5}', '"text" is a int, not a string'),
        ('{"text": null}', '"text" is a NoneType'),
        ('{"text": "a", "id": 1.5}', '"id" is a float'),
        ('{"text": "a", "id": true}', '"id" is a bool'),
        ('{"text": "a\\ud800"}', r"U\+D800 is half of a surrogate pair"),
        ('{"text": "a", "id": "\\udfff"}', r"U\+DFFF is half"),
    ],
)
def test_json_lines_that_are_refused(tmp_path: Path, line: str, message: str) -> None:
    content = f'{{"text": "fine"}}\n{line}\n{{"text": "fine"}}\n'.encode()
    with pytest.raises(InputError, match=r"texts\.jsonl, line 2: .*" + message):
        read_texts(written(tmp_path, content, "texts.jsonl"))


def test_files_that_cant_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        read_texts(str(tmp_path))
    with pytest.raises(InputError, match=r"can't read .*none\.txt: No such file"):
        read_texts(str(tmp_path / "none.txt"))
