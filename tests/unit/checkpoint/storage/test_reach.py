"""The first contact with a place: it answers in time, and takes what is written, or that is said."""

import os
import threading
import uuid
from pathlib import Path

import pytest

from shardwise.checkpoint.storage import root as reach
from shardwise.checkpoint.storage.root import Root, StoreError


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    return Root.of(tmp_path / "new/run" if request.param == "local" else f"memory://{uuid.uuid4().hex}/run")


def test_a_place_that_can_be_written_is_left_as_it_was(root: Root) -> None:
    reach.require_writable(root)
    assert root.names() == []
    assert reach.in_time(root, lambda: 3) == 3


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda _: seen.extend(tmp_path.iterdir()))
    reach.require_writable(Root.of(tmp_path))
    assert seen == [], "a kill at this moment would leave the file"


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="file/run cannot be made: "):
        reach.require_writable(Root.of(tmp_path / "file/run"))


def test_nobody_waits_for_a_place_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "PATIENCE_SECONDS", 0.01)
    with pytest.raises(StoreError, match="memory://far cannot be reached: no answer within 0 s"):
        reach.in_time(Root.of("memory://far"), threading.Event().wait)
