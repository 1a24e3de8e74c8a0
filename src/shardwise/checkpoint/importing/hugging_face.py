"""A Hugging Face folder, whichever program spelled the names of its weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from shardwise.boxes import Box
from shardwise.checkpoint.companions import beside_weights, token_ids
from shardwise.checkpoint.importing.foreign_model import ForeignModel, canonical_shapes
from shardwise.checkpoint_format.comparison import differing_copies, find_sources
from shardwise.checkpoint_format.manifest import MODEL, TensorEntry
from shardwise.checkpoint_format.model_file import read_model
from shardwise.checkpoint_format.safetensors import DTYPES
from shardwise.checkpoint_format.tensors import StoredTensors, segments
from shardwise.checkpoint_format.writing import CONFIG, STREAM_BYTES, StreamedWeight
from shardwise.errors import ConfigError
from shardwise.storage.root import Buffer, Root


def open_hugging_face(folder: Root, ignore: Collection[str] = ()) -> ForeignModel:
    """The model of a folder with config.json and safetensors weights.

    Args:
        folder: the folder.
        ignore: fields of config.json that change nothing, as the user says.

    Raises:
        ConfigError: it is none that we have, or its weights are not the model's: every mismatch. StoreError: a file
        cannot be read.
    """
    if not (folder / CONFIG).exists():
        raise ConfigError(f"{folder} must hold a {CONFIG} that describes the model: it has none")
    config = read_model(folder / CONFIG, ignore)
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
    return ForeignModel(config, weights, beside=beside_weights(folder), tokens=token_ids(folder / CONFIG))


def _read(tensors: StoredTensors, name: str) -> Iterator[Buffer]:
    for box in _boxes(tensors.states[MODEL][name]):
        yield tensors.read(MODEL, name, box).tobytes()


def _boxes(entry: TensorEntry) -> Iterator[Box]:
    """A tensor, cut so that one box fits into memory."""
    return segments(entry.shape, STREAM_BYTES // DTYPES[entry.dtype].itemsize)
