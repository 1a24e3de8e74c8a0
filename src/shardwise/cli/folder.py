"""The model that a command is given: a checkpoint, a run's newest one, a Hugging Face folder or a hub id."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from shardwise import hub
from shardwise.checkpoint_format.manifest import MANIFEST, Manifest
from shardwise.cli.checkpoint import places
from shardwise.config import Config, apply_overrides, config_from
from shardwise.config.hugging_face import parse_hugging_face
from shardwise.config.model import OwnConfig
from shardwise.data import Tokenizer, detect
from shardwise.errors import ConfigError, listing, nearest_name
from shardwise.files import reason_of
from shardwise.storage.chunks import read_whole
from shardwise.storage.root import Root

HELP = (
    "a checkpoint, a run's folder or a folder of checkpoints (the newest one), a path or a URL (s3://bucket/run); "
    "or a Hugging Face folder or hub id"
)
_METAVAR = "CHECKPOINT"
_CONFIG, _GENERATION = "config.json", "generation_config.json"
# What `config.json` of a user's own model has beside its `model` section.
_BESIDE = ("torch_dtype", "bos_token_id", "eos_token_id")
# Keys that name the data: those of a command replace those of the run.
_SOURCES = ("dataset", "path", "blend")
# What a run says of its own data, and of no others.
_OF_SOURCE = ("config", "streaming", "shuffle_buffer")
# Keys of a run that say how its model reads text.
_RUN_KEYS = {"train": ("sequence_length", "micro_batch", "seed"), "precision": ("mode",)}
_LONGEST = 1024
_MICRO_BATCH = 4


@dataclass(frozen=True)
class ModelFolder:
    """A folder with weights. As a context it removes the copies that were made for it.

    Attributes:
        name: for the user. location: the path or URL by which a rank opens it again. weights: the folder itself.
        path: where its `files`, which describe model and tokenizer, lie on this machine; of a checkpoint they are
        verified. model: its `model` section. run: the configuration of the run that wrote it; empty where nothing says
        so.
    """

    name: str
    location: str
    weights: Root
    path: Path
    files: frozenset[str]
    model: Mapping[str, Any]
    run: Mapping[str, Any]

    @property
    def tokenizer(self) -> Path | None:
        """Where its tokenizer lies, as `data.tokenizer` names it."""
        return self.path if hub.holds_tokenizer(self.files) else None

    def stops(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Ids after which a text ends: as transformers reads them, else the tokenizer's end of a document."""
        for name in (_GENERATION, _CONFIG):
            found = None
            if name in self.files:
                found = _object((self.path / name).read_bytes(), f"{self.name}/{name}").get("eos_token_id")
            if found is not None:
                return frozenset(found if isinstance(found, list) else [found])
        return frozenset([tokenizer.end_of_document_id])

    def __enter__(self) -> ModelFolder:
        return self

    def __exit__(self, *_error: object) -> None:
        if not self.weights.is_local:
            shutil.rmtree(self.path, ignore_errors=True)


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
    target: str, given: Overrides, *, cached: bool, announce: Callable[[str], None] | None = None
) -> ModelFolder:
    """The folder that `target` names: its newest intact checkpoint, a Hugging Face folder, or a hub id, then fetched.

    A folder's own class is code that runs: the user must have named it as `model.family`.

    Raises:
        ConfigError: there is none, it holds no weights, describes a model that we do not have, or one of a class that
        the user did not name. StoreError: a checkpoint cannot be read. DamageError: it is not what was written.
    """
    if hub.is_url(target) or Path(target).expanduser().is_dir():
        place = places.newest_intact(target, announce)
        if place.single:
            if given.revision is not None:
                raise ConfigError(
                    f"checkpoint.revision ({given.revision}) must be left out: {place.root} is a checkpoint, and only "
                    "a hub id has revisions"
                )
            return _open_checkpoint(place, given.family)
        if not place.root.is_local:
            raise ConfigError(
                f"{place.root} must be a checkpoint or hold checkpoints, and it has no {MANIFEST}: copy a Hugging Face "
                "folder to this machine first"
            )
        target = str(place.root.local()) if hub.is_url(target) else target
    with argument_named():
        path = hub.resolve(target, given.revision, cached=cached, announce=announce)
    if not (path / _CONFIG).is_file():
        raise ConfigError(f"the folder {path} holds no {_CONFIG}")
    try:
        described = (path / _CONFIG).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path / _CONFIG} cannot be read: {reason_of(error)}") from None
    files = frozenset(each.name for each in path.iterdir() if each.is_file())
    model = _model_section(described, str(path / _CONFIG), given.family)
    return ModelFolder(str(path), str(path), Root.of(path), path, files, model, {})


def _open_checkpoint(place: places.Place, family: str | None) -> ModelFolder:
    """One of our checkpoints: what is read of it was verified; of one behind a URL, small files are copied here."""
    root = place.root
    manifest = Manifest.read(root)
    kinds = (_CONFIG, *hub.BESIDE_WEIGHTS)
    entries = {entry.path: entry for entry in manifest.files}
    if _CONFIG not in entries:
        raise ConfigError(f"{root} must have a {_CONFIG} that its {MANIFEST} lists, and it has none")
    contents = {
        path: read_whole(root, entry)
        for path, entry in entries.items()
        if "/" not in path and any(fnmatchcase(path, kind) for kind in kinds)
    }
    model = _model_section(contents[_CONFIG], str(root / _CONFIG), family)
    if root.is_local:
        path = root.local()
    else:
        path = Path(tempfile.mkdtemp(prefix="shardwise-"))
        for name, content in contents.items():
            (path / name).write_bytes(content)
    return ModelFolder(str(root), place.location, root, path, frozenset(contents), model, manifest.config)


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
    at_once = micro_batch * replicas if isinstance(micro_batch, int) else 1
    train["global_batch"] = at_once * _any_schedule(sections["parallel"])
    if part == "all":
        data["split"] = "1,0"
    chosen = values.get("data", {})
    named = {key for key in _SOURCES if key in chosen}
    if named:
        for key in {"path", "blend"} - named:
            data[key] = None
        if "format" not in chosen and data.get("format") in ("megatron", "hdf5", "datasets"):
            data["format"] = "auto"
        for key in set(_OF_SOURCE) - set(chosen):
            data.pop(key, None)
    if chosen.get("tokenizer") is None:
        data["tokenizer"] = None if folder.tokenizer is None else str(folder.tokenizer)
    config = config_from(sections)
    if config.data.tokenizer is None and detect(config.data) == "text":
        raise _without_tokenizer(folder)
    return config


def generation_config(folder: ModelFolder, values: Mapping[str, Any]) -> Config:
    """What a generation reads: the model, how it is cut, its dtype and its tokenizer.

    Raises:
        ConfigError: with every problem of the values.
    """
    sections = _sections(folder, values)
    sections["train"] |= {"sequence_length": 1, "global_batch": _any_schedule(sections["parallel"]), "micro_batch": 1}
    sections["data"] = {"tokenizer": values.get("data", {}).get("tokenizer") or _tokenizer(folder)}
    return config_from(sections)


def open_tokenizer(
    config: Config, folder: ModelFolder, *, cached: bool = False, announce: Callable[[str], None] | None = None
) -> Tokenizer:
    """The tokenizer of a configuration made here; a hub id is fetched, or with `cached` opened from the cache.

    Raises:
        ConfigError: it cannot be opened, or has ids that the model has not.
    """
    path = config.data.tokenizer
    assert path is not None
    tokenizer = Tokenizer.load(hub.resolve_tokenizer(path, cached=cached, announce=announce))
    if tokenizer.vocab_size > config.model.vocab_size:
        shown = folder.name if Path(path) == folder.tokenizer else path
        raise ConfigError(
            f"the vocabulary of the tokenizer {shown} ({tokenizer.vocab_size:,}) must be at most that of the model in "
            f"{folder.name} ({config.model.vocab_size:,}): name its own one by data.tokenizer"
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


def _any_schedule(parallel: Mapping[str, Any]) -> int:
    """Micro-batches that suit every schedule of a pipeline: nothing here takes a step, and what is read are others."""
    degree = parallel.get("pipeline", 1)
    return 2 * degree if isinstance(degree, int) and degree > 1 else 1


def _tokenizer(folder: ModelFolder) -> str:
    if folder.tokenizer is None:
        raise _without_tokenizer(folder)
    return str(folder.tokenizer)


def _without_tokenizer(folder: ModelFolder) -> ConfigError:
    return ConfigError(
        f"{folder.name} must hold the model's tokenizer ({hub.tokenizer_names()}), and it holds none: name it "
        "by data.tokenizer"
    )


def _model_section(text: bytes, file: str, family: str | None) -> dict[str, Any]:
    """What the text of a `config.json`, called `file`, describes."""
    described = _object(text, file)
    own = described.get("family")
    if not isinstance(own, str) or ":" not in own:
        section = parse_hugging_face(text, file)
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


def _object(text: bytes, file: str) -> dict[str, Any]:
    try:
        values = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return values
