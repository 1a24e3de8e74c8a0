"""What data hold, told from little of them where there is much: seconds and bounded memory, whatever their size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise import hub
from shardwise.config import data_from
from shardwise.data.formats.hdf5 import reads_shards
from shardwise.data.reading.megatron import is_indexed
from shardwise.data.samples.sampler import IntArray
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.errors import ConfigError, DataError

_BARS = 12


@dataclass(frozen=True)
class Lengths:
    """How long things are.

    Attributes:
        what: the things and the unit, such as "tokens of a document". counted: those that were looked at, of `number`;
        `number` is None where nobody knows. bins: lengths from, to (included), and how many.
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
        """Of at least one length; the bins are powers of 2 wide, or of 4 where these would be many."""
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
        text: decoded; None where there is no tokenizer. ids: None of what is text.
    """

    number: int
    text: str | None
    ids: Sequence[int] | None


@dataclass(frozen=True)
class Inspection:
    """What data hold.

    Attributes:
        rows: names and what they are, in the order in which to show them. counts: the same for programs. ids: the
        lowest and the highest token of those looked at, and how many these are. notes: what to know beside.
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
    """Shows tokens as text, where a tokenizer is at hand.

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
        """Ids that the tokenizer does not have are left to be shown as ids."""
        values = [int(each) for each in ids]
        if self.tokenizer is None or any(not 0 <= each < self.tokenizer.vocab_size for each in values):
            return Sample(number, None, values)
        return Sample(number, self.tokenizer.decode(values), values)


def inspect(path: str, *, tokenizer: str | None, samples: int, text_key: str) -> Inspection:
    """Looks at Megatron's .bin and .idx, HDF5 shards, an arrow folder or file, or text.

    Raises:
        DataError: nothing of the kind is there, or it is damaged.
    """
    from shardwise.prepare import formats

    place = Path(path).expanduser()
    data = data_from({"path": path, "text_key": text_key})
    folder = place.parent if place.suffix == ".arrow" else place
    if formats.is_arrow(folder):
        return formats.arrow(folder, tokenizer, samples)
    if is_indexed(path):
        return formats.megatron(path, tokenizer, samples)
    if reads_shards(data):
        return formats.hdf5(data, tokenizer, samples)
    if not place.exists():
        where = "" if place.is_absolute() else f" in {Path.cwd()}"
        raise DataError(
            f"PATH ({path}) does not exist{where}: name Megatron's PREFIX, HDF5 shards, an arrow folder or text"
        )
    return formats.text(data, tokenizer, samples)


def spread(number: int, most: int) -> IntArray:
    """`most` numbers spread evenly over 0 … number - 1, or all of them where there are no more."""
    if number <= most:
        return np.arange(number, dtype=np.int64)
    return np.arange(most, dtype=np.int64) * (number - 1) // (most - 1)
