"""The model that a command is given: a checkpoint, a run's newest one, a Hugging Face folder or a hub id."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise import hub
from shardwise.config import Config, apply_overrides, config_from
from shardwise.config.hugging_face import read_hugging_face
from shardwise.config.model import OwnConfig
from shardwise.data import Tokenizer
from shardwise.errors import ConfigError, listing, nearest_name
from shardwise.store.folders import checkpoints
from shardwise.store.root import Root

HELP = "a checkpoint, a run's folder (its newest checkpoint), a Hugging Face folder or a hub id"
_METAVAR = "CHECKPOINT"
_MANIFEST, _CONFIG, _GENERATION = "manifest.json", "config.json", "generation_config.json"
_TOKENIZERS = ("tokenizer.json", "vocab.txt")
# What `config.json` of a user's own model has beside its `model` section.
_BESIDE = ("torch_dtype", "bos_token_id", "eos_token_id")
# Keys of a run that say how its model reads text.
_RUN_KEYS = {"train": ("sequence_length", "micro_batch", "seed"), "precision": ("mode",)}
_LONGEST = 1024
_MICRO_BATCH = 4


@dataclass(frozen=True)
class ModelFolder:
    """A folder with weights.

    Attributes:
        model: its `model` section. run: the configuration of the run that wrote it; empty where nothing says so.
    """

    path: Path
    model: Mapping[str, Any]
    run: Mapping[str, Any]

    @property
    def tokenizer(self) -> Path | None:
        """Where its tokenizer lies, as `data.tokenizer` names it."""
        return self.path if any((self.path / name).is_file() for name in _TOKENIZERS) else None

    def stops(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Ids after which a text ends: as transformers reads them, else the tokenizer's end of a document."""
        for name in (_GENERATION, _CONFIG):
            file = self.path / name
            found = _read_object(file).get("eos_token_id") if file.is_file() else None
            if found is not None:
                return frozenset(found if isinstance(found, list) else [found])
        return frozenset([tokenizer.end_of_document_id])


@contextmanager
def argument_named() -> Iterator[None]:
    """Errors on weights name the argument that the user gave; in a recipe it is the key `checkpoint.load`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([text.replace("checkpoint.load", _METAVAR) for text in error.problems]) from error


@dataclass(frozen=True)
class Overrides:
    """Nested values of `key=value` arguments, and apart from them `checkpoint.revision` and `model.family`."""

    values: dict[str, Any]
    revision: str | None
    family: str | None


def split_overrides(overrides: Sequence[str], allowed: Sequence[str], command: str) -> Overrides:
    """What the user's `key=value` arguments say.

    allowed: the keys that the command reads; one that ends in a dot stands for a section.

    Raises:
        ConfigError: another key, or no `key=value`.
    """
    values: dict[str, Any] = {}
    problems = []
    for override in overrides:
        key = override.partition("=")[0].strip()
        if "=" in override and not any(key == name or (name[-1] == "." and key.startswith(name)) for name in allowed):
            near = nearest_name(key, [name for name in allowed if name[-1] != "."], cutoff=0.75)
            names = listing(f"{name}*" if name[-1] == "." else name for name in allowed)
            problems.append(f"{key}: " + (f"did you mean {near}?" if near else f"{command} reads {names}"))
    problems += apply_overrides(values, overrides)
    if problems:
        raise ConfigError(problems)
    revision, family = values.pop("checkpoint", {}).get("revision"), values.pop("model", {}).get("family")
    return Overrides(values, None if revision is None else str(revision), None if family is None else str(family))


def open_folder(
    target: str,
    revision: str | None,
    *,
    cached: bool,
    family: str | None = None,
    announce: Callable[[str], None] | None = None,
) -> ModelFolder:
    """The folder that `target` names, fetched where it is a hub id.

    `family`: what the user names as `model.family`. A folder's own class is code that runs, so the user must name it.

    Raises:
        ConfigError: there is none, it holds no weights, describes a model that we do not have, or one of a class that
        the user did not name.
    """
    given = Path(target).expanduser()
    with argument_named():
        path = hub.resolve(str(_newest(given, announce) or target), revision, cached=cached, announce=announce)
    return ModelFolder(path, _model_section(path, family), _run_section(path))


def evaluation_config(folder: ModelFolder, values: Mapping[str, Any], replicas: int, part: str) -> Config:
    """What an evaluation reads: the run's own data and sequence length unless `values` say otherwise.

    replicas: the data-parallel degree. part: `all` puts every document into one part, the training one.

    Raises:
        ConfigError: with every problem of the values.
    """
    sections = _sections(folder, values)
    train, data = sections["train"], sections["data"]
    limit = folder.model.get("max_position_embeddings")
    train.setdefault("sequence_length", _LONGEST if limit is None else min(limit, _LONGEST))
    train.setdefault("micro_batch", _MICRO_BATCH)
    micro_batch = train["micro_batch"]
    train["global_batch"] = micro_batch * replicas if isinstance(micro_batch, int) else 1
    if part == "all":
        data["split"] = "1,0"
    chosen = values.get("data", {})
    if "dataset" in chosen and "path" not in chosen:
        data["path"] = None
    if chosen.get("tokenizer") is None:
        data["tokenizer"] = _tokenizer(folder)
    return config_from(sections)


def generation_config(folder: ModelFolder, values: Mapping[str, Any]) -> Config:
    """What a generation reads: the model, how it is cut, its dtype and its tokenizer.

    Raises:
        ConfigError: with every problem of the values.
    """
    sections = _sections(folder, values)
    sections["train"] |= {"sequence_length": 1, "global_batch": 1, "micro_batch": 1}
    sections["data"] = {"tokenizer": values.get("data", {}).get("tokenizer") or _tokenizer(folder)}
    return config_from(sections)


def open_tokenizer(config: Config, folder: ModelFolder) -> Tokenizer:
    """The tokenizer of a configuration made here.

    Raises:
        ConfigError: it cannot be opened, or has ids that the model has not.
    """
    path = config.data.tokenizer
    assert path is not None
    tokenizer = Tokenizer.load(Path(path).expanduser())
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"the vocabulary of the tokenizer {path} ({tokenizer.vocab_size:,}) must be at most that of the model in "
            f"{folder.path} ({config.model.vocab_size:,}): name its own one by data.tokenizer"
        )
    return tokenizer


def _sections(folder: ModelFolder, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A whole configuration's sections: what nothing here reads has any valid value."""
    run = {
        section: {key: held[key] for key in keys if key in held}
        for section, keys in _RUN_KEYS.items()
        if isinstance(held := folder.run.get(section, {}), dict)
    }
    data = folder.run.get("data")
    base = {"data": data if isinstance(data, dict) else {}, "optimizer": {"lr": 1.0}, "parallel": {}, **run}
    sections = {name: {**section, **values.get(name, {})} for name, section in base.items()}
    sections["train"]["steps"] = 1
    return {"model": dict(folder.model), **sections}


def _tokenizer(folder: ModelFolder) -> str:
    if folder.tokenizer is None:
        raise ConfigError(
            f"{folder.path} must hold the model's tokenizer ({listing(_TOKENIZERS, 'or')}), and it holds none: name it "
            "by data.tokenizer"
        )
    return str(folder.tokenizer)


def _newest(run: Path, announce: Callable[[str], None] | None) -> Path | None:
    """The newest intact checkpoint of a run's folder; None where it is none."""
    folder = run / "checkpoints"
    if (run / _CONFIG).is_file() or not folder.is_dir():
        return None
    skipped: list[str] = []
    for found in checkpoints(Root.of(str(folder))):
        if found.problem is None:
            if skipped and announce is not None:
                announce(f"taking {found.folder}: {'; '.join(skipped)}")
            return found.folder.local()
        skipped.append(found.problem)
    raise ConfigError([f"{run} holds no intact checkpoint", *skipped] if skipped else f"{run} holds no checkpoint yet")


def _model_section(path: Path, family: str | None) -> dict[str, Any]:
    file = path / _CONFIG
    described = _read_object(file) if file.is_file() else {}
    own = described.get("family")
    if not isinstance(own, str) or ":" not in own:
        section = read_hugging_face(path)
        if family not in (None, section["family"]):
            raise ConfigError(f"model.family ({family}) must be left out or {section['family']}, as {file} says")
        return section
    if family != own:
        shown = own if own.isprintable() else repr(own)
        given = f"model.family ({family}) must be {shown}: " if family is not None else ""
        raise ConfigError(
            f"{given}{file} names a class of its own, {shown}, whose code would run: if you trust it, give "
            f"model.family={shown} too"
        )
    return {
        key: value
        for key, value in described.items()
        if key not in _BESIDE and not (value is None and key in OwnConfig.model_fields)
    }


def _run_section(path: Path) -> dict[str, Any]:
    file = path / _MANIFEST
    found = _read_object(file).get("config", {}) if file.is_file() else {}
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must hold the run's configuration under config: copy the checkpoint again")
    return found


def _read_object(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return values
