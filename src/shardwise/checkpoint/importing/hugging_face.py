"""A Hugging Face folder, whichever program spelled the names of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from functools import partial
from typing import Any

from shardwise.boxes import Box
from shardwise.checkpoint.agreement import read_model
from shardwise.checkpoint.importing.foreign_model import ForeignModel, canonical_shapes
from shardwise.checkpoint_format.comparison import differing_copies, find_sources
from shardwise.checkpoint_format.manifest import MODEL, TensorEntry
from shardwise.checkpoint_format.safetensors import DTYPES
from shardwise.checkpoint_format.tensors import StoredTensors, segments
from shardwise.checkpoint_format.writing import CONFIG, STREAM_BYTES, StreamedWeight
from shardwise.errors import ConfigError
from shardwise.hub import BESIDE_WEIGHTS, INDEX
from shardwise.parsing import json_value
from shardwise.storage.root import Buffer, Root


def open_hugging_face(folder: Root) -> ForeignModel:
    """The model of a folder with config.json and safetensors weights.

    Raises:
        ConfigError: it is none that we have, or its weights are not the model's: every mismatch. StoreError: a file
        cannot be read.
    """
    if not (folder / CONFIG).exists():
        raise ConfigError(f"{folder} must hold a {CONFIG} that describes the model: it has none")
    config = read_model(folder / CONFIG)
    tensors = StoredTensors.of(folder)
    stored = tensors.states[MODEL]
    shapes = canonical_shapes(config)
    sources, problems = find_sources(str(folder), config.family, shapes, stored)
    if not problems:
        copied = {name: names[0] for name, names in sources.items() if len(names) > 1}
        boxes = [(name, box) for name, first in copied.items() for box in _boxes(stored[first])]
        problems = differing_copies(str(folder), tensors, sources, boxes)
    if problems:
        raise ConfigError(problems)
    weights = [
        StreamedWeight(name, stored[source].dtype, shape, partial(_read, tensors, source))
        for name, shape in shapes.items()
        for source in sources[name][:1]
    ]
    names = [name for name in folder.names() if any(fnmatch(name, pattern) for pattern in BESIDE_WEIGHTS)]
    beside = {name: (folder / name).read() for name in names if name != INDEX and not (folder / name).is_folder()}
    return ForeignModel(config, weights, beside=beside, tokens=token_ids(folder / CONFIG))


def _read(tensors: StoredTensors, name: str) -> Iterator[Buffer]:
    for box in _boxes(tensors.states[MODEL][name]):
        yield tensors.read(MODEL, name, box).tobytes()


def _boxes(entry: TensorEntry) -> Iterator[Box]:
    """A tensor, cut so that one box fits into memory."""
    return segments(entry.shape, STREAM_BYTES // DTYPES[entry.dtype].itemsize)


def token_ids(config_file: Root) -> Mapping[str, Any]:
    """The ids of special tokens in a `config.json`; a copy without one has the same default."""
    return {key: value for key, value in json_value(config_file.read()).items() if key.endswith("_token_id")}
