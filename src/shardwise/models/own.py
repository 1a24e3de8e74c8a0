"""A model of the user's own: `model.family=package.module:Class`.

The class is called with keywords: every key under `model` but `family`, and of what the run decides (`RUN`) those that
its constructor names, or the base's to which it passes `**kwargs`. A constructor that names `config` gets the section
as an object instead of its keys. Its `forward(ids_SB, targets_SB)` returns the sum of the counted targets' losses; with
`dropout` among its keywords it is given the step's `DropoutKey`, or None in an evaluation; with
`data.reset_position_ids` it is given `positions_SB`, with `data.reset_attention_mask` `starts_SB`, the first place that
each place may attend to. An evaluation gives it `lengths_B` where it names it and a sequence is padded.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from inspect import Parameter, getattr_static, signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise import device as devices
from shardwise.config import Config, OwnConfig
from shardwise.errors import ConfigError, listing, nearest_name
from shardwise.mesh import Group
from shardwise.placement import of, placements

RUN = ("group", "sequence_parallel", "recompute", "seed", "device", "dtype")
"""Arguments that are the run's to give: how the model is cut, what the backward pass computes again, and how
parameters are made. A class without the last three is made after `torch.manual_seed(train.seed)`, then moved."""

_BATCH = ("ids_SB", "targets_SB")
_LIBRARIES = (Path(__file__).parents[1], Path(torch.__file__).parent)
_SHOWN = 4
_STORED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_Signature = Mapping[str, Parameter]


def check_own(config: Config) -> type[nn.Module]:
    """The class that `model.family` names, if its signatures suit the configuration. Makes no model.

    Raises:
        ConfigError: it cannot be imported, is no `torch.nn.Module`, or cannot be called as the configuration says.
    """
    assert isinstance(config.model, OwnConfig)
    found = _own_class(config.model.family)
    takes = _constructor(found)
    problems = _key_problems(config.model, takes) + _layout_problems(config, takes)
    problems += _forward_problems(config, _forward(found))
    if problems:
        raise ConfigError(problems)
    return found


def build_own(
    config: Config,
    group: Group,
    *,
    sequence_parallel: bool,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """This rank's shard of the model that `model.family` names.

    Raises:
        ConfigError: as `check_own`; the class cannot be made, or its parameters cannot be trained at this layout.
    """
    found, model = check_own(config), config.model
    assert isinstance(model, OwnConfig)
    takes = _constructor(found)
    run = dict(
        zip(RUN, (group, sequence_parallel, config.train.recompute, config.train.seed, device, dtype), strict=True)
    )
    given = {"config": model} if _takes_config(model, takes) else _given(model)
    arguments = {name: value for name, value in given.items() if _accepts(takes, name)}
    arguments |= {name: value for name, value in run.items() if _names(takes, name)}
    torch.manual_seed(config.train.seed)
    try:
        built = found(**arguments)
    except Exception as error:
        if devices.is_out_of_memory(error) or isinstance(error, dist.DistError):
            raise
        raise ConfigError(f"model.family ({model.family}) cannot be built: {_told(error)}") from error
    if not _names(takes, "device"):
        built.to(device=device)
    if not _names(takes, "dtype"):
        built.to(dtype=dtype)
    problems = _parameter_problems(built, model.family, group)
    if problems:
        raise ConfigError(problems)
    return built


# ---- the class


def _own_class(family: str) -> type[nn.Module]:
    module_name, _, name = family.partition(":")
    try:
        module = _import(module_name)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(
                f"model.family ({family}): there is no module {missing} in {Path.cwd()} nor among the installed "
                "packages; start in the folder that holds it, or install it"
            ) from error
        raise ConfigError(f"model.family ({family}) cannot be imported: {_told(error)}") from error
    except Exception as error:
        raise ConfigError(f"model.family ({family}) cannot be imported: {_told(error)}") from error
    found = getattr(module, name, None)
    where = f"model.family ({family}): {module.__file__ or module_name}"
    if found is None:
        classes = [
            key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, nn.Module)
        ]
        near = nearest_name(name, classes)
        raise ConfigError(f"{where} has no {name}" + (f"; did you mean {near}?" if near else ""))
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(f"{where}: {name} must be a class derived from torch.nn.Module")
    return found


def _import(name: str) -> ModuleType:
    """The module, from the current directory before the installed packages.

    Neither `shardwise` nor `python -P` looks there. While the module is imported the directory comes first, as it does
    for `python -m`; afterwards it comes last, so that no file in it stands in for a module that a library imports.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)


def _told(error: Exception) -> str:
    """The error, with the innermost line of the user's own code."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and not any(Path(frame.filename).is_relative_to(library) for library in _LIBRARIES)
    ]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


# ---- what it can be called with


def _constructor(found: type[nn.Module]) -> _Signature:
    """What the constructor takes. One with `**kwargs` is taken to pass them on to the next of its bases."""
    takes = dict(signature(found).parameters)
    passed_on = _is_open(takes)
    for base in found.__mro__[1:]:
        if not passed_on or base is nn.Module:
            break
        if "__init__" in vars(base):
            inner = signature(base).parameters
            new = [name for name in inner if name not in takes and _names(inner, name)]
            takes |= {name: inner[name].replace(default=None) for name in new}  # none that the recipe must give
            passed_on = _is_open(inner)
    return takes


def _forward(found: type[nn.Module]) -> _Signature:
    """What `forward` of an instance takes: the argument that receives the instance is left out, whatever its name."""
    forward = getattr_static(found, "forward")
    bind = getattr(type(forward), "__get__", None)
    return signature(forward if bind is None else bind(forward, found, found)).parameters


def _is_open(takes: _Signature) -> bool:
    return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in takes.values())


def _names(takes: _Signature, name: str) -> bool:
    return name in takes and takes[name].kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def _accepts(takes: _Signature, name: str) -> bool:
    return _names(takes, name) or _is_open(takes)


def _required(takes: _Signature) -> list[str]:
    open_ended = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in takes.items()
        if parameter.default is Parameter.empty and parameter.kind not in open_ended
    ]


def _given(model: OwnConfig) -> dict[str, Any]:
    """The keys that the recipe sets."""
    return {key: getattr(model, key) for key in sorted(model.model_fields_set) if key != "family"}


def _takes_config(model: OwnConfig, takes: _Signature) -> bool:
    return "config" in takes and "config" not in model.model_fields_set


def _key_problems(model: OwnConfig, takes: _Signature) -> list[str]:
    """Keys that the class does not take, and arguments that no key gives. Sizes that the layout is held to are read."""
    given = _given(model)
    problems = [f"model.{key}: the run itself gives {key} to {model.family}: rename it" for key in given if key in RUN]
    if _takes_config(model, takes):
        return problems
    names = [name for name in takes if name not in RUN]
    for key in given:
        if key in RUN or key in OwnConfig.model_fields or _names(takes, key):
            continue
        if _is_open(takes):  # what else it takes is unknown; what is like an argument without a key is misspelt
            near = nearest_name(key, [name for name in names if name not in given], cutoff=0.8)
            if near:
                problems.append(f"model.{key}: {model.family} names no such argument; did you mean model.{near}?")
            continue
        near = nearest_name(key, names, cutoff=0.75)
        hint = f"did you mean model.{near}?" if near else f"it takes {listing(names) or 'none'}"
        problems.append(f"model.{key}: {model.family} takes no such argument; {hint}")
    missing = [name for name in _required(takes) if name not in given and name not in RUN]
    return problems + [f"model.{name} is missing (an argument of {model.family})" for name in missing]


def _layout_problems(config: Config, takes: _Signature) -> list[str]:
    """What the run asks for and the class does not say that it can do."""
    family, tensor = config.model.family, config.parallel.tensor
    asked = (
        ("group", tensor > 1, f"parallel.tensor ({tensor}) must be 1"),
        ("sequence_parallel", tensor > 1 and config.parallel.sequence, "parallel.sequence (true) must be false"),
        ("recompute", config.train.recompute != "none", f"train.recompute ({config.train.recompute}) must be none"),
    )
    return [
        f"{rule}: {family} takes no argument {name}"
        for name, wanted, rule in asked
        if wanted and not _names(takes, name)
    ]


def _forward_problems(config: Config, takes: _Signature) -> list[str]:
    data = config.data
    asked = (("positions_SB", data.reset_position_ids), ("starts_SB", data.reset_attention_mask))
    given = (*_BATCH, *(name for name, wanted in asked if wanted))
    missing = [name for name in given if not _accepts(takes, name)]
    unknown = [name for name in _required(takes) if name not in (*given, "dropout")]
    if not missing and not unknown:
        return []
    return [
        f"model.family ({config.model.family}): forward({', '.join(takes)}) must take {listing(given)} and need no "
        "other argument; dropout it may take"
    ]


# ---- what it made


def _parameter_problems(built: nn.Module, family: str, group: Group) -> list[str]:
    where = f"model.family ({family})"
    if not any(parameter.requires_grad and parameter.numel() for parameter in built.parameters()):
        return [f"{where}: the number of trainable parameters (0) must be at least 1"]
    problems = []
    strange = [f"{path} ({_name(p.dtype)})" for path, p in built.named_parameters() if p.dtype not in _STORED]
    if strange:
        problems.append(
            f"{where}: the dtype of {_some(strange)} must be {listing(map(_name, _STORED), 'or')}, which "
            "checkpoints have: register it as a buffer with persistent=False"
        )
    unplaced = [path for path, p in built.named_parameters() if p.requires_grad and of(p) is None]
    if group.size > 1 and unplaced:
        problems.append(
            f"{where}: parallel.tensor ({group.size}) needs layers of shardwise, or placement.make_parameter, for "
            f"{_some(unplaced)}: nothing says which part of them a rank holds"
        )
    names = Counter(name for _, _, record in placements(built) for name in {piece.name for piece in record.pieces})
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        problems.append(f"{where}: several parameters have the name {_some(twice)}: give their layers other names")
    parameters = dict(built.named_parameters(remove_duplicate=False))
    buffers = [name for name in built.state_dict() if name not in parameters]
    if buffers:
        problems.append(
            f"{where}: a checkpoint holds parameters only, and {_some(buffers)} would be lost: register them with "
            "persistent=False, or as parameters"
        )
    return problems


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return listing([*names[:_SHOWN], f"{more} more"] if more > 0 else names)
