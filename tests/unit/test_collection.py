"""pytest's default would leave out a folder called dist, and with it most of what matters."""

from __future__ import annotations

import pytest


def test_every_folder_of_tests_is_collected(pytestconfig: pytest.Config) -> None:
    folders = {path.name for path in (pytestconfig.rootpath / "tests").iterdir() if (path / "conftest.py").exists()}
    skipped = set(pytestconfig.getini("norecursedirs"))
    assert "dist" in folders
    assert not folders & skipped
