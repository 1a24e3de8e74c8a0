"""The units of a model that are compiled, its blocks and the loss of its output head, and the facts of their graphs.

Each kind of unit is one function with one graph for training and one for evaluation, whatever the number of blocks,
pipeline stages and ranks: what differs between them enters as a tensor. The rest of a model stays eager: an embedding
is one lookup, and the optimizer's update one fused kernel.

Two runs whose graphs have the same facts share them.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.base.errors import ConfigError, listing, nearest_name, see
from shardwise.base.hardware import cpu_count
from shardwise.config import CompileConfig, Config, FamilyConfig, Layout
from shardwise.distributed import devices
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import placements
from shardwise.distributed.torch_private import (
    compiler_counts,
    inductor_options_problem,
    prepare_compiler,
    trace_problem,
)
from shardwise.layers.dropout import DropoutKey, Place, define_dropout
from shardwise.layers.embedding import ParallelLMHead
from shardwise.layers.loss import VocabularyShard, chunk_losses
from shardwise.layers.matmul import define_linear
from shardwise.models.attention import Attention
from shardwise.models.blocks import Context
from shardwise.models.causal import CausalLM
from shardwise.models.user_model import check_user_model
from shardwise.train.compile.graph_cache import Facts

BLOCK = "block"
UNROTATED = "block without rotary positions"
"""Some models rotate queries and keys in a part of their blocks only."""
HEAD = "loss of the head"


@dataclass(frozen=True)
class CapturedGraph:
    """One graph that this process has captured.

    Attributes:
        unit: name of the unit that it computes.
        training: the graph has a backward pass.
        is_hit: the code was in the cache.
        seconds: time of the call that captured it.
    """

    unit: str
    training: bool
    is_hit: bool
    seconds: float


@dataclass
class Compilation:
    """The compiled units of a model.

    Attributes:
        units: names of the units; several blocks of one kind are one unit.
        graphs: graphs that were captured so far, in order.
    """

    units: list[str] = field(default_factory=list)
    graphs: list[CapturedGraph] = field(default_factory=list)

    @contextmanager
    def watched(self, unit: str, description: str, training: bool) -> Iterator[None]:
        """Record the graph that a call of a unit captures, if it does.

        Raises:
            ConfigError: the unit cannot be captured as one graph.
        """
        before = compiler_counts()
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            problem = trace_problem(error)
            if problem is None:
                raise
            raise ConfigError(
                f"compile.enabled (true) needs a model that torch.compile takes as one graph, and {description} is "
                f"not: {problem}; change that line, or set compile.enabled=false"
                f"{see('training#graph-break')}"
            ) from error
        after = compiler_counts()
        if after.graphs > before.graphs:
            seconds = time.perf_counter() - start
            self.graphs.append(CapturedGraph(unit, training, after.hits > before.hits, seconds))


def backend_of(settings: CompileConfig, device: torch.device) -> str:
    """The backend of `torch.compile`: the configuration's, or the device's own."""
    return settings.backend or ("neuron" if device.type == "neuron" else "inductor")


def check_backend(settings: CompileConfig, device: torch.device) -> None:
    """Refuse a backend, or options of the default one, that torch does not know.

    Raises:
        ConfigError: the text has the nearest name.
    """
    backend = backend_of(settings, device)
    valid = torch.compiler.list_backends(())
    if backend not in valid:
        near = nearest_name(backend, valid)
        hint = f"one of {listing(torch.compiler.list_backends(), 'or')}"
        if near:
            hint = f"did you mean {near}?"
        raise ConfigError(f"compile.backend ({backend}) must be a backend that torch has: {hint}")
    if backend == "inductor" and (problem := inductor_options_problem(settings.options)) is not None:
        raise ConfigError(f"compile.options: {problem}")


def compile_units(
    model: nn.Module, settings: CompileConfig, device: torch.device, *, only: str | None = None
) -> Compilation:
    """Let each block and head of a model, or of its pipeline stages, call its compiled function. Nothing runs yet.

    Args:
        only: unit that is compiled; None compiles all.

    Raises:
        ConfigError: the model has no block, or torch has no such backend or option.
    """
    check_backend(settings, device)
    prepare_compiler(threads=max(1, cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    define_linear()
    define_dropout()
    for module in model.modules():
        if isinstance(group := getattr(module, "group", None), Group):
            group.share_graphs()
    compilation = Compilation()
    functions: dict[Any, Callable[..., Any]] = {}

    def traced(function: Callable[..., Any]) -> Callable[..., Any]:
        # One compiled function for all blocks of a class: they share its graphs.
        if function not in functions:
            functions[function] = torch.compile(
                function,
                fullgraph=True,
                dynamic=False,
                backend=backend_of(settings, device),
                options=settings.options or None,
            )
        return functions[function]

    has_rotary = any(getattr(module, "rotary", None) is not None for module in model.modules())
    for name, block in _blocks(model):
        kind = UNROTATED if has_rotary and not _rotates(block) else BLOCK
        compilation.units.append(kind)
        if only is None or only == kind:
            block.forward = MethodType(
                _call_of_block(compilation, kind, name, block, traced(type(block).forward)), block
            )
    if not compilation.units and only is None:
        raise ConfigError(
            "compile.enabled (true) needs a model with blocks, and model.family has none: put its blocks into a "
            "torch.nn.ModuleList, or set compile.enabled=false"
        )
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and (only is None or only == HEAD):
            compilation.units.append(HEAD)
            module.chunk_losses = _call_of_head(compilation, traced(_chunk_losses))
        if isinstance(module, CausalLM):
            module.is_compiled = only in (None, BLOCK, UNROTATED)
    compilation.units = list(dict.fromkeys(compilation.units))
    return compilation


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of each `ModuleList` that holds no other, with their canonical names, or names in the model."""
    for name, module in model.named_modules():
        holds_lists = any(isinstance(inside, nn.ModuleList) for inside in list(module.modules())[1:])
        if isinstance(module, nn.ModuleList) and not holds_lists:
            for number, block in module.named_children():
                yield _canonical(block) or f"{name}.{number}", block


def _canonical(block: nn.Module) -> str:
    """The common beginning of the canonical names of a block's tensors; "" without one."""
    names = [piece.name.split(".") for _, _, record in placements(block) for piece in record.pieces]
    common: list[str] = []
    for parts in zip(*names, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _rotates(module: nn.Module) -> bool:
    return any(isinstance(part, Attention) and part.rotates for part in module.modules())


def _call_of_block(
    compilation: Compilation, kind: str, name: str, block: nn.Module, traced: Callable[..., Any]
) -> Callable[..., Any]:
    """`forward` of a block: its key of dropout, which has numbers of the step and the block, becomes tensors."""
    candidates = [getattr(module, "place", None) for module in block.modules()]
    places = [place for place in candidates if isinstance(place, Place)]
    parameters = list(block.parameters())
    eager = block.forward

    def forward(self: nn.Module, *args: Any, **options: Any) -> Any:
        if len(args) == 2 and isinstance(context := args[1], Context):
            # A prompt has any length, and a graph is for one length.
            if context.cache is not None:
                return eager(*args)
            if isinstance(context.dropout, DropoutKey):
                args = (args[0], replace(context, dropout=context.dropout.of_block(places)))
        with compilation.watched(kind, name, torch.is_grad_enabled()), _without_wider_gradients(parameters):
            return traced(self, *args, **options)

    return forward


@contextmanager
def _without_wider_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Hide gradients in another dtype than their parameters', such as float32 ones of bfloat16.

    torch.compile describes a parameter with its gradient, and takes them to have one dtype.
    """
    hidden = [(p, p.grad) for p in parameters if p.grad is not None and p.grad.dtype != p.dtype]
    for p, _ in hidden:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in hidden:
            p.grad = gradient


def _chunk_losses(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    # A graph that overwrites its input would copy the result back.
    return chunk_losses(logits.clone(), *args)


def _call_of_head(compilation: Compilation, traced: Callable[..., Any]) -> Callable[..., Any]:
    def losses(
        logits: Tensor, bias: Tensor | None, target: Tensor, shard: VocabularyShard, with_gradient: bool, *args: bool
    ) -> Any:
        with compilation.watched(HEAD, HEAD, with_gradient):
            return traced(logits, bias, target, shard.in_tensors(logits.device), with_gradient, *args)

    return losses


_SOURCES = (
    "models/*.py",
    "layers/*.py",
    "train/compile/units.py",
    "distributed/collectives.py",
    "distributed/random_bits.py",
    "distributed/torch_private.py",
)
"""Files of this package that a graph is captured from."""
_OUTSIDE_OF_GRAPHS = ("num_hidden_layers", "initializer_range", "ignore")
"""Fields of a model that no graph depends on."""


def planned_graphs(config: Config) -> list[tuple[str, bool]]:
    """Pairs (unit, is in training) of all graphs that a training captures, on any rank.

    Their number depends neither on the layers nor on the ranks.
    """
    model = config.shapes
    units = [BLOCK]
    if model is not None:
        units = [*dict.fromkeys(unit_of_layer(model, layer) for layer in range(model.num_hidden_layers)), HEAD]
    modes = (True, False) if config.train.eval_every else (True,)
    return [(unit, training) for unit in units for training in modes]


def unit_of_layer(model: FamilyConfig, layer: int) -> str:
    """The name of the unit to which a block of a family's model belongs."""
    return BLOCK if not model.rotary_dim or model.rotates(layer) else UNROTATED


def graph_facts(config: Config, layout: Layout, device: torch.device, unit: str, training: bool) -> Facts:
    """The facts of one graph, by configuration key where there is one.

    Raises:
        ConfigError: the machine has no C++ compiler, and the backend needs one.
    """
    model = config.model
    train = config.train
    data = config.data
    parallel = config.parallel
    facts: dict[str, Any] = {
        "unit": unit,
        "training": training,
        "parallel.tensor": layout.tensor,
        "parallel.sequence": layout.sequence_parallel,
        "parallel.vocab_multiple": parallel.vocab_multiple,
        "train.micro_batch": train.micro_batch,
        "train.sequence_length": train.sequence_length,
        "precision.mode": config.precision.resolved(device.type != "cpu").parameter,
        "data.reset_attention_mask": data.reset_attention_mask,
        "data.reset_position_ids": data.reset_position_ids,
        "data.masked_fraction": data.masked_fraction,
        "data.max_predictions": data.max_predictions,
        "compile.backend": backend_of(config.compile, device),
        "compile.options": config.compile.options,
        "device": _device_name(device),
        "torch": version("torch"),
        "python": sys.version.partition(" ")[0],
        "code": _code(config),
    }
    if device.type == "cpu":
        facts["threads"] = torch.get_num_threads()
        facts["matmuls"] = "oneDNN" if devices.cpu_prefers_onednn() else "torch"
        if facts["compile.backend"] == "inductor":
            facts["compiler"] = _compiler()
            facts["processor"] = _processor()
    if training:
        facts["train.recompute"] = train.recompute
        facts["train.dropout_mode"] = train.dropout_mode
    described = model.model_dump(mode="json")
    for key in _OUTSIDE_OF_GRAPHS:
        described.pop(key, None)
    return facts | {f"model.{key}": value for key, value in described.items()}


def _device_name(device: torch.device) -> str:
    return f"cpu, {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else devices.name(device)


@functools.cache
def _compiler() -> str:
    """The C++ compiler that the backend runs on a CPU, with its version."""
    path = _compiler_path()
    if path is None:
        raise ConfigError(
            f"compile.enabled (true) needs a C++ compiler on a CPU, and there is no {_compiler_name()}: install it "
            "(Debian: g++), name another one by CXX, or set compile.enabled=false"
            f"{see('training#no-compiler')}"
        )
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return output.partition("\n")[0]


def _compiler_name() -> str:
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def _compiler_path() -> str | None:
    return shutil.which(_compiler_name())


@functools.cache
def _processor() -> str:
    """A hash of all instructions that the compiler may use here: the backend compiles for the processor it runs on."""
    command = [_compiler_path() or "", "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return hashlib.sha256("".join(sorted(output.splitlines())).encode()).hexdigest()[:16]


def _code(config: Config) -> str:
    """A hash of the sources that a graph is captured from; of a model of the user's own, those of its package too."""
    root = Path(shardwise.__file__).parent
    paths = {path for pattern in _SOURCES for path in root.glob(pattern)}
    if config.shapes is None:
        paths |= _user_sources(check_user_model(config))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()[:16]


def _user_sources(model: type) -> set[Path]:
    """The file of a user's own model, and those of imported modules in the folder of its outermost package."""
    file = Path(inspect.getfile(model)).resolve()
    top = file.parents[model.__module__.count(".")]
    sources = {file}
    files = [Path(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())]
    for path in [file.resolve() for file in files if file.is_absolute() and file.suffix == ".py"]:
        if path.is_relative_to(top) and "site-packages" not in path.relative_to(top).parts:
            sources.add(path)
    return sources
