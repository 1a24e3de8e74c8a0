"""Inspections: the contents of data of any format, for a user and for programs.

An inspection takes seconds and bounded memory, as only samples of large data are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np

from shardwise.base.errors import ConfigError
from shardwise.base.units import count, counted
from shardwise.data.formats.data_format import FirstDocuments, InspectedSample, Inspection
from shardwise.data.rows import IntArray, Integers
from shardwise.data.samples.packing import PackedSamples
from shardwise.data.tokens.tokenizer import Tokenizer, load_tokenizer

# Two lines of a terminal hold no more of a sample.
_SAMPLE_TOKENS = 64
_SAMPLE_CHARACTERS = 400


def inspected_texts(texts: Iterable[str]) -> list[InspectedSample]:
    """Samples of an inspection, which show the beginning of each text."""
    return [InspectedSample(number, text[:_SAMPLE_CHARACTERS], None) for number, text in enumerate(texts)]


def inspection_with_tokens(
    inspection: Inspection, named: str | None, first: Iterable[Integers], looked_at: Sequence[Integers], total: int
) -> Inspection:
    """An inspection of data that hold tokens, with the range of the ids and the first samples.

    Args:
        inspection: inspection without them; its manifest may name the tokenizer that shows samples as text.
        named: tokenizer that the user names instead; None if there is none.
        looked_at: some of the tokens, or all.

    Raises:
        ConfigError: the tokenizer that the user names cannot be opened.
    """
    tokenizer, notes = _tokenizer(named, inspection.manifest)
    blocks = [block for block in looked_at if block.size]
    seen = sum(block.size for block in blocks)
    lowest = min((int(block.min()) for block in blocks), default=0)
    highest = max((int(block.max()) for block in blocks), default=0)
    if lowest < 0:
        notes.append(
            f"the lowest id ({lowest:,}) is negative, which no token is: a run refuses it; prepare the data again"
        )
    recorded = None if inspection.manifest is None else inspection.manifest["tokenizer"].get("vocab_size")
    for owner, vocabulary in (("tokenizer", tokenizer and tokenizer.vocab_size), ("manifest", recorded)):
        if isinstance(vocabulary, int) and highest >= vocabulary:
            notes.append(
                f"the highest id ({highest:,}) is beyond the vocabulary of the {owner} ({vocabulary:,}): other data, "
                "or another tokenizer"
            )
    samples = []
    for number, row in enumerate(first):
        ids = [int(token) for token in row[:_SAMPLE_TOKENS]]
        text = None
        if tokenizer is not None and all(0 <= token < tokenizer.vocab_size for token in ids):
            text = tokenizer.decode(ids)
        samples.append(InspectedSample(number, text, ids))
    limit = "" if seen >= total else f" in {count(seen)} tokens that were looked at"
    return replace(
        inspection,
        rows=[*inspection.rows, ("ids", f"{lowest:,} … {highest:,}{limit}")],
        counts={**inspection.counts, "ids": {"lowest": lowest, "highest": highest, "looked_at": seen}},
        samples=samples,
        notes=notes,
    )


def inspection_with_packing(
    inspection: Inspection, named: str | None, documents: FirstDocuments, length: int, samples: int
) -> Inspection:
    """An inspection whose samples are those of `data.packing=best_fit` at a sequence length."""
    packed = PackedSamples.from_bounds(documents.bounds, length)
    tokenizer, _ = _tokenizer(named, inspection.manifest)
    limit = "" if documents.is_all else f"; looked at: the first {counted(packed.facts.documents, 'document')}"
    shown = []
    for number, (begin, end) in enumerate(pairwise(packed.begins[: samples + 1].tolist())):
        pieces = packed.pieces[begin:end].tolist()
        texts = []
        for start, size in pieces:
            row = documents.tokens.take(np.arange(start, start + min(size, max(1, _SAMPLE_TOKENS // len(pieces)))))
            text = " ".join(map(str, row)) if tokenizer is None else tokenizer.decode(row.tolist())
            texts.append(f"{counted(size, 'token')}: {text}")
        padding = length - sum(size for _, size in pieces)
        texts += [f"{counted(padding, 'token')} of padding"] if padding else []
        shown.append(InspectedSample(number, " ‖ ".join(texts), None))
    return replace(
        inspection,
        rows=[*inspection.rows, ("samples", f"{packed.facts}{limit}")],
        counts={**inspection.counts, "packing": asdict(packed.facts)},
        samples=shown,
    )


def _tokenizer(named: str | None, manifest: Mapping[str, Any] | None) -> tuple[Tokenizer | None, list[str]]:
    """The tokenizer that the user names, else that of the manifest if it is still the same; and the note if neither."""
    if named is not None:
        return load_tokenizer(named), []
    if manifest is None or manifest["tokenizer"]["sha256"] is None:
        return None, ["samples are ids: --tokenizer shows them as text"]
    name = manifest["tokenizer"].get("name")
    try:
        tokenizer = load_tokenizer(str(name), cached=True)
    except ConfigError:
        return None, [f"samples are ids: the tokenizer {name} is not here, name it by --tokenizer"]
    if tokenizer.digest != manifest["tokenizer"]["sha256"]:
        return None, [f"samples are ids: {name} is another tokenizer now, name it by --tokenizer"]
    return tokenizer, []


def evenly_spread(number: int, most: int) -> IntArray:
    """Numbers of the rows that an inspection looks at: `most`, spread evenly over 0 … number - 1, or all of them."""
    if number <= most:
        return np.arange(number, dtype=np.int64)
    return np.arange(most, dtype=np.int64) * (number - 1) // (most - 1)
