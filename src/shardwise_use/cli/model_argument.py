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

from shardwise.base.errors import ConfigError, StoreError, keys_renamed, listing
from shardwise.base.files import reason_of, user_path, write_files
from shardwise.base.hardware import accelerators
from shardwise.base.hub import holds_tokenizer
from shardwise.base.mesh_axes import DIVIDING_KEYS
from shardwise.base.yaml_and_json import json_object
from shardwise.checkpoint.format.manifest import MANIFEST, Manifest
from shardwise.checkpoint.format.weight_files import BESIDE_WEIGHTS, GENERATION, resolve_weights
from shardwise.checkpoint.storage.checkpoint_folders import NamedFolder, parse_step, weights_folder
from shardwise.checkpoint.storage.chunks import read_whole
from shardwise.checkpoint.storage.root import Root, is_url
from shardwise.config import CHAT, CHAT_KEYS, Config, apply_overrides, config_from_sections, names_chat, values_at_step
from shardwise.config.hugging_face import from_hugging_face
from shardwise.config.load import ignored_fields
from shardwise.config.model import ModelConfig, UserModelConfig
from shardwise.config.suggestions import suggestions
from shardwise.data.open_data import data_format_of
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.data.tokens.tokenizer_files import resolve_tokenizer, tokenizer_names
from shardwise.launch.environment import Rank
from shardwise.launch.local import launch_without_run

HELP = (
    "a checkpoint, a run's folder or a folder of checkpoints (the newest one), a path or a URL (s3://bucket/run); "
    "or a Hugging Face folder or hub id"
)
ARGUMENTS = {"checkpoint.load": "CHECKPOINT"}
"""Key of a recipe → name in errors."""
LAYOUT_KEYS = (*DIVIDING_KEYS, "parallel.stages")
"""The keys of the layout of a model that is used."""
_CONFIG = "config.json"
_OTHER_FIELDS = ("torch_dtype", "bos_token_id", "eos_token_id")
"""Fields that `config.json` of a user's own model has beside its `model` section."""
_SOURCE_KEYS = ("config", "streaming", "shuffle_buffer")  # keys that describe the run's own data, and no other data
_RUN_KEYS = {"train": ("sequence_length", "micro_batch", "seed"), "precision": ("mode",)}
"""Keys of a run that its evaluation takes over."""
_LONGEST_SEQUENCE = 1024  # length of the sequences at most, where neither the user nor the run says one
_MICRO_BATCH = 4


@dataclass(frozen=True)
class ModelFolder:
    """A folder with weights, as a command's argument names it. As a context it removes the copies made for it."""

    name: str  # text for the user
    location: str  # path or URL by which a rank opens it again
    weights: Root
    path: Path  # folder on this machine that holds its `files`; those of a checkpoint are verified
    files: frozenset[str]  # names of the files that describe the model and the tokenizer
    model: Mapping[str, Any]  # the `model` section of the folder
    run: Mapping[str, Any]  # configuration of the run that wrote it; empty where it is not known
    is_checkpoint: bool = False  # it is a checkpoint of shardwise

    @property
    def tokenizer(self) -> str | None:
        """The folder's tokenizer as `data.tokenizer` names it; None where it has none."""
        return str(self.path) if holds_tokenizer(self.files) else None

    def longest(self, model: ModelConfig) -> int | None:
        """Tokens of the longest text that the model reads: of a class that does not say, those of its training."""
        trained = (self.run.get("train") or {}).get("sequence_length") if model.is_own else None
        return model.max_position_embeddings or trained

    def stops(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Ids after which a text ends: as transformers reads them, else the tokenizer's end of a document, if any."""
        for name in (GENERATION, _CONFIG):
            if name in self.files:
                ids = json_object((self.path / name).read_bytes(), f"{self.name}/{name}").get("eos_token_id")
                if ids is not None:
                    return frozenset(ids if isinstance(ids, list) else [ids])
        end = tokenizer.end_of_document_id
        return frozenset(() if end is None else (end,))

    def __enter__(self) -> ModelFolder:
        return self

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        # Only for weights behind a URL the folder is a copy; else it is the user's own.
        if not self.weights.is_local:
            shutil.rmtree(self.path, ignore_errors=True)
        if self.is_checkpoint and isinstance(error, Exception):
            _refuse_if_removed(self.weights)


def parse_overrides(overrides: Sequence[str], allowed: Sequence[str], command: str) -> dict[str, Any]:
    """The sections that a command on a trained model gets by `key=value` arguments.

    Args:
        allowed: the keys that the command reads; one that ends in a dot stands for a section.

    Raises:
        ConfigError: another key, or no `key=value`.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    keys = [name for name in allowed if not name.endswith(".")]
    sections = tuple(name for name in allowed if name.endswith("."))
    for override in overrides:
        key, separator, _ = override.partition("=")
        key = key.strip()
        if separator and key not in keys and not key.startswith(sections):
            near = listing(suggestions(key, keys, options=()), "or")
            names = listing(f"{name}*" if name in sections else name for name in allowed)
            problems.append(f"{key}: did you mean {near}?" if near else f"{key}: {command} reads {names}")
    problems += apply_overrides(values, overrides)
    if problems:
        raise ConfigError(problems)
    return values


def open_model_folder(
    target: str, values: Mapping[str, Any], *, cached: bool, announce: Callable[[str], None] | None = None
) -> ModelFolder:
    """The folder that `target` names: its newest intact checkpoint, a Hugging Face folder, or a hub id, then fetched.

    A folder's own class is code that runs: the user must have named it as `model.family`.

    Args:
        values: the user's, of which `checkpoint.revision`, `model.family` and `model.ignore` count.
        announce: called with one line on what takes a moment.

    Raises:
        ConfigError: there is none, it holds no weights, describes a model that we do not have, or one of a class that
            the user did not name.
        StoreError: a checkpoint cannot be read.
        DamageError: a checkpoint is not what was written.
    """
    revision = values.get("checkpoint", {}).get("revision")
    user_model = values.get("model", {})
    if is_url(target) or user_path(target).is_dir():
        folder = weights_folder(target, announce)
        if folder.is_checkpoint:
            if revision is not None:
                raise ConfigError(
                    f"checkpoint.revision ({revision}) must be left out: {folder.root} is a checkpoint, and only a hub "
                    "id has revisions"
                )
            return _open_checkpoint(folder, user_model)
        if not folder.root.is_local:
            raise ConfigError(
                f"{folder.root} must be a checkpoint or hold checkpoints, and it has no {MANIFEST}: copy a Hugging "
                "Face folder to this machine first"
            )
        # A local URL, file://…, names a folder too.
        if is_url(target):
            target = str(folder.root.local())
    # Otherwise the name of a checkpoint would be looked for on the hub.
    if parse_step(Path(target).name) is not None and not user_path(target).exists():
        raise ConfigError(f"there is no checkpoint {target}: it was not saved, or was removed as an old one")
    with keys_renamed(ARGUMENTS):
        path = resolve_weights(target, None if revision is None else str(revision), cached=cached, announce=announce)
    return _open_hugging_face(path, user_model)


def _open_hugging_face(path: Path, user_model: Mapping[str, Any]) -> ModelFolder:
    try:
        described = (path / _CONFIG).read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"the folder {path} holds no {_CONFIG}") from None
    except OSError as error:
        raise ConfigError(f"{path / _CONFIG} cannot be read: {reason_of(error)}") from None
    files = frozenset(file.name for file in path.iterdir() if file.is_file())
    model = _model_section(described, str(path / _CONFIG), user_model)
    return ModelFolder(str(path), str(path), Root.of(path), path, files, model, run={})


def _refuse_if_removed(folder: Root) -> None:
    """Raise ConfigError where a checkpoint is there no more: what else went wrong with it follows from that."""
    with contextlib.suppress(StoreError):
        if (folder / MANIFEST).exists():
            return
        raise ConfigError(
            f"the checkpoint {folder} was removed while it was read, as checkpoint.keep and `shardwise checkpoint "
            "prune` remove old ones: give the command again, or keep it by checkpoint.keep_every"
        ) from None


def _open_checkpoint(folder: NamedFolder, user_model: Mapping[str, Any]) -> ModelFolder:
    """A checkpoint, whose small files are verified; those of one behind a URL are copied to this machine."""
    root = folder.root
    # Small files at the top of a checkpoint describe the model; those in its folders are states.
    patterns = (_CONFIG, *BESIDE_WEIGHTS)
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
    model = _model_section(contents[_CONFIG], str(root / _CONFIG), user_model)
    if root.is_local:
        path = root.local()
    else:
        path = Path(tempfile.mkdtemp(prefix="shardwise-"))
        write_files(path, contents)
    files = frozenset(contents)
    run = values_at_step(manifest.config, manifest.step)
    return ModelFolder(str(root), folder.location, root, path, files, model, run, is_checkpoint=True)


def launch_command(command: str, arguments: argparse.Namespace, folder: ModelFolder, world: int, **options: Any) -> int:
    """Run a command on `world` local ranks with the user's arguments, on the folder that was opened.

    `options` replace options of the user. Returns the exit code.
    """
    # The folder that was opened has the files of the revision already.
    overrides = [text for text in arguments.overrides if not text.startswith("checkpoint.revision=")]
    flags: list[str] = []
    for name, value in {**vars(arguments), "nproc": world, **options}.items():
        if name not in ("checkpoint", "overrides") and value is not None and value is not False:
            flag = f"--{name.replace('_', '-')}"
            flags.append(flag if value is True else f"{flag}={value}")
    launch_without_run([command, folder.location, *overrides, *flags], world)
    return 0


def evaluation_config(folder: ModelFolder, values: Mapping[str, Any], replicas: int, part: str) -> Config:
    """The configuration of `evaluate`: the run's own data and sequence length unless `values` say otherwise.

    Args:
        replicas: the data-parallel degree.
        part: `all` puts every document into one part, the training one.
    """
    sections = _sections_of_batches(folder, values, replicas)
    data = sections["data"]
    # A split without a second part leaves all documents to the training part.
    if part == "all":
        data["split"] = "1,0"
    user_data = values.get("data", {})
    # The user names other data: the keys that describe the run's own do not fit them.
    if not user_data.keys().isdisjoint(("dataset", "path", "blend")):
        data |= {key: None for key in ("path", "blend") if key not in user_data}
        if "format" not in user_data and data.get("format") in ("megatron", "hdf5", "datasets", CHAT):
            data["format"] = "auto"
        is_other_kind = names_chat(data) != names_chat(folder.run.get("data", {}))
        for key in {*_SOURCE_KEYS, *(CHAT_KEYS if is_other_kind else ())} - set(user_data):
            data.pop(key, None)
    elif reader := folder.run.get("hooks", {}).get("data"):
        raise ConfigError(
            f"{folder.name} was trained on hooks.data ({reader}), code that an evaluation does not run: name a text by "
            "data.path or data.dataset"
        )
    if user_data.get("tokenizer") is None:
        data["tokenizer"] = folder.tokenizer
    config = config_from_sections(sections)
    if config.data.tokenizer is None and data_format_of(config.data).name in ("text", CHAT):
        raise _without_tokenizer(folder)
    return config


def evaluation_ranks_and_config(
    config_for: Callable[[int], Config], place: Rank | None, nproc: int | None
) -> tuple[int, Config]:
    """The number of ranks of the command `evaluate`, and its configuration.

    Args:
        config_for: makes the configuration for a data-parallel degree, which the batch needs.
        place: place in the job that was launched; None outside of one.
        nproc: number of ranks that the user gives; None: one for each accelerator, or those of one copy of the model.

    Raises:
        ConfigError: the number is below 1, or a key is wrong.
    """
    _, accelerated = accelerators()
    # The degree follows from the configuration, which is therefore made twice.
    parallel = config_for(1).parallel
    copy_ranks = parallel.model_ranks
    world = place.world if place is not None else nproc or accelerated // copy_ranks * copy_ranks or copy_ranks
    if world < 1:
        raise ConfigError(f"--nproc ({world}) must be at least 1")
    return world, config_for(max(1, world // parallel.ranks))


def tasks_config(folder: ModelFolder, values: Mapping[str, Any], replicas: int, settings: Mapping[str, Any]) -> Config:
    """The configuration of `evaluate` on tasks: the model, its layout, its dtype and its tokenizer."""
    sections = _sections_of_batches(folder, values, replicas)
    sections["data"] = {"tokenizer": _tokenizer_of(folder, values)}
    sections["evaluation"] = dict(settings)
    return config_from_sections(sections)


def generation_config(folder: ModelFolder, values: Mapping[str, Any]) -> Config:
    """The configuration of the command `generate`: the model, its layout, its dtype and its tokenizer."""
    sections = _sections(folder, values)
    parallel = sections["parallel"]
    sections["train"] |= {"sequence_length": 1, "global_batch": _micro_batches(parallel), "micro_batch": 1}
    sections["data"] = {"tokenizer": _tokenizer_of(folder, values)}
    config = config_from_sections(sections)
    # Where one copy of the model takes more ranks than compute one text, these read the same one.
    sections["train"]["global_batch"] *= config.parallel.model_ranks // config.parallel.ranks
    return config_from_sections(sections)


def _tokenizer_of(folder: ModelFolder, values: Mapping[str, Any]) -> str:
    tokenizer: str | None = values.get("data", {}).get("tokenizer") or folder.tokenizer
    if tokenizer is None:
        raise _without_tokenizer(folder)
    return tokenizer


def tokenizer_of_command(
    config: Config, folder: ModelFolder, *, cached: bool = False, announce: Callable[[str], None] | None = None
) -> Tokenizer:
    """The tokenizer of a command on a model; a hub id is fetched, or with `cached` opened from the cache.

    ConfigError: it cannot be opened, or has ids that the model lacks.
    """
    path = config.data.tokenizer
    assert path is not None
    tokenizer = Tokenizer.load(resolve_tokenizer(path, cached=cached, announce=announce))
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
    # The learning rate is a required key; nothing is optimized here.
    run_sections: dict[str, dict[str, Any]] = {"data": run.get("data", {}), "optimizer": {"lr": 1.0}, "parallel": {}}
    for name, keys in _RUN_KEYS.items():
        run_sections[name] = {key: value for key, value in run.get(name, {}).items() if key in keys}
    sections = {"model": dict(folder.model)}
    for name, section in run_sections.items():
        sections[name] = {**section, **values.get(name, {})}
    # The stages of a mixture begin within the run's steps.
    sections["train"]["steps"] = run.get("train", {}).get("steps", 1)
    return sections


def _sections_of_batches(folder: ModelFolder, values: Mapping[str, Any], replicas: int) -> dict[str, dict[str, Any]]:
    sections = _sections(folder, values)
    train = sections["train"]
    # The model reads no longer sequences, whatever the run or the default says.
    limit = folder.model.get("max_position_embeddings")
    train.setdefault("sequence_length", _LONGEST_SEQUENCE if limit is None else min(limit, _LONGEST_SEQUENCE))
    train.setdefault("micro_batch", _MICRO_BATCH)
    micro_batch = train["micro_batch"]
    # No step is taken, but every configuration must have a batch that its layout can divide.
    samples_at_once = micro_batch * replicas if isinstance(micro_batch, int) else 1
    train["global_batch"] = samples_at_once * _micro_batches(sections["parallel"])
    return sections


def _micro_batches(parallel: Mapping[str, Any]) -> int:
    """A number of micro-batches that every schedule of a pipeline accepts; without a training step it has no effect."""
    degree = parallel.get("pipeline", 1)
    return 2 * degree if isinstance(degree, int) and degree > 1 else 1


def _without_tokenizer(folder: ModelFolder) -> ConfigError:
    return ConfigError(
        f"{folder.name} must hold the model's tokenizer ({tokenizer_names()}), and it holds none: name it "
        "by data.tokenizer"
    )


def _model_section(text: bytes, file: str, user_model: Mapping[str, Any]) -> dict[str, Any]:
    """The `model` section of the text of a `config.json`; of the user's, `family` and `ignore` count."""
    described = json_object(text, file)
    class_name = described.get("family")
    user_family = user_model.get("family")
    if not isinstance(class_name, str) or ":" not in class_name:
        section = from_hugging_face(described, file, ignored_fields(user_model))
        if user_family not in (None, section["family"]):
            raise ConfigError(f"model.family ({user_family}) must be left out or {section['family']}, as {file} says")
        return section
    if user_family != class_name:
        shown = class_name if class_name.isprintable() else repr(class_name)
        problem = f"model.family ({user_family}) must be {shown}: " if user_family is not None else ""
        raise ConfigError(
            f"{problem}{file} names a class of its own, {shown}, whose code would run: if you trust it, give "
            f"model.family={shown} too"
        )
    section = {}
    for key, value in described.items():
        # A checkpoint's file has null for optional keys that were not set.
        is_unset = value is None and key in UserModelConfig.model_fields
        if key not in _OTHER_FIELDS and not is_unset:
            section[key] = value
    return section
