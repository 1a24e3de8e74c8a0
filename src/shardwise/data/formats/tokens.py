"""Files of token ids, as their makers wrote them: flat ones are mapped into memory, rows are joined and cached."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from shardwise.base.errors import DataError, raise_problems
from shardwise.base.files import user_path
from shardwise.base.units import counted, size
from shardwise.config import DataConfig
from shardwise.data.formats import datasets, inspections, packing_cache, prepared_data
from shardwise.data.formats.data_format import DataFormat, Inspection, LengthStatistics
from shardwise.data.reading.data_manifest import read_manifest
from shardwise.data.reading.token_files import (
    FlatTokens,
    RowFiles,
    datatrove_metadata_files,
    flat_token_files,
    holds_token_rows,
)
from shardwise.data.request import DataRequest
from shardwise.data.rows import PART_NAMES, Part, json_digest, part_bounds, part_sizes_text
from shardwise.data.tokens.tokenizer import load_tokenizer

# An inspection takes seconds: about the most tokens that it looks at.
_LOOKED_AT = 1 << 22


def _open_data(request: DataRequest) -> prepared_data.PreparedText:
    data = request.data
    if not _is_flat(data):
        return datasets.open_token_rows(RowFiles(data), request)
    raise_problems(DataError, problems := prepared_data.document_mark_problems(data))
    tokenizer = prepared_data.tokenizer_of_tokens(request, datatrove_metadata_files(data), problems)
    if request.in_pairs:
        problems.append(f"model.family ({request.family}) must have text, for its pairs of sentences, not {data.name}")
    raise_problems(DataError, problems)
    size_of = None if tokenizer is None else tokenizer.vocab_size
    tokens = FlatTokens.open(data, request.vocab_size, size_of)
    ends = tokens.documents
    problems = prepared_data.missing_tokenizer_problems(request, has_documents=ends is not None)
    if ends is None:
        cuts = part_bounds(len(tokens), data.split_weights)
    else:
        cuts = ends[part_bounds(len(ends) - 1, data.split_weights)].tolist()
    rows = {part: tokens.part(*bounds) for part, bounds in zip(PART_NAMES, pairwise(cuts), strict=True)}
    sizes: dict[Part, int] = {part: len(row) for part, row in rows.items()}
    for part in request.needed_parts:
        problems += prepared_data.too_few_samples(request, part, data.name, sizes[part], None)
    raise_problems(DataError, problems)
    prepared = prepared_data.PreparedText(
        prepared_data.tokenizer_in_cache(request, tokenizer),
        json_digest([tokens.digest, cuts]),
        f"{data.name}: {_shown(tokens)}, {part_sizes_text(sizes)} tokens",
        tokens=rows,
        vocab_size=size_of or request.vocab_size,
    )
    # An index tells the documents, else their last token.
    finders = None if ends is None else {part: row.bounds for part, row in rows.items() if len(row)}
    return packing_cache.with_packed_samples(request, prepared, finders)


def _is_flat(data: DataConfig) -> bool:
    assert data.path is not None
    path = user_path(data.path)
    return bool(flat_token_files(path)) or not path.exists()


def _shown(tokens: FlatTokens) -> str:
    kinds = dict.fromkeys(file.reading or file.tokens.dtype.name for file in tokens.files)
    documents = "" if tokens.documents is None else f", {counted(len(tokens.documents) - 1, 'document')}"
    nbytes = size(sum(file.tokens.nbytes for file in tokens.files))
    return f"{nbytes} in {counted(len(tokens.files), 'file')} ({'; '.join(kinds)}){documents}"


def _preview(request: DataRequest) -> str:
    if not _is_flat(request.data):
        rows = RowFiles(request.data)
        files = counted(len(rows.readings), "file")
        return f"{files} with rows of tokens in {rows.column!r}, cached when the run starts"
    tokens = _previewed(request)
    return f"{_shown(tokens)}, {len(tokens):,} tokens"


def _previewed(request: DataRequest) -> FlatTokens:
    problems: list[str] = []
    tokenizer = prepared_data.tokenizer_of_tokens(request, (), problems)
    return FlatTokens.open(request.data, request.vocab_size, None if tokenizer is None else tokenizer.vocab_size)


def _most_tokens(request: DataRequest, limit: int) -> int | None:
    if not _is_flat(request.data):
        return None
    total = len(_previewed(request))
    return total if total <= limit else None


def _inspect(data: DataConfig, samples: int) -> Inspection:
    if not _is_flat(data):
        rows = RowFiles(data)
        return datasets.inspect_token_rows(rows, data, samples, rows.files, "rows of tokens")
    named = data.tokenizer and load_tokenizer(data.tokenizer).vocab_size
    tokens = FlatTokens.open(data, None, named or None)
    documents = tokens.documents
    starts = tokens.begins if documents is None else documents
    number = None if documents is None else len(documents) - 1
    unit = "tokens of a file" if documents is None else "tokens of a document"
    inspection = Inspection(
        data.name,
        "token ids",
        sum(file.path.stat().st_size for file in tokens.files),
        rows=[("files", _shown(tokens)), ("tokens", f"{len(tokens):,}")],
        counts={"files": len(tokens.files), "tokens": len(tokens), "documents": number},
        lengths=LengthStatistics.of(unit, np.diff(starts), len(starts) - 1),
        manifest=next(filter(None, map(read_manifest, datatrove_metadata_files(data))), None),
    )
    leading = [tokens[start:stop] for start, stop in pairwise(starts[: samples + 1].tolist())]
    return inspections.inspection_with_tokens(inspection, data.tokenizer, leading, [tokens[:_LOOKED_AT]], len(tokens))


FORMAT = DataFormat(
    name="tokens",
    contents="tokens",
    is_at=lambda path: bool(flat_token_files(path)),
    is_in=holds_token_rows,
    open_data=_open_data,
    preview=_preview,
    inspect=_inspect,
    manifests=datatrove_metadata_files,
    most_tokens=_most_tokens,
)
