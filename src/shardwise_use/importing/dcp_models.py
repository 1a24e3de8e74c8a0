"""Models and optimizers in folders of torch.distributed.checkpoint, whatever program wrote them: what all share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from shardwise.base.errors import ConfigError, listing
from shardwise.checkpoint.canonical_tensors import canonical_shapes
from shardwise.checkpoint.format.manifest import MODEL
from shardwise.checkpoint.format.stored_tensors import lines_of_layers, tensor_mismatches
from shardwise.checkpoint.format.weight_files import has_weights
from shardwise.checkpoint.format.writing import StreamedWeight
from shardwise.config import FamilyConfig
from shardwise_use.importing.imported_model import ImportedProgress
from shardwise_use.importing.torch_dcp import METADATA, DcpFolder, LazyTensor

MOMENTS = ("exp_avg", "exp_avg_sq")
Found: TypeAlias = Iterable[tuple[str, str, LazyTensor]]
"""Canonical name, name in the folder, and tensor."""
_STEP = re.compile(r"step-?(\d+)")
_CANONICAL = re.compile(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)")
_MAKERS = (
    ("torchtitan", re.compile(r"tok_embeddings\.weight")),
    ("olmo-core", re.compile(r"(model\.)?(module\.)?blocks\.\d+\.attention\..*")),
    ("megatron", re.compile(r"(model\.)?(decoder\.layers|embedding\.word_embeddings)\..*")),
)
"""Value of --from → names in its folders."""


def newest_step_folder(source: Path, inside: str = METADATA) -> Path:
    """The folder of the newest step in SOURCE or in its `checkpoint`, which has an entry `inside`; or SOURCE itself."""
    if (source / inside).exists():
        return source
    steps = {
        int(match[1]): folder
        for parent in (source, source / "checkpoint")
        if parent.is_dir()
        for folder in parent.iterdir()
        if (match := _STEP.fullmatch(folder.name)) and (folder / inside).exists()
    }
    return steps[max(steps)] if steps else source


def open_dcp_folder(folder: Path, maker: str) -> DcpFolder:
    """Open a folder of torch.distributed.checkpoint; ConfigError as of `DcpFolder.open`, or with who else wrote it."""
    if not (folder / METADATA).exists():
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        hint = "is a Hugging Face folder: leave out --from" if has_weights(names) else ""
        if any(re.fullmatch(r"mp_rank_.*|iter_\d+|latest_checkpointed_iteration\.txt", name) for name in names):
            hint = "is a checkpoint of Megatron-LM: give --from megatron"
        if hint:
            raise ConfigError(f"{folder} must be a checkpoint of {maker}, and {hint}")
    opened = DcpFolder.open(folder)
    found = next((name for name, pattern in _MAKERS if any(map(pattern.fullmatch, opened.tensors))), None)
    if found != maker:
        tensors = listing(opened.tensors, most=3)
        fix = f"it is of {found}: give --from {found}" if found else f"its tensors are {tensors}"
        raise ConfigError(f"{folder} must be a checkpoint of {maker}, and {fix}")
    return opened


def named_weights(
    where: str, config: FamilyConfig, found: Found, stored: Mapping[str, LazyTensor], state: str = MODEL
) -> list[StreamedWeight]:
    """The weights or moments of an imported model, in its order; ConfigError with all of `stored` that do not fit."""
    adapters = [name for name in stored if "lora_" in name]
    if adapters:
        raise ConfigError(
            f"{where} has adapters ({listing(adapters, most=2)}): merge them into the weights there, then save again"
        )
    used: set[str] = set()
    tensors: dict[str, LazyTensor] = {}
    for name, there, tensor in found:
        used.add(there)
        tensors[name] = tensor
    shapes = canonical_shapes(config)
    unused = [(name, list(tensor.shape)) for name, tensor in stored.items() if name not in used]
    problems = [
        *lines_of_layers(where, " has {} {}, which the model lacks", unused, "" if state == MODEL else f"{state} of "),
        *tensor_mismatches(where, shapes, {name: tensor.entry for name, tensor in tensors.items()}, state=state),
    ]
    if problems:
        raise ConfigError(problems)
    return [tensors[name].streamed(name, state) for name in shapes if name in tensors]


def foreign_name(name: str, layers: str, modules: Mapping[str, str]) -> str:
    """The name that another program's DCP folder has for a canonical weight: layers under `layers`, its own modules."""
    match = _CANONICAL.fullmatch(name)
    if match is None or match[2] not in modules:
        return name
    return f"{f'{layers}.{match[1]}.' if match[1] else ''}{modules[match[2]]}.{match[3]}"


def drop_tied_copy(where: str, stored: dict[str, LazyTensor], name: str, copy: str) -> None:
    """Remove an imported model's second copy of a tied weight; ConfigError where it does not equal the first."""
    if copy in stored and name in stored:
        pairs = zip(stored[name].segments(), stored.pop(copy).segments(), strict=True)
        if any(bytes(first) != bytes(second) for first, second in pairs):
            raise ConfigError(f"{where}: {copy} must equal {name}: the model has one weight for both")


def pairs_to_halves(head: Tensor) -> Tensor:
    """Import rows of a head that is rotated in neighbouring pairs (0 with 1, …) as one that is rotated in halves."""
    return head.view(-1, 2, *head.shape[1:]).transpose(0, 1).flatten(0, 1)


def adamw_progress(
    folder: DcpFolder, prefix: str, step: int, config: FamilyConfig, find: Callable[[Mapping[str, LazyTensor]], Found]
) -> ImportedProgress | None:
    """The progress of a model after `step` updates by AdamW; None where the folder has no such state.

    Args:
        prefix: `optimizer.` or `optim.`; the names are `PREFIX.state.NAME.STATE` and `PREFIX.param_groups.NAME.OPTION`.
        find: function that finds the model's tensors among those of the folder's names.

    Raises:
        ConfigError: moments of weights are missing or misshapen, or one optimizer here cannot have their options.
    """
    states: dict[str, dict[str, LazyTensor]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name in [*folder.tensors, *folder.objects]:
        weight, _, last = name.removeprefix(f"{prefix}state.").removeprefix(f"{prefix}param_groups.").rpartition(".")
        if name.startswith(f"{prefix}state."):
            states.setdefault(last, {})[weight] = folder.tensors[name]
        elif name.startswith(f"{prefix}param_groups."):
            is_tensor = name in folder.tensors
            value = folder.tensors[name].read().tolist() if is_tensor else folder.object(name)
            groups.setdefault(weight, {})[last] = tuple(value) if isinstance(value, list | tuple) else value
    if set(states) != {"step", *MOMENTS}:
        return None
    streamed = [
        weight
        for moment in MOMENTS
        for weight in named_weights(folder.where, config, find(states[moment]), states[moment], moment)
    ]
    there = {name: source for name, source, _ in find(states["exp_avg"])}
    counts = {name: int(states["step"][source].read().item()) for name, source in there.items()}
    updates = counts if len({*counts.values()}) > 1 else next(iter(counts.values()))
    keys = _optimizer_keys(folder.where, {name: groups.get(source, {}) for name, source in there.items()})
    vectors = {name for name, shape in canonical_shapes(config).items() if len(shape) == 1}
    if keys["optimizer.no_decay"] == _patterns(vectors, there):
        del keys["optimizer.no_decay"]
    return ImportedProgress(step, streamed, updates=updates, keys=keys)


def _optimizer_keys(where: str, groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The keys of AdamW that carry over; `groups`: canonical name → options of its parameter group."""
    keys: dict[str, Any] = {}
    for option, key in {"initial_lr": "lr", "betas": "betas", "eps": "eps"}.items():
        values = {group.get(option, group.get("lr")) for group in groups.values()}
        if len(values) > 1:
            raise ConfigError(
                f"{where}: {option} must be the same for all weights, and there are {listing(map(str, values))}: no "
                "optimizer here has several; --weights-only imports the weights alone"
            )
        (value,) = values
        keys[f"optimizer.{key}"] = list(value) if isinstance(value, tuple) else value
    rates = {group.get("weight_decay", 0.0) for group in groups.values()} - {0.0}
    coupled = any(group.get("decoupled_weight_decay") is False for group in groups.values()) and rates
    if len(rates) > 1 or coupled:
        kind = "Adam's, in the gradients" if coupled else listing(map(str, sorted(rates)))
        raise ConfigError(
            f"{where}: weight_decay must be one rate of AdamW, and it is {kind}; --weights-only imports the weights"
        )
    keys["optimizer.weight_decay"] = rates.pop() if rates else 0.0
    free = {name for name, group in groups.items() if not group.get("weight_decay", 0.0)}
    keys["optimizer.no_decay"] = _patterns(free, groups)
    return keys


def _patterns(names: Iterable[str], all_names: Iterable[str]) -> list[str]:
    """Patterns of these names and of no other: of all layers in one, where they can be."""
    chosen = set(names)
    patterns = sorted({re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in chosen})
    reached = {name for name in all_names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    return patterns if reached == chosen else sorted(chosen)
