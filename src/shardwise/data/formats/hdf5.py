"""Samples of BERT from HDF5 shards: sentence pairs whose tokens were masked when the shards were made.

    input_ids, input_mask, segment_ids   [N, S]  tokens; 1 for a token and 0 for padding; 0 in the first segment, else 1
    masked_lm_positions, masked_lm_ids   [N, P]  filled up with zeros: the first position 0 ends a row's list
    next_sentence_labels                 [N]     0 where the second segment follows the first, else 1

N and P may be others in each shard; the integers may have any width. A sample is a row of a shard.

Shapes: N = rows of a shard, B = samples, S = sequence length, P = predictions of a sample, at most.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.config import Config, DataConfig
from shardwise.config.data import MASKED_FRACTION
from shardwise.data import cache
from shardwise.data.formats.common import kept_tokenizer, padding_problems, require_bert
from shardwise.data.reading.hdf5 import ANEW, KEYS, Shard, library, opened, unreadable
from shardwise.data.reading.manifest import of_folder, tokenizer_problems
from shardwise.data.reading.unpacking import Chunked, unpack
from shardwise.data.samples.batch import IGNORE, Batch, Batches, SampledBatches
from shardwise.data.samples.sampler import IntArray
from shardwise.data.tokens.split import PART_NAMES, Part, part_bounds
from shardwise.data.tokens.tokenizer import Tokenizer, open_user_tokenizer
from shardwise.errors import DataError, listing
from shardwise.units import count, size

PATTERN = "*_training_*.hdf5"
"""The files of a folder that are shards."""
_SUFFIXES = (".hdf5", ".h5")
_VOCABULARY = "set model.vocab_size to that of the tokenizer that made the data"
# Of all shards together; of each the first and the last one at least.
_CHECKED_BLOCKS = 256
# Far below the usual limit of 65,530 maps of a process, of which a shard takes one for each array.
_SHARDS_KEPT = 1024
_PROBLEMS_SHOWN = 5


def reads_shards(data: DataConfig) -> bool:
    """Whether the `data` section names HDF5 shards: by format, or by what lies at the path."""
    if data.format != "auto" or data.path is None:
        return data.format == "hdf5"
    path = Path(data.path).expanduser()
    try:
        if path.is_dir():
            return any(path.glob(PATTERN))
        return path.suffix in _SUFFIXES or any(each.suffix in _SUFFIXES for each in _matches(path))
    except OSError:
        return False  # who opens the path tells of it


def shard_paths(data: DataConfig) -> list[Path]:
    """The files that `data.path` names, by name: one file, the shards of a folder, or what a glob matches.

    Raises:
        DataError: there are none.
    """
    assert data.path is not None
    path = Path(data.path).expanduser()
    try:
        if path.is_file():
            return [path]
        if path.is_dir():
            found, missing = sorted(path.glob(PATTERN)), f"must hold shards, {PATTERN}, and the folder has none"
        else:
            where = "" if path.is_absolute() else f" in {Path.cwd()}"
            found, missing = _matches(path), f"names no file that exists{where}"
    except OSError as error:
        raise unreadable(path, error) from None
    if not found:
        raise DataError(
            f"data.path ({data.path}) {missing}: name an HDF5 file, a folder of {PATTERN} or a glob such as "
            "'FOLDER/*.hdf5'"
        )
    return found


def _matches(path: Path) -> list[Path]:
    """The files that a glob matches, by name; a link to nowhere stays, and fails by its name."""
    found = glob.glob(str(path), recursive=True)  # noqa: PTH207  that of pathlib raises ValueError on some
    return sorted(each for each in map(Path, found) if not each.is_dir())


class Shards:
    """All rows of all shards, one shard after another, for a model of `vocab_size` tokens and `types` segments.

    A shard is opened when one of its rows is read. Of a shard no more is read at once than the rows asked for.
    """

    def __init__(self, shards: Sequence[Shard], vocab_size: int, types: int) -> None:
        self.shards = shards
        self.length = shards[0].length
        self.predictions = max(shard.predictions for shard in shards)
        self._begins = np.cumsum([0, *(shard.rows for shard in shards)])
        self._open: dict[int, dict[str, npt.NDArray[Any]]] = {}
        self._opening = Lock()
        token, place = (vocab_size - 1, _VOCABULARY), (self.length - 1, f"it lies beyond the sequence; {ANEW}")
        self._limits = {
            "input_ids": token,
            "input_mask": (1, ANEW),
            "segment_ids": (types - 1, f"set model.type_vocab_size to what the data have, or {ANEW}"),
            "masked_lm_positions": place,
            "masked_lm_ids": token,
            "next_sentence_labels": (1, ANEW),
        }

    def __len__(self) -> int:
        """Of the rows."""
        return int(self._begins[-1])

    def take(self, rows_B: IntArray) -> dict[str, IntArray]:
        """The arrays of these rows by their keys, int64: [B, S], [B, P] or [B]; P is the largest of any shard.

        Raises:
            DataError: a value is none that the model can read, or a file cannot be read; file and row are named.
        """
        sizes = {"N": len(rows_B), "S": self.length, "P": self.predictions}
        found = {key: np.zeros([sizes[each] for each in dimensions], np.int64) for key, dimensions in KEYS.items()}
        numbers_B = np.searchsorted(self._begins, rows_B, side="right") - 1
        for number in np.unique(numbers_B).tolist():
            chosen = np.flatnonzero(numbers_B == number)
            rows, places = np.unique(rows_B[chosen] - self._begins[number], return_inverse=True)
            for key, array in self._read(number, rows).items():
                if array.ndim == 1:
                    found[key][chosen] = array[places]
                else:
                    found[key][chosen, : array.shape[1]] = array[places]
        return found

    def _read(self, number: int, rows: IntArray) -> dict[str, IntArray]:
        """Ascending rows of one shard."""
        found = {key: array[rows].astype(np.int64) for key, array in self._arrays(number).items()}
        self._check(self.shards[number].path, rows, found)
        return found

    def _arrays(self, number: int) -> dict[str, npt.NDArray[Any]]:
        """Of one shard; of those that are mapped the one that was not used for longest gives way."""
        with self._opening:
            found = self._open.pop(number, None)
            if found is None:
                while len(self._open) >= _SHARDS_KEPT:
                    del self._open[next(iter(self._open))]
                found = self.shards[number].arrays()
            self._open[number] = found
        return found

    def _check(self, path: Path, rows: IntArray, found: dict[str, IntArray]) -> None:
        listed = in_list(found["masked_lm_positions"])
        for key, (largest, what_to_do) in self._limits.items():
            wrong = (found[key] < 0) | (found[key] > largest)
            if KEYS[key] == "NP":
                wrong &= listed
            if wrong.any():
                row, *column = np.argwhere(wrong)[0].tolist()
                place = "".join(f"[{each}]" for each in column)
                raise DataError(
                    f"{path}: row {rows[row]}: {key}{place} ({found[key][row, *column]}) must be in 0 … {largest}: "
                    f"{what_to_do}"
                )
        empty = np.flatnonzero(~found["input_mask"].any(axis=1))
        if empty.size:
            raise DataError(f"{path}: row {rows[empty[0]]}: input_mask must be 1 for a token or more: {ANEW}")
        # What is in no list becomes -1, -2, …, so that only positions of a list can be equal.
        places = np.where(listed, found["masked_lm_positions"], -1 - np.arange(listed.shape[1]))
        ordered = np.sort(places, axis=1)
        twice = np.argwhere(ordered[:, 1:] == ordered[:, :-1])
        if twice.size:
            row, column = twice[0].tolist()
            raise DataError(
                f"{path}: row {rows[row]}: masked_lm_positions must name each position once, and "
                f"{ordered[row, column]} is there twice: {ANEW}"
            )


def in_list(positions_BP: IntArray) -> npt.NDArray[np.bool_]:
    """Which of the masked positions come before the first 0, [B, P]."""
    found: npt.NDArray[np.bool_] = np.logical_and.accumulate(positions_BP != 0, axis=1)
    return found


class ShardBatches(SampledBatches):
    """Batches of the rows `first` to before `after` of all shards; sample `i` is row `first + i`.

    Each epoch has every row once, in another order (`Sampler`); the masks are the same in each.

    Inputs: those of `SentencePairBatches`, with targets at the masked positions alone. A sample that counts nothing is
    the first row, with targets and `next_sentence_B` of `IGNORE`.
    """

    objectives = ("mlm", "nsp")

    def __init__(self, shards: Shards, first: int, after: int, seed: int) -> None:
        super().__init__(after - first, seed)
        self.shards, self.first = shards, first

    def collate(self, indices: IntArray, epochs: IntArray, samples: IntArray) -> Batch:
        real_B = indices >= 0
        found = self.shards.take(np.maximum(indices, 0) + self.first)
        positions_BP = found["masked_lm_positions"]
        listed_BP = in_list(positions_BP)
        targets_BP = np.where(listed_BP & real_B[:, None], found["masked_lm_ids"], IGNORE)
        inputs = {
            "ids_SB": found["input_ids"].T.copy(),
            "token_types_SB": found["segment_ids"].T.copy(),
            "mask_SB": found["input_mask"].T.copy(),
            "positions_PB": np.where(listed_BP, positions_BP, 0).T.copy(),
            "targets_PB": targets_BP.T.copy(),
            "next_sentence_B": np.where(real_B, found["next_sentence_labels"], IGNORE),
        }
        counts = np.array([np.count_nonzero(targets_BP != IGNORE), np.count_nonzero(real_B)])
        return Batch(inputs, counts, samples)


@dataclass(frozen=True)
class PreparedShards:
    """`PreparedData` of HDF5 shards.

    Attributes:
        bounds: the first row of the training, the evaluation and the test part, then the number of rows.
    """

    tokenizer_path: Path | None
    shards: Shards
    bounds: Sequence[int]
    fingerprint: str
    summary: str

    def rows(self, part: Part) -> range:
        """The rows of a part."""
        number = list(PART_NAMES).index(part)
        return range(self.bounds[number], self.bounds[number + 1])

    def count(self, part: Part) -> int:
        """Tokens of a part, padding included."""
        return len(self.rows(part)) * self.shards.length

    def beginning(self, part: Part, tokens: int) -> list[int]:
        """The first tokens of a part, as they are masked."""
        rows = self.rows(part)[: -(-tokens // self.shards.length)]
        ids: list[int] = self.shards.take(np.array(rows, dtype=np.int64))["input_ids"].ravel()[:tokens].tolist()
        return ids

    def batches(self, config: Config, part: Part, *, evaluation: bool = False, tail: bool = False) -> Batches | None:
        """As `PreparedData`; neither `evaluation` nor `tail` makes a difference."""
        rows = self.rows(part)
        return ShardBatches(self.shards, rows.start, rows.stop, config.train.seed) if rows else None


def prepare_shards(
    config: Config, root: Path, announce: Callable[[str], None] | None = None, *, any_size: bool
) -> PreparedShards:
    """Opens the shards of `config`; what lies in chunks, and the tokenizer where one is named, is kept in the cache.

    Raises:
        DataError: with every problem of the files and the tokenizer, or of the parts' sizes.
    """
    data, model = config.data, require_bert(config)
    shards, problems = [], []
    library()
    for path in shard_paths(data):
        try:
            shards.append(Shard.open(path, config.train.sequence_length))
        except DataError as error:
            problems += error.problems
    if len(problems) > _PROBLEMS_SHOWN:
        more = len(problems) - _PROBLEMS_SHOWN
        problems = [*problems[:_PROBLEMS_SHOWN], f"{more} more of the shards of data.path ({data.name}) are wrong too"]
    tokenizer: Tokenizer | None = None
    if data.tokenizer is not None:
        try:
            tokenizer = open_user_tokenizer(data.tokenizer, model.vocab_size, pairs=True)
            problems += padding_problems(tokenizer.pair_tokens(), config)
            folders = sorted({shard.path.parent for shard in shards})
            problems += tokenizer_problems(tokenizer, data.tokenizer, map(of_folder, folders))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    opened = Shards(_unpacked(shards, root, announce), model.vocab_size, model.type_vocab_size)
    bounds = part_bounds(len(opened), data.split_weights)
    problems = [] if any_size else _too_few(bounds, config)
    if problems:
        raise DataError(problems)
    return PreparedShards(
        tokenizer_path=None if tokenizer is None else kept_tokenizer(config, tokenizer, root),
        shards=opened,
        bounds=bounds,
        fingerprint=_fingerprint(shards, bounds),
        summary=_summary(opened, bounds, config),
    )


def _unpacked(shards: Sequence[Shard], root: Path, announce: Callable[[str], None] | None) -> list[Shard]:
    try:
        chunked = [Chunked(shard.path, shard.nbytes) for shard in shards if shard.chunked]
        folders = unpack(root, chunked, list(KEYS), opened, announce)
    except OSError as error:
        raise unreadable(Path(error.filename), error) from None
    return [replace(shard, unpacked=folders.get(shard.path)) for shard in shards]


def _too_few(bounds: Sequence[int], config: Config) -> list[str]:
    parts: tuple[Part, ...] = ("train", "eval") if config.train.eval_every > 0 else ("train",)
    return [
        f"the {PART_NAMES[part]} part of data.path {config.data.name} (0 of {bounds[-1]:,} samples at "
        f"data.split={config.data.split}) must hold at least one: give more shards or another split"
        for number, part in enumerate(parts)
        if bounds[number + 1] == bounds[number]
    ]


def _fingerprint(shards: Sequence[Shard], bounds: Sequence[int]) -> str:
    """Of the names and of blocks that are spread over the shards: reading all of them would take minutes."""
    blocks = max(2, _CHECKED_BLOCKS // len(shards))
    try:
        digests = [[shard.path.name, cache.spread_digest(shard.path, blocks)] for shard in shards]
    except OSError as error:
        raise unreadable(Path(error.filename), error) from None
    described = {"digests": digests, "bounds": list(bounds)}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _summary(shards: Shards, bounds: Sequence[int], config: Config) -> str:
    number, total = len(shards.shards), sum(shard.path.stat().st_size for shard in shards.shards)
    sizes = dict(zip(PART_NAMES, np.diff(bounds).tolist(), strict=True))
    shown = [f"{count(sizes[part])} {name}" for part, name in PART_NAMES.items() if part != "test" or sizes[part]]
    unread = []
    if config.data.max_predictions not in (None, shards.predictions):
        unread.append(f"data.max_predictions ({config.data.max_predictions})")
    if config.data.masked_fraction != MASKED_FRACTION:
        unread.append(f"data.masked_fraction ({config.data.masked_fraction})")
    told = f", whatever {listing(unread)} may say" if unread else ""
    return (
        f"{config.data.name}: {size(total)}, {number:,} shard{'' if number == 1 else 's'}, {listing(shown)} samples of "
        f"{shards.length:,} tokens, masked when they were made, at most {shards.predictions:,} each{told}"
    )
