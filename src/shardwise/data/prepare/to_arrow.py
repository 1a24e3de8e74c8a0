"""Tokens in blocks of one length, as a folder that `datasets.load_from_disk` opens."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.base.errors import DataError
from shardwise.base.files import sync_folder, to_disk
from shardwise.data.prepare.outputs import FormatJob, OutputFormat
from shardwise.data.prepare.work_folder import Estimate
from shardwise.data.reading.content import optional_library
from shardwise.data.reading.megatron_files import IndexedFile
from shardwise.data.reading.text_files import TOKENS

# Tokens of a file of the folder: 512 MiB of int32, about the size of the files that `datasets` writes.
_SHARD_TOKENS = 1 << 27
# Tokens that are converted at once, 8 MiB.
_BATCH_TOKENS = 1 << 21


def _library() -> Any:
    return optional_library("datasets", "--format arrow needs", "datasets")


def _option_problems(options: Mapping[str, Any]) -> list[str]:
    _library()
    if options["sequence_length"] < 1:
        return [f"--sequence-length ({options['sequence_length']}) must be at least 1"]
    return []


def _disk_bytes(estimate: Estimate, options: Mapping[str, Any]) -> int:
    """The bytes of all blocks: int32 tokens and an offset each."""
    length: int = options["sequence_length"]
    return estimate.tokens // length * (4 * length + 4)


def _write(job: FormatJob) -> dict[str, Any]:
    job.work.remove_output()
    tokens = IndexedFile.open(job.prefix)
    length = job.options["sequence_length"]
    with job.bar("writing blocks", tokens.tokens.nbytes) as advance:
        blocks = _write_blocks(tokens, length, job.work.output, job.digest[:16], advance)
    return {"dtype": "int32", "sequences": blocks, "tokens": blocks * length}


def _write_blocks(
    tokens: IndexedFile, length: int, folder: Path, fingerprint: str, advance: Callable[[int], None]
) -> int:
    """Cuts the tokens into blocks of `length` in a new folder; returns their number. A shorter remainder is left out.

    Args:
        advance: called with the bytes of tokens that were written.

    Raises:
        DataError: there are fewer tokens than a block has.
    """
    blocks = len(tokens.tokens) // length
    if not blocks:
        raise DataError(
            f"the text ({len(tokens.tokens):,} tokens) must have {length:,} or more, --sequence-length: give more text "
            "or a shorter sequence"
        )
    datasets = _library()
    features = datasets.Features({TOKENS: datasets.List(datasets.Value("int32"))})
    blocks_per_file = max(1, _SHARD_TOKENS // length)
    count = -(-blocks // blocks_per_file)
    names = [f"data-{number:05d}-of-{count:05d}.arrow" for number in range(count)]
    folder.mkdir()
    for first, name in zip(range(0, blocks, blocks_per_file), names, strict=True):
        stop = min(first + blocks_per_file, blocks)
        _write_file(tokens, length, first, stop, folder / name, features.arrow_schema, advance)
    # Written here as `save_to_disk` writes it, which would need all blocks as a data set in its cache first.
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


def _write_file(
    tokens: IndexedFile, length: int, first: int, stop: int, path: Path, schema: Any, advance: Callable[[int], None]
) -> None:
    """Writes blocks number `first` to `stop` - 1."""
    pyarrow = importlib.import_module("pyarrow")
    step = max(1, _BATCH_TOKENS // length)
    with path.open("wb") as file:
        with pyarrow.ipc.new_stream(file, schema) as stream:
            for start in range(first, stop, step):
                rows = min(step, stop - start)
                values = tokens.tokens[start * length : (start + rows) * length].astype(np.int32)
                offsets = np.arange(0, (rows + 1) * length, length, dtype=np.int32)
                lists = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(values))
                stream.write_batch(pyarrow.RecordBatch.from_arrays([lists.cast(schema.field(0).type)], schema=schema))
                advance(rows * length * tokens.tokens.itemsize)
        to_disk(file)


ARROW = OutputFormat(
    name="arrow", is_folder=True, option_problems=_option_problems, disk_bytes=_disk_bytes, write=_write
)
