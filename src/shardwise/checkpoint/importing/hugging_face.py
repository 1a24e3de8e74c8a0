"""A Hugging Face folder, its weights spelled as any of its writers did; torch-free once it is open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from functools import partial
from typing import Any

import numpy as np

from shardwise.checkpoint.agreement import read_model
from shardwise.checkpoint.importing.opened import Opened, canonical_shapes, mismatches
from shardwise.checkpoint.reading import DTYPES
from shardwise.checkpoint.spelling import spelling
from shardwise.checkpoint_format import safetensors
from shardwise.checkpoint_format.tensors import Tensors, segments
from shardwise.checkpoint_format.verify import MODEL
from shardwise.checkpoint_format.writing import STREAM_BYTES, Weight
from shardwise.errors import ConfigError
from shardwise.hub import BESIDE_WEIGHTS, INDEX
from shardwise.storage.root import Buffer, Root

_CONFIG = "config.json"


def open_hugging_face(folder: Root) -> Opened:
    """The model of a folder with config.json and safetensors weights.

    Raises:
        ConfigError: it is none that we have, or its weights are not the model's: every mismatch. StoreError: a file
        cannot be read.
    """
    if not (folder / _CONFIG).exists():
        raise ConfigError(f"{folder} must hold a {_CONFIG} that describes the model: it has none")
    config = read_model(folder / _CONFIG)
    tensors = Tensors.of(folder)
    stored = tensors.states[MODEL]
    shapes = canonical_shapes(config)
    spelled = spelling(config.family)
    canonical = spelled.canonical(list(stored), shapes)
    sources: dict[str, list[str]] = {}
    for name, whole in canonical.items():
        sources.setdefault(whole, []).append(name)
    for names in sources.values():
        names.sort(key=lambda name: (name not in shapes, name in spelled.tied))
    strange = [(name, stored[name].dtype) for name in canonical if stored[name].dtype not in DTYPES]
    found = {name: stored[names[0]].shape for name, names in sources.items()}
    problems = mismatches(str(folder), shapes, found, strange)
    if not problems:
        problems = [
            f"{folder}: {copy} must equal {names[0]}: the model has one weight for both"
            for names in sources.values()
            for copy in names[1:]
            if not _equal(tensors, names[0], copy)
        ]
    if problems:
        raise ConfigError(problems)
    weights = [
        Weight(name, stored[source].dtype, shape, partial(_read, tensors, source))
        for name, shape in shapes.items()
        for source in sources[name][:1]
    ]
    return Opened(config, weights, beside=_beside(folder), tokens=token_ids(folder / _CONFIG))


def _read(tensors: Tensors, name: str) -> Iterator[Buffer]:
    entry = tensors.states[MODEL][name]
    for box in segments(entry.shape, STREAM_BYTES // safetensors.DTYPES[entry.dtype].itemsize):
        yield tensors.read(MODEL, name, box).tobytes()


def _equal(tensors: Tensors, name: str, copy: str) -> bool:
    first, second = (tensors.states[MODEL][each] for each in (name, copy))
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    boxes = segments(first.shape, STREAM_BYTES // safetensors.DTYPES[first.dtype].itemsize)
    return all(np.array_equal(tensors.read(MODEL, name, box), tensors.read(MODEL, copy, box)) for box in boxes)


def _beside(folder: Root) -> dict[str, bytes]:
    names = [name for name in folder.names() if any(fnmatch(name, pattern) for pattern in BESIDE_WEIGHTS)]
    return {name: (folder / name).read() for name in names if name != INDEX and not (folder / name).is_folder()}


def token_ids(described: Root) -> Mapping[str, Any]:
    """Those that a `config.json` names; what it leaves out has the same default in a copy."""
    return {key: value for key, value in json.loads(described.read()).items() if key.endswith("_token_id")}
