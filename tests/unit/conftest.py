"""Places for tests that train in this process."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with a cache of its own, in a process that is no rank; imports leave no path behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def recipe(own_folder: Path) -> str:
    """A recipe that trains in a moment."""
    from tests.e2e.command import MINIATURE  # most tests do without

    (own_folder / "small.yaml").write_text(MINIATURE)
    return "small.yaml"
