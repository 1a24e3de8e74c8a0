"""Five thousand documents for the tests of data formats."""

from pathlib import Path

import numpy as np

from shardwise.config import DataConfig
from shardwise.data.reading.text_sources import open_text_source

SHARED = Path(__file__).resolve().parents[3] / "shared/data"
NUMBER = 5_000


def documents() -> list[str]:
    """Slices of a corpus, of 1 to 400 characters, some with other scripts."""
    file = SHARED / "text/wikitext-2-valid.txt"
    if file.is_file():
        text = file.read_text().replace("<unk>", "unknown")  # the name of a special token of some tokenizers
    else:
        text = "".join(piece.text for piece in open_text_source(DataConfig(dataset="stories")).pieces())
    generator = np.random.default_rng(0)
    starts, lengths = generator.integers(0, len(text) - 400, NUMBER), generator.integers(1, 400, NUMBER)
    extra = (" 日本語 — naïve 🙂", *("" for _ in range(49)))
    return [text[s : s + n] + extra[i % 50] for i, (s, n) in enumerate(zip(starts, lengths, strict=True))]
