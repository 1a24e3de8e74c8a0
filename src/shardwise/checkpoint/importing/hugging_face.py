"""A Hugging Face folder, whichever program spelled the names of its weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from shardwise.base.errors import ConfigError
from shardwise.base.tensor_box import Box
from shardwise.checkpoint.format.config_json import read_model
from shardwise.checkpoint.format.files_beside_weights import files_beside_weights, token_ids
from shardwise.checkpoint.format.manifest import MODEL, TensorEntry
from shardwise.checkpoint.format.safetensors import DTYPES
from shardwise.checkpoint.format.stored_tensors import StoredTensors, differing_copies, find_sources, segments
from shardwise.checkpoint.format.writing import CONFIG, STREAM_BYTES, StreamedWeight
from shardwise.checkpoint.importing.foreign_model import ForeignModel, canonical_shapes
from shardwise.checkpoint.storage.root import Buffer, Root


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
        # Only tied weights have a second copy, whose values must be those of the first.
        boxes: list[tuple[str, Box]] = []
        for name, stored_names in sources.items():
            if len(stored_names) > 1:
                boxes += [(name, box) for box in _segments(stored[stored_names[0]])]
        problems = differing_copies(str(folder), tensors, sources, boxes)
    if problems:
        raise ConfigError(problems)
    weights: list[StreamedWeight] = []
    for name, shape in shapes.items():
        for stored_name in sources[name][:1]:
            read = partial(_read, tensors, stored_name)
            weights.append(StreamedWeight(name, stored[stored_name].dtype, shape, read))
    small_files = files_beside_weights(folder)
    return ForeignModel(config, weights, small_files=small_files, tokens=token_ids(folder / CONFIG))


def _read(tensors: StoredTensors, name: str) -> Iterator[Buffer]:
    """Yield the bytes of a stored weight."""
    for box in _segments(tensors.states[MODEL][name]):
        yield tensors.read(MODEL, name, box).tobytes()


def _segments(entry: TensorEntry) -> Iterator[Box]:
    """A tensor, cut so that one box fits into memory."""
    return segments(entry.shape, STREAM_BYTES // DTYPES[entry.dtype].itemsize)
