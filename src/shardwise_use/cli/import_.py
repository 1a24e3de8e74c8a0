"""Make a checkpoint of a model from elsewhere, at which a run starts or goes on, at any layout.

SOURCE is a Hugging Face folder or hub id. If a Hugging Face Trainer saved optimizer.pt there (checkpoint-500), the
optimizer's state, the step and the rates are imported too: DEST becomes the folder of a run, and `shardwise train
DEST/imported.yaml --run-dir DEST` goes on. Otherwise the checkpoint is of step 0, and `checkpoint.load` starts from its
weights.

With --from SOURCE is the folder of a sharded checkpoint of torchtitan (Llama 3 and Qwen 3 models), olmo-core (OLMo 2
and 3, Llama and Qwen 3 models), megatron (GPT-2, Llama, Qwen, Mixtral and Qwen3-MoE models), neuronx-nemo-megatron (GPT
and Llama models; FOLDER/NAME.ckpt if the ranks' folders hold several) or neuronx-distributed (Llama, GPT-NeoX and BERT
models). The state of AdamW, the step and the rates are imported too, if they are there, but of Megatron-LM's `torch`
format. The shards of all ranks are combined. Pickled files are opened in a way that runs no code in them. The command
needs memory for only some rows of a tensor.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base import units
from shardwise.base.errors import ConfigError, keys_renamed, listing
from shardwise.base.files import user_path, write_atomic
from shardwise.base.units import counted, size
from shardwise.base.yaml_and_json import dump_yaml, parse_value
from shardwise.checkpoint.format.weight_files import resolve_weights
from shardwise.checkpoint.storage.root import answering_root, is_url
from shardwise.cli import output
from shardwise.cli.checkpoint.export import add_max_shard_size, shard_bytes
from shardwise.cli.help import add_json, count
from shardwise.data.tokens.tokenizer_files import resolve_tokenizer
from shardwise.runs.folder import RunDirectory

if TYPE_CHECKING:
    from shardwise.checkpoint.storage.root import Root
    from shardwise_use.importing.imported_model import ImportedModel, ImportedProgress

_HUB = "hugging-face"
_MEGATRON = "megatron"
_NEMO = "neuronx-nemo-megatron"
_NEURONX = "neuronx-distributed"
_TITAN = "torchtitan"
_OLMO = "olmo-core"
_OPTIONS = {
    "config": ("--config", (_NEURONX, _TITAN)),
    "revision": ("--revision", (_HUB,)),
    "vocab_size": ("--vocab-size", (_MEGATRON, _NEMO)),
    "tokenizer": ("--tokenizer", (_MEGATRON, _NEMO, _NEURONX, _TITAN, _OLMO)),
    "allow_drift": ("--allow-drift", (_MEGATRON, _NEMO, _NEURONX)),
    "ignore": ("--ignore", (_HUB, _NEURONX, _TITAN)),
}
_RECIPE = "imported.yaml"  # the file in a run's folder with the keys by which the run goes on as it began elsewhere

_KEYS = {"checkpoint.load": "SOURCE", "checkpoint.revision": "--revision", "model.ignore": "--ignore"}
"""Keys that messages name → what the command has instead."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SOURCE", help="a folder, or a hub id such as openai-community/gpt2")
    add("dest", metavar="DEST", help="a run's folder, or a folder of checkpoints, for the checkpoint; a path or a URL")
    add(
        "--from",
        dest="kind",
        metavar="FORMAT",
        choices=(_HUB, _MEGATRON, _NEMO, _NEURONX, _TITAN, _OLMO),
        default=_HUB,
        help=f"{_HUB} (default), {_MEGATRON}, {_NEMO}, {_NEURONX}, {_TITAN} or {_OLMO}",
    )
    add("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    config_help = f"{_NEURONX}, {_TITAN}: the model's Hugging Face config.json, or its folder"
    add("--config", metavar="PATH", type=Path, help=config_help)
    vocab_size_help = (
        f"{_MEGATRON}, {_NEMO}: tokens without the embedding's padding (default: from the checkpoint or --tokenizer)"
    )
    add("--vocab-size", metavar="N", type=count, help=vocab_size_help)
    tokenizer_help = "shards: the model's tokenizer, which is copied too; a path or hub id, as for data.tokenizer"
    add("--tokenizer", metavar="PATH", help=tokenizer_help)
    allow_drift_help = (
        "shards: if replicas differ, as they can with stochastic rounding, take the first one (default: refused)"
    )
    add("--allow-drift", action="store_true", default=None, help=allow_drift_help)
    ignore_help = "fields of config.json to leave out, because they do not change what the model computes"
    add("--ignore", metavar="NAME,…", help=ignore_help)
    add("--weights-only", action="store_true", help="leave out the step and the optimizer's state that SOURCE has")
    samples_help = "samples that SOURCE was trained on, after which the data go on (default: as SOURCE says)"
    add("--samples", metavar="N", type=_from_0, help=samples_help)
    add("--tokens", metavar="N", type=_from_0, help="tokens that SOURCE was trained on (default: as SOURCE says)")
    add_max_shard_size(parser)
    add_json(parser)


def _from_0(text: str) -> int:
    return 0 if text == "0" else count(text)


def run(arguments: argparse.Namespace) -> int:
    _require_fitting(arguments)
    max_shard_bytes = shard_bytes(arguments.max_shard_size)
    from shardwise_use.importing.imported_model import write_imported_checkpoint

    opened = _open(arguments)
    opened = replace(opened, progress=_completed(opened.progress, arguments))
    root, run_folder = _place(arguments.dest, is_run=opened.progress is not None)
    for note in opened.notes:
        output.progress(f"note: {note}")
    done = write_imported_checkpoint(opened, root, max_shard_bytes)
    cut = f" from TP {opened.layout['tensor']} × PP {opened.layout['pipeline']}" if opened.layout else ""
    lines = [
        f"{done.folder}: {opened.config.family}, {units.count(opened.parameters)} parameters in {opened.dtype}{cut}; "
        f"{counted(done.files, 'file')}, {size(done.bytes)}"
    ]
    facts = {
        "checkpoint": str(done.folder),
        "family": opened.config.family,
        "parameters": opened.parameters,
        "dtype": opened.dtype,
        "source_layout": dict(opened.layout),
        "files": done.files,
        "bytes": done.bytes,
        "step": 0,
        "notes": list(opened.notes),
    }
    if opened.progress is not None:
        facts |= _told_progress(opened, opened.progress, done.folder, run_folder, lines)
    else:
        facts["command"] = f"shardwise train RECIPE checkpoint.load={done.folder}"
        if arguments.kind != _HUB:
            lines.append("weights alone are imported: the state of the optimizer and of the schedule is left out")
        lines.append(f"start from it: {facts['command']}")
    output.answer(facts, lines, as_json=arguments.json)
    return 0


def _place(dest: str, *, is_run: bool) -> tuple[Root, Path | None]:
    """The folder of checkpoints in DEST, and the local run's folder that has it, in which a run is to go on."""
    if "://" in dest:
        root = answering_root(dest)
        if is_run and Path(_RECIPE).exists():
            raise ConfigError(f"{_RECIPE} is written here, as DEST ({dest}) is a URL, and exists: move it away")
        return (root / "checkpoints" if (root / "checkpoints").is_folder() else root), None
    path = user_path(dest)
    is_inside = (path / "checkpoints").is_dir() or (is_run and path.name != "checkpoints")
    folder = path / "checkpoints" if is_inside else path
    if is_run and RunDirectory(folder.parent).holds_run:
        raise ConfigError(
            f"DEST ({dest}) must hold no run yet, in whose place the imported one is to go on: choose another"
        )
    return answering_root(str(folder)), folder.parent if is_run else None


def _completed(progress: ImportedProgress | None, arguments: argparse.Namespace) -> ImportedProgress | None:
    """The progress with what the user tells of it; ConfigError: nobody says where the data go on."""
    samples, tokens = arguments.samples, arguments.tokens
    if progress is None or arguments.weights_only:
        if samples is not None or tokens is not None:
            raise ConfigError("--samples and --tokens must be left out: of SOURCE the weights alone are imported")
        return None
    samples = progress.samples if samples is None else samples
    if samples is None:
        raise ConfigError(
            f"SOURCE does not say how many samples its {progress.step:,} steps took: give --samples N, after which the "
            "data go on (0: from their beginning), or --weights-only"
        )
    return replace(progress, samples=samples, tokens=progress.tokens if tokens is None else tokens)


def _told_progress(
    opened: ImportedModel, progress: ImportedProgress, folder: Root, run_folder: Path | None, lines: list[str]
) -> dict[str, Any]:
    tokens = "tokens not known, counted from 0" if progress.tokens is None else counted(progress.tokens, "token")
    states = sorted({weight.state for weight in progress.states})
    lines.append(
        f"after step {progress.step:,}, {counted(progress.samples or 0, 'sample')} and {tokens}, with the optimizer's "
        f"{listing(states, 'and')}"
    )
    model = opened.config.model_dump(mode="json", exclude_defaults=True)
    values: dict[str, dict[str, Any]] = {"model": {"family": opened.config.family, **model}}
    keys = {"optimizer.name": "adamw", **progress.keys}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    recipe = (run_folder or Path()) / _RECIPE
    write_atomic(recipe, dump_yaml(values))
    words = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in keys.items()]
    lines.append(f"keys that carry the training over, in {recipe}: {shlex.join(words)}")
    place = ["RUN", f"checkpoint.path={str(folder).rpartition('/')[0]}"] if run_folder is None else [str(run_folder)]
    missing = [f"{key}=N" for key in ("train.global_batch", "train.sequence_length") if key not in keys]
    command = shlex.join(["shardwise", "train", str(recipe), "--run-dir", *place, "data.path=DATA", *missing])
    lines.append(f"go on: {command}")
    counts = {"step": progress.step, "samples": progress.samples or 0, "tokens": progress.tokens}
    return {**counts, "states": states, "recipe": str(recipe), "keys": keys, "command": command}


def _require_fitting(arguments: argparse.Namespace) -> None:
    kind = arguments.kind
    problems = [
        f"{option}{'' if value is True else f' ({value})'} must be left out with --from {kind}: it is for --from "
        f"{listing(kinds, 'or')}"
        for name, (option, kinds) in _OPTIONS.items()
        if (value := getattr(arguments, name)) is not None and kind not in kinds
    ]
    if kind in (_NEURONX, _TITAN) and arguments.config is None:
        problems.append(f"--from {kind} needs --config PATH: its checkpoints do not describe their model")
    if problems:
        raise ConfigError(problems)


def _open(arguments: argparse.Namespace) -> ImportedModel:
    from shardwise.checkpoint.storage.root import Root
    from shardwise_use.importing.hugging_face import open_hugging_face
    from shardwise_use.importing.hugging_face_trainer import with_trainer_progress
    from shardwise_use.importing.megatron import open_megatron
    from shardwise_use.importing.nemo import open_nemo
    from shardwise_use.importing.neuronx import open_neuronx
    from shardwise_use.importing.olmo_core import open_olmo_core
    from shardwise_use.importing.torchtitan import open_torchtitan

    ignore = _names(arguments.ignore)
    if arguments.kind == _HUB:
        with keys_renamed(_KEYS):
            if is_url(arguments.source):
                return open_hugging_face(answering_root(arguments.source), ignore)
            folder = resolve_weights(arguments.source, arguments.revision, announce=output.progress)
            model = open_hugging_face(Root.of(folder), ignore)
            return model if arguments.weights_only else with_trainer_progress(model, folder)
    source = user_path(arguments.source)
    # Shards of other trainers have no tokenizer beside them.
    vocabulary, files, tokens = _tokenizer(arguments.tokenizer)
    drift, weights_only = bool(arguments.allow_drift), arguments.weights_only
    if arguments.config is not None:
        config = user_path(arguments.config)
        with keys_renamed(_KEYS):
            if arguments.kind == _TITAN:
                opened = open_torchtitan(source, config, ignore, weights_only=weights_only)
            else:
                opened = open_neuronx(source, config, allow_drift=drift, ignore=ignore, weights_only=weights_only)
    elif arguments.kind == _OLMO:
        opened = open_olmo_core(source, weights_only=weights_only)
    else:
        open_shards = open_megatron if arguments.kind == _MEGATRON else partial(open_nemo, weights_only=weights_only)
        opened = open_shards(source, arguments.vocab_size or vocabulary, allow_drift=drift)
    if vocabulary is not None and vocabulary > opened.config.vocab_size:
        raise ConfigError(
            f"the vocabulary of --tokenizer ({vocabulary:,}) must be at most the model's ({opened.config.vocab_size:,})"
        )
    return replace(opened, small_files=files, tokens=tokens) if files else opened


def _names(given: str | None) -> list[str]:
    if given is None:
        return []
    # As a list of YAML, so that quotes mean the same as in a recipe.
    names = parse_value(f"[{given.removeprefix('[').removesuffix(']')}]", "--ignore")
    return [str(name) for name in names]


def _tokenizer(path: str | None) -> tuple[int | None, dict[str, bytes], dict[str, int | None]]:
    if path is None:
        return None, {}, {}
    from shardwise.checkpoint.storage.root import Root
    from shardwise.data.tokens.tokenizer import Tokenizer, export_user_tokenizer, special_token_ids

    with keys_renamed({"data.tokenizer": "--tokenizer"}), tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer.load(resolve_tokenizer(path, announce=output.progress))
        export_user_tokenizer(path, tokenizer, Path(folder))
        files = {name: Path(folder, name).read_bytes() for name in Root.of(folder).files()}
        return tokenizer.vocab_size, files, special_token_ids(Path(folder))
