"""AdamW's state as programs with torch_xla save it: by number on each rank, cut by ZeRO-1; here it gets names again.

    "param_groups"              options, and under "params" the numbers of the parameters, counted over all groups
    "state"                     number → step, exp_avg and exp_avg_sq, without ZeRO-1
    "base_state"                with ZeRO-1: R rows are padded to D·r, r = ⌈R / D⌉; rank d of D has r from row d·r on
    "shape_info"                number → shape [R, …]; not in the first releases
    "sharded_master_weights"    number → rows of the float32 weight, with save_master_weights

As torch_xla/distributed/zero_redundancy_optimizer.py (2.9) writes them, on which neuronx-distributed and
neuronx-nemo-megatron rest. In a group, parameters have the order of the file of weights. A second group, if there is
one, has those that do not decay. With XLA_DOWNCAST_BF16 float32 numbers are float64 in the files.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardwise.base.errors import ConfigError, listing
from shardwise.base.units import counted
from shardwise.checkpoint.format.export_checkpoint import MASTER
from shardwise_use.importing import pickled
from shardwise_use.importing.hugging_face import ForeignModel, ForeignProgress, rate_keys
from shardwise_use.importing.torch_dcp import LazyTensor
from shardwise_use.importing.trainer import LEAVE, MOMENTS, Groups, adamw_keys, adamw_state, curve_points

MASTERS = "sharded_master_weights"
_RULES = (("bias", "norm"), ("bias",), ("bias", "LayerNorm"))
"""Parts of the names that do not decay, in the programs' scripts and in older ones."""
Rank: TypeAlias = tuple[int, int]
"""Tensor-parallel rank and pipeline stage."""
Found: TypeAlias = dict[Rank, dict[int, tuple[Path, Any]]]
"""Rank → data-parallel rank → a file, and the state of an optimizer in it."""
ByName: TypeAlias = Mapping[Rank, Mapping[str, Tensor | LazyTensor]]


def combined_with_progress(
    where: str,
    combine: Callable[[str, ByName], ForeignModel],
    weights: Callable[[], ByName],
    found: Found | None,
    parameters: Mapping[Rank, tuple[Path, Mapping[str, Any]]],
    told: Callable[[int], dict[str, Any]],
) -> ForeignModel:
    """A model, and its progress where the state of an optimizer is found.

    Args:
        where: name of the source, for messages.
        combine: function of a name and the ranks' tensors, which are weights or moments, that makes a model of them.
        weights: function that reads the weights. Masters, if there are any, are the weights before rounding.
        found: states of the optimizer; None: the weights alone are wanted.
        parameters: rank → its file of weights, and these by name, in order, a tied one once.
        told: function of the data-parallel degree (0: not known) that gives step, scheduler (its state), given (the
            program's arguments), batch (samples of an update), length (tokens of a sample) and samples (so far).

    Raises:
        ConfigError: as `combine`; the state is incomplete, damaged, or of another optimizer or model.
    """
    if not found:
        opened = combine(where, weights())
        told_of = [] if found is None else [f"{where} has no state of AdamW: the weights alone are imported"]
        return replace(opened, notes=[*opened.notes, *told_of])
    states, updates = _states(where, found, parameters)
    opened = combine(where, states.pop(MASTER) if MASTER in states else weights())
    moments = {kind: combine(f"{where}: {kind}", by_rank) for kind, by_rank in states.items()}
    streamed = [replace(each, state=kind) for kind, model in moments.items() for each in model.weights]
    path, first = found[min(found)][0]
    groups = first["param_groups"]
    try:
        training = told(len(found[min(found)]) if "base_state" in first else 0)
        # Without them the optimizer's own count is that of the steps.
        step, batch, length = int(training["step"] or updates), training["batch"], training["length"]
        keys, notes = _keys(groups, step, training)
        samples = training["samples"] or (batch and step * batch) or None
        tokens = samples * length if samples and length else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{where} must tell of its training as its program does ({error!r}): {LEAVE}") from None
    if (no_decay := _names(path, groups, parameters[min(found)][1])[1]) is not None:
        keys["optimizer.no_decay"] = no_decay
    if MASTERS in first or opened.dtype != "float32":
        keys["precision.mode"] = "mixed"
    progress = ForeignProgress(step, streamed, samples=samples, tokens=tokens, updates=updates, keys=keys)
    notes = [note for model in (opened, *moments.values()) for note in model.notes] + notes
    return replace(opened, progress=progress, notes=list(dict.fromkeys(notes)))


def _states(
    where: str, found: Found, parameters: Mapping[Rank, tuple[Path, Mapping[str, Any]]]
) -> tuple[dict[str, dict[Rank, dict[str, Tensor | LazyTensor]]], int]:
    """exp_avg, exp_avg_sq and, where they were saved, master; and the updates of each parameter."""
    degree = max(data for parts in found.values() for data in parts) + 1
    expected = [(*rank, data) for rank in sorted(parameters) for data in range(degree)]
    lacking = [f"DP {data} TP {t} PP {p}" for t, p, data in expected if data not in found.get((t, p), {})]
    if lacking:
        raise ConfigError(
            f"{where} must have the optimizer's state of every rank, and it lacks that of {listing(lacking, most=4)}: "
            f"copy the checkpoint whole, or {LEAVE}"
        )
    states: dict[str, dict[Rank, dict[str, Tensor | LazyTensor]]] = {}
    updates: set[int] = set()
    for rank, (file, values) in sorted(parameters.items()):
        parts = [found[rank][data] for data in range(degree)]
        held = [(path, adamw_state(state, path)[1]) for path, state in parts]
        path, first = parts[0]
        for number, name in _names(path, first["param_groups"], values)[0].items():
            if lacking := [str(path) for path, state in held if number not in state]:
                raise ConfigError(f"{lacking[0]} must have the state of {name} (parameter {number}): {LEAVE}")
            updates.add(int(pickled.followed(held[0][1][number]["step"], path)))
            shape = (first.get("shape_info") or {}).get(number) or pickled.followed(values[name], file).shape
            shards = {moment: [(path, state[number][moment]) for path, state in held] for moment in MOMENTS}
            if MASTERS in first:
                shards[MASTER] = [(path, state[MASTERS][number]) for path, state in parts]
            for kind, tensors in shards.items():
                states.setdefault(kind, {}).setdefault(rank, {})[name] = _joined(tensors, shape, f"{kind} of {name}")
    if len(updates) > 1:
        counts = listing(map(str, sorted(updates)), most=4)
        raise ConfigError(f"{where}: all parameters must have as many updates, and they have {counts}: {LEAVE}")
    return states, updates.pop()


def _names(path: Path, groups: Groups, values: Mapping[str, Any]) -> tuple[dict[int, str], list[str] | None]:
    """The name of each number; patterns of what does not decay, where that is not the vectors."""
    sizes = [len(group["params"]) for group in groups]
    for words in _RULES:
        free = {name for name in values if any(word in name for word in words)}
        ordered = [[*values]] if len(groups) == 1 else [[n for n in values if (n in free) == last] for last in (0, 1)]
        if [len(names) for names in ordered] == sizes:
            break
    else:
        raise ConfigError(
            f"{path} must hold the state of the {len(values)} parameters of its rank, in one group or with biases and "
            f"norms in a second one, and it has groups of {listing(map(str, sizes))}: it is of another model, or a "
            f"part was frozen; {LEAVE}"
        )
    numbers = (number for group in groups for number in group["params"])
    # BERT's script decays the weights of norms: their names have a capital letter.
    vectors = {name for name in values if name.endswith("bias") or "norm" in name.lower()}
    patterns = [f"*{word}*" for word in words if any(word in name for name in free)]
    no_decay = patterns if len(groups) == 2 and free != vectors else None
    return dict(zip(numbers, itertools.chain(*ordered), strict=True)), no_decay


def _joined(shards: Sequence[tuple[Path, Any]], shape: Sequence[int], name: str) -> LazyTensor:
    """The tensor of this shape, in float32, of the rows that data-parallel ranks have, without those of padding."""
    wanted = (-(-shape[0] // len(shards)), *shape[1:])

    def opened(path: Path, value: Any) -> LazyTensor:
        tensor = pickled.followed(value, path)
        found = list(tensor.shape) if isinstance(tensor, Tensor) and tensor.is_floating_point() else "no numbers"
        if found != list(wanted):
            raise ConfigError(
                f"{path}: {name} ({found}) must be {list(wanted)}, the part of {list(shape)} on one of "
                f"{counted(len(shards), 'data-parallel rank')}: files of ranks are missing, or of another checkpoint; "
                f"{LEAVE}"
            )
        # A file is mapped into memory while a box of it is read: there are many of them.
        return LazyTensor(wanted, torch.float32, lambda box: pickled.followed(value, path)[box.slices].float())

    return LazyTensor.cat([opened(*shard) for shard in shards]).rows(0, shape[0])


def _keys(groups: Groups, step: int, training: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The keys by which a run goes on, and sentences on what has no counterpart."""
    keys, notes = adamw_keys(groups)
    scheduler, given = training["scheduler"], training["given"]
    rate, steps = keys["optimizer.lr"], scheduler.get("max_steps") or given.get("max_steps")
    curves = [*_curves(scheduler, given, rate, steps)] or [[]]
    kind = given.get("name") or "its points are not saved"
    tried = [rate_keys(points, rate, step, float(groups[0]["lr"]), kind) for points in curves]
    schedule, unlike = next((found for found in tried if found[0]), tried[0])
    known = {"train.steps": steps, "train.global_batch": training["batch"], "train.sequence_length": training["length"]}
    clipping = "clipping is not saved there: give optimizer.max_norm (1.0 in the programs' scripts, and here)"
    return keys | schedule | {key: int(value) for key, value in known.items() if value}, [*notes, *unlike, clipping]


def _curves(
    scheduler: Mapping[str, Any], given: Mapping[str, Any], rate: float, steps: int | None
) -> Iterator[list[dict[str, Any]]]:
    """Schedules as `optimizer.points` that may be the one: update s has the rate after s - 1 updates."""
    warmup = scheduler.get("warmup_steps", given.get("warmup_steps"))
    if steps is None or warmup is None:
        return
    if "decay_steps" in scheduler:
        # CosineAnnealing of NeMo; that of neuronx-distributed begins at 0 if it has constant_steps.
        end = steps - scheduler.get("constant_steps", 0)
        for first in (1 / (warmup + 1), 0.0):
            points = [(1, first, "linear")] if warmup else []
            points += [(warmup + 1, 1.0, "linear"), (end + 1, float(scheduler["min_lr"]) / rate, "cosine")]
            yield [{"at": at, "factor": factor, "shape": shape} for at, factor, shape in points]
    elif "lr_lambdas" in scheduler:
        # get_linear_schedule_with_warmup of transformers.
        yield curve_points({"lr_scheduler_type": "linear", "warmup_steps": warmup}, rate, steps) or []
