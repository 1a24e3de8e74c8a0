"""The files of a model's folder beside its weights: `config.json`, tokenizer, generation settings, licence."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, DataError, see
from shardwise.base.files import write_files
from shardwise.base.hub import CHAT_TEMPLATES, TOKENIZER, TOKENIZER_CONFIG, holds_tokenizer
from shardwise.base.yaml_and_json import json_object
from shardwise.checkpoint.format.weight_files import BESIDE_WEIGHTS, GENERATION
from shardwise.checkpoint.format.writing import CONFIG, to_json
from shardwise.checkpoint.storage.root import Root
from shardwise.config import FamilyConfig, ModelConfig, checked_model_section, family_config, rope_scaling
from shardwise.config.hugging_face import parse_hugging_face
from shardwise.data.tokens.tokenizer import PLAIN_CLASS, Tokenizer, plain_tokenizer_config

BEGIN_ID = "bos_token_id"
END_ID = "eos_token_id"
_ID_SUFFIX = "_token_id"


@dataclass(frozen=True)
class FilesBesideWeights:
    """The small files of a model's folder, or a `config.json` by itself."""

    place: str  # name of the folder or file, for messages
    ids: Mapping[str, Any]  # ids of special tokens that `config.json` names, such as `eos_token_id`: one id or several
    files: Mapping[str, bytes]  # name → content of the other files; empty for a file by itself

    @staticmethod
    def read(place: Root) -> FilesBesideWeights:
        """Read a folder, or a `config.json`: one of that name stands for its folder."""
        if place.is_local and place.name == CONFIG:
            return FilesBesideWeights.read(Root.of(place.local().parent))
        is_folder = place.is_folder()
        config_file = place / CONFIG if is_folder else place
        ids: dict[str, Any] = {}
        if config_file.exists():
            ids = {name: value for name, value in config_token_ids(config_file).items() if value is not None}
        return FilesBesideWeights(str(place), ids, files_beside_weights(place) if is_folder else {})

    @property
    def generation(self) -> dict[str, Any]:
        """The fields of `generation_config.json`."""
        if GENERATION not in self.files:
            return {}
        return json_object(self.files[GENERATION], f"{self.place}/{GENERATION}")

    @property
    def end_ids(self) -> list[int]:
        """The ids that end a text."""
        return [*special_ids(self.ids, END_ID), *special_ids(self.generation, END_ID)]

    @property
    def names_ends_of_texts(self) -> bool:
        """True if an id begins or ends a text."""
        return any(special_ids(fields, name) for fields in (self.ids, self.generation) for name in (BEGIN_ID, END_ID))

    def tokenizer(self) -> Tokenizer | None:
        """The folder's tokenizer; None where it has none that can be opened."""
        if not holds_tokenizer(self.files):
            return None
        # Tokenizers are read from a folder on this machine, and these files may come from a store.
        with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
            write_files(Path(folder), self.files)
            try:
                return Tokenizer.load(folder)
            except DataError:
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


def with_readable_tokenizer(files: Mapping[str, bytes], *, pairs: bool) -> dict[str, bytes]:
    """Files beside weights, with the class in `tokenizer_config.json` that reads a `tokenizer.json` as it is.

    Args:
        pairs: True if the model reads the types of tokens.
    """
    read = dict(files)
    if TOKENIZER in files:
        with contextlib.suppress(ConfigError):  # transformers cannot read the file either
            settings = json_object(files.get(TOKENIZER_CONFIG, b"{}"), TOKENIZER_CONFIG)
            if settings.get("tokenizer_class") not in (PLAIN_CLASS["tokenizer_class"], "TokenizersBackend"):
                read[TOKENIZER_CONFIG] = to_json(plain_tokenizer_config(settings, pairs=pairs))
    return read


def config_token_ids(config_file: Root) -> dict[str, Any]:
    """The special tokens' ids in the `config.json` of a model's folder, by field; a copy without one has the same."""
    fields = json_object(config_file.read(), str(config_file))
    return {key: value for key, value in fields.items() if key.endswith(_ID_SUFFIX)}


def special_ids(fields: Mapping[str, Any], suffix: str = _ID_SUFFIX) -> list[int]:
    """The ids of special tokens in a model's files beside its weights, of `fields` whose names end in `suffix`."""
    # A model may end a text by any of several tokens: the field is then a list.
    ids: list[int] = []
    for key, value in fields.items():
        if key.endswith(suffix):
            values = value if isinstance(value, Sequence) else [value]
            ids += [number for number in values if isinstance(number, int)]
    return ids


_LONGEST = "max_position_embeddings"
_ROTARY_KEYS = (
    *(_LONGEST, "rope_theta", "rope_scaling", "rotary_pct", "no_rope_layers"),
    *("rope_local_base_freq", "sliding_window", "layer_types"),
)
"""Keys that decide how rotary positions turn queries and keys, and which keys a query sees; weights do not depend on
them."""
_ROLES_WITHOUT_WEIGHTS = ("activation", "norm_eps")  # roles of other keys that no weight depends on


@dataclass(frozen=True)
class _ModelDifferences:
    """Differences of a recipe's model from that of a folder."""

    problems: tuple[str, ...] = ()  # why the weights of the folder are not those of the recipe's model
    # Sentences for the user, on each change that the recipe states and that weights allow.
    changes: tuple[str, ...] = ()


def model_differences(model: ModelConfig, folder: Root) -> _ModelDifferences:
    """The differences of `model` from the `config.json` beside the weights in `folder`; none where there is no file.

    Free to differ are dropout, the initial weights' deviation, names of one activation (`gelu_new` and
    `gelu_pytorch_tanh`), and the longest sequence where no angle depends on it. Other keys of rotary positions may
    change where the recipe, or the command line, states them: a default alone, or the file of `model.config`, must not
    change what was learned. The activation and the norms' epsilon may change where the command line states them.

    Raises:
        ConfigError: the file is of another family, of no model that we have, or not readable: names and shapes of the
        weights then say nothing more.
    """
    path = folder / "config.json"
    config = family_config(model)
    if config is None or not path.exists():
        return _ModelDifferences()
    stored = model_beside_weights(path, config.ignore)
    if stored.family != config.family:
        raise ConfigError(
            f"model.family ({config.family}) must be that of {path} ({stored.family}){see('checkpoints#other-model')}"
        )
    values = _meaningful_values(config)
    stored_values = _meaningful_values(stored)
    free_keys = _free_keys(config)
    problems: list[str] = []
    changes: list[str] = []
    for key, value in values.items():
        stored_value = stored_values[key]
        if value == stored_value:
            continue
        if key in free_keys:
            changes.append(f"model.{key} ({value}) replaces that of {path} ({stored_value}), with the same weights")
            continue
        # A longer sequence turns no query otherwise, unless the angles are scaled by it.
        has_effect = key != _LONGEST or not config.rotary_dim
        if has_effect or _rotates_by_longest(values) or _rotates_by_longest(stored_values):
            problems.append(f"model.{key} ({value}) must be that of {path} ({stored_value})")
    if problems:
        keys = "this key" if len(problems) == 1 else "these keys"
        problems[-1] += f"; model.config={folder} takes the folder's model, without {keys} beside it"
    return _ModelDifferences(tuple(problems), tuple(changes))


def model_beside_weights(path: Root, ignore: Collection[str] = ()) -> FamilyConfig:
    """The model of a checkpoint's weight files, by the `config.json` beside them; `ignore`: fields without effect.

    Raises:
        ConfigError: the model is not supported, or the file cannot be read: every problem.
    """
    return checked_model_section(parse_hugging_face(path.read(), str(path), ignore), str(path))


def _free_keys(config: FamilyConfig) -> frozenset[str]:
    """The keys that may change because the user stated them and no weight depends on them."""
    free: frozenset[str] = frozenset()
    if config.rotary_dim:
        stated = frozenset(config.model_fields_set) - config.origin.from_file
        free = stated.intersection(_ROTARY_KEYS)
    return free | config.origin.typed.intersection(config.keys[role] for role in _ROLES_WITHOUT_WEIGHTS)


def _meaningful_values(config: FamilyConfig) -> dict[str, Any]:
    dropout_keys = {key for role, key in config.keys.items() if role.endswith("_dropout")}
    free = {"initializer_range", "ignore", *dropout_keys}
    values = {key: value for key, value in config.model_dump(mode="json").items() if key not in free}
    values[config.keys["activation"]] = config.activation
    if values.get("rope_scaling") is not None:
        values["rope_scaling"] = rope_scaling.effective_scaling(values["rope_scaling"], values[_LONGEST])
    return values


def _rotates_by_longest(values: Mapping[str, Any]) -> bool:
    scaling = values["rope_scaling"] or {"rope_type": "default"}
    if scaling["rope_type"] == "dynamic":
        return True
    has_factor = "factor" in scaling or "attention_factor" in scaling
    return scaling["rope_type"] == "longrope" and not has_factor
