"""Megatron-LM's checkpoints in its `torch_dist` format, with the optimizer's state: GPT-2, Llama, Qwen, Mixtral.

    SOURCE/iter_0000100/metadata.json      names the format and its version
    SOURCE/iter_0000100/common.pt          "args", "iteration", "opt_param_scheduler", "optimizer": no large tensors
    SOURCE/iter_0000100/.metadata, *.distcp        a folder of torch.distributed.checkpoint

As megatron/core/dist_checkpointing writes them. Tensors are whole, whatever the layout was. Those of the layers, and of
the experts in them, are stacked on a leading axis, or numbered where layers differ; gates of SwiGLU stand above its up
projections; Q, K and V are fused by groups as in version 3. Moments have the names of their weights after
`optimizer.state.exp_avg.`, and masters after `optimizer.state.fp32_param.` or `….param.`. The distributed optimizer
writes its own buffers in their place, unless it is told to be `fully_reshardable`: for each rank of TP and PP

    optimizer.distributed.dp_group_idx_G.gbuf_idx_C.dtype_….bucket_idx_B.{param,exp_avg,exp_avg_sq}      [elements]

with the parameters of model chunk C in reverse order, each of them at a multiple of 64 elements. Which parameter is
where is not written: the order is that of Megatron Core's modules, and counts where the masters there are the weights.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardwise.base.errors import ConfigError, listing
from shardwise.base.tensor_box import Box, box_segments
from shardwise.base.yaml_and_json import json_object
from shardwise.checkpoint.format.writing import StreamedWeight
from shardwise_use import sparse_models
from shardwise_use.importing import megatron_arguments, megatron_model, pickled
from shardwise_use.importing.imported_model import ImportedModel, ImportedProgress, imported_points, schedule_keys
from shardwise_use.importing.tensor_parallel_shards import TensorParallelShards
from shardwise_use.importing.torch_dcp import DcpFolder, LazyTensor

_FORMAT = "metadata.json"
_COMMON = "common.pt"
_STATES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32_param": "master", "param": "master"}
"""Megatron's name of a state → the name in a checkpoint of shardwise."""
_BY_NAME = re.compile(r"(?:chained_0\.)?optimizer\.state\.(\w+)\.(.+)")
_BUCKET = re.compile(
    r"(?:chained_0\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_.*\.bucket_idx_(\d+)\.(\w+)"
)
_HYPERPARAMETERS = re.compile(r"(?:chained_0\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/.*")
_WSD_SHAPES = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "sqrt"}
_COMPARED = 2**22
_ALIGNMENT = 64  # elements: each parameter in a bucket begins at a multiple of them
_SHOWN = 6
_RESHARDABLE = "save it again by Megatron-LM with --dist-ckpt-optim-fully-reshardable for its moments"
_ORDER = ("qkv", "q_norm", "k_norm", "post_norm", "fc1", "fc2")
"""Roles of a layer's tensors in the order of its modules, between the first two and those of sparse models alone."""
_Tensors: TypeAlias = Mapping[str, LazyTensor]


def open_megatron_dist(folder: Path, vocab_size: int | None = None) -> ImportedModel:
    """The model in a `torch_dist` checkpoint of Megatron-LM, with its progress; `vocab_size`: without padding."""
    common = _common(folder)
    args = vars(common["args"])
    megatron_arguments.require_known_arguments(args, str(folder))
    stored = DcpFolder.open(folder)
    weights = {name: tensor for name, tensor in stored.tensors.items() if ".optimizer." not in f".{name}"}
    shards = _shards(weights, str(folder))
    config, notes = megatron_model.megatron_config(shards, args, vocab_size, legacy=False)
    model = megatron_model.megatron_weights(shards, config)
    layout = {name: args.get(f"{name}_model_parallel_size") or 1 for name in ("tensor", "pipeline")}
    opened = ImportedModel(config, model, layout, tokens=megatron_model.NO_TOKENS, notes=notes)
    states, reason = _states(stored, opened, shards, args)
    if not states:
        note = f"the weights alone are imported, without step and optimizer: {reason}"
        return replace(opened, notes=(*notes, note))
    with pickled.content_errors(f"{folder / _COMMON} must tell of a training as Megatron-LM does"):
        progress, remarks = _progress(common, states, stored)
    padding = len(shards.parts("word.weight")[0]) - config.vocab_size
    if padding:
        remarks.append(
            f"Megatron-LM's loss counts {padding:,} rows of padding among the tokens, and here there are none: its "
            f"loss is less by their probability (--vocab-size {config.vocab_size + padding} keeps them)"
        )
    return replace(opened, progress=progress, notes=(*notes, *remarks))


def _common(folder: Path) -> dict[str, Any]:
    try:
        described = json_object((folder / _FORMAT).read_bytes(), str(folder / _FORMAT))
    except OSError:
        raise ConfigError(
            f"{folder} must have a {_FORMAT}, as Megatron-LM writes it with --ckpt-format torch_dist: it has none, as "
            "with fsdp_dtensor and torch_dcp: save it again in that format"
        ) from None
    backend, version = described.get("sharded_backend"), described.get("sharded_backend_version")
    if (backend, version) != ("torch_dist", 1):
        raise ConfigError(
            f"{folder / _FORMAT}: its format ({backend}, version {version}) must be torch_dist, version 1: save the "
            "checkpoint again with --ckpt-format torch_dist"
        )
    if not (folder / _COMMON).is_file():
        raise ConfigError(f"{folder} must have a {_COMMON} beside its tensors: it is missing, copy the folder whole")
    common = pickled.load_pickled(folder / _COMMON)
    if not isinstance(common, dict) or not isinstance(common.get("args"), argparse.Namespace):
        raise ConfigError(
            f"{folder / _COMMON} must hold the arguments of the training under 'args', as Megatron-LM writes them; "
            "Megatron-Bridge writes none: its AutoBridge.export_ckpt makes a Hugging Face folder"
        )
    if common.get("checkpoint_version") != 3:
        raise ConfigError(f"{folder}: its checkpoint_version ({common.get('checkpoint_version')!r}) must be 3.0")
    return common


def _shards(tensors: _Tensors, where: str) -> TensorParallelShards:
    found: dict[str, LazyTensor] = {}
    unknown: list[str] = []
    for name, tensor in tensors.items():
        for full_name, part in _unstacked(name, tensor):
            role = megatron_model.megatron_role(full_name, 0)
            if role is not None:
                found[role] = part
            elif not megatron_model.NO_WEIGHTS.fullmatch(full_name):
                unknown.append(name)
    if unknown:
        names = listing(dict.fromkeys(unknown), most=_SHOWN)
        raise ConfigError(f"{where} has {names}, which its arguments do not tell of")
    shards = TensorParallelShards(where, 1)
    shards.add([found], "in the checkpoint")
    shards.require_floats()
    return shards


def _unstacked(name: str, tensor: LazyTensor) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors of layers, and of experts in them, by their numbers: without one in the name they are stacked."""
    if stacked := sparse_models.MEGATRON_STACKED.fullmatch(name):
        for i in range(len(tensor)):
            yield from _unstacked(f"{stacked[1]}{i}.{stacked[2]}", tensor[i])
    else:
        yield name, tensor


# ---- the optimizer's state


def _states(
    stored: DcpFolder, opened: ImportedModel, weights: TensorParallelShards, args: Mapping[str, Any]
) -> tuple[list[StreamedWeight], str]:
    """The optimizer's state of all weights; where there is none that can be read, the reason."""
    kinds: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in stored.tensors.items():
        if match := _BY_NAME.fullmatch(name):
            kinds.setdefault(match[1], {})[match[2]] = tensor
    buckets = {name: match for name in stored.tensors if (match := _BUCKET.fullmatch(name))}
    if not kinds and not buckets:
        return [], f"{stored.where} holds no state of an optimizer"
    found = {kind: _shards(tensors, f"{stored.where}: {kind}") for kind, tensors in kinds.items()}
    if buckets:
        found = _unpacked(stored, buckets, weights, opened.config, args)
        if not found:
            return [], f"the buffers of its distributed optimizer do not have the order of its modules; {_RESHARDABLE}"
    if args.get("optimizer") != "adam" or not {"exp_avg", "exp_avg_sq"} <= found.keys() <= _STATES.keys():
        return [], f"its optimizer ({args.get('optimizer')}, with {listing(sorted(found))}) must be adam"
    return [
        replace(weight, state=_STATES[kind])
        for kind, shards in found.items()
        # Masters of float32 weights are the weights.
        if _STATES[kind] != "master" or opened.dtype != "float32"
        for weight in megatron_model.megatron_weights(shards, opened.config)  # type: ignore[arg-type]
    ], ""


def _unpacked(
    stored: DcpFolder,
    buckets: Mapping[str, re.Match[str]],
    weights: TensorParallelShards,
    config: Any,
    args: Mapping[str, Any],
) -> dict[str, TensorParallelShards]:
    """The states in the buffers of the distributed optimizer; {} where the masters there are not the weights."""
    tensor = args.get("tensor_model_parallel_size") or 1
    pipeline = args.get("pipeline_model_parallel_size") or 1
    chunks = max(int(match[2]) for match in buckets.values()) + 1
    packed: dict[tuple[int, int, str], list[LazyTensor]] = {}
    for name, match in sorted(buckets.items(), key=lambda bucket: int(bucket[1][3])):
        packed.setdefault((int(match[1]), int(match[2]), match[4]), []).append(stored.tensors[name])
    layers = args["num_layers"]
    per_chunk, left = divmod(layers, pipeline * chunks)
    kinds = {match[4] for match in buckets.values()}
    if left or "param" not in kinds or len(packed) != tensor * pipeline * chunks * len(kinds):
        return {}

    def placed(order: Sequence[str]) -> dict[str, TensorParallelShards]:
        found = {kind: TensorParallelShards(f"{stored.where}: {kind}", tensor) for kind in kinds}
        for chunk, stage in itertools.product(range(chunks), range(pipeline)):
            first = (chunk * pipeline + stage) * per_chunk
            roles = _roles(weights, range(first, first + per_chunk), layers, order)
            shapes = {role: _local_shape(role, weights, tensor) for role in roles}
            for kind, shards in found.items():
                ranks = [
                    _placed(packed.get((stage * tensor + rank, chunk, kind), []), shapes) for rank in range(tensor)
                ]
                if not all(ranks):
                    return {}
                shards.add(ranks, "")
        return found

    # Megatron Core's own modules and TransformerEngine's.
    firsts = (("input_norm", "dense"), ("dense", "input_norm"))
    for first, matrices in itertools.product(firsts, sparse_models.megatron_orders(args)):
        found = placed((*first, *_ORDER, *matrices))
        if found and _are_masters(
            megatron_model.megatron_tensors(found["param"], config), megatron_model.megatron_tensors(weights, config)
        ):
            return found
    return {}


def _roles(weights: TensorParallelShards, layers: range, of_all: int, order: Sequence[str]) -> Iterator[str]:
    names = ["word", "position"] if layers.start == 0 else []
    names += [f"layers.{layer}.{role}" for layer in layers for role in order]
    names += ["final_norm", "head"] if layers.stop == of_all else []
    for role in (f"{name}.{kind}" for name in names for kind in ("weight", "bias")):
        # The last stage of a pipeline has a copy of a tied embedding.
        if weights.has(role) or (role == "head.weight" and layers.start > 0):
            yield role


def _local_shape(role: str, weights: TensorParallelShards, ranks: int) -> tuple[int, ...]:
    shape = weights.tensors[role if weights.has(role) else "word.weight"][0].shape
    name, _, kind = role.rpartition(".")
    name = name.rpartition(".")[2]
    if name in ("word", "head", "qkv", "fc1"):
        return (shape[0] // ranks, *shape[1:])
    return (shape[0], shape[1] // ranks) if name in ("dense", "fc2") and kind == "weight" else shape


def _placed(buckets: Sequence[LazyTensor], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LazyTensor]:
    """The tensors in the buckets of a rank by role, of these shapes; {} where these do not fill the buckets."""
    found: dict[str, LazyTensor] = {}
    number = at = 0
    for role in reversed(list(shapes)):
        size = math.prod(shapes[role])
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        if number < len(buckets) and at >= len(buckets[number]):
            number, at = number + 1, 0
        if number >= len(buckets) or at + size > len(buckets[number]):
            return {}
        found[role] = _view(buckets[number], at, shapes[role])
        at += size
    return found if number == len(buckets) - 1 and at == len(buckets[number]) else {}


def _view(flat: LazyTensor, start: int, shape: tuple[int, ...]) -> LazyTensor:
    row = math.prod(shape[1:])

    def load(box: Box) -> Tensor:
        rows = flat.load(Box((start + box.start[0] * row,), (box.size[0] * row,)))
        return rows.view(box.size[0], *shape[1:])[(slice(None), *box.slices[1:])]

    return LazyTensor(shape, flat.dtype, load)


def _are_masters(masters: _Tensors, weights: _Tensors) -> bool:
    return all(
        torch.equal(masters[name].load(box).to(weight.dtype), weight.load(box))
        for name, weight in weights.items()
        for box in box_segments(weight.shape, _COMPARED)
    )


# ---- rates


def _progress(
    common: Mapping[str, Any], states: Sequence[StreamedWeight], stored: DcpFolder
) -> tuple[ImportedProgress, list[str]]:
    args = vars(common["args"])
    records = [stored.object(name) for name in stored.objects if _HYPERPARAMETERS.fullmatch(name)]
    groups: list[dict[str, Any]] = next(_found([common.get("optimizer"), *records[:1]], "param_groups"), [])
    updates = [*_found(common.get("optimizer"), "common_step"), *(group.get("step") for group in groups)]
    step, batch, length = int(common["iteration"]), int(args["global_batch_size"]), int(args["seq_length"])
    samples = int(args["consumed_train_samples"])
    keys: dict[str, Any] = {
        "train.steps": args.get("train_iters") or math.ceil(args["train_samples"] / batch),
        "train.global_batch": batch,
        "train.sequence_length": length,
        "optimizer.lr": float(groups[0]["max_lr"]),
        "optimizer.weight_decay": max(float(group["weight_decay"]) for group in groups),
        "optimizer.betas": [float(args["adam_beta1"]), float(args["adam_beta2"])],
        "optimizer.eps": float(args["adam_eps"]),
        "optimizer.max_norm": float(args.get("clip_grad") or 0) or None,
    }
    notes: list[str] = []
    if len({group["max_lr"] for group in groups}) > 1:
        notes.append("some parameters have a learning rate of their own there, and none has here")
    if args.get("start_weight_decay") != args.get("end_weight_decay"):
        notes.append(f"weight decay changes there: {keys['optimizer.weight_decay']:g} is that of the next step")
    points = _points(common.get("opt_param_scheduler") or {}, args, batch)
    rate, style = keys["optimizer.lr"], args.get("lr_decay_style")
    balance, unlike = sparse_models.megatron_balance(args)
    keys |= balance
    notes += unlike
    schedule, unlike = schedule_keys(points, rate, step, float(groups[0]["lr"]), style)
    keys |= schedule
    notes += unlike
    if args.get("fp16"):
        notes.append("training was in fp16: set precision.mode yourself")
    elif args.get("bf16"):
        keys["precision.mode"] = "mixed"
    done = [int(count) for count in updates if count is not None]
    progress = ImportedProgress(
        step, states, samples=samples, tokens=samples * length, updates=max(done, default=step), keys=keys
    )
    return progress, notes


def _found(value: Any, key: str) -> Iterator[Any]:
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from _found(inner, key)


def _points(scheduler: Mapping[str, Any], args: Mapping[str, Any], batch: int) -> list[dict[str, Any]]:
    """Megatron's rates as points of `optimizer.points`: update s has that of s - 1 updates; none for another curve.

    Its scheduler counts in samples.
    """
    peak = float(scheduler.get("max_lr") or 0)
    style = scheduler.get("lr_decay_style")
    stops = {name: scheduler.get(f"lr_{name}_steps", 0) / batch for name in ("warmup", "decay")}
    if not peak or args.get("rampup_batch_size") or any(stop % 1 for stop in stops.values()):
        return []
    warmup, decay = int(stops["warmup"]), int(stops["decay"])
    first, least = float(args.get("lr_warmup_init") or 0) / peak, float(scheduler["min_lr"]) / peak
    stop, shape = warmup, {"linear": "linear", "cosine": "cosine", "constant": "linear"}.get(str(style))
    if style == "WSD":
        annealed = args.get("lr_wsd_decay_iters") or (args.get("lr_wsd_decay_samples") or 0) / batch
        shape = None if annealed % 1 or not annealed else _WSD_SHAPES.get(str(args.get("lr_wsd_decay_style")))
        stop = decay - int(annealed)
        # With less room than for warmup and decay, Megatron starts the decay in its midst.
        shape = None if stop < warmup else shape
    end = warmup if style == "constant" else decay
    return [] if shape is None else imported_points(first, warmup, stop, end, least, shape)
