"""Data sets of the library `datasets`: their text as any text, or tokens, of which rows are joined as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.base import hub
from shardwise.base.errors import DataError, raise_problems
from shardwise.base.files import user_path
from shardwise.base.units import counted, size
from shardwise.config import BUILT_IN_TEXTS, DataConfig
from shardwise.data import cache
from shardwise.data.formats import inspections, packing_cache, prepared_data, streamed_text, text
from shardwise.data.formats.data_format import DataFormat, Inspection, LengthStatistics
from shardwise.data.formats.text import TextSplit, plan_text_split
from shardwise.data.reading.data_manifest import manifest_of_folder, read_manifest
from shardwise.data.reading.dataset_tables import DataSet, is_saved_data_set, place_of_dataset, require_datasets_library
from shardwise.data.reading.text_sources import ColumnSource
from shardwise.data.reading.token_files import RowFiles
from shardwise.data.request import DataRequest
from shardwise.data.rows import PART_NAMES, PARTS, IntArray, Integers, Part, part_sizes_text
from shardwise.data.tokens.encoding import token_writers
from shardwise.data.tokens.tokenizer import open_user_tokenizer

# An inspection takes seconds: about the most rows that it looks at.
_ARROW_ROWS = 1024
_TEXT = ("string", "large_string")
TokenRowSource = DataSet | RowFiles


def _open_data(request: DataRequest) -> prepared_data.PreparedText:
    """Opens a data set's column of text or of tokens from the cache, which is filled first if it has none.

    The data set itself is opened as late as possible, as its library takes seconds to import and asks the hub: the
    cache knows the content of a text, or has an entry of tokens.
    """
    if request.data.streaming:
        return streamed_text.open_stream(request)
    dataset = ColumnSource.open(request.data)
    is_known_text = cache.known_text_digest(request.root, dataset.stamp()) is not None
    if not is_known_text:
        key = _key(dataset, request)
        if cache.open_tokens(request.root, key) is not None or _holds_tokens(dataset, request.root):
            return open_token_rows(dataset, request)
    if request.data.tokenizer is None and (request.any_size or request.weights is not None):
        raise DataError(
            f"{dataset.shown} holds text, which is read with the model's tokenizer: name it by data.tokenizer"
        )
    return text.open_text(request, dataset)


def open_token_rows(dataset: TokenRowSource, request: DataRequest) -> prepared_data.PreparedText:
    """Opens a data set's rows of tokens from the cache, which is filled first if it has none."""
    raise_problems(DataError, prepared_data.document_mark_problems(request.data, of_rows=True))
    entry = cache.open_or_build_tokens(
        request.root,
        _key(dataset, request),
        lambda folder: _build(folder, dataset, request),
        f"{dataset.name}: once",
        request.announce,
    )
    return packing_cache.with_packed_samples(request, _prepared(entry, dataset, request))


def _appended(request: DataRequest) -> int | None:
    data = request.data
    if not data.append_eod or data.eod_token is not None:
        return data.eod_token if data.append_eod else None
    if data.tokenizer is None:
        raise DataError(
            "data.append_eod (true) needs the id that ends a document: set data.eod_token or data.tokenizer"
        )
    return open_user_tokenizer(data.tokenizer, request.vocab_size).required_end()


def _holds_tokens(dataset: DataSet, root: Path) -> bool:
    """Opens the data set to know: one process does so at a time, as a data set of the hub is fetched first."""
    with cache.lock_entry(root, dataset.stamp()[:32]):
        return dataset.holds_tokens


def _key(dataset: TokenRowSource, request: DataRequest) -> str:
    weights = request.data.split_weights
    end = _appended(request)
    return cache.cache_key(
        {
            "rows": dataset.stamp(),
            "split": list(request.data.split_names) or weights[1] / sum(weights),
            "vocab_size": request.vocab_size,
        }
        | ({} if end is None else {"end": end})
    )


def _build(folder: Path, dataset: TokenRowSource, request: DataRequest) -> dict[str, Any]:
    vocab_size = request.vocab_size
    dtype = cache.token_dtype(vocab_size)
    split = None if request.data.split_names else _plan(dataset, request)
    last: Counter[int] = Counter()
    with ExitStack() as files:
        writers = token_writers(files, dtype, folder)
        for part, number, tokens in _parts(dataset, request, split, last):
            writers[part].write(tokens)
            writers[part].documents += number
    facts: dict[str, Any] = {part: writer.facts() for part, writer in writers.items()}
    # The word keeps fingerprints of tokens apart from those of text.
    digests = ["tokens", dtype.str, *(row["sha256"] for row in facts.values())]
    return {
        "dtype": dtype.str,
        "vocab_size": vocab_size,
        "documents": sum(writer.documents for writer in writers.values()),
        "last": last.most_common(1),
        **facts,
        "tokenizer": None,
        "fingerprint": cache.data_fingerprint(digests),
    }


def _plan(dataset: TokenRowSource, request: DataRequest) -> TextSplit:
    end = _appended(request)
    lengths = [rows.ended(end).lengths for name in dataset.splits for rows in dataset.rows(name)]
    return plan_text_split(np.concatenate(lengths or [np.empty(0, dtype=np.int64)]), request.data.split_weights)


def _parts(
    dataset: TokenRowSource, request: DataRequest, split: TextSplit | None, last: Counter[int]
) -> Iterator[tuple[Part, int, Integers]]:
    """Rows of a part: the number of them that begin, and their tokens, joined with nothing between them.

    Without `split`, the splits that are read are the parts. `last` counts the last tokens of rows, as the data have
    them.
    """
    start = 0  # tokens of the data set before these rows
    end = _appended(request)
    for part, name in zip(PART_NAMES, dataset.splits, strict=False):
        first = 0
        for given in dataset.rows(name):
            given.require_below(request.vocab_size)
            last.update(given.last.tolist())
            rows = given.ended(end)
            lengths, tokens = rows.lengths, rows.tokens
            if split is None:
                yield part, len(rows), tokens
            else:
                if split.held_out is not None:
                    rows_held_out = split.held_out[first : first + len(rows)]
                    tokens_held_out = np.repeat(rows_held_out, lengths)
                else:  # of tokens, the boundary is a token and no character
                    rows_held_out = start + np.cumsum(lengths) - lengths >= split.boundary
                    tokens_held_out = start + np.arange(len(tokens)) >= split.boundary
                yield "train", int((~rows_held_out).sum()), tokens[~tokens_held_out]
                yield "eval", int(rows_held_out.sum()), tokens[tokens_held_out]
            first += len(rows)
            start += len(tokens)


def _prepared(entry: cache.CacheEntry, dataset: TokenRowSource, request: DataRequest) -> prepared_data.PreparedText:
    problems = prepared_data.missing_tokenizer_problems(request)
    if request.in_pairs and not problems:
        problems.append(
            f"model.family ({request.family}) must have text, for its pairs of sentences, and {dataset.shown} "
            "holds tokens: name a column of text by data.text_key"
        )
    tokenizer = prepared_data.tokenizer_of_tokens(request, _manifests(request.data), problems)
    problems = problems or prepared_data.too_short_parts(request, entry, dataset.name, request.needed_parts)
    raise_problems(DataError, problems)
    sizes = {part: entry.manifest[part]["tokens"] for part in PARTS}
    nbytes = sum(sizes.values()) * np.dtype(entry.manifest["dtype"]).itemsize
    number = counted(entry.manifest["documents"], "row")
    return prepared_data.PreparedText(
        prepared_data.tokenizer_in_cache(request, tokenizer),
        entry.manifest["fingerprint"],
        f"{dataset.name}: {size(nbytes)}, {number}, {part_sizes_text(sizes)} tokens{_ends(entry.manifest)}",
        tokens={part: entry.tokens(part) for part in PARTS},
        vocab_size=request.vocab_size if tokenizer is None else tokenizer.vocab_size,
    )


def _ends(manifest: Mapping[str, Any]) -> str:
    """The token that most rows end with, or that they have none, after a semicolon."""
    if "last" not in manifest:
        return ""
    token, count = next(iter(manifest["last"]), (None, 0))
    if 2 * count > manifest["documents"]:
        return (
            f"; {'each row ends' if count == manifest['documents'] else f'{count:,} rows end'} with the token {token}"
        )
    return "; rows end with different tokens: data.append_eod=true puts an end of document after each"


def _manifests(data: DataConfig) -> list[Path]:
    return [] if data.path is None else [manifest_of_folder(user_path(data.path))]


def preview(request: DataRequest) -> str:
    """The number of files of a saved data set; for a data set on the hub, the place where it was found."""
    if request.data.is_hub_dataset:
        require_datasets_library(request.data)
        return hub.FOUND[hub.find_on_hub(place_of_dataset(request.data.name, BUILT_IN_TEXTS))]
    dataset = DataSet.open(request.data)
    dataset.stamp()
    number = sum(map(len, dataset.files_by_split().values()))
    return f"a data set of {counted(number, 'file')}, {text.preparation_time(request)}"


def _inspect(data: DataConfig, samples: int) -> Inspection:
    dataset = ColumnSource.open(data)
    if not dataset.holds_tokens:
        return text.inspect_text(data, samples)
    raise_problems(DataError, prepared_data.document_mark_problems(data))
    return inspect_token_rows(dataset, data, samples, text.files_of_source(dataset)[0], "arrow")


def inspect_token_rows(
    dataset: TokenRowSource, data: DataConfig, samples: int, files: Sequence[Path], shown: str
) -> Inspection:
    """An inspection of a data set that has rows of tokens."""
    seen: list[Integers] = []
    lengths: list[IntArray] = []
    leading: list[Integers] = []
    for rows in (rows for name in dataset.splits for rows in dataset.rows(name)):
        lengths.append(rows.lengths)
        seen.append(rows.tokens)
        cuts = np.cumsum(rows.lengths)[: samples - len(leading)]
        leading += np.split(rows.tokens, cuts)[: samples - len(leading)]
        if sum(map(len, lengths)) >= _ARROW_ROWS:
            break
    number = dataset.num_rows
    measured = np.concatenate(lengths)
    inspection = Inspection(
        dataset.name,
        shown,
        sum(file.stat().st_size for file in files),
        rows=[
            ("rows", f"{len(measured):,} that were looked at" if number is None else f"{number:,}"),
            ("column", dataset.column),
        ],
        counts={"rows": number, "column": dataset.column},
        lengths=LengthStatistics.of(f"tokens of {dataset.column}", measured, number),
        manifest=read_manifest(manifest_of_folder(user_path(data.name))),
    )
    return inspections.inspection_with_tokens(
        inspection, data.tokenizer, leading, seen, round(measured.mean() * (number or len(measured)))
    )


FORMAT = DataFormat(
    name="datasets",
    contents="text or tokens",
    is_at=is_saved_data_set,
    open_data=_open_data,
    preview=preview,
    inspect=_inspect,
    manifests=_manifests,
    has_splits=True,
)
