"""The files of a model's folder beside its weights: tokenizer, generation settings, ids of special tokens, licence."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, DataError
from shardwise.base.parsing import json_value
from shardwise.checkpoint.format.writing import CONFIG
from shardwise.checkpoint.storage.root import Root
from shardwise.data.hub import BESIDE_WEIGHTS, CHAT_TEMPLATES, GENERATION, holds_tokenizer
from shardwise.data.tokens.tokenizer import Tokenizer

BEGIN_ID = "bos_token_id"
END_ID = "eos_token_id"
_ID_SUFFIX = "_token_id"


@dataclass(frozen=True)
class FilesBesideWeights:
    """The small files of a model's folder, or a `config.json` by itself.

    Attributes:
        place: name of the folder or file, for messages.
        ids: ids of special tokens that `config.json` names, such as `eos_token_id`: one id or several.
        files: name → content of the other files; empty for a file by itself.
    """

    place: str
    ids: Mapping[str, Any]
    files: Mapping[str, bytes]

    @staticmethod
    def read(place: Root) -> FilesBesideWeights:
        """Read a folder, or a `config.json`: one of that name stands for its folder."""
        if place.is_local and place.name == CONFIG:
            return FilesBesideWeights.read(Root.of(place.local().parent))
        is_folder = place.is_folder()
        config_file = place / CONFIG if is_folder else place
        ids: dict[str, Any] = {}
        if config_file.exists():
            ids = {name: value for name, value in token_ids(config_file).items() if value is not None}
        return FilesBesideWeights(str(place), ids, files_beside_weights(place) if is_folder else {})

    @property
    def generation(self) -> dict[str, Any]:
        """The fields of `generation_config.json`."""
        if GENERATION not in self.files:
            return {}
        return _json_object(self.files[GENERATION], f"{self.place}/{GENERATION}")

    @property
    def end_ids(self) -> list[int]:
        """The ids that end a text."""
        return [*flat_ids(self.ids, END_ID), *flat_ids(self.generation, END_ID)]

    @property
    def names_ends_of_texts(self) -> bool:
        """True if an id begins or ends a text."""
        return any(flat_ids(fields, name) for fields in (self.ids, self.generation) for name in (BEGIN_ID, END_ID))

    def tokenizer(self) -> Tokenizer | None:
        """The folder's tokenizer; None where it has none that can be opened."""
        if not holds_tokenizer(self.files):
            return None
        # Tokenizers are read from a folder on this machine, and these files may come from a store.
        with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
            for name, content in self.files.items():
                file = Path(folder, name)
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(content)
            with suppress(DataError):
                return Tokenizer.load(folder)
        return None


def files_beside_weights(folder: Root) -> dict[str, bytes]:
    """Name → content of the files that a model's folder has beside its weights and `config.json`."""
    templates = [f"{CHAT_TEMPLATES}/{name}" for name in (folder / CHAT_TEMPLATES).names()]
    files: dict[str, bytes] = {}
    for name in [*folder.names(), *templates]:
        is_beside = any(fnmatch(name, pattern) for pattern in BESIDE_WEIGHTS)
        if is_beside and not (folder / name).is_folder():
            files[name] = (folder / name).read()
    return files


def token_ids(config_file: Root) -> dict[str, Any]:
    """The ids of special tokens in a `config.json`; a copy without one has the same default."""
    fields = _json_object(config_file.read(), str(config_file))
    return {key: value for key, value in fields.items() if key.endswith(_ID_SUFFIX)}


def flat_ids(fields: Mapping[str, Any], suffix: str = _ID_SUFFIX) -> list[int]:
    """The ids in the fields whose names end in `suffix`."""
    ids: list[int] = []
    for key, value in fields.items():
        if key.endswith(suffix):
            values = value if isinstance(value, Sequence) else [value]
            ids += [number for number in values if isinstance(number, int)]
    return ids


def differ_in_tokens(folder: Path, other_folder: Path) -> bool:
    """True if two folders hold a `tokenizer.json` each, and one token has another id in the one than in the other."""
    vocabularies = []
    try:
        for path in (folder, other_folder):
            vocabularies.append(_vocabulary(json_value((path / "tokenizer.json").read_text(encoding="utf-8"))))
        return bool(vocabularies[0] != vocabularies[1])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    """Token → id of a `tokenizer.json`: its model has a mapping of them, or a list of (token, score) in their order."""
    vocabulary = tokenizer["model"]["vocab"]
    if not isinstance(vocabulary, dict):
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    # Tokens that were added after the training of the tokenizer stand apart.
    return {**vocabulary, **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}


def _json_object(text: bytes, file: str) -> dict[str, Any]:
    try:
        values = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return values
