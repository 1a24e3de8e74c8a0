"""Tokens in blocks of one length, as a folder that `datasets.load_from_disk` opens."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.base.errors import DataError
from shardwise.base.files import sync_folder, to_disk
from shardwise.data.reading.content import optional_library
from shardwise.data.reading.dataset_tables import TOKENS
from shardwise.data.reading.megatron_files import IndexedFile

_SHARD_TOKENS = 1 << 27
_BATCH_TOKENS = 1 << 21


def library() -> Any:
    """The library `datasets`."""
    return optional_library("datasets", "--format arrow needs", "datasets")


def row_bytes(length: int) -> int:
    """The bytes of a block on the disk: int32 tokens and an offset."""
    return 4 * length + 4


def write_blocks(
    tokens: IndexedFile, length: int, folder: Path, fingerprint: str, advance: Callable[[int], None]
) -> int:
    """Cuts the tokens into blocks of `length` in a new folder; returns their number. A shorter rest is left out.

    Args:
        advance: is called with the bytes of tokens that were written.

    Raises:
        DataError: there are fewer tokens than a block has.
    """
    blocks = len(tokens.tokens) // length
    if not blocks:
        raise DataError(
            f"the text ({len(tokens.tokens):,} tokens) must have {length:,} or more, --sequence-length: give more text "
            "or a shorter sequence"
        )
    datasets = library()
    features = datasets.Features({TOKENS: datasets.List(datasets.Value("int32"))})
    most = max(1, _SHARD_TOKENS // length)
    count = -(-blocks // most)
    names = [f"data-{number:05d}-of-{count:05d}.arrow" for number in range(count)]
    folder.mkdir()
    for first, name in zip(range(0, blocks, most), names, strict=True):
        after = min(first + most, blocks)
        _write_shard(tokens, length, first, after, folder / name, features.arrow_schema, advance)
    datasets.DatasetInfo(features=features).write_to_directory(str(folder))
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    sync_folder(folder)
    return blocks


def _write_shard(
    tokens: IndexedFile, length: int, first: int, after: int, path: Path, schema: Any, advance: Callable[[int], None]
) -> None:
    pyarrow = importlib.import_module("pyarrow")
    step = max(1, _BATCH_TOKENS // length)
    with path.open("wb") as file:
        with pyarrow.ipc.new_stream(file, schema) as stream:
            for start in range(first, after, step):
                rows = min(step, after - start)
                values = tokens.tokens[start * length : (start + rows) * length].astype(np.int32)
                offsets = np.arange(0, (rows + 1) * length, length, dtype=np.int32)
                lists = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(values))
                stream.write_batch(pyarrow.RecordBatch.from_arrays([lists.cast(schema.field(0).type)], schema=schema))
                advance(rows * length * tokens.tokens.itemsize)
        to_disk(file)
