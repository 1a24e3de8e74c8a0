"""The committed conversations are what their script writes."""

from scripts import make_chat_corpus


def test_the_script_writes_the_committed_file() -> None:
    assert make_chat_corpus.corpus() == make_chat_corpus.TARGET.read_text(encoding="utf-8")
    assert make_chat_corpus.TARGET.stat().st_size < 100_000
