"""The built-in texts: `data.dataset=stories`, and the committed ones."""

import hashlib
import re
from itertools import islice

import pytest

from scripts import make_chat_corpus, make_tiny_corpus
from shardwise.data.reading.stories import STORIES, stories
from tests.arch.source import ROOT


def test_stories_are_the_same_sentences_everywhere() -> None:
    """A change of the words or the sentences is one of the quickstart's results too."""
    texts = list(stories())
    assert len(texts) == len(set(texts)) == STORIES
    assert hashlib.sha256("".join(texts).encode()).hexdigest()[:16] == "83a3501b37b40863"
    for text in islice(stories(), 0, None, 4):
        assert text.endswith("\n")
        assert not re.search(r"[{}]|  |\ba [aeiou]", text), text
        # Each sentence begins with a capital letter, and each quotation ends.
        assert not re.search(r"(^|[.!?] \"?)[a-z]", text), text
        assert text.count('"') % 2 == 0, text


@pytest.mark.parametrize(
    ("script", "name", "most"), [(make_chat_corpus, "chat", 100_000), (make_tiny_corpus, "tiny", 250_000)]
)
def test_the_script_writes_the_committed_file(script, name: str, most: int) -> None:
    target = ROOT / f"src/shardwise/data/corpus/{name}.jsonl"
    assert target == script.TARGET
    assert script.corpus() == target.read_text(encoding="utf-8")
    assert target.stat().st_size < most
