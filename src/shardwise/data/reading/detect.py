"""Which format data have: the one answer for training, dry runs, inspection and preparation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from shardwise.config import DataConfig
from shardwise.data.reading import dataset_tables, hdf5_files, megatron_files

DataFormat = Literal["megatron", "hdf5", "datasets", "text"]


def detect(data: DataConfig) -> DataFormat:
    """The format of what the `data` section names: as its keys say, else by what lies at the path.

    No file is opened. A path that the system refuses counts as text: opening it will report why.
    """
    if data.blend is not None:
        return "megatron"
    if data.path is None:
        return "datasets" if data.is_hub_dataset else "text"
    if data.format == "megatron" or data.format == "hdf5" or data.format == "datasets":
        return data.format
    if data.format != "auto":
        return "text"
    path = Path(data.path).expanduser()
    try:
        if megatron_files.is_indexed(path):
            return "megatron"
        if hdf5_files.names_shards(path):
            return "hdf5"
        if dataset_tables.is_saved(path):
            return "datasets"
    except OSError:
        pass
    return "text"


def is_raw_tokens(path: Path) -> bool:
    """Whether `path` is named as raw token ids are: a .bin without the .idx of a Megatron data set."""
    return path.suffix == ".bin" and path.is_file() and not path.with_suffix(".idx").exists()
