"""A model of the user's own: `model.family=package.module:Class`.

The class is called with keywords: every key under `model` but `family`, and those of the run's arguments (`RUN`) that
its constructor, or the base class to which it passes `**kwargs`, names. A constructor that names `config` gets the
section as an object instead of its keys. `forward(ids_SB, targets_SB)` returns the sum of the counted targets' losses.
It also gets

- `dropout`, if it names it: the step's `DropoutKey`, or None in an evaluation,
- `positions_SB` with `data.reset_position_ids`,
- `starts_SB` with `data.reset_attention_mask`: the first place that each place may attend to,
- `lengths_B`, if it names it, in an evaluation that pads a sequence.

Whether a checkpoint can hold a model of the user's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.base.errors import ConfigError, listing, nearest_name, see
from shardwise.base.names import SAFETENSORS_METADATA, is_tensor_name
from shardwise.base.user_code import RAISED, error_text, load
from shardwise.config import Config, UserModelConfig
from shardwise.distributed import devices
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import of, placements, unplaced_state
from shardwise.distributed.torch_private import has_data
from shardwise.layers.dropout import Dropout

RUN = ("group", "sequence_parallel", "recompute", "seed", "device", "dtype")
"""Arguments that the run gives. A class that does not take the last three is made after `torch.manual_seed(train.seed)`
and then moved to its device and dtype."""


def check_own(config: Config) -> type[nn.Module]:
    """The class that `model.family` names; checks its signatures, and makes no model.

    Raises:
        ConfigError: it cannot be imported, is no `torch.nn.Module`, or cannot be called as the configuration says.
    """
    model_class = _import_class(config.model.family)
    problems = _constructor_problems(config, _Constructor.of(model_class)) + _forward_problems(config, model_class)
    if problems:
        raise ConfigError(problems)
    return model_class


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
    model_class, train = check_own(config), config.train
    constructor = _Constructor.of(model_class)
    arguments = constructor.section_arguments(config)
    run = zip(RUN, (group, sequence_parallel, train.recompute, train.seed, device, dtype), strict=True)
    arguments |= {name: value for name, value in run if name in constructor.names}
    torch.manual_seed(train.seed)
    try:
        model = model_class(**arguments)
    except RAISED as error:
        if devices.is_out_of_memory(error) or isinstance(error, dist.DistError):
            raise
        raise ConfigError(
            f"model.family ({config.model.family}) cannot be built: {error_text(error)}{see('runs#own-code-fails')}"
        ) from error
    if "device" not in constructor.names:
        _to(model, device=device)
    if "dtype" not in constructor.names:
        _to(model, dtype=dtype)
    problems = [*_parameter_problems(model, group), *_dropout_problems(model, group)]
    if problems:
        raise ConfigError([f"model.family ({config.model.family}): {text}" for text in problems])
    return model


def _to(model: nn.Module, **to: Any) -> None:
    """`model.to(**to)`, after which modules that shared a parameter share it still.

    To an accelerator that is not CUDA torch may make the parameters of each module anew. Tensors without data
    (`fake_tensors`), to which torch itself refers, it cannot convert in place: they are made anew here.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    are_real = all(has_data(parameter) for _, parameter in named)
    if are_real:
        model.to(**to)
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for name, before in named:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        now = getattr(module, leaf) if are_real else _parameter_without_data(before, to)
        setattr(module, leaf, moved.setdefault(before, now))
    for name, buffer in [] if are_real else list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, _tensor_without_data(buffer, to))


def _parameter_without_data(parameter: nn.Parameter, to: dict[str, Any]) -> nn.Parameter:
    made = nn.Parameter(_tensor_without_data(parameter.detach(), to), requires_grad=parameter.requires_grad)
    if (record := of(parameter)) is not None:
        cast(Any, made).placement = record
    return made


def _tensor_without_data(tensor: Tensor, to: dict[str, Any]) -> Tensor:
    """As `Module.to` does, whole numbers keep their dtype."""
    return tensor.to(**to) if "dtype" not in to or tensor.is_floating_point() or tensor.is_complex() else tensor


# ---- the class


def _import_class(family: str) -> type[nn.Module]:
    def is_model(value: object) -> bool:
        return isinstance(value, type) and issubclass(value, nn.Module)

    model_class = load("model.family", family, is_model, "a class derived from torch.nn.Module")
    return cast("type[nn.Module]", model_class)


# ---- its signatures


@dataclass(frozen=True)
class _Constructor:
    """The arguments of a class.

    Attributes:
        names: keyword arguments of the class and, as far as constructors pass on `**kwargs`, of its base classes.
        required: its own arguments without a default. A base's are not required: the class itself may give them.
        takes_any: whether it has `**kwargs`, and so may take other names too.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_any: bool

    @classmethod
    def of(cls, model_class: type[nn.Module]) -> _Constructor:
        def takes_any(parameters: Iterable[Parameter]) -> bool:
            return any(p.kind is Parameter.VAR_KEYWORD for p in parameters)

        own = signature(model_class).parameters.values()
        names: dict[str, None] = {}
        for base in model_class.__mro__:
            if base is not model_class and "__init__" not in vars(base):
                continue
            parameters = signature(base).parameters.values()
            names |= {p.name: None for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
            if base is nn.Module or not takes_any(parameters):
                break
        variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        required = (p.name for p in own if p.default is p.empty and p.kind not in variable)
        return cls(tuple(names), tuple(required), takes_any(own))

    def takes_config(self, keys: dict[str, Any]) -> bool:
        """Whether the class gets the section as `config` instead of its keys."""
        return "config" in self.names and "config" not in keys

    def section_arguments(self, config: Config) -> dict[str, Any]:
        """The arguments that the `model` section gives."""
        keys = _keys(config)
        if self.takes_config(keys):
            return {"config": config.model}
        return {key: value for key, value in keys.items() if self.takes_any or key in self.names}


def _keys(config: Config) -> dict[str, Any]:
    """The keys of `model` that the recipe sets, without `family`."""
    return {key: getattr(config.model, key) for key in sorted(config.model.model_fields_set) if key != "family"}


def _constructor_problems(config: Config, constructor: _Constructor) -> list[str]:
    """Keys that the class does not take, arguments that no key gives, and settings that need an argument."""
    family, keys, tensor, recompute = config.model.family, _keys(config), config.parallel.tensor, config.train.recompute
    problems = [f"model.{key}: the run itself gives {key} to {family}: rename it" for key in keys if key in RUN]
    if not constructor.takes_config(keys):
        names = [name for name in constructor.names if name not in RUN]
        # A class need not take the fields of UserModelConfig: the layout is checked against them.
        for key in sorted(keys.keys() - {*RUN, *names, *UserModelConfig.model_fields}):
            # `**kwargs` may take any key. Then a key is misspelt only if it is near an argument that has no key.
            meant = [name for name in names if name not in keys or not constructor.takes_any]
            near = nearest_name(key, meant, cutoff=0.8 if constructor.takes_any else 0.75)
            if near or not constructor.takes_any:
                hint = f"did you mean model.{near}?" if near else f"it takes {listing(names) or 'none'}"
                verb = "names" if constructor.takes_any else "takes"
                problems.append(f"model.{key}: {family} {verb} no such argument; {hint}")
        missing = (name for name in constructor.required if name not in keys and name not in RUN)
        problems += [f"model.{name} is missing (an argument of {family})" for name in missing]
    needed = (
        ("group", tensor > 1, f"parallel.tensor ({tensor}) must be 1"),
        ("sequence_parallel", tensor > 1 and config.parallel.sequence, "parallel.sequence (true) must be false"),
        ("recompute", recompute != "none", f"train.recompute ({recompute}) must be none"),
    )
    lacking = [(name, rule) for name, wanted, rule in needed if wanted and name not in constructor.names]
    return problems + [f"{rule}: {family} takes no argument {name}" for name, rule in lacking]


def _forward_problems(config: Config, model_class: type[nn.Module]) -> list[str]:
    optional = (("positions_SB", config.data.reset_position_ids), ("starts_SB", config.data.reset_attention_mask))
    given = ["ids_SB", "targets_SB", *(name for name, wanted in optional if wanted)]
    # The method of an instance, even of one that was never initialised, has a signature without `self`.
    forward = signature(object.__new__(model_class).forward)
    try:
        forward.bind(**dict.fromkeys([*given, *({"dropout"} & forward.parameters.keys())]))
    except TypeError:
        return [
            f"model.family ({config.model.family}): forward({', '.join(forward.parameters)}) must take "
            f"{listing(given)} and need no other argument; dropout it may take"
        ]
    return []


# ---- its parameters


def _parameter_problems(model: nn.Module, group: Group) -> list[str]:
    """Why a model cannot be trained or saved."""
    trainable = {path: p for path, p in model.named_parameters() if p.requires_grad}
    if not any(p.numel() for p in trainable.values()):
        return ["the number of trainable parameters (0) must be at least 1"]
    unplaced = [path for path, p in trainable.items() if group.size > 1 and of(p) is None]
    alone = [path for path, p in trainable.items() if (record := of(p)) and record.group.size != group.size]
    problems = {
        f"parallel.tensor ({group.size}) needs layers of shardwise, or shardwise.make_parameter, for {{}}: nothing "
        "says which part of them a rank holds": unplaced,
        f"parallel.tensor ({group.size}) needs group=group, which the constructor is given, in the layers of {{}}: "
        "they were made without it": alone,
        "a checkpoint holds parameters only, and {} would be lost: register them with persistent=False, or as "
        "parameters": unplaced_state(model),
    }
    return storage_problems(model) + sentences(problems)


def _dropout_problems(model: nn.Module, group: Group) -> list[str]:
    """Dropout that would not drop, or would drop the same elements at several places."""
    ours = {path: module for path, module in model.named_modules() if isinstance(module, Dropout) and module.p}
    plain = [path for path, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p]
    takes_key = "dropout" in signature(model.forward).parameters
    places = Counter((module.place.layer, module.place.site) for module in ours.values())
    problems = {
        f"parallel.tensor ({group.size}) needs shardwise.Dropout in place of torch.nn.Dropout for {{}}, which would "
        "drop the same elements of each rank's part": plain if group.size > 1 else [],
        "forward must take dropout, the step's key, and give it to {}, which drop nothing without it": []
        if takes_key
        else list(ours),
        "{} must have a layer and a site of their own, or they draw one mask": [
            path for path, module in ours.items() if places[module.place.layer, module.place.site] > 1
        ],
    }
    return sentences(problems)


_DTYPES = ("float64", "float32", "float16", "bfloat16")
_SHOWN = 4


def storage_problems(model: nn.Module) -> list[str]:
    """Parameters that no checkpoint can hold, or that could not be read again."""
    dtype_of = {path: str(p.dtype).removeprefix("torch.") for path, p in model.named_parameters()}
    names = Counter(name for _, _, record in placements(model) for name in {piece.name for piece in record.pieces})
    return sentences(
        {
            f"the dtype of {{}} must be {listing(_DTYPES, 'or')}, which checkpoints have: register it as a buffer with "
            "persistent=False": [f"{path} ({dtype})" for path, dtype in dtype_of.items() if dtype not in _DTYPES],
            "several parameters have the name {}: give their layers other names": [
                name for name, count in names.items() if count > 1
            ],
            f"{{}}: a parameter's name must have printable characters only and not be "
            f"{SAFETENSORS_METADATA}, which safetensors uses: give it or its module another name": [
                ascii(name) for name in names if not is_tensor_name(name)
            ],
        }
    )


def sentences(problems: Mapping[str, Sequence[str]]) -> list[str]:
    """Each text with its names in place of `{}`, where there are any."""
    return [text.format(listing(names, most=_SHOWN)) for text, names in problems.items() if names]
