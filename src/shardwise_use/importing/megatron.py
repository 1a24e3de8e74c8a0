"""Megatron-LM's checkpoints in its `torch` format: GPT-2, Llama and Qwen models, of `megatron.legacy` or Megatron Core.

    SOURCE/latest_checkpointed_iteration.txt           a number, or "release"
    SOURCE/iter_0000100/mp_rank_TT/model_optim_rng.pt          tensor-parallel rank TT
    SOURCE/iter_0000100/mp_rank_TT_PPP/model_optim_rng.pt      and pipeline stage PPP

As megatron/training/checkpointing.py writes them, and tools/checkpoint/{loader_base,schema_core}.py read them. A file
holds "args", "checkpoint_version" and the state of "model", or of "model0", "model1", … with virtual stages: chunk v
of stage p is block v·P + p of the layers, which are counted from 0 in each. Column-parallel weights are cut by rows,
row-parallel ones by columns, and SwiGLU's first layer has a rank's gate above its up projection. Legend: n heads, g
query groups, d head size; the fused Q, K and V have, by checkpoint version,

    0          [3, n, d] on each rank
    1          [n, d, 3] on each rank
    2 and 3    [g, (n/g + 2)·d] over all ranks: the queries of a group, its key, its value

NeMo's models have the names of `megatron.legacy` after the prefix `model.`. Where g < n, their queries are a tensor
of their own, and another one has keys and values as [g, 2, d].
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from shardwise.base.errors import ConfigError, listing
from shardwise.base.yaml_and_json import whole_number
from shardwise.checkpoint.format.weight_files import conversion_hint
from shardwise_use.importing import megatron_dist, megatron_model, pickled
from shardwise_use.importing.imported_model import ImportedModel
from shardwise_use.importing.megatron_arguments import SIZES, is_count
from shardwise_use.importing.tensor_parallel_shards import (
    TensorParallelShards,
    require_all_ranks,
    tensor_parallel_files,
)
from shardwise_use.importing.torch_dcp import LazyTensor, is_dcp_folder

_RankStates: TypeAlias = Mapping[tuple[int, int], Mapping[str, Any]]
"""(tensor-parallel rank, pipeline stage) → content of its file."""
_TRACKER = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
# Without and with pipeline stages.
_RANK_NAMES = ("mp_rank_{:02d}", "mp_rank_{:02d}_{:03d}")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_VERSIONS = (0, 1, 2, 3)
_MOST_RANKS = 2**20  # more ranks than any machine has: a wrong degree must not make a list of all of them
_SHOWN = 8


def open_megatron(source: Path, vocab_size: int | None = None, *, allow_drift: bool = False) -> ImportedModel:
    """The model in a Megatron-LM checkpoint.

    Args:
        source: the folder of the checkpoint, or of one iteration.
        vocab_size: number of tokens without padding, where the checkpoint lacks it.
    """
    folder = _iteration(source)
    if is_dcp_folder(folder):
        return megatron_dist.open_megatron_dist(folder, vocab_size)
    states = {rank: _open(file) for rank, file in _ranks(folder).items()}
    return combine_megatron_ranks(states, folder, vocab_size, _RANK_NAMES, allow_drift=allow_drift)


def combine_megatron_ranks(
    states: _RankStates, folder: Path | str, vocab_size: int | None, rank_names: tuple[str, str], *, allow_drift: bool
) -> ImportedModel:
    """The model of which each rank holds a part, as Megatron-LM's files have it.

    `rank_names`: formats of the ranks' names, without and with pipeline stages.
    """
    args, version = _common_arguments(states, folder)
    tensor, pipeline = _degrees(args, set(states), folder, rank_names)
    shards = TensorParallelShards(str(folder), tensor, allow_drift)
    _add_tensors(states, shards, pipeline)
    first = states[0, 0]
    is_legacy = "language_model" in first["model" if "model" in first else "model0"]  # by `megatron.legacy`
    config, notes = megatron_model.megatron_config(shards, args, vocab_size, legacy=is_legacy)
    weights = megatron_model.megatron_weights(shards, config, version)
    layout = {"tensor": tensor, "pipeline": pipeline}
    return ImportedModel(config, weights, layout, tokens=megatron_model.NO_TOKENS, notes=[*notes, *shards.notes])


# ---- files


def _iteration(source: Path) -> Path:
    tracker = source / _TRACKER
    if not tracker.is_file():
        return source
    text = tracker.read_text(errors="replace").strip()
    iteration = whole_number(text)
    if text != "release" and iteration is None:
        raise ConfigError(f"{tracker} must hold the number of an iteration or 'release', and it holds {text[:40]!r}")
    folder = source / (text if text == "release" else f"iter_{iteration:07d}")
    if not folder.is_dir():
        raise ConfigError(f"{tracker} names iteration {text}, and there is no folder {folder}")
    return folder


def _ranks(folder: Path) -> dict[tuple[int, int], Path]:
    ranks: dict[tuple[int, int], Path] = {}
    problems: list[str] = []
    for rank, path in tensor_parallel_files(folder, _RANK).items():
        if files := [path / name for name in _FILES if (path / name).is_file()]:
            ranks[rank] = files[0]
        else:
            problems.append(f"{path} must hold {listing(_FILES, 'or')}, and it holds neither")
    if problems:
        raise ConfigError(problems)
    if not ranks:
        names = [file.name for file in folder.iterdir()]
        hint = "".join(f", and {way}" for way in [conversion_hint(str(folder), names)] if way)
        raise ConfigError(f"{folder} must hold folders mp_rank_00, mp_rank_01, … or mp_rank_00_000, …{hint}")
    return ranks


def _open(path: Path) -> Mapping[str, Any]:
    state = pickled.load_pickled(path)
    if not isinstance(state, dict):
        raise ConfigError(f"{path} must hold a dictionary, as Megatron-LM writes it")
    if not isinstance(state.get("args"), argparse.Namespace):
        raise ConfigError(f"{path} must hold the arguments of the training under 'args': they are missing")
    return state


def _common_arguments(states: _RankStates, folder: Path | str) -> tuple[dict[str, Any], int]:
    first = next(iter(states.values()))
    args = dict(vars(first["args"]))
    version = first.get("checkpoint_version", 0)
    if version not in _VERSIONS:
        raise ConfigError(f"the checkpoint_version of {folder} ({version!r}) must be {listing(_VERSIONS, 'or')}")
    problems: list[str] = []
    for name in (*SIZES, "tensor_model_parallel_size", "pipeline_model_parallel_size"):
        values = list(dict.fromkeys(vars(state["args"]).get(name) for state in states.values()))
        if len(values) > 1:
            problems.append(
                f"{folder}: {name} must be the same in all files, and some have {values[0]!r} and some {values[1]!r}"
            )
    for name in ("iteration", "checkpoint_version"):
        if any(state.get(name) != first.get(name) for state in states.values()):
            problems.append(f"{folder}: {name} must be the same in all files: some are of another checkpoint")
    if problems:
        raise ConfigError(problems)
    return args, int(version)


def _degrees(
    args: Mapping[str, Any], ranks: set[tuple[int, int]], folder: Path | str, rank_names: tuple[str, str]
) -> tuple[int, int]:
    """Tensor- and pipeline-parallel degree; every rank of them must have a file."""
    tensor = args.get("tensor_model_parallel_size") or args.get("model_parallel_size") or max(t for t, _ in ranks) + 1
    pipeline = args.get("pipeline_model_parallel_size") or max(p for _, p in ranks) + 1
    if not is_count(tensor) or not is_count(pipeline) or tensor * pipeline > _MOST_RANKS:
        raise ConfigError(
            f"{folder}: TP {tensor!r} × PP {pipeline!r} must be whole numbers, at most {_MOST_RANKS:,} ranks"
        )
    require_all_ranks(str(folder), ranks, tensor, pipeline, rank_names[pipeline > 1])
    return tensor, pipeline


# ---- names


def _add_tensors(states: _RankStates, shards: TensorParallelShards, pipeline: int) -> None:
    keys = _chunk_keys(states, shards.where)
    # Chunk v of all stages comes before chunk v + 1 of any: the layers are counted in this order.
    first = 0
    unknown: dict[str, None] = {}
    for key in keys:
        for stage in range(pipeline):
            tensors_by_rank = [_chunk(states[rank, stage][key], first, unknown) for rank in range(shards.ranks)]
            place = f"in {key} of stage {stage}" if pipeline * len(keys) > 1 else f"in {key}"
            shards.add(tensors_by_rank, place)
            first += megatron_model.count_layers([name for tensors in tensors_by_rank for name in tensors], first)
    if unknown:
        names = listing(unknown, most=_SHOWN)
        shards.problems.append(f"{shards.where} has {names}, of which no GPT-2 or Llama has any")
    shards.require_floats()


def _chunk_keys(states: _RankStates, where: str) -> list[str]:
    names = {key for state in states.values() for key in state if re.fullmatch(r"model\d*", key)}
    keys = ["model"] if names == {"model"} else [f"model{i}" for i in range(len(names))]
    if not names or any(set(keys) != names & set(state) for state in states.values()):
        raise ConfigError(f"{where} must hold 'model', or 'model0', 'model1', …, the same in every file")
    if any(not isinstance(state[key], dict) for state in states.values() for key in keys):
        raise ConfigError(f"{where} must hold the state of a model under {listing(keys)}")
    return keys


def _chunk(state: Mapping[str, Any], first: int, unknown: dict[str, None]) -> dict[str, Tensor | LazyTensor]:
    """The tensors of a block of layers, which begins with the model's layer number `first`; adds names to `unknown`."""
    tensors: dict[str, Tensor | LazyTensor] = {}
    for name, value in _flattened(state):
        if megatron_model.NO_WEIGHTS.fullmatch(name):
            continue
        role = megatron_model.megatron_role(name, first)
        if role is None or not isinstance(value, Tensor | LazyTensor) or role in tensors:
            unknown[name] = None
        else:
            tensors[role] = value
    return tensors


def _flattened(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        name = prefix + str(key)
        if isinstance(value, dict):
            yield from _flattened(value, f"{name}.")
        else:
            yield re.sub(r"^((model|module)\.)*(language_model\.)?", "", name), value
