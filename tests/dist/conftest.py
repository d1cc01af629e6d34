from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.stop()
