"""Fixtures of the end-to-end tests: tiny models, made once, and the commands."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e_harness import Commands, marked, save_bert, save_clip_vision, save_t5_pipeline

signal.signal(signal.SIGINT, signal.default_int_handler)
"""A shell ignores SIGINT for what it runs in the background, and so would all that is started here."""


def _made(save: Callable[[Path], None], folder: Path) -> Path:
    save(folder)
    return folder


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _made(save_bert, tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def t5_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _made(save_t5_pipeline, tmp_path_factory.mktemp("t5_pipeline"))


@pytest.fixture(scope="session")
def clip_vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _made(save_clip_vision, tmp_path_factory.mktemp("clip_vision"))


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    commands = Commands(tmp_path)
    yield commands
    for pid in marked(commands.marker):  # only what this test started carries its marker
        os.kill(pid, 9)
