"""What lies beside the weights that a run starts from, and stays beside those that it saves.

These are the ids of special tokens in `config.json`, `generation_config.json`, and the tokenizer where the data have
none. An id means a token, so ids are kept only where the tokenizer of the data has the same tokens at them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, DataError
from shardwise.checkpoint.format.writing import CONFIG, to_json
from shardwise.checkpoint.storage.find_checkpoint import place_of_companions
from shardwise.checkpoint.storage.root import Root, StoreError
from shardwise.config import Config
from shardwise.data.hub import BESIDE_WEIGHTS, CHAT_TEMPLATES, GENERATION, INDEX, holds_tokenizer
from shardwise.data.tokens.tokenizer import Tokenizer

_BEGIN, _END = "bos_token_id", "eos_token_id"


@dataclass(frozen=True)
class Companions:
    """What goes into each checkpoint of a run.

    Attributes:
        ids: fields of `config.json`, such as `eos_token_id`, of one id or several.
        files: name → content.
        notes: for the user, on what is left out or replaced.
    """

    ids: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Source:
    """A folder of a model, or a `config.json` by itself."""

    name: str
    ids: Mapping[str, Any]
    files: Mapping[str, bytes]

    @property
    def generation(self) -> dict[str, Any]:
        """The fields of `generation_config.json`."""
        if GENERATION not in self.files:
            return {}
        return _object(self.files[GENERATION], f"{self.name}/{GENERATION}")

    @property
    def bounds(self) -> list[int]:
        """The ids that begin or end a text."""
        return [i for fields in (self.ids, self.generation) for name in (_BEGIN, _END) for i in _ids(fields, name)]

    def tokenizer(self) -> Tokenizer | None:
        """The folder's tokenizer; None where it has none that can be opened."""
        if not holds_tokenizer(self.files):
            return None
        with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
            for name, content in self.files.items():
                file = Path(folder, name)
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(content)
            with suppress(DataError):
                return Tokenizer.load(folder)
        return None


def find_companions(config: Config, weights: Root | None, tokenizer: Path | None) -> Companions:
    """Those of the first place that describes text of the same tokens as the data.

    The places are that of `checkpoint.companions`, that of the loaded weights or the file of `model.config`, and the
    folder of `data.tokenizer`.

    Args:
        config: of the run.
        weights: the folder of `checkpoint.load`; None where it names none.
        tokenizer: the folder of the data's tokenizer; None where it is not known.

    Raises:
        ConfigError: a file cannot be read, or is missing.
    """
    try:
        sources = [_read(place) for place in _places(config, weights)]
    except StoreError as error:
        raise ConfigError(str(error)) from None
    if (named := config.checkpoint.companions) is not None and not (sources[0].ids or sources[0].files):
        raise ConfigError(
            f"checkpoint.companions ({named}) must hold a config.json with ids of special tokens, or a "
            "generation_config.json or tokenizer, and it holds none of them: name a model's folder, or a run's"
        )
    return _chosen(sources, tokenizer)


def resumed_companions(checkpoint: Root, tokenizer: Path | None) -> Companions:
    """Those that a checkpoint of the run has already.

    Raises:
        ConfigError: a file is damaged. StoreError: it cannot be read.
    """
    return _chosen([_read(checkpoint)], tokenizer)


def _chosen(sources: Sequence[_Source], tokenizer: Path | None) -> Companions:
    """Those of the first source that fits the data's tokenizer."""
    notes = []
    for source in sources:
        if tokenizer is None and source.files:
            return Companions(source.ids, source.files)
        if not source.ids and GENERATION not in source.files:
            continue
        companions = Companions(source.ids) if tokenizer is None else _fitting(source, tokenizer)
        if companions is not None:
            return companions
        if not source.bounds:
            continue  # such as a BERT's, which names padding alone
        notes.append(
            f"the checkpoints have the special tokens of the data's tokenizer, and not those of {source.name}, whose "
            "ids mean other tokens"
        )
    return Companions(notes=tuple(notes))


def _places(config: Config, weights: Root | None) -> list[Root]:
    places = [] if weights is None else [weights]
    if config.checkpoint.companions is not None:
        places.insert(0, place_of_companions(config.checkpoint.companions))
    elif (named := config.companions) is not None and Path(named).expanduser().exists():
        places.insert(0, Root.of(Path(named).expanduser()))
    if config.data.tokenizer is not None:
        tokenizer = Path(config.data.tokenizer).expanduser()
        folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
        places += [Root.of(folder)] if tokenizer.exists() else []  # else it is a hub id
    return places


def beside_weights(folder: Root) -> dict[str, bytes]:
    """Name → content of the files that a model's folder has beside its weights and `config.json`."""
    there = [*folder.names(), *(f"{CHAT_TEMPLATES}/{name}" for name in (folder / CHAT_TEMPLATES).names())]
    names = [name for name in there if any(fnmatch(name, pattern) for pattern in BESIDE_WEIGHTS)]
    return {name: (folder / name).read() for name in names if name != INDEX and not (folder / name).is_folder()}


def token_ids(config_file: Root) -> dict[str, Any]:
    """The ids of special tokens in a `config.json`; a copy without one has the same default."""
    fields = _object(config_file.read(), str(config_file))
    return {key: value for key, value in fields.items() if key.endswith("_token_id")}


def _read(place: Root) -> _Source:
    if place.is_local and place.name == CONFIG:
        return _read(Root.of(place.local().parent))
    is_folder = place.is_folder()
    file = place / CONFIG if is_folder else place
    ids = {name: value for name, value in token_ids(file).items() if value is not None} if file.exists() else {}
    return _Source(str(place), ids, beside_weights(place) if is_folder else {})


def _fitting(source: _Source, tokenizer: Path) -> Companions | None:
    """What is kept of a source beside the data's tokenizer; None where its ids mean other tokens there.

    A source without a tokenizer fits where one of its ends of a text is the tokenizer's. Where the two tokenizers end a
    document by different tokens, the data's is the user's choice.
    """
    generation = source.generation
    ends = [*_ids(source.ids, _END), *_ids(generation, _END)]
    ours, theirs = Tokenizer.load(tokenizer), source.tokenizer()
    end = ours.end_of_document_id
    if theirs is None:
        if end not in ends:
            return None
    elif any(ours.token_of(i) != theirs.token_of(i) for fields in (source.ids, generation) for i in _ids(fields)):
        return None
    files = {name: content for name, content in source.files.items() if name == GENERATION}
    if theirs is None or end in ends or end in (None, theirs.end_of_document_id):
        return Companions(source.ids, files)
    files = {name: to_json({**generation, _END: end}) for name in files}
    note = (
        f"the checkpoints end a text with {ours.end_of_document}, as the data's tokenizer does, and not with "
        f"{theirs.end_of_document}, as in {source.name}"
    )
    return Companions({**source.ids, _END: end}, files, (note,))


def _ids(fields: Mapping[str, Any], name: str = "_token_id") -> list[int]:
    """The ids in the fields whose names end so."""
    values = [value for key, value in fields.items() if key.endswith(name)]
    flat = [number for value in values for number in (value if isinstance(value, Sequence) else [value])]
    return [number for number in flat if isinstance(number, int)]


def _object(text: bytes, file: str) -> dict[str, Any]:
    try:
        values = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return values
