"""A Hugging Face folder as a model to import, and the `config.json` that describes the model of other checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

from shardwise.base.errors import ConfigError
from shardwise.base.tensor_box import Box, box_segments
from shardwise.checkpoint.canonical_tensors import canonical_shapes
from shardwise.checkpoint.format import writing
from shardwise.checkpoint.format.manifest import MODEL, TensorEntry
from shardwise.checkpoint.format.model_files import (
    config_token_ids,
    files_beside_weights,
    model_beside_weights,
    with_readable_tokenizer,
)
from shardwise.checkpoint.format.safetensors import DTYPES
from shardwise.checkpoint.format.stored_tensors import StoredTensors, differing_tied_copies, find_sources
from shardwise.checkpoint.storage.root import Buffer, Root
from shardwise.config import FamilyConfig
from shardwise_use.importing.imported_model import ImportedModel


def model_of_config_file(config_file: Path, ignore: Collection[str]) -> tuple[Path, FamilyConfig]:
    """The config.json that `checkpoint import --config` names, and the model in it, without the fields to `ignore`."""
    path = config_file / writing.CONFIG if config_file.is_dir() else config_file
    if not path.is_file():
        raise ConfigError(f"--config ({config_file}) must be a Hugging Face config.json or its folder: there is none")
    return path, model_beside_weights(Root.of(path), ignore)


def open_hugging_face(folder: Root, ignore: Collection[str] = ()) -> ImportedModel:
    """Open a Hugging Face folder to import, with config.json and safetensors weights, without fields to `ignore`.

    ConfigError: it is none that we have, or its weights are not the model's: every mismatch. StoreError: a file cannot
    be read.
    """
    if not (folder / writing.CONFIG).exists():
        raise ConfigError(f"{folder} must hold a {writing.CONFIG} that describes the model: it has none")
    config = model_beside_weights(folder / writing.CONFIG, ignore)
    tensors = StoredTensors.of(folder)
    stored = tensors.states[MODEL]
    shapes = canonical_shapes(config)
    sources, problems = find_sources(str(folder), config.family, shapes, stored, tensors.files)
    if not problems:
        # Only tied weights have a second copy, whose values must be those of the first.
        tied = {name: names[0] for name, names in sources.items() if len(names) > 1}
        boxes = [(name, box) for name, first in tied.items() for box in _segments(stored[first])]
        problems = differing_tied_copies(str(folder), tensors, sources, boxes)
    if problems:
        raise ConfigError(problems)
    weights: list[writing.StreamedWeight] = []
    for name, shape in shapes.items():
        # A tensor without elements may be missing in the folder.
        for stored_name in sources[name][:1]:
            read = partial(_read, tensors, stored_name)
            weights.append(writing.StreamedWeight(name, stored[stored_name].dtype, shape, read))
    small_files = with_readable_tokenizer(files_beside_weights(folder), pairs=not config.causal)
    return ImportedModel(config, weights, small_files=small_files, tokens=config_token_ids(folder / writing.CONFIG))


def _read(tensors: StoredTensors, name: str) -> Iterator[Buffer]:
    for box in _segments(tensors.states[MODEL][name]):
        yield tensors.read(MODEL, name, box).tobytes()


def _segments(entry: TensorEntry) -> Iterator[Box]:
    return box_segments(entry.shape, writing.STREAM_BYTES // DTYPES[entry.dtype].itemsize)
