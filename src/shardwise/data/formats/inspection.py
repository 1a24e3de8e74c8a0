"""What an inspection shows of data: found in seconds and in bounded memory, as only samples of large data are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise import hub
from shardwise.data.samples.sampler import IntArray
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.errors import ConfigError
from shardwise.units import count

_BARS = 12
SAMPLE_TOKENS, SAMPLE_CHARACTERS = 64, 400
"""Shown of a sample, at most."""


@dataclass(frozen=True)
class Lengths:
    """How long things are.

    Attributes:
        what: the things and the unit, such as "tokens of a document".
        counted: how many were measured.
        number: how many there are; None where that is not known.
        bins: the shortest and the longest length of each bin, and how many lengths it has.
    """

    what: str
    counted: int
    number: int | None
    least: int
    most: int
    mean: float
    median: float
    bins: Sequence[tuple[int, int, int]]

    @classmethod
    def of(cls, what: str, lengths: IntArray, number: int | None) -> Lengths:
        """The statistics of at least one length; bins are powers of 2 wide, or of 4 where these would be too many."""
        least, most = int(lengths.min()), int(lengths.max())
        step = 1 if most.bit_length() - least.bit_length() < _BARS else 2
        bits = np.ceil(np.log2(lengths + 1)).astype(np.int64)
        bins = []
        for low in range(int(bits.min()), int(bits.max()) + 1, step):
            held = lengths[(bits >= low) & (bits < low + step)]
            first, last = (1 << low) >> 1, (1 << (low + step - 1)) - 1
            bins.append((max(first, least), min(max(last, first), most), len(held)))
        return cls(what, len(lengths), number, least, most, float(lengths.mean()), float(np.median(lengths)), bins)


@dataclass(frozen=True)
class Sample:
    """The beginning of one document or row.

    Attributes:
        text: the decoded tokens; None where there is no tokenizer.
        ids: the tokens; None where the data are text.
    """

    number: int
    text: str | None
    ids: Sequence[int] | None


@dataclass(frozen=True)
class Inspection:
    """What data hold.

    Attributes:
        rows: names and what they are, in the order in which to show them.
        counts: the same for programs.
        notes: warnings, and why samples are shown as ids.
    """

    path: str
    format: str
    bytes: int
    rows: Sequence[tuple[str, str]]
    counts: Mapping[str, Any]
    lengths: Lengths | None
    samples: Sequence[Sample]
    manifest: Mapping[str, Any] | None
    notes: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True)
class Decoder:
    """Shows tokens as text, where there is a tokenizer.

    Attributes:
        note: why there is none.
    """

    tokenizer: Tokenizer | None
    note: str | None = None

    @classmethod
    def find(cls, named: str | None, manifest: Mapping[str, Any] | None) -> Decoder:
        """The tokenizer that the user names, else that of the manifest if it is still the same.

        Raises:
            ConfigError: the user's cannot be opened.
        """
        if named is not None:
            return cls(Tokenizer.load(hub.resolve_tokenizer(named)))
        if manifest is None or manifest["tokenizer"]["sha256"] is None:
            return cls(None, "samples are ids: --tokenizer shows them as text")
        made = manifest["tokenizer"]
        try:
            tokenizer = Tokenizer.load(hub.resolve_tokenizer(str(made.get("name")), cached=True))
        except ConfigError:
            return cls(None, f"samples are ids: the tokenizer {made.get('name')} is not here, name it by --tokenizer")
        if tokenizer.digest != made["sha256"]:
            return cls(None, f"samples are ids: {made.get('name')} is another tokenizer now, name it by --tokenizer")
        return cls(tokenizer)

    def sample(self, number: int, ids: npt.NDArray[np.integer[Any]]) -> Sample:
        """The sample of these ids; it has no text where the tokenizer lacks one of them."""
        values = [int(each) for each in ids]
        if self.tokenizer is None or any(not 0 <= each < self.tokenizer.vocab_size for each in values):
            return Sample(number, None, values)
        return Sample(number, self.tokenizer.decode(values), values)


def spread(number: int, most: int) -> IntArray:
    """`most` numbers spread evenly over 0 … number - 1, or all of them where there are no more."""
    if number <= most:
        return np.arange(number, dtype=np.int64)
    return np.arange(most, dtype=np.int64) * (number - 1) // (most - 1)


def describe_ids(lowest: int, highest: int, seen: int, total: int) -> str:
    """The range of the token ids that were looked at, `seen` of `total`."""
    return f"{lowest:,} … {highest:,}" + ("" if seen >= total else f" in {count(seen)} tokens that were looked at")


def token_notes(decoder: Decoder, record: Mapping[str, Any] | None, lowest: int, highest: int) -> list[str]:
    """What to know of tokens in this range: no tokenizer shows them, or they are of another vocabulary."""
    notes = [] if decoder.note is None else [decoder.note]
    if lowest < 0:
        notes.append(
            f"the lowest id ({lowest:,}) is negative, which no token is: a run refuses it; prepare the data anew"
        )
    sizes = [] if decoder.tokenizer is None else [("the tokenizer", decoder.tokenizer.vocab_size)]
    if record is not None and isinstance(record["tokenizer"].get("vocab_size"), int):
        sizes.append(("the manifest", record["tokenizer"]["vocab_size"]))
    return notes + [
        f"the highest id ({highest:,}) is beyond the vocabulary of {whose} ({vocabulary:,}): other data, or another "
        "tokenizer"
        for whose, vocabulary in sizes
        if highest >= vocabulary
    ]
