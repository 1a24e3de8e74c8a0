"""The committed corpus is what its script writes."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]


def test_the_script_writes_the_committed_file() -> None:
    spec = importlib.util.spec_from_file_location("make_tiny_corpus", ROOT / "scripts/make_tiny_corpus.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.corpus() == script.TARGET.read_text(encoding="utf-8")
    assert script.TARGET == ROOT / "src/shardwise/data/corpus/tiny.jsonl"
