"""The progress that a Hugging Face Trainer saved beside a model: `checkpoint-500/` with optimizer.pt.

    optimizer.pt          AdamW's state by number: of the weights that decay, then of biases and norms, each in the
                          order of `model.named_parameters()`
    trainer_state.json    step, steps in all, tokens if they were counted, losses
    training_args.bin     TrainingArguments, pickled: rates, clipping, batch; each of its objects is opened as a record
    rng_state*.pth        one a rank: their number is that of the ranks

Rates of the Trainer lag by a step: update s has the rate of s - 1 updates, the first of a warmup 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from shardwise.base import files
from shardwise.base.errors import ConfigError, listing
from shardwise.checkpoint.format.writing import CONFIG, StreamedWeight
from shardwise.config.hugging_face_names import WITHOUT_GRADIENT
from shardwise.runs.json_records import read_record
from shardwise_use.importing import pickled
from shardwise_use.importing.imported_model import ImportedModel, ImportedProgress, imported_points, schedule_keys
from shardwise_use.importing.torch_dcp import LazyTensor
from shardwise_use.sparse_models import split_sparse_name, trainer_balance

OPTIMIZER = "optimizer.pt"
_STATE = "trainer_state.json"
_ARGUMENTS = "training_args.bin"
_PACKAGES = ("transformers.", "accelerate.", "trl.")
"""Packages whose classes a training_args.bin may name: each object becomes a record."""
MOMENTS = ("exp_avg", "exp_avg_sq")
LEAVE = "import the weights alone by --weights-only"
_LAYER = re.compile(r".*?\.(?:layers?|h)\.\d+\.")
_LOSSES = 32
Groups: TypeAlias = Sequence[Mapping[str, Any]]
States: TypeAlias = Mapping[int, Mapping[str, Tensor]]
"""The state of a parameter, by the number that the groups give it."""


def with_trainer_progress(opened: ImportedModel, folder: Path) -> ImportedModel:
    """A model with the progress that a Hugging Face Trainer saved, if any; ConfigError: its files do not fit."""
    if not (folder / OPTIMIZER).exists():
        if not (folder / _STATE).exists():
            return opened
        note = f"{folder} has no {OPTIMIZER}, so the weights alone are imported, without step and optimizer"
        return replace(opened, notes=(*opened.notes, note))
    try:
        saved = read_record(folder / _STATE)
    except (OSError, ValueError) as error:
        reason = files.reason_of(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"{folder / _STATE}, which has the step of {OPTIMIZER}, cannot be read ({reason}): put a copy of it back, "
            f"or {LEAVE}"
        ) from None
    groups, states = adamw_state(_unpickled(folder / OPTIMIZER, LEAVE), folder / OPTIMIZER)
    arguments = _read_arguments(folder / _ARGUMENTS)
    with pickled.content_errors(f"{folder} must hold a training as a Trainer saves it", f"; {LEAVE}"):
        progress, notes = _progress(opened, saved, groups, states, arguments, folder)
    return replace(opened, progress=progress, notes=(*opened.notes, *notes))


def _progress(
    opened: ImportedModel,
    saved: Mapping[str, Any],
    groups: Groups,
    states: States,
    arguments: Mapping[str, Any],
    folder: Path,
) -> tuple[ImportedProgress, list[str]]:
    step, steps = (saved.get(key) for key in ("global_step", "max_steps"))
    if type(step) is not int or type(steps) is not int or not 0 < step <= steps:
        raise ConfigError(f"{folder / _STATE} must have a global_step ({step}) from 1 to its max_steps ({steps})")
    streamed, updates = _by_name(opened, groups, states, folder / OPTIMIZER)
    keys, notes = _keys(arguments, groups, step, steps, opened.dtype)
    samples = None
    if arguments:
        ranks = max(1, len(list(folder.glob("rng_state_*.pth"))))
        per_rank = int(saved.get("train_batch_size") or arguments["per_device_train_batch_size"])
        keys["train.global_batch"] = per_rank * int(arguments["gradient_accumulation_steps"]) * ranks
        samples = step * keys["train.global_batch"]
    model = read_record(folder / CONFIG)
    balance, remarks = trainer_balance(model, [weight.name for weight in opened.weights])
    keys |= balance
    notes += remarks
    if opened.config.family not in ("gpt", "gpt_neox") and isinstance(pad := model.get("pad_token_id"), int):
        notes.append(
            f"transformers does not train the embedding of pad_token_id ({pad}), and here it is trained: losses differ "
            "if that token is in the data"
        )
    if opened.config.family == "gpt":
        notes.append(
            "losses of GPT-2 are larger here by the factor (S + 1) / S for rows of S targets: the Trainer divides them "
            "by their S + 1 labels"
        )
    tokens = saved.get("num_input_tokens_seen") or None
    losses = [float(entry["loss"]) for entry in saved.get("log_history") or () if "loss" in entry]
    progress = ImportedProgress(
        step,
        streamed,
        samples=samples,
        tokens=None if tokens is None else int(tokens),
        updates=updates,
        keys=keys,
        # Others are means of many steps.
        losses=tuple(losses[-_LOSSES:]) if saved.get("logging_steps") == 1 else (),
    )
    return progress, notes


def _unpickled(path: Path, fix: str, records: tuple[str, ...] = ()) -> Any:
    """The content of a pickle; ConfigError, with the fix: it names classes, as 8-bit moments of torchao do."""
    try:
        return pickled.load_pickled(path, records=records)
    except ConfigError as error:
        raise ConfigError([f"{problem}; {fix}" for problem in error.problems]) from None


# ---- optimizer.pt


def adamw_state(held: Any, path: Path) -> tuple[Groups, States]:
    """The parameter groups and, by the parameter's number, the state of a torch AdamW, or of its shard by ZeRO-1."""
    held = held if isinstance(held, dict) else {}
    groups, states = held.get("param_groups"), held.get("base_state") or held.get("state")
    are_groups = isinstance(groups, list) and all(isinstance(group, dict) and "params" in group for group in groups)
    are_states = isinstance(states, dict) and all(isinstance(state, dict) for state in states.values())
    if not (groups and states and are_groups and are_states):
        raise ConfigError(f"{path} must be the state of an optimizer after a step, and is none: {LEAVE}")
    kept = {name for state in states.values() for name in state}
    needed = {"step", *MOMENTS}
    if kept != needed or not all(state.keys() == needed for state in states.values()):
        raise ConfigError(
            f"{path} must hold the state of AdamW ({listing(sorted(needed))}), and it holds {listing(sorted(kept))}, "
            f"of another optimizer: go on where it was made, or {LEAVE}"
        )
    for group in groups:
        if not group.get("decoupled_weight_decay", True) and group["weight_decay"]:
            raise ConfigError(f"{path} must be of AdamW, and is of Adam with weight decay in its gradients: {LEAVE}")
        if not group.get("correct_bias", True):
            raise ConfigError(f"{path} must be of AdamW, and is of one without the correction of its bias: {LEAVE}")
    return groups, states


@dataclass(frozen=True)
class _Parameter:
    """A parameter of the model in transformers: its shape, and the canonical weights in it, each with its place."""

    shape: tuple[int, ...]
    parts: dict[str, tuple[int | slice, ...]]


def _by_name(
    opened: ImportedModel, groups: Groups, states: States, path: Path
) -> tuple[list[StreamedWeight], int | dict[str, int]]:
    shapes = {weight.name: weight.shape for weight in opened.weights if not weight.name.endswith(WITHOUT_GRADIENT)}
    numbers = [number for group in groups for number in group["params"]]
    of_both = [{tuple(states[number][state].shape) for state in MOMENTS if number in states} for number in numbers]
    saved = [found_shapes.pop() if len(found_shapes) == 1 else () for found_shapes in of_both]
    # Some families have the router of a layer, `gate`, before its experts.
    for gate_first in (True, False):
        parameters = _parameters(shapes, opened.config.family, gate_first=gate_first)
        if len(groups) > 1:
            # By the Trainer's rule: biases and norms, which are the vectors, do not decay.
            parameters.sort(key=lambda parameter: len(parameter.shape) == 1)
        if [parameter.shape for parameter in parameters] == saved:
            break
    else:
        pairs = [(next(iter(p.parts)), p.shape, shape) for p, shape in zip(parameters, saved, strict=False)]
        differing = [f"; {name} {list(a)} is {list(b)} there" for name, a, b in pairs if a != b]
        raise ConfigError(
            f"{path} must hold the state of the {len(parameters)} parameters of the {opened.config.family} model, and "
            f"it holds {len(states)} of {len(saved)}{''.join(differing[:1])}: it is of another model, or a part was "
            f"frozen; {LEAVE}"
        )
    streamed: list[StreamedWeight] = []
    updates: dict[str, int] = {}
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, place in parameter.parts.items():
            updates[name] = int(states[number]["step"])
            for state in MOMENTS:
                streamed.append(LazyTensor.of(states[number][state][place]).streamed(name, state))
    common = set(updates.values())
    return streamed, common.pop() if len(common) == 1 else updates


def _parameters(shapes: Mapping[str, tuple[int, ...]], family: str, *, gate_first: bool) -> list[_Parameter]:
    first: dict[str, int] = {}
    places: dict[str, tuple[int, int, int, bool]] = {}
    for name in shapes:
        layer = _LAYER.match(name)
        module = name.rpartition(".")[0]
        # A module's own parameters are before those of the modules in it: `cls.predictions.bias` is the first there.
        for end in re.finditer(r"\.", name):
            first.setdefault(name[: end.start()], len(first))
        outer = first[layer[0][:-1] if layer else module]
        rank = _rank(name.removeprefix(layer[0]), family, gate_first=gate_first) if layer else 0
        places[name] = (outer, rank, first[module], name.endswith("bias"))
    parameters: dict[str, _Parameter] = {}
    for name in sorted(shapes, key=lambda name: places[name]):
        key, shape, place = _place_in_layer(name, shapes[name])
        parts = parameters[key].parts if key in parameters else {}
        parameters[key] = _Parameter(shape, parts | {name: place})
    return list(parameters.values())


def _place_in_layer(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], tuple[int | slice, ...]]:
    """The parameter in transformers 5 that has a weight: name, shape with the experts so far, the weight's place.

    The experts of a layer are `[E, 2F, H]` with the gates above, and `[E, H, F]`.
    """
    plain, number = split_sparse_name(name)
    if number is None:
        return name, shape, ()
    layer_experts, leaf, _ = plain.rsplit(".", 2)
    is_down = leaf in ("down_proj", "w2")
    rows = slice(None) if is_down else slice(shape[0], None) if leaf in ("up_proj", "w3") else slice(shape[0])
    return f"{layer_experts}.{is_down}", (number + 1, shape[0] * (2 - is_down), shape[1]), (number, rows)


def _rank(name: str, family: str, *, gate_first: bool) -> int:
    """The place of a module in its layer: attention, its norms, MLP, the layer's norms, which GPT-NeoX has first."""
    is_norm = "norm" in name
    if name.startswith(("self_attn.", "attention.")):
        return 1 + is_norm
    if is_norm:
        return 0 if family == "gpt_neox" else 5
    return 3 if gate_first and name.endswith(".gate.weight") else 4


# ---- rates


def _read_arguments(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    record = _unpickled(path, f"move {path.name} away to import without its rates, or {LEAVE}", records=_PACKAGES)
    if not isinstance(record, pickled.PickledRecord):
        raise ConfigError(f"{path} must hold TrainingArguments, and holds none: move it away, or {LEAVE}")
    return {
        name: value.value if isinstance(value, pickled.PickledRecord) else value
        for name, value in record.fields.items()
    }


def _keys(
    arguments: Mapping[str, Any], groups: Groups, step: int, steps: int, dtype: str
) -> tuple[dict[str, Any], list[str]]:
    options, notes = adamw_keys(groups)
    keys: dict[str, Any] = {"train.steps": steps, **options}
    group, rate = groups[0], keys["optimizer.lr"]
    if not arguments:
        notes.append(
            f"there is no {_ARGUMENTS}: set optimizer.schedule, optimizer.max_norm and train.global_batch yourself"
        )
        return keys, notes
    keys["optimizer.max_norm"] = float(arguments.get("max_grad_norm") or 0.0) or None
    points = _curve_points(arguments, rate, steps) or []
    schedule, unlike = schedule_keys(points, rate, step, float(group["lr"]), arguments.get("lr_scheduler_type"))
    keys |= schedule
    notes += unlike
    if arguments.get("bf16"):
        keys["precision.mode"] = "mixed" if dtype == "float32" else "bfloat16"
    elif dtype != "float32" or arguments.get("fp16"):
        notes.append(f"weights are {dtype}{' with fp16' if arguments.get('fp16') else ''}: set precision.mode yourself")
    notes += [
        f"{name} ({arguments[name]}) has no counterpart here"
        for name in ("label_smoothing_factor", "neftune_noise_alpha")
        if arguments.get(name)
    ]
    return keys, notes


def adamw_keys(groups: Groups) -> tuple[dict[str, Any], list[str]]:
    """The keys of an AdamW with these parameter groups, and sentences on what has no counterpart."""
    group = groups[0]
    keys: dict[str, Any] = {
        "optimizer.lr": float(group.get("initial_lr", group["lr"])),
        "optimizer.weight_decay": float(group["weight_decay"]),
        "optimizer.betas": [float(beta) for beta in group["betas"]],
        "optimizer.eps": float(group["eps"]),
    }
    notes: list[str] = []
    decays = {float(each["weight_decay"]) for each in groups}
    if len(decays) == 1 and decays != {0.0}:
        keys["optimizer.no_decay"] = []
    elif len(decays - {0.0}) > 1:
        notes.append(f"several rates of weight decay there, {listing(map(str, sorted(decays)))}, and one here")
    return keys, notes


def _curve_points(arguments: Mapping[str, Any], rate: float, steps: int) -> list[dict[str, Any]] | None:
    schedule = arguments.get("lr_scheduler_type")
    given = arguments.get("lr_scheduler_kwargs") or {}
    warmup = arguments.get("warmup_steps") or arguments.get("warmup_ratio") or 0
    # A share of all steps where it is less than 1; releases before 5 had `warmup_ratio` for it.
    warmup = int(warmup) if warmup >= 1 else math.ceil(steps * warmup)
    end, shape, least, stop = steps, "linear", 0.0, warmup
    if schedule in ("constant", "constant_with_warmup"):
        warmup = end = stop = warmup * (schedule != "constant")
    elif schedule in ("cosine", "cosine_with_min_lr"):
        shape = "cosine"
        least = float(given.get("min_lr_rate") or (given.get("min_lr") or 0.0) / rate)
        if given.get("num_cycles", 0.5) != 0.5:
            return None
    elif schedule == "polynomial" and given.get("power", 1.0) == 1.0:
        least = float(given.get("lr_end", 1e-7)) / rate
    elif schedule == "warmup_stable_decay" and given.get("warmup_type", "linear") == "linear":
        shape = {"linear": "linear", "cosine": "cosine", "1-sqrt": "sqrt"}[given.get("decay_type", "cosine")]
        least = float(given.get("min_lr_ratio", 0.0))
        decay = int(given["num_decay_steps"])
        stable = given.get("num_stable_steps")
        stop = warmup + (steps - warmup - decay if stable is None else int(stable))
        # With less room than for warmup and decay, the Trainer starts the decay in its midst.
        if stop < warmup or (shape == "cosine" and given.get("num_cycles", 0.5) != 0.5):
            return None
        end = stop + decay
    elif schedule != "linear":
        return None
    first = least if schedule == "warmup_stable_decay" else 0.0
    return imported_points(first, warmup, stop, end, least, shape)
