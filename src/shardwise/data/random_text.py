"""Random text with structure, from which a model learns in few steps and which needs no download."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from shardwise.data.cache import token_dtype
from shardwise.data.formats.common import PreparedText
from shardwise.data.samples.sentences import Sentences
from shardwise.data.split import Part
from shardwise.data.tokens.tokenizer import PairTokens


def random_text(vocabulary: int = 131, samples: int = 64, length: int = 16, *, pairs: bool = False) -> PreparedText:
    """Tokens, four in five of which follow from their predecessor.

    Args:
        pairs: True if the tokens are in sentences, for samples of sentence pairs.
    """
    generator = np.random.default_rng(0)
    tokens = [1]
    for noise in generator.random(samples * length):
        if noise < 0.8:
            tokens.append((tokens[-1] * 7 + 3) % vocabulary)
        else:
            tokens.append(int(noise * 1000) % vocabulary)
    row = np.asarray(tokens, token_dtype(vocabulary))
    evaluation = row[: 8 * length + 1]
    data = PreparedText(Path(), "test", "test", {"train": row, "eval": evaluation, "test": row[:0]}, vocabulary)
    if not pairs:
        return data
    parts: tuple[tuple[Part, int], ...] = (("train", len(row)), ("eval", len(evaluation)))
    sentences = {part: _sentences(tokens) for part, tokens in parts}
    return replace(data, sentences=sentences, pair_tokens=PairTokens(pad=0, unk=1, cls=2, sep=3, mask=4))


def _sentences(tokens: int) -> Sentences:
    """Sentences of 5 tokens and documents of 10 sentences; the last ones take the remainder and are longer."""
    bounds = np.append(np.arange(0, tokens - 4, 5), tokens)
    documents = np.append(np.arange(0, len(bounds) - 10, 10), len(bounds) - 1)
    return Sentences(bounds, documents)
