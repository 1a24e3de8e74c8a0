"""A model of the user's own: `model.family=package.module:Class`.

The class is called with keywords: every key under `model` but `family`, and those of the run's arguments (`RUN`) that
its constructor, or the base class to which it passes `**kwargs`, names. A constructor that names `config` gets the
section as an object instead of its keys. `forward(ids, targets)`, called by position, returns the sum of the counted
targets' losses. It also gets, by name,

- `dropout`, if it names it: the step's `DropoutKey`, or None in an evaluation,
- `positions_SB` with `data.reset_position_ids`,
- `starts_SB` with `data.reset_attention_mask`: the first place that each place may attend to,
- `lengths_B`, if it names it, in an evaluation that pads a sequence.

A model is refused that cannot be trained at the layout, or that no checkpoint can hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.base.errors import RAISED, ConfigError, error_text, listing, nearest_name, see
from shardwise.base.files import SAFETENSORS_METADATA, is_printable_name
from shardwise.base.user_code import load_user_object
from shardwise.config import BITWISE, PLAIN_MODULE, Config, ModelConfig, ParallelConfig, Recompute, UserModelConfig
from shardwise.config.key_rules import FP8_MULTIPLE
from shardwise.distributed import devices
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import of, placements, unplaced_state
from shardwise.distributed.torch_private import has_data
from shardwise.layers.dropout import Dropout
from shardwise.layers.execution import Execution, execution, made_with
from shardwise.layers.linear import RowParallelLinear, linear_layers
from shardwise.models.blocks import ModelPart, gives_losses

RUN = ("group", "sequence_parallel", "recompute", "seed", "device", "dtype")
"""Arguments that the run gives. A class that lacks `seed`, `device` or `dtype` is made after
`torch.manual_seed(train.seed)` and then moved to its device and dtype."""


def check_user_model(config: Config) -> type[nn.Module]:
    """Import the class that `model.family` names and check its signatures; makes no model.

    Raises:
        ConfigError: it cannot be imported, is no `torch.nn.Module`, or cannot be called as the configuration says.
    """
    user_class = _OwnClass.of(config.model.family)
    sources = [config.data, *config.evaluation.sets.values()]
    given = {
        "positions_SB": any(source.reset_position_ids for source in sources),
        "starts_SB": any(source.reset_attention_mask for source in sources),
    }
    problems = user_class.constructor_problems(_keys(config.model), config.parallel, config.recompute)
    if config.parallel.pipeline > 1 and not isinstance(getattr(user_class.model_class, "part", None), ModelPart):
        problems.append(
            f"parallel.pipeline ({config.parallel.pipeline}) must be 1 with {config.model.family}, which names no "
            "blocks: `Trained = shardwise.pipelined(Class, …)`, with the names of its modules, makes the class to name"
        )
    problems += user_class.forward_problems([name for name, is_given in given.items() if is_given], config.hooks.loss)
    if problems:
        raise ConfigError(problems)
    return user_class.model_class


def takes(family: str, argument: str) -> bool:
    """Return whether the constructor of the user's model class takes an argument of the run."""
    return argument in _OwnClass.of(family).names


def build_user_model(
    config: Config,
    group: Group,
    *,
    sequence_parallel: bool,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seeds: bool = True,
    part: ModelPart | None = None,
) -> nn.Module:
    """Build this rank's shard of the model that `model.family` names, or of a pipeline stage of it.

    Of a stage the whole model is built too, and what other stages have is dropped before it is moved to its device: so
    every rank draws the weights of one process, whatever the class draws them from.

    Args:
        seeds: false for tensors without data, to leave torch's generators as they are.
        part: the stage; None: the whole model.

    Raises:
        ConfigError: the class is refused (`check_user_model`) or cannot be made, or its parameters cannot be trained at
            this layout.
    """
    family = config.model.family
    check_user_model(config)
    user_class = _OwnClass.of(family)
    values_of_run = (group, sequence_parallel, config.recompute, config.train.seed, device, dtype)
    run = {name: value for name, value in zip(RUN, values_of_run, strict=True) if name in user_class.names}
    # A class that takes no seed draws the same weights on every rank.
    if seeds:
        torch.manual_seed(config.train.seed)
    chosen = execution()
    model_class = user_class.model_class if chosen.loss is None else _with_loss(user_class.model_class, chosen.loss)
    try:
        # Which layers are in blocks is known later, and only these multiply in fp8.
        with made_with(replace(chosen, fp8=False)):
            model = model_class(**user_class.section_arguments(config.model), **run)
    except RAISED as error:
        if devices.is_out_of_memory(error) or isinstance(error, dist.DistError):
            raise  # no fault of the class: the callers say what to do
        raise ConfigError(
            f"model.family ({family}) cannot be built: {error_text(error)}{see('runs#own-code-fails')}"
        ) from error
    if part is not None:
        _drop_other_stages(model, part, config.model, config.parallel.pipeline)
    if "device" not in user_class.names:
        _move(model, device=device)
    if "dtype" not in user_class.names:
        _move(model, dtype=dtype)
    problems = [*_parameter_problems(model, group), *_dropout_problems(model, group)]
    if problems:
        raise ConfigError([f"model.family ({family}): {text}" for text in problems])
    _finish_blocks(model, family, chosen)
    for _, parameter, record in placements(model) if part is not None else ():
        # Its canonical name is its path in the whole model, and not that in a list of stages.
        cast(Any, parameter).placement = record
    return model


def _drop_other_stages(model: Any, part: ModelPart, section: ModelConfig, pipeline: int) -> None:
    """Leave the modules and blocks of a pipeline stage in a model of `shardwise.pipelined`.

    Raises:
        ConfigError: it has other blocks than the keys say, or a parameter in no stage or in several.
    """
    family = f"model.family ({section.family})"
    try:
        modules: dict[str, Any] = {name: model.get_submodule(name) for name in model.modules_in_order}
    except AttributeError as error:
        raise ConfigError(f"{family}: shardwise.pipelined must name modules of the class: {error}") from None
    lists = [name for name, module in modules.items() if isinstance(module, nn.ModuleList)]
    blocks = modules[lists[0]]._modules if len(lists) == 1 else {}
    if len(blocks) != section.num_hidden_layers:
        raise ConfigError(
            f"{family}: model.num_hidden_layers ({section.num_hidden_layers}) must be the number of blocks "
            f"({len(blocks)}) in the one torch.nn.ModuleList that shardwise.pipelined names"
        )
    users: dict[nn.Parameter, list[str]] = {parameter: [] for parameter in model.parameters()}
    units = {**modules, **{f"{lists[0]}.{number}": block for number, block in blocks.items()}}
    del units[lists[0]]
    for name, unit in units.items():
        for parameter in unit.parameters():
            users[parameter].append(name)
    for path, parameter in model.named_parameters():
        if len(users[parameter]) != 1:
            raise ConfigError(
                f"{family}: {path} must be in one module that shardwise.pipelined names, or in one block, with "
                f"parallel.pipeline ({pipeline}), and is in {listing(users[parameter]) or 'none'}"
            )
    names = list(modules)
    place = names.index(lists[0])
    for name in names[:place] * (not part.is_first) + names[place + 1 :] * (not part.is_last):
        model.set_submodule(name, nn.Identity())
    for number in [number for number in blocks if int(number) not in (part.layers or ())]:
        del blocks[number]  # del list[i] would rename those that stay
    model.part = part


def _finish_blocks(model: nn.Module, family: str, chosen: Execution) -> None:
    """Let blocks, which are the modules of a `ModuleList`, multiply in fp8 and be compiled where they shall.

    The class puts its blocks into a list when it has made them: no layer can know before that it is in one.

    Raises:
        ConfigError: there is no block, or the rank's part of a layer has a width that fp8 products do not take.
    """
    lists = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    if chosen.fp8:
        layers = [layer for blocks in lists.values() for layer in linear_layers(blocks)]
        if not layers:
            raise ConfigError(
                f"precision.matmul (fp8) must be left out with model.family {family}, which has no column- or "
                "row-parallel layer in a torch.nn.ModuleList"
            )
        for layer in layers:
            outputs, inputs = layer.weight.shape
            if outputs % FP8_MULTIPLE or inputs % FP8_MULTIPLE:
                raise ConfigError(
                    f"widths of each rank's linear layers ({inputs} and {outputs}) must be multiples of {FP8_MULTIPLE} "
                    "with precision.matmul (fp8): change them, or leave precision.matmul out"
                )
            layer.scaling = chosen.scaling(layer.group, cuts_outputs=not isinstance(layer, RowParallelLinear))
    if chosen.compiler is None:
        return
    has_blocks = False
    for path, blocks in lists.items():
        if not any(isinstance(inside, nn.ModuleList) for inside in list(blocks.modules())[1:]):
            for name, block in blocks.named_children():
                chosen.compiler.add_block(block, f"{path}.{name}")
                has_blocks = True
    if not has_blocks:
        raise ConfigError(
            "compile.enabled (true) needs a model with blocks, and model.family has none: put its blocks into a "
            "torch.nn.ModuleList, or set compile.enabled=false"
        )


def _with_loss(model_class: type[nn.Module], loss: Callable[[Tensor, Tensor], Tensor]) -> type[nn.Module]:
    """Return the class whose forward gives the loss that a function of the user's computes of its logits."""

    class WithLoss(model_class):  # type: ignore[misc, valid-type]
        def forward(self, ids_SB: Tensor, targets_SB: Tensor, **given: Tensor) -> Tensor:
            out = self.logits(ids_SB, **given)
            return loss(out.float(), targets_SB) if gives_losses(self) else out

    WithLoss.__name__ = model_class.__name__
    return WithLoss


def _move(model: nn.Module, **target: Any) -> None:
    """Call `model.to(**target)`, after which modules that shared a parameter still share it."""
    parameters = list(model.named_parameters(remove_duplicate=False))
    have_data = all(has_data(parameter) for _, parameter in parameters)
    if have_data:
        # For an accelerator that is not CUDA, torch may make the parameters of each module anew.
        model.to(**target)
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in parameters:
        module_name, _, attribute = name.rpartition(".")
        module = model.get_submodule(module_name)
        new = getattr(module, attribute) if have_data else _converted_parameter(parameter, target)
        setattr(module, attribute, moved.setdefault(parameter, new))
    if have_data:
        return
    # torch cannot convert tensors without data (`fake_tensors`) in place, as it refers to them itself.
    for name, buffer in list(model.named_buffers()):
        module_name, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module_name), attribute, _converted_tensor(buffer, target))


def _converted_parameter(parameter: nn.Parameter, target: dict[str, Any]) -> nn.Parameter:
    new = nn.Parameter(_converted_tensor(parameter.detach(), target), requires_grad=parameter.requires_grad)
    placement = of(parameter)
    if placement is not None:
        cast(Any, new).placement = placement
    return new


def _converted_tensor(tensor: Tensor, target: dict[str, Any]) -> Tensor:
    """Return `tensor.to(**target)`; as with `Module.to`, whole numbers keep their dtype."""
    keeps_dtype = not (tensor.is_floating_point() or tensor.is_complex())
    if "dtype" in target and keeps_dtype:
        return tensor
    return tensor.to(**target)


# ---- the class and its signatures


_IDS = object()
_TARGETS = object()


@dataclass(frozen=True)
class _OwnClass:
    """A class of the user's own, and the arguments of its constructor.

    Attributes:
        names: keyword arguments of the class and, as far as constructors pass on `**kwargs`, of its base classes.
        required: arguments of the class without a default. Those of a base are not required: the class may give them.
        takes_any: true if the class has `**kwargs`, and so may take other names too.
    """

    model_class: type[nn.Module]
    family: str
    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_any: bool

    @classmethod
    def of(cls, family: str) -> _OwnClass:
        """Import the class, and read its signature and those of its bases."""

        def is_model(value: object) -> bool:
            return isinstance(value, type) and issubclass(value, nn.Module)

        def takes_any(parameters: Iterable[Parameter]) -> bool:
            return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)

        loaded = load_user_object("model.family", family, is_model, "a class derived from torch.nn.Module")
        model_class = cast("type[nn.Module]", loaded)
        variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        names: dict[str, None] = {}  # a set in order
        for base in model_class.__mro__:
            if base is not model_class and "__init__" not in vars(base):
                continue  # a mixin: the call goes to the next base as it is
            parameters = signature(base).parameters.values()
            unnamed = (*variable, Parameter.POSITIONAL_ONLY)
            names |= {parameter.name: None for parameter in parameters if parameter.kind not in unnamed}
            if base is nn.Module or not takes_any(parameters):
                break  # no argument of another name goes further
        parameters = signature(model_class).parameters.values()
        has_default = {parameter.name: parameter.default is not Parameter.empty for parameter in parameters}
        required = [p.name for p in parameters if not has_default[p.name] and p.kind not in variable]
        return cls(model_class, family, tuple(names), tuple(required), takes_any(parameters))

    def section_arguments(self, model: ModelConfig) -> dict[str, Any]:
        """Return the arguments that the `model` section gives: the section as `config`, or its keys."""
        keys = _keys(model)
        if self._takes_config(keys):
            return {"config": model}
        return {key: value for key, value in keys.items() if self.takes_any or key in self.names}

    def _takes_config(self, keys: Mapping[str, Any]) -> bool:
        return "config" in self.names and "config" not in keys

    def constructor_problems(
        self, keys: Mapping[str, Any], parallel: ParallelConfig, recompute: Recompute
    ) -> list[str]:
        """Return keys that the class does not take, arguments that no key gives, and settings that need an argument."""
        family = self.family
        problems = [f"model.{key}: the run itself gives {key} to {family}: rename it" for key in keys if key in RUN]
        if not self._takes_config(keys):
            problems += self._unknown_keys(keys)
            missing = (name for name in self.required if name not in keys and name not in RUN)
            problems += [f"model.{name} is missing (an argument of {family})" for name in missing]
        tensor = parallel.tensor
        needed = (
            ("group", tensor > 1, f"parallel.tensor ({tensor}) must be 1"),
            ("sequence_parallel", tensor > 1 and parallel.sequence, "parallel.sequence (true) must be false"),
            ("recompute", recompute != "none", f"train.recompute ({recompute}) must be none"),
        )
        for name, is_needed, rule in needed:
            if is_needed and name not in self.names:
                problems.append(f"{rule}: {family} takes no argument {name} (docs/own-model.md)")
        return problems

    def _unknown_keys(self, keys: Mapping[str, Any]) -> list[str]:
        """Return an error for each key that the class does not take, or that is probably misspelt."""
        names = [name for name in self.names if name not in RUN]
        # `**kwargs` may take any key. Then a key is misspelt only if it is very near an argument that has no key.
        candidates = [name for name in names if name not in keys] if self.takes_any else names
        problems = []
        # A class need not take the fields of UserModelConfig: the layout is checked against them.
        for key in sorted(set(keys) - {*RUN, *names, *UserModelConfig.model_fields}):
            near = nearest_name(key, candidates, cutoff=0.8 if self.takes_any else 0.75)
            if near or not self.takes_any:
                hint = f"did you mean model.{near}?" if near else f"it takes {listing(names) or 'none'}"
                problems.append(f"model.{key}: {self.family} takes no such argument; {hint}")
        return problems

    def forward_problems(self, given: Sequence[str], loss: str | None) -> list[str]:
        """Return an error if the run's arguments, of which some are given by name, do not fit `forward`.

        With a `loss` of the user's, `logits` is called in its place.
        """
        if loss is not None:
            if hasattr(self.model_class, "logits"):
                return []
            return [
                f"hooks.loss ({loss}) needs a method logits(ids) of model.family ({self.family}), whose result it "
                f"gets; {PLAIN_MODULE}"
            ]
        if self.model_class.forward is nn.Module.forward:
            return [f"model.family ({self.family}) must have a method forward(ids, targets)"]
        # The method of an instance, even of one that was never initialised, has a signature without `self`.
        forward = signature(object.__new__(self.model_class).forward)
        where = f"model.family ({self.family}): forward({', '.join(forward.parameters)})"
        try:
            optional = {"dropout", "lengths_B"} & forward.parameters.keys()
            bound = forward.bind(_IDS, _TARGETS, **dict.fromkeys([*given, *optional])).arguments
        except TypeError:
            by_name = f", and {listing(given)} by name" if given else ""
            return [
                f"{where} must take the token ids and the targets as its first two arguments, of any names{by_name}; "
                f"every other argument except dropout must have a default; {PLAIN_MODULE}"
            ]
        if bound.get("ids_SB", _IDS) is not _IDS or bound.get("targets_SB", _TARGETS) is not _TARGETS:
            return [f"{where} must take the token ids first and the targets second, as both are given by position"]
        return []


def _keys(model: ModelConfig) -> dict[str, Any]:
    # A key of the user's may have the name of an attribute or a method of the section: `causal`, `json`.
    values = {**vars(model), **(model.model_extra or {})}
    return {key: values[key] for key in sorted(model.model_fields_set) if key != "family"}


# ---- its parameters


def _parameter_problems(model: nn.Module, group: Group) -> list[str]:
    trainable = {path: parameter for path, parameter in model.named_parameters() if parameter.requires_grad}
    if not any(parameter.numel() for parameter in trainable.values()):
        return ["the number of trainable parameters (0) must be at least 1"]
    unplaced = []
    unordered = []
    outside_group = []
    for path, parameter in trainable.items():
        placement = of(parameter)
        if placement is None and group.size > 1:
            unplaced.append(path)
        elif placement is not None and placement.group.size != group.size:
            outside_group.append(path)
        elif (group.grain or 1) > 1 and not (placement is not None and placement.is_ordered):
            unordered.append(path)
    problems = {
        f"parallel.tensor ({group.size}) needs layers of shardwise, or shardwise.make_parameter, for {{}}: nothing "
        "says which part of them a rank holds": unplaced,
        f"{BITWISE} (true) with parallel.grain ({group.grain}) needs parameters that layers of shardwise make, "
        "with group=group; gradients of other parameters, {}, are summed in another order at each layout: set "
        "parallel.grain=1, with which parallel.tensor is 1": unordered,
        f"parallel.tensor ({group.size}) needs group=group, which the constructor is given, in the layers of {{}}: "
        "they were made without it": outside_group,
        "a checkpoint holds parameters only, and {} would be lost: register them with persistent=False, or as "
        "parameters": unplaced_state(model),
    }
    return storage_problems(model) + _sentences(problems)


def _dropout_problems(model: nn.Module, group: Group) -> list[str]:
    """Return an error for dropout that would not drop, or would drop the same elements at several places."""
    keyed = {path: module for path, module in model.named_modules() if isinstance(module, Dropout) and module.p}
    torchs = [path for path, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p]
    takes_key = "dropout" in signature(model.forward).parameters
    places = Counter((module.place.layer, module.place.site) for module in keyed.values())
    problems = {
        f"parallel.tensor ({group.size}) needs shardwise.Dropout in place of torch.nn.Dropout for {{}}, which would "
        "drop the same elements of each rank's part": torchs if group.size > 1 else [],
        "forward must take dropout, the step's key, and give it to {}, which drop nothing without it": []
        if takes_key
        else list(keyed),
        "{} must have a layer and a site of their own, or they draw one mask": [
            path for path, module in keyed.items() if places[module.place.layer, module.place.site] > 1
        ],
    }
    return _sentences(problems)


_DTYPES = ("float64", "float32", "float16", "bfloat16")
_SHOWN = 4


def storage_problems(model: nn.Module) -> list[str]:
    """Return errors in the definition of a user's own model: parameters that no checkpoint can hold, or give back."""
    dtypes = {path: str(parameter.dtype).removeprefix("torch.") for path, parameter in model.named_parameters()}
    names = Counter(name for _, _, record in placements(model) for name in {piece.name for piece in record.pieces})
    return _sentences(
        {
            f"the dtype of {{}} must be {listing(_DTYPES, 'or')}, which checkpoints have: register it as a buffer with "
            "persistent=False": [f"{path} ({dtype})" for path, dtype in dtypes.items() if dtype not in _DTYPES],
            "several parameters have the name {}: give their layers other names": [
                name for name, count in names.items() if count > 1
            ],
            f"{{}}: a parameter's name must have printable characters only and not be "
            f"{SAFETENSORS_METADATA}, which safetensors uses: give it or its module another name": [
                ascii(name) for name in names if not is_printable_name(name)
            ],
        }
    )


def _sentences(problems: Mapping[str, Sequence[str]]) -> list[str]:
    """Return each text that has names, with these names in place of `{}`."""
    return [text.format(listing(names, most=_SHOWN)) for text, names in problems.items() if names]
