"""The committed texts are what their scripts write."""

import pytest

from scripts import make_chat_corpus, make_tiny_corpus
from tests.arch.source import ROOT


@pytest.mark.parametrize(
    ("script", "name", "most"), [(make_chat_corpus, "chat", 100_000), (make_tiny_corpus, "tiny", 250_000)]
)
def test_the_script_writes_the_committed_file(script, name: str, most: int) -> None:
    target = ROOT / f"src/shardwise/data/corpus/{name}.jsonl"
    assert target == script.TARGET
    assert script.corpus() == target.read_text(encoding="utf-8")
    assert target.stat().st_size < most
