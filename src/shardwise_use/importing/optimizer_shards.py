"""AdamW's state as programs with torch_xla save it: by number on each rank, cut by ZeRO-1; here it gets names again.

    "param_groups"              options, and under "params" the numbers of the parameters, counted over all groups
    "state"                     number → step, exp_avg and exp_avg_sq, without ZeRO-1
    "base_state"                with ZeRO-1: of R rows, padded to D·r, r = ⌈R / D⌉, rank d of D has r from row d·r on
    "shape_info"                number → shape [R, …]; not in the first releases
    "sharded_master_weights"    number → rows of the float32 weight, with save_master_weights

As torch_xla/distributed/zero_redundancy_optimizer.py (2.9) writes them, on which neuronx-distributed and
neuronx-nemo-megatron rest. In a group, parameters have the order of the file of weights. A second group, if there is
one, has those that do not decay. With XLA_DOWNCAST_BF16 float32 numbers are float64 in the files.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardwise.base.errors import ConfigError, listing
from shardwise.checkpoint.format.export_checkpoint import MASTER
from shardwise_use.importing import pickled
from shardwise_use.importing.hugging_face_trainer import LEAVE, MOMENTS, Groups, adamw_keys, adamw_state
from shardwise_use.importing.imported_model import ImportedModel, ImportedProgress, imported_points, schedule_keys
from shardwise_use.importing.torch_dcp import LazyTensor

_MASTERS = "sharded_master_weights"
_RULES = (("bias", "norm"), ("bias",), ("bias", "LayerNorm"))
"""Parts of the names that do not decay, in the programs' scripts and in older ones."""
Rank: TypeAlias = tuple[int, int]
"""Tensor-parallel rank and pipeline stage."""
Values: TypeAlias = Mapping[Rank, tuple[Path, Mapping[str, Any]]]
"""Rank → its file of weights, and the weights by name, in the file's order: tensors, or references to them."""
Found: TypeAlias = dict[tuple[int, int, int], tuple[Path, Any]]
"""Tensor-parallel rank, pipeline stage and data-parallel rank → a file, and the state of an optimizer in it."""
ByName: TypeAlias = dict[Rank, dict[str, Tensor | LazyTensor]]


def combine_with_optimizer(
    where: str,
    values: Values,
    tied: Mapping[str, str],
    found: Found | None,
    combine: Callable[[str, ByName], ImportedModel],
    told: Callable[[int], dict[str, Any]],
) -> ImportedModel:
    """An imported model, and its progress where shards of an optimizer's state are found.

    Args:
        tied: second name of a weight → its name. Where a rank has both, they are one parameter.
        found: states of the optimizer; None: the weights alone are wanted.
        combine: function of a name for messages and the ranks' tensors, which are weights or moments.
        told: function of the data-parallel degree (0: not known, as of `full_…`): what is saved of the training, with
            the arguments `given`, `batch` (samples of an update), `length` (tokens of a sample), `samples` so far.
    """
    if not found:
        opened = combine(where, _tensors(values))
        notes = [*opened.notes, f"{where} has no state of AdamW: weights alone are imported"]
        return opened if found is None else replace(opened, notes=notes)
    parameters = {
        rank: (file, {name: value for name, value in named.items() if tied.get(name) not in named})
        for rank, (file, named) in values.items()
    }
    states, updates = _states(where, found, parameters)
    # Masters are the weights before they were rounded, whose files may be missing then.
    masters = states.pop(MASTER, None)
    opened = combine(where, masters or _tensors(values))
    moments = {kind: combine(f"{where}: {kind}", by_rank) for kind, by_rank in states.items()}
    streamed = [replace(each, state=kind) for kind, model in moments.items() for each in model.weights]
    path, first = found[0, 0, 0]
    with pickled.content_errors(f"{where} must tell of its training as its program does", f"; {LEAVE}"):
        is_whole = "base_state" not in first or path.name.startswith("full")
        training = told(0 if is_whole else max(data for *_, data in found) + 1)
        step = int(training.get("total_steps") or training.get("global_step") or updates)
        batch, length = (int(training[name] or 0) for name in ("batch", "length"))
        keys, notes = _keys(first["param_groups"], step, training)
        samples = training.get("samples") or step * batch or None
        tokens = samples * length if samples and length else None
    if _names(path, first["param_groups"], parameters[0, 0][1])[1]:
        keys["optimizer.no_decay"] = ["*bias*"]
    if masters or opened.dtype != "float32":
        keys["precision.mode"] = "mixed"
    progress = ImportedProgress(step, streamed, samples=samples, tokens=tokens, updates=updates, keys=keys)
    notes = [note for model in (opened, *moments.values()) for note in model.notes] + notes
    return replace(opened, progress=progress, notes=list(dict.fromkeys(notes)))


def _tensors(values: Values) -> ByName:
    found = {
        rank: {name: pickled.follow_reference(value, path) for name, value in named.items()}
        for rank, (path, named) in values.items()
    }
    for rank, named in found.items():
        if wrong := [name for name, value in named.items() if not isinstance(value, Tensor)]:
            raise ConfigError([f"{values[rank][0]}: {name} must be a tensor" for name in wrong])
    return found


def _states(where: str, found: Found, parameters: Values) -> tuple[dict[str, ByName], int]:
    """exp_avg, exp_avg_sq and, where they were saved, master; and the updates of each parameter."""
    degree = max(data for *_, data in found) + 1
    expected = [(*rank, data) for rank in sorted(parameters) for data in range(degree)]
    if lacking := [f"DP {place[2]} TP {place[0]} PP {place[1]}" for place in expected if place not in found]:
        raise ConfigError(f"{where} lacks the optimizer's state of {listing(lacking, most=4)}: copy it, or {LEAVE}")
    states: dict[str, ByName] = {}
    updates: set[int] = set()
    for rank, (file, values) in sorted(parameters.items()):
        parts = [found[*rank, data] for data in range(degree)]
        held = [(path, adamw_state(state, path)[1]) for path, state in parts]
        path, first = parts[0]
        with pickled.content_errors(f"{where} must have the state of AdamW for each weight on each rank", f"; {LEAVE}"):
            for number, name in _names(path, first["param_groups"], values)[0].items():
                updates.add(int(pickled.follow_reference(held[0][1][number]["step"], path)))
                shapes = first.get("shape_info") or {}
                shape = shapes.get(number) or pickled.follow_reference(values[name], file).shape
                shards = {moment: [(path, state[number][moment]) for path, state in held] for moment in MOMENTS}
                # A file `full_…` of the converter has the masters of data-parallel rank 0 alone.
                if _MASTERS in first and not path.name.startswith("full"):
                    shards[MASTER] = [(path, state[_MASTERS][number]) for path, state in parts]
                for kind, of_all in shards.items():
                    states.setdefault(kind, {}).setdefault(rank, {})[name] = _joined(of_all, shape, f"{kind} of {name}")
    if len(updates) > 1:
        raise ConfigError(f"{where}: parameters must have as many updates each, and have {sorted(updates)}: {LEAVE}")
    return states, updates.pop()


def _names(path: Path, groups: Groups, values: Mapping[str, Any]) -> tuple[dict[int, str], bool]:
    """The name of each number; True if only biases do not decay, as in BERT's script: its norms are "LayerNorm"."""
    sizes = [len(group["params"]) for group in groups]
    for words in _RULES:
        free = [name for name in values if any(word in name for word in words)]
        ordered = [[*values]] if len(groups) == 1 else [[name for name in values if name not in free], free]
        if [len(names) for names in ordered] == sizes:
            numbers = (number for group in groups for number in group["params"])
            has_norms = any(name.endswith("weight") for name in free)
            return dict(zip(numbers, itertools.chain(*ordered), strict=True)), len(groups) == 2 and not has_norms
    raise ConfigError(
        f"{path} must hold the state of the {len(values)} parameters of its rank, in one group or with biases and "
        f"norms in a second one, and it has groups of {listing(map(str, sizes))}: it is of another model, or a part "
        f"was frozen; {LEAVE}"
    )


def _joined(shards: Sequence[tuple[Path, Any]], shape: Sequence[int], name: str) -> LazyTensor:
    """The tensor of this shape, in float32, of the rows that data-parallel ranks have, without those of padding."""
    expected = (-(-shape[0] // len(shards)), *shape[1:])
    for path, value in shards:
        tensor = pickled.follow_reference(value, path)
        found = list(tensor.shape) if isinstance(tensor, Tensor) and tensor.is_floating_point() else "no numbers"
        if found != list(expected):
            raise ConfigError(
                f"{path}: {name} ({found}) must be {list(expected)}, of {list(shape)} over DP {len(shards)}: files are "
                f"missing, or of another checkpoint; {LEAVE}"
            )

    # A file is mapped into memory while a box of it is read: there are many of them.
    def part(path: Path, value: Any) -> LazyTensor:
        return LazyTensor(
            expected, torch.float32, lambda box: pickled.follow_reference(value, path)[box.slices].float()
        )

    return LazyTensor.cat([part(*shard) for shard in shards]).rows(0, shape[0])


def _keys(groups: Groups, step: int, training: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    keys, notes = adamw_keys(groups)
    given, schedulers = training["given"], training.get("lr_schedulers") or [{}]
    scheduler = training.get("scheduler") or schedulers[0]
    steps = scheduler.get("max_steps") or given.get("max_steps")
    curves = _curves(given | scheduler, keys["optimizer.lr"], steps)
    kind = given.get("name") or "its points are not saved"
    tried = [schedule_keys(curve, keys["optimizer.lr"], step, float(groups[0]["lr"]), kind) for curve in curves]
    schedule, unlike = next((found for found in tried if found[0]), tried[0])
    known = {"train.steps": steps, "train.global_batch": training["batch"], "train.sequence_length": training["length"]}
    notes += [*unlike, "clipping is not saved there: give optimizer.max_norm (1.0 in the programs' scripts, and here)"]
    return keys | schedule | {key: int(value) for key, value in known.items() if value}, notes


def _curves(told: Mapping[str, Any], rate: float, steps: int | None) -> list[list[dict[str, Any]]]:
    """Schedules as `optimizer.points` that may be the one: update s has the rate after s - 1 updates."""
    if steps is None or told.get("warmup_steps") is None:
        return [[]]
    warmup = int(told["warmup_steps"])
    if "decay_steps" not in told:
        return [imported_points(0.0, warmup, warmup, steps, 0.0, "linear") if "lr_lambdas" in told else []]
    end, least = steps - told["constant_steps"], float(told["min_lr"]) / rate
    # CosineAnnealing of NeMo begins at a part of the peak; neuronx-distributed's with constant_steps at 0.
    return [imported_points(first, warmup, warmup, end, least, "cosine") for first in (1 / (warmup + 1), 0.0)]
