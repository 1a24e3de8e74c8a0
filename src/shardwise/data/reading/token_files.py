"""Files of token ids that a path names: rows in tables, or flat files that are read as one row of tokens."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from shardwise.base.errors import DataError, Problems, raise_problems
from shardwise.base.files import user_path
from shardwise.config import DataConfig
from shardwise.data.cache import spread_digest
from shardwise.data.reading import content, raw_tokens, text_sources, token_rows
from shardwise.data.rows import AnyArray, IntArray, json_digest

# A start looks at so many blocks of tokens of all files together.
_BLOCKS = 256
_BLOCK_TOKENS = 1 << 15


def holds_token_rows(data: DataConfig) -> bool:
    """True if the first row of the first file at `data.path` has token ids."""
    assert data.path is not None
    path = user_path(data.path)
    try:
        if not path.exists():
            return False
        first = text_sources.text_files_at(path, data).files[0]
        return token_rows.token_column(first, data.text_key) is not None
    except DataError:  # opening the path as text will report it
        return False


def flat_token_files(path: Path) -> list[Path]:
    """The flat files at a path, sorted: a file, those of a folder and its folders, or a glob's matches."""
    if path.is_file():
        return [path] if raw_tokens.is_raw_tokens(path) else []
    pattern = glob.escape(str(path)) + "/**" if path.is_dir() else str(path)
    return sorted(file for name in glob.glob(pattern, recursive=True) if raw_tokens.is_raw_tokens(file := Path(name)))  # noqa: PTH207


def datatrove_metadata_files(data: DataConfig) -> list[Path]:
    """The files of datatrove that say which tokenizer made the tokens; they need not be there."""
    assert data.path is not None
    return [raw_tokens.datatrove_metadata_file(file) for file in flat_token_files(user_path(data.path))]


@dataclass(frozen=True)
class FlatTokens:
    """The tokens of flat files, one file after another, mapped into memory: those from `first` on, before `stop`."""

    files: Sequence[raw_tokens.RawTokens]
    vocab_size: int
    first: int
    stop: int

    @staticmethod
    def open(data: DataConfig, vocab_size: int | None, tokenizer_size: int | None) -> FlatTokens:
        """All tokens that `data.path` names.

        Args:
            vocab_size: vocabulary of the model; None: any token is taken.
            tokenizer_size: vocabulary of the tokenizer, by which ids without a header are read; None: `vocab_size`.

        Raises:
            DataError: a file cannot be read, or one of the blocks that are looked at has a token beyond the vocabulary.
        """
        assert data.path is not None
        paths = flat_token_files(user_path(data.path))
        if not paths:
            raise DataError(f"data.path ({data.path}) names no files of tokens that exist: .bin, .npy or .ds")
        files, problems, size = [], Problems(), tokenizer_size or vocab_size
        dtype = None if data.token_dtype == "auto" else data.token_dtype
        # Of a task without documents, datatrove leaves an empty file.
        for path in [path for path in paths if path.stat().st_size] or paths:
            with problems, content.read_errors(path):
                files.append(raw_tokens.RawTokens.open(path, dtype, size, "data.token_dtype"))
        raise_problems(DataError, problems)
        tokens = FlatTokens(files, vocab_size or np.iinfo(np.int64).max, 0, sum(len(file.tokens) for file in files))
        last = max(0, len(tokens) - _BLOCK_TOKENS)
        for start in np.unique(np.linspace(0, last, _BLOCKS).astype(np.int64)).tolist():
            tokens[start : start + _BLOCK_TOKENS]
        return tokens

    @cached_property
    def begins(self) -> IntArray:
        """The first token of each file, then the number of tokens: [files + 1]."""
        return np.cumsum([0, *(len(file.tokens) for file in self.files)])

    @cached_property
    def digest(self) -> str:
        """A digest of blocks that are spread over all files."""
        blocks = max(2, _BLOCKS // len(self.files))
        return json_digest([[str(file.tokens.dtype), spread_digest(file.path, blocks)] for file in self.files])

    @cached_property
    def documents(self) -> IntArray | None:
        """The first token of each document, then the number of tokens; None if a file lacks an index."""
        opened = zip(self.begins, self.files, strict=False)
        ends = [begin + file.ends for begin, file in opened if file.ends is not None]
        if len(ends) < len(self.files):
            return None
        bounds = np.unique(np.concatenate([np.zeros(1, dtype=np.int64), *ends]))
        return bounds[(bounds >= self.first) & (bounds <= self.stop)] - self.first

    def bounds(self) -> IntArray:
        """`documents`, where all files have an index."""
        assert self.documents is not None
        return self.documents

    def part(self, first: int, stop: int) -> FlatTokens:
        """The tokens from the place `first` on, before `stop`."""
        return FlatTokens(self.files, self.vocab_size, first, stop)

    def __len__(self) -> int:
        return self.stop - self.first

    def __getitem__(self, places: slice) -> AnyArray:
        start, stop, _ = places.indices(len(self))
        pieces = [np.empty(0, dtype=self.files[0].tokens.dtype)]
        for number, begin in enumerate(self.begins[:-1].tolist()):
            low, high = max(0, self.first + start - begin), self.first + stop - begin
            if low < min(high, len(self.files[number].tokens)):
                pieces.append(self._checked(number, slice(low, high), low))
        return np.concatenate(pieces)

    def take(self, places: IntArray) -> AnyArray:
        """The tokens at `places`; a DataError names the file and the place of one beyond the vocabulary."""
        places = places + self.first
        number_of = np.searchsorted(self.begins, places, side="right") - 1
        tokens = np.empty(len(places), dtype=np.int64)
        for number in np.unique(number_of).tolist():
            chosen = number_of == number
            tokens[chosen] = self._checked(number, places[chosen] - self.begins[number])
        return tokens

    def _checked(self, number: int, places: IntArray | slice, start: int | None = None) -> AnyArray:
        file = self.files[number]
        found = file.tokens[places]
        for at in np.flatnonzero((found < 0) | (found >= self.vocab_size))[:1]:
            place = start + at if isinstance(places, slice) else places[at]
            raise DataError(f"{file.path}: token {place} {token_rows.beyond_vocabulary(found[at], self.vocab_size)}")
        return found


@dataclass(frozen=True)
class RowFiles:
    """Rows of token ids in JSON lines and parquet files, one file after another, as a data set of one split."""

    data: DataConfig

    splits = ("",)
    num_rows = None

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def shown(self) -> str:
        """The name with its key, for messages."""
        return f"{self.data.key} ({self.name})"

    @cached_property
    def files(self) -> Sequence[Path]:
        """The files, in their order."""
        assert self.data.path is not None
        return text_sources.text_files_at(user_path(self.data.path), self.data).files

    @cached_property
    def readings(self) -> Sequence[tuple[Path, content.FileReading, str]]:
        """Each file with its reading and its column; DataError if one has no rows of tokens."""
        readings = []
        for file in self.files:
            column = token_rows.token_column(file, self.data.text_key)
            if column is None:
                raise DataError(
                    f"{file} must hold lists of token ids in {self.data.text_key!r} or 'input_ids', as "
                    f"{self.files[0]} does: leave it out, or set data.text_key"
                )
            readings.append((file, *column))
        return readings

    @property
    def column(self) -> str:
        """The column of the first file."""
        return self.readings[0][2]

    def stamp(self) -> str:
        """A digest that changes when the files do, found without opening them."""
        facts = [[str(file.absolute()), (status := file.stat()).st_size, status.st_mtime_ns] for file in self.files]
        return json_digest(["rows", facts, self.data.text_key])

    def rows(self, _split: str) -> Iterator[token_rows.TokenRows]:
        """All rows, many at once."""
        for file, reading, column in self.readings:
            yield from token_rows.token_rows_of_file(file, reading, column)
