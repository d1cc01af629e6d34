"""Read the texts to encode from .txt, .jsonl or standard input, and refuse what can't be used, by line number."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from enfold.errors import InputError

NAMED_LINES = 5
"""How many line numbers a message lists before it only counts."""


@dataclass(frozen=True)
class Text:
    """One text, the number of its line in the input (1-based), and the id that a .jsonl line gave it."""

    text: str
    line: int
    id: str | int | None = None

    def to_json(self) -> str:
        """Return it as one line of JSON: {"id"?, "text"}."""
        fields = {"text": self.text} if self.id is None else {"id": self.id, "text": self.text}
        return json.dumps(fields, ensure_ascii=False)


def read_texts(source: str) -> list[Text]:
    """Return the texts of a .txt file (one per line), a .jsonl file ({"text": ..., "id": optional}), or `-`.

    Raises InputError for a file that can't be read or is empty, for bytes that are no UTF-8, for empty lines in
    plain text, and for JSON lines without a text; the message names the lines.
    """
    parse = _parse_json if source.lower().endswith((".jsonl", ".ndjson")) else _parse_plain
    name = "standard input" if source == "-" else source
    texts = list(parse(name, _decode(name, _read_bytes(source))))
    if not texts:
        raise InputError(f"{name} is empty; give one text per line")
    return texts


def _read_bytes(source: str) -> bytes:
    if source == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(source).read_bytes()
    except IsADirectoryError:
        raise InputError(f"{source} is a folder; give a .txt or .jsonl file, or - for standard input") from None
    except OSError as error:
        raise InputError(f"can't read {source}: {error.strerror}") from None


def _decode(name: str, content: bytes) -> list[str]:
    """Return the lines. Only a line feed ends a line: str.splitlines would also cut inside a text, at U+2028."""
    content = content.removeprefix(b"\xef\xbb\xbf")
    lines = content.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    return [_decode_line(name, number, line.removesuffix(b"\r")) for number, line in enumerate(lines, 1)]


def _decode_line(name: str, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}, line {number}: byte {error.start + 1} of the line (0x{line[error.start]:02x}) is no valid UTF-8; "
            f"convert the file to UTF-8 first"
        ) from None


def _parse_plain(name: str, lines: list[str]) -> Iterator[Text]:
    empty = [number for number, line in enumerate(lines, 1) if not line.strip()]
    if empty and len(empty) < len(lines):
        count = f"{len(empty)} empty {'line' if len(empty) == 1 else 'lines'} of {len(lines)} ({_name_lines(empty)})"
        raise InputError(
            f'{name} has {count}; remove them, or use a .jsonl file with {{"text": ""}} where an empty text is meant'
        )
    if not empty:
        yield from (Text(line, number) for number, line in enumerate(lines, 1))


def _parse_json(name: str, lines: list[str]) -> Iterator[Text]:
    for number, line in enumerate(lines, 1):
        yield _parse_json_line(f"{name}, line {number}", number, line)


def _parse_json_line(where: str, number: int, line: str) -> Text:
    if not line.strip():
        raise InputError(f'{where}: the line is empty; remove it, or write {{"text": ""}} where an empty text is meant')
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: no valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise InputError(f'{where}: a {type(fields).__name__}, not an object; write {{"text": "..."}}')
    if "text" not in fields:
        keys = ", ".join(map(repr, fields)) or "nothing"
        raise InputError(f'{where}: no "text" (it has {keys}); write {{"text": "..."}}')
    text, identity = fields["text"], fields.get("id")
    if not isinstance(text, str):
        raise InputError(f'{where}: "text" is a {type(text).__name__}, not a string')
    if isinstance(identity, bool) or not isinstance(identity, (str, int, type(None))):
        raise InputError(f'{where}: "id" is a {type(identity).__name__}; use a string or a whole number')
    for value in (text, identity):
        _check_encodable(where, value)
    return Text(text, number, identity)


def _check_encodable(where: str, value: str | int | None) -> None:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            code = ord(value[error.start])
            raise InputError(f"{where}: U+{code:04X} is half of a surrogate pair and stands for no character") from None


def _name_lines(numbers: list[int]) -> str:
    more = len(numbers) - NAMED_LINES
    listed = ", ".join(map(str, numbers[:NAMED_LINES]))
    return f"line {listed}" + (f" and {more} more" if more > 0 else "")
