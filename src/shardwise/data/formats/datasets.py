"""Data sets that hold tokens already: rows of ids are joined, checked and cached, without a tokenizer."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.config import Config
from shardwise.data import cache
from shardwise.data.formats.common import (
    PreparedText,
    in_pairs,
    kept_tokenizer,
    needed_parts,
    too_short,
    without_tokenizer,
)
from shardwise.data.reading.datasets import DataSet
from shardwise.data.reading.manifest import of_folder, tokenizer_problems
from shardwise.data.tokens.encoding import token_writers
from shardwise.data.tokens.split import PART_NAMES, Part, Split, plan_split
from shardwise.data.tokens.tokenizer import Tokenizer, open_user_tokenizer
from shardwise.errors import DataError, listing
from shardwise.units import count, size


def prepare_rows(
    dataset: DataSet, config: Config, root: Path, announce: Callable[[str], None] | None, *, any_size: bool
) -> PreparedText | None:
    """Opens a data set's column of tokens from the cache, which is filled first where it has none; None: it is text.

    Rows are joined as they are: nothing is put between them. Each part is one row of tokens then, which samples of any
    length are cut from.

    Raises:
        DataError: a token is beyond the vocabulary or null, or there are too few.
    """
    if cache.known_content(root, dataset.stamp()) is not None:
        return None
    key = _key(dataset, config)
    entry = cache.open_entry(root, key)
    if entry is None:
        with cache.locked(root, key) as exclusive:
            entry = cache.open_entry(root, key)
            if entry is None:
                if not dataset.holds_tokens:
                    return None
                if announce is not None:
                    announce(f"preparing the data {dataset.name}: once, then cached in {root}")
                with cache.writing(root), cache.building(root, key, exclusive) as folder:
                    _build(folder, dataset, config)
                entry = cache.open_entry(root, key)
    if entry is None:
        raise cache.returns_other_bytes(root)
    return _prepared(entry, dataset, config, root, any_size)


def _key(dataset: DataSet, config: Config) -> str:
    weights = config.data.split_weights
    parts = {
        "format": cache.FORMAT,
        "rows": dataset.stamp(),
        "split": list(config.data.split_names) or weights[1] / sum(weights),
        "vocab_size": config.model.vocab_size,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _build(folder: Path, dataset: DataSet, config: Config) -> None:
    vocab_size, dtype = config.model.vocab_size, cache.token_dtype(config.model.vocab_size)
    split = None if config.data.split_names else _plan(dataset, config)
    rows = 0
    with ExitStack() as files:
        writers = token_writers(files, dtype, folder)
        for part, number, tokens in _parts(dataset, vocab_size, split):
            writers[part].write(tokens)
            writers[part].documents += number
            rows += number
    facts: dict[str, Any] = {part: writer.facts() for part, writer in writers.items()}
    digests = ["tokens", dtype.str, *(row["sha256"] for row in facts.values())]
    manifest: dict[str, Any] = {
        "dtype": dtype.str,
        "vocab_size": vocab_size,
        "documents": rows,
        **facts,
        "tokenizer": None,
        "fingerprint": hashlib.sha256("\n".join(digests).encode()).hexdigest(),
    }
    cache.write_manifest(folder, manifest)


def _plan(dataset: DataSet, config: Config) -> Split:
    lengths = [_lengths(array) for name in dataset.splits for array in dataset.rows(name)]
    return plan_split(np.concatenate(lengths or [np.empty(0, dtype=np.int64)]), config.data.split_weights)


def _parts(
    dataset: DataSet, vocab_size: int, split: Split | None
) -> Iterator[tuple[Part, int, npt.NDArray[np.integer[Any]]]]:
    """Rows of a part: how many begin, and their tokens. Without `split`, the splits that are read are the parts."""
    start = 0
    for part, name in zip(PART_NAMES, dataset.splits, strict=False):
        first = 0
        for array in dataset.rows(name):
            lengths, after = _lengths(array), first + len(array)
            tokens = _tokens(array, lengths, dataset.where(name), first, vocab_size)
            if split is None:
                yield part, len(array), tokens
            elif split.documents is not None:
                held = split.documents[first:after]
                yield "eval", int(held.sum()), tokens[np.repeat(held, lengths)]
                yield "train", int((~held).sum()), tokens[~np.repeat(held, lengths)]
            else:
                cut = min(max(split.boundary - start, 0), len(tokens))
                begun = int(np.searchsorted(np.cumsum(lengths) - lengths, cut))
                yield "train", begun, tokens[:cut]
                yield "eval", len(array) - begun, tokens[cut:]
            first, start = after, start + len(tokens)


def _lengths(array: Any) -> npt.NDArray[np.int64]:
    """Tokens of each row."""
    found = importlib.import_module("pyarrow.compute").list_value_length(array)
    lengths: npt.NDArray[np.int64] = found.to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def _tokens(
    array: Any, lengths: npt.NDArray[np.int64], where: str, first: int, vocab_size: int
) -> npt.NDArray[np.integer[Any]]:
    """All tokens of rows of these lengths, of which the first is row number `first`."""
    flat = array.flatten()
    if flat.null_count:
        at = flat.is_null().to_pylist().index(True)
        raise DataError(f"{_place(at, lengths, where, first)} is null: a row must hold tokens alone")
    tokens: npt.NDArray[np.integer[Any]] = flat.to_numpy()
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        at = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
        raise DataError(
            f"{_place(at, lengths, where, first)} ({tokens[at]}) must be in 0 … {vocab_size - 1}: set model.vocab_size "
            "to that of the tokenizer that made the data"
        )
    return tokens


def _place(at: int, lengths: npt.NDArray[np.int64], where: str, first: int) -> str:
    ends = np.cumsum(lengths)
    row = int(np.searchsorted(ends, at, side="right"))
    return f"{where}: row {first + row}: token {at - int(ends[row] - lengths[row])}"


def _prepared(entry: cache.Entry, dataset: DataSet, config: Config, root: Path, any_size: bool) -> PreparedText:
    problems = without_tokenizer(config)
    if in_pairs(config) and not problems:
        problems.append(
            f"model.family ({config.model.family}) must have text, for its pairs of sentences, and {dataset.shown} "
            "holds tokens: name a column of text by data.text_key"
        )
    tokenizer: Tokenizer | None = None
    if config.data.tokenizer is not None:
        try:
            tokenizer = open_user_tokenizer(config.data.tokenizer, config.model.vocab_size)
            folders = [] if config.data.path is None else [Path(config.data.path).expanduser()]
            problems += tokenizer_problems(tokenizer, config.data.tokenizer, map(of_folder, folders))
        except DataError as error:
            problems += error.problems
    problems = problems or too_short(entry, dataset.name, config, [] if any_size else needed_parts(config))
    if problems:
        raise DataError(problems)
    tokens = {part: entry.tokens(part) for part in PART_NAMES}
    shown = [f"{count(len(row))} {PART_NAMES[part]}" for part, row in tokens.items() if part != "test" or len(row)]
    rows = entry.manifest["documents"]
    return PreparedText(
        tokenizer_path=None if tokenizer is None else kept_tokenizer(config, tokenizer, root),
        train_tokens=tokens["train"],
        eval_tokens=tokens["eval"],
        test_tokens=tokens["test"],
        fingerprint=entry.manifest["fingerprint"],
        vocab_size=config.model.vocab_size if tokenizer is None else tokenizer.vocab_size,
        summary=f"{dataset.name}: {size(sum(row.nbytes for row in tokens.values()))}, {rows:,} "
        f"row{'' if rows == 1 else 's'}, {listing(shown)} tokens",
    )
