"""Text files from the command line: mixed folders are read; what is wrong is one sentence at any number of ranks."""

import gzip
from pathlib import Path

import pytest

from tests.e2e.command import miniature, within
from tests.e2e.page import run_section


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    """docs/data.md: a folder with .jsonl.gz and .parquet is trained on."""
    _, (trained,) = run_section("Text files", tmp_path)
    assert "data: texts: " in trained.out
    assert " 400 documents" in trained.out


def test_what_is_wrong_is_one_sentence(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"text": "fine"}\n' * 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(packed[:-9])
    miniature(tmp_path)
    said = within("train", "miniature.yaml", "data.path=a.jsonl.gz", "parallel.tensor=2", at=tmp_path).failed(2)
    assert said.count("a.jsonl.gz is cut off: its ") == 1
    assert not (tmp_path / "runs").exists()
