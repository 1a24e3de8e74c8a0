"""What each format of data tells of itself."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.config import DataConfig
from shardwise.data.formats.hdf5 import Shards, in_list, shard_paths
from shardwise.data.reading import manifest as records
from shardwise.data.reading.hdf5 import Shard
from shardwise.data.reading.megatron import IndexedFile, prefix_of
from shardwise.data.reading.sources import open_source
from shardwise.data.reading.text import require_sound
from shardwise.errors import DataError
from shardwise.prepare.arrow import COLUMN, library
from shardwise.prepare.inspection import Decoder, Inspection, Lengths, Sample, spread
from shardwise.units import count, size

_LENGTHS = 1 << 20
"""Documents whose lengths are looked at, at most."""
_BLOCKS, _BLOCK = 256, 1 << 16
"""Blocks of tokens in which the lowest and the highest are looked for, and tokens of each."""
_RUNS, _RUN = 64, 64
"""Runs of rows of HDF5, and rows of each: neighbours lie in one compressed chunk."""
_ARROW_ROWS = 1024
_TEXT_BYTES = 1 << 26
_TEXT = ("string", "large_string")
_SAMPLE_TOKENS, _SAMPLE_CHARACTERS = 64, 400


def megatron(path: str, tokenizer: str | None, samples: int) -> Inspection:
    """A data set of PREFIX.bin and PREFIX.idx."""
    prefix = prefix_of(path)
    file = IndexedFile.open(prefix)
    record = records.read_manifest(records.of_prefix(prefix))
    decoder = Decoder.find(tokenizer, record)
    number, total = file.num_documents, len(file.tokens)
    chosen = spread(number, _LENGTHS)
    lengths = file.starts(chosen + 1) - file.starts(chosen)
    empty = int(np.count_nonzero(lengths == 0))
    blocks = [file.tokens[at : at + _BLOCK] for at in _block_starts(total)]
    seen = sum(map(len, blocks))
    lowest, highest = (min(int(b.min()) for b in blocks), max(int(b.max()) for b in blocks)) if seen else (0, 0)
    found = []
    for document in range(min(samples, number)):
        start, end = file.starts(np.array([document, document + 1])).tolist()
        found.append(decoder.sample(document, file.tokens[start : min(end, start + _SAMPLE_TOKENS)]))
    size_ = sum(Path(f"{prefix}{suffix}").stat().st_size for suffix in (".bin", ".idx"))
    counts = {
        "documents": number,
        "sequences": len(file.sizes),
        "tokens": total,
        "dtype": file.tokens.dtype.name,
        "empty_documents": empty,
        "ids": {"lowest": lowest, "highest": highest, "looked_at": seen},
    }
    of_those = "" if len(chosen) == number else f" of {len(chosen):,} that were looked at"
    rows = [
        ("documents", f"{number:,}" + (f", {empty:,} without tokens{of_those}" if empty else "")),
        ("sequences", f"{len(file.sizes):,}"),
        ("tokens", f"{total:,}, {file.tokens.dtype.name}"),
        ("ids", _ids(lowest, highest, seen, total)),
    ]
    return Inspection(
        str(prefix), "Megatron .bin and .idx", size_, rows, counts,
        Lengths.of("tokens of a document", lengths, number) if number else None,
        found, record, _notes(decoder, record, lowest, highest),
    )  # fmt: skip


def hdf5(data: DataConfig, tokenizer: str | None, samples: int) -> Inspection:
    """Shards of masked sentence pairs."""
    paths = shard_paths(data)
    first = Shard.open(paths[0])
    shards = [first, *(Shard.open(path, first.length) for path in paths[1:])]
    record = records.read_manifest(records.of_folder(first.path.parent))
    decoder = Decoder.find(tokenizer, record)
    opened = Shards(shards, 1 << 31, 2)
    number = len(opened)
    rows_B = np.unique(np.minimum(np.add.outer(spread(number, _RUNS), np.arange(_RUN)), number - 1))
    values = opened.take(rows_B)
    lengths = values["input_mask"].sum(axis=1)
    listed = in_list(values["masked_lm_positions"])
    masked, after = float(listed.sum(axis=1).mean()), float((values["next_sentence_labels"] == 0).mean())
    lowest, highest = int(values["input_ids"].min()), int(values["input_ids"].max())
    ids = opened.take(np.arange(min(samples, number)))["input_ids"]
    found = [decoder.sample(row, ids[row][: min(_SAMPLE_TOKENS, lengths[row])]) for row in range(len(ids))]
    counts = {
        "shards": len(shards),
        "samples": number,
        "sequence_length": first.length,
        "predictions": opened.predictions,
        "looked_at": len(rows_B),
        "masked_mean": masked,
        "next_sentence_share": after,
        "ids": {"lowest": lowest, "highest": highest, "looked_at": int(values["input_ids"].size)},
    }
    sizes = sorted(shard.rows for shard in shards)
    each = f"{sizes[0]:,}" if sizes[0] == sizes[-1] else f"{sizes[0]:,} … {sizes[-1]:,}"
    rows = [
        ("shards", f"{len(shards):,} of {each} samples"),
        ("samples", f"{number:,} of {first.length:,} tokens, at most {opened.predictions:,} of them masked"),
        ("masked", f"{masked:.1f} tokens a sample"),
        ("next sentence", f"follows in {after:.0%} of the samples, and is a random one in the rest"),
        ("ids", _ids(lowest, highest, int(values["input_ids"].size), number * first.length)),
    ]
    return Inspection(
        str(data.path), "HDF5 shards of sentence pairs", sum(path.stat().st_size for path in paths), rows, counts,
        Lengths.of("tokens of a sample, without padding", lengths, number), found, record,
        _notes(decoder, record, lowest, highest),
    )  # fmt: skip


def text(data: DataConfig, tokenizer: str | None, samples: int) -> Inspection:
    """Files of text, as training reads them: all of them, or the beginning where they are large."""
    source = open_source(data)
    decoder = Decoder.find(tokenizer, None) if tokenizer is not None else None
    lengths: list[int] = []
    found: list[Sample] = []
    held = read = tokens = encoded = 0
    beginning, whole = "", True
    for piece in source.pieces():
        if len(lengths) < samples:
            beginning += piece.text[: _SAMPLE_CHARACTERS - len(beginning)]
        if decoder is not None and decoder.tokenizer is not None and encoded < _BLOCKS << 12:
            tokens += len(decoder.tokenizer.encode_rows([piece.text])[0])
            encoded += len(piece.text.encode())
        held += piece.characters
        read += len(piece.text.encode())
        if piece.ends_document:
            if len(lengths) < samples:
                found.append(Sample(len(lengths), beginning, None))
            lengths.append(held)
            held, beginning = 0, ""
        if read >= _TEXT_BYTES:
            whole = False
            break
    if held:  # of a document that goes on beyond what was read
        found += [Sample(len(lengths), beginning, None)] if len(lengths) < samples else []
        lengths.append(held)
    files = getattr(source, "files", ())
    size_ = sum(path.stat().st_size for path in files)
    kinds = {"".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:]) for path in files} - {""}
    number = len(lengths) if whole else None
    limit = "" if whole else f" in the first {size(read)} of text"
    counts: dict[str, Any] = {
        "files": len(files),
        "documents": number,
        "looked_at": len(lengths),
        "bytes_looked_at": read,
    }
    rows = [("files", f"{len(files):,}")] if len(files) != 1 else []
    rows += [("documents", f"{len(lengths):,}{limit}"), ("characters", f"{count(sum(lengths))}{limit}")]
    if encoded and tokens:
        counts["bytes_per_token"] = encoded / tokens
        rows.append(("tokens", f"about {count(read * tokens / encoded)}{limit}, {encoded / tokens:.2f} bytes each"))
    return Inspection(
        source.name, f"text{'' if len(kinds) != 1 else f', {kinds.pop()}'}", size_, rows, counts,
        Lengths.of("characters of a document", np.array(lengths), number), found, None,
    )  # fmt: skip


def is_arrow(path: Path) -> bool:
    """Whether it is a folder that `datasets` saved."""
    return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def arrow(path: Path, tokenizer: str | None, samples: int) -> Inspection:
    """A folder that `datasets.load_from_disk` opens: tokens or text."""
    datasets = library()
    try:
        opened = datasets.load_from_disk(str(path))
        parts = dict(opened) if isinstance(opened, datasets.DatasetDict) else {"": opened}
        return _arrow(path, parts, tokenizer, samples)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        if isinstance(error, DataError):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(
            f"{path} cannot be opened as an arrow folder ({reason}): it is damaged, copy it again"
        ) from None


def _arrow(path: Path, parts: Mapping[str, Any], tokenizer: str | None, samples: int) -> Inspection:
    record = records.read_manifest(records.of_folder(path))
    name, rows_of = max(parts.items(), key=lambda part: len(part[1]))
    columns = list(rows_of.column_names)
    total = sum(map(len, parts.values()))
    size_ = sum(file.stat().st_size for file in path.rglob("*.arrow"))
    splits = ", ".join(f"{each} {len(part):,}" for each, part in parts.items()) if name else f"{total:,}"
    schema = rows_of.features.arrow_schema
    types = {each: str(schema.field(each).type) for each in columns}
    rows = [("rows", splits), ("columns", ", ".join(f"{each} ({kind})" for each, kind in types.items()))]
    counts: dict[str, Any] = {"rows": {each or "all": len(part) for each, part in parts.items()}, "columns": columns}
    has_tokens = "list<" in types.get(COLUMN, "")
    column = COLUMN if has_tokens else next((each for each in columns if types[each] in _TEXT), None)
    if column is None or not len(rows_of):
        return Inspection(str(path), "arrow", size_, rows, counts, None, (), record)
    arrow = importlib.import_module("pyarrow.compute")
    table = rows_of.select_columns([column]).with_format("arrow")
    looked_at = table[spread(len(rows_of), _ARROW_ROWS).tolist()].column(0)
    leading = table[: min(samples, len(rows_of))].column(0)
    for each in (*looked_at.chunks, *leading.chunks):
        require_sound(each, str(path), column)
    first = leading.to_pylist()
    if not has_tokens:
        lengths = Lengths.of(f"characters of {column}", arrow.utf8_length(looked_at).fill_null(0).to_numpy(), total)
        found = [Sample(number, (value or "")[:_SAMPLE_CHARACTERS], None) for number, value in enumerate(first)]
        return Inspection(str(path), "arrow", size_, rows, counts, lengths, found, record)
    lengths = Lengths.of(f"tokens of {column}", arrow.list_value_length(looked_at).fill_null(0).to_numpy(), total)
    decoder = Decoder.find(tokenizer, record)
    found = [decoder.sample(number, np.array(value or [])[:_SAMPLE_TOKENS]) for number, value in enumerate(first)]
    ids = arrow.list_flatten(looked_at)
    lowest, highest = (arrow.min_max(ids)[each].as_py() or 0 for each in ("min", "max"))
    counts["ids"] = {"lowest": lowest, "highest": highest, "looked_at": len(ids)}
    rows.append(("ids", _ids(lowest, highest, len(ids), round(lengths.mean * total))))
    return Inspection(
        str(path), "arrow", size_, rows, counts, lengths, found, record, _notes(decoder, record, lowest, highest)
    )


def _block_starts(total: int) -> list[int]:
    """Where to look: everywhere, or at blocks spread over what is too much."""
    if total <= _BLOCKS * _BLOCK:
        return list(range(0, total, _BLOCK))
    return [(total - _BLOCK) * number // (_BLOCKS - 1) for number in range(_BLOCKS)]


def _ids(lowest: int, highest: int, seen: int, total: int) -> str:
    return f"{lowest:,} … {highest:,}" + ("" if seen >= total else f" in {count(seen)} tokens that were looked at")


def _notes(decoder: Decoder, record: Mapping[str, Any] | None, lowest: int, highest: int) -> list[str]:
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
