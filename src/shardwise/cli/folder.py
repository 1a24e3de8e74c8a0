"""The model that a command is given: a checkpoint, a run's newest one, a Hugging Face folder or a hub id."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, keys_renamed, listing, nearest_name
from shardwise.base.files import reason_of
from shardwise.base.parsing import json_value
from shardwise.checkpoint.format.manifest import MANIFEST, Manifest
from shardwise.checkpoint.storage.chunks import read_whole
from shardwise.checkpoint.storage.locate import Place, newest_intact
from shardwise.checkpoint.storage.root import Root, StoreError
from shardwise.checkpoint.storage.step_folders import step_of
from shardwise.config import Config, apply_overrides, config_from
from shardwise.config.hugging_face import from_hugging_face
from shardwise.config.load import ignored_fields
from shardwise.config.model import UserModelConfig
from shardwise.data import hub
from shardwise.data.reading.detect import detect
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.launch.local import launch_without_run

HELP = (
    "a checkpoint, a run's folder or a folder of checkpoints (the newest one), a path or a URL (s3://bucket/run); "
    "or a Hugging Face folder or hub id"
)
ARGUMENTS = {"checkpoint.load": "CHECKPOINT"}
"""What errors name instead of the key of a recipe."""
_CONFIG = "config.json"
# What `config.json` of a user's own model has beside its `model` section.
_BESIDE = ("torch_dtype", "bos_token_id", "eos_token_id")
# Keys that describe the run's own data, and no other data.
_OF_SOURCE = ("config", "streaming", "shuffle_buffer")
# Keys of a run that its evaluation takes over.
_RUN_KEYS = {"train": ("sequence_length", "micro_batch", "seed"), "precision": ("mode",)}
_LONGEST = 1024
_MICRO_BATCH = 4


@dataclass(frozen=True)
class ModelFolder:
    """A folder with weights. As a context it removes the copies of files that were made for it.

    Attributes:
        name: for the user.
        location: the path or URL by which a rank opens it again.
        weights: the folder itself.
        path: a folder on this machine that holds its `files`; those of a checkpoint are verified.
        files: names of the files that describe the model and the tokenizer.
        model: its `model` section.
        run: the configuration of the run that wrote it; empty where it is not known.
        is_checkpoint: it is one of our checkpoints.
    """

    name: str
    location: str
    weights: Root
    path: Path
    files: frozenset[str]
    model: Mapping[str, Any]
    run: Mapping[str, Any]
    is_checkpoint: bool = False

    @property
    def tokenizer(self) -> str | None:
        """Its tokenizer as `data.tokenizer` names it; None where it has none."""
        return str(self.path) if hub.holds_tokenizer(self.files) else None

    def stops(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Ids after which a text ends: as transformers reads them, else the tokenizer's end of a document, if any."""
        for name in (hub.GENERATION, _CONFIG):
            if name in self.files:
                ids = _object((self.path / name).read_bytes(), f"{self.name}/{name}").get("eos_token_id")
                if ids is not None:
                    return frozenset(ids if isinstance(ids, list) else [ids])
        end = tokenizer.end_of_document_id
        return frozenset(() if end is None else (end,))

    def __enter__(self) -> ModelFolder:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if not self.weights.is_local:
            shutil.rmtree(self.path, ignore_errors=True)
        if self.is_checkpoint and isinstance(error, Exception):
            _refuse_if_removed(self.weights)


def parse_overrides(overrides: Sequence[str], allowed: Sequence[str], command: str) -> dict[str, Any]:
    """The sections that the user's `key=value` arguments give.

    Args:
        overrides: the arguments.
        allowed: the keys that the command reads; one that ends in a dot stands for a section.
        command: its name, for messages.

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
    return values


def open_folder(
    target: str, values: Mapping[str, Any], *, cached: bool, announce: Callable[[str], None] | None = None
) -> ModelFolder:
    """The folder that `target` names: its newest intact checkpoint, a Hugging Face folder, or a hub id, then fetched.

    A folder's own class is code that runs: the user must have named it as `model.family`.

    Args:
        target: a path, a URL or a hub id.
        values: the user's, of which `checkpoint.revision`, `model.family` and `model.ignore` count.
        cached: open a hub id from the cache, without any request.
        announce: called with one line on what takes a moment.

    Raises:
        ConfigError: there is none, it holds no weights, describes a model that we do not have, or one of a class that
            the user did not name.
        StoreError: a checkpoint cannot be read.
        DamageError: a checkpoint is not what was written.
    """
    revision, chosen = values.get("checkpoint", {}).get("revision"), values.get("model", {})
    if hub.is_url(target) or Path(target).expanduser().is_dir():
        place = newest_intact(target, announce)
        if place.single and revision is not None:
            raise ConfigError(
                f"checkpoint.revision ({revision}) must be left out: {place.root} is a checkpoint, and only a hub id "
                "has revisions"
            )
        if place.single:
            return _open_checkpoint(place, chosen)
        if not place.root.is_local:
            raise ConfigError(
                f"{place.root} must be a checkpoint or hold checkpoints, and it has no {MANIFEST}: copy a Hugging Face "
                "folder to this machine first"
            )
        target = str(place.root.local()) if hub.is_url(target) else target
    if step_of(Path(target).name) is not None and not Path(target).expanduser().exists():
        raise ConfigError(f"there is no checkpoint {target}: it was not saved, or was removed as an old one")
    with keys_renamed(ARGUMENTS):
        path = hub.resolve(target, None if revision is None else str(revision), cached=cached, announce=announce)
    try:
        described = (path / _CONFIG).read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"the folder {path} holds no {_CONFIG}") from None
    except OSError as error:
        raise ConfigError(f"{path / _CONFIG} cannot be read: {reason_of(error)}") from None
    files = frozenset(file.name for file in path.iterdir() if file.is_file())
    model = _model_section(described, str(path / _CONFIG), chosen)
    return ModelFolder(str(path), str(path), Root.of(path), path, files, model, {})


def _refuse_if_removed(folder: Root) -> None:
    """Raise ConfigError where a checkpoint is there no more: what else went wrong with it follows from that."""
    with contextlib.suppress(StoreError):
        if (folder / MANIFEST).exists():
            return
        raise ConfigError(
            f"the checkpoint {folder} was removed while it was read, as checkpoint.keep and `shardwise checkpoint "
            "prune` remove old ones: give the command again, or keep it by checkpoint.keep_every"
        ) from None


def _open_checkpoint(place: Place, chosen: Mapping[str, Any]) -> ModelFolder:
    """One of our checkpoints: what is read of it was verified; of one behind a URL, small files are copied here."""
    root = place.root
    patterns = (_CONFIG, *hub.BESIDE_WEIGHTS)
    try:
        manifest = Manifest.read(root)
        contents = {
            entry.path: read_whole(root, entry)
            for entry in manifest.files
            if "/" not in entry.path and any(fnmatchcase(entry.path, pattern) for pattern in patterns)
        }
    except StoreError:
        _refuse_if_removed(root)
        raise
    if _CONFIG not in contents:
        raise ConfigError(f"{root} must have a {_CONFIG} that its {MANIFEST} lists, and it has none")
    model = _model_section(contents[_CONFIG], str(root / _CONFIG), chosen)
    if root.is_local:
        path = root.local()
    else:
        path = Path(tempfile.mkdtemp(prefix="shardwise-"))
        for name, content in contents.items():
            (path / name).write_bytes(content)
    files, run = frozenset(contents), manifest.config
    return ModelFolder(str(root), place.location, root, path, files, model, run, is_checkpoint=True)


def launch_command(command: str, arguments: argparse.Namespace, folder: ModelFolder, world: int, **options: Any) -> int:
    """Run a command on `world` local ranks with the user's arguments, on the folder that was found.

    `options` replace options of the user. Returns the exit code.
    """
    given = {**vars(arguments), "nproc": world, **options}
    overrides = [text for text in arguments.overrides if not text.startswith("checkpoint.revision=")]
    flags = []
    for name, value in given.items():
        if name not in ("checkpoint", "overrides", "call") and value is not None and value is not False:
            flag = f"--{name.replace('_', '-')}"
            flags.append(flag if value is True else f"{flag}={value}")
    launch_without_run([command, folder.location, *overrides, *flags], world)
    return 0


def evaluation_config(folder: ModelFolder, values: Mapping[str, Any], replicas: int, part: str) -> Config:
    """What an evaluation reads: the run's own data and sequence length unless `values` say otherwise.

    Args:
        folder: the model.
        values: the user's.
        replicas: the data-parallel degree.
        part: `all` puts every document into one part, the training one.

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
    if not chosen.keys().isdisjoint(("dataset", "path", "blend")):  # other data than the run's
        data |= {key: None for key in ("path", "blend") if key not in chosen}
        if "format" not in chosen and data.get("format") in ("megatron", "hdf5", "datasets"):
            data["format"] = "auto"
        for key in set(_OF_SOURCE) - set(chosen):
            data.pop(key, None)
    elif reader := folder.run.get("hooks", {}).get("data"):
        raise ConfigError(
            f"{folder.name} was trained on hooks.data ({reader}), code that an evaluation does not run: name a text by "
            "data.path or data.dataset"
        )
    if chosen.get("tokenizer") is None:
        data["tokenizer"] = folder.tokenizer
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
    tokenizer = values.get("data", {}).get("tokenizer") or folder.tokenizer
    if tokenizer is None:
        raise _without_tokenizer(folder)
    sections["data"] = {"tokenizer": tokenizer}
    return config_from(sections)


def open_tokenizer(
    config: Config, folder: ModelFolder, *, cached: bool = False, announce: Callable[[str], None] | None = None
) -> Tokenizer:
    """The tokenizer of a configuration made here; a hub id is fetched, or with `cached` opened from the cache.

    Raises:
        ConfigError: it cannot be opened, or has ids that the model lacks.
    """
    path = config.data.tokenizer
    assert path is not None
    tokenizer = Tokenizer.load(hub.resolve_tokenizer(path, cached=cached, announce=announce))
    if tokenizer.vocab_size > config.model.vocab_size:
        shown = folder.name if path == folder.tokenizer else path
        raise ConfigError(
            f"the vocabulary of the tokenizer {shown} ({tokenizer.vocab_size:,}) must be at most that of the model in "
            f"{folder.name} ({config.model.vocab_size:,}): name its own one by data.tokenizer"
        )
    return tokenizer


def _sections(folder: ModelFolder, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """All sections of a configuration. Keys that no evaluation or generation reads have any valid value."""
    run = {name: section if isinstance(section, dict) else {} for name, section in folder.run.items()}
    sections: dict[str, dict[str, Any]] = {"data": run.get("data", {}), "optimizer": {"lr": 1.0}, "parallel": {}}
    for name, keys in _RUN_KEYS.items():
        sections[name] = {key: value for key, value in run.get(name, {}).items() if key in keys}
    sections = {name: {**section, **values.get(name, {})} for name, section in sections.items()}
    sections["train"]["steps"] = 1
    return {"model": dict(folder.model), **sections}


def _any_schedule(parallel: Mapping[str, Any]) -> int:
    """A number of micro-batches that every schedule of a pipeline accepts; without a training step it has no effect."""
    degree = parallel.get("pipeline", 1)
    return 2 * degree if isinstance(degree, int) and degree > 1 else 1


def _without_tokenizer(folder: ModelFolder) -> ConfigError:
    return ConfigError(
        f"{folder.name} must hold the model's tokenizer ({hub.tokenizer_names()}), and it holds none: name it "
        "by data.tokenizer"
    )


def _model_section(text: bytes, file: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The `model` section that the text of a `config.json` describes.

    Args:
        text: of the file.
        file: its name, for messages.
        chosen: the user's `model` section, of which `family` and `ignore` count.
    """
    described, family = _object(text, file), chosen.get("family")
    own = described.get("family")
    if not isinstance(own, str) or ":" not in own:
        section = from_hugging_face(described, file, ignored_fields(chosen))
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
        if key not in _BESIDE and not (value is None and key in UserModelConfig.model_fields)
    }


def _object(text: bytes, file: str) -> dict[str, Any]:
    try:
        values = json_value(text.decode("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return values
