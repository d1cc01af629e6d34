"""The prompts of `enfold generate`: from the command line, a .txt file, a .jsonl file, or standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enfold.config import SEED_LIMIT
from enfold.errors import InputError

KEYS = {"prompt": str, "seed": int, "negative_prompt": str}


@dataclass(frozen=True)
class Prompt:
    """One prompt, the seed of its first picture, and what it should not show."""

    text: str
    seed: int
    negative: str | None = None


def read_prompts(given: Sequence[str], file: str | None, seed: int, negative: str | None) -> list[Prompt]:
    """Return the prompts of the command line, then those of the file; raise InputError that names the line."""
    _check_seed("--seed", seed)
    prompts = [Prompt(text, seed, negative) for text in given]
    if file is not None:
        lines = enumerate(_read(file).splitlines(), start=1)
        read = _from_json if file.endswith(".jsonl") else _from_text
        prompts += [read(f"{file}:{number}", line, seed, negative) for number, line in lines if line.strip()]
    if not prompts:
        where = f"{file} holds none" if file is not None else "none was given"
        raise InputError(f'no prompt: {where}; use --prompt "a red circle above a blue square" or --prompt-file FILE')
    return prompts


def _read(file: str) -> str:
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
        return content.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"--prompt-file {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"--prompt-file {file} is not UTF-8: byte {error.start}; save it as UTF-8") from None


def _from_text(where: str, line: str, seed: int, negative: str | None) -> Prompt:
    return Prompt(line.strip(), seed, negative)


def _from_json(where: str, line: str, seed: int, negative: str | None) -> Prompt:
    try:
        fields: Any = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}") from None
    if not isinstance(fields, dict) or "prompt" not in fields:
        raise InputError(f'{where} is no object with "prompt"; write {{"prompt": "a red fox", "seed": 1}}')
    for key, value in fields.items():
        if key not in KEYS:
            raise InputError(f"{where}: {key!r} is not known; use {', '.join(KEYS)}")
        if not isinstance(value, KEYS[key]) or isinstance(value, bool):
            raise InputError(f"{where}: {key} is a {type(value).__name__}, and a {KEYS[key].__name__} is needed")
    prompt = Prompt(fields["prompt"], fields.get("seed", seed), fields.get("negative_prompt", negative))
    _check_seed(where, prompt.seed)
    return prompt


def _check_seed(where: str, seed: int) -> None:
    if not 0 <= seed < SEED_LIMIT:
        raise InputError(f"{where}: seed {seed} is outside 0 to 2**63 - 1")
