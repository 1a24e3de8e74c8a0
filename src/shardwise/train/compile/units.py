"""The units of a model that are compiled: its blocks, and the loss of its output head.

Each kind of unit is one function with one graph for training and one for evaluation, whatever the number of blocks,
pipeline stages and ranks: what differs between them enters as a tensor. The rest of a model stays eager: an embedding
is one lookup, and the optimizer's update one fused kernel.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.errors import ConfigError, listing, nearest_name, see
from shardwise.base.hardware import cpu_count
from shardwise.config import CompileConfig, Config
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
from shardwise.layers.weight_gradients import define_add_product, graph_gradients
from shardwise.models.attention import Attention
from shardwise.models.blocks import Context
from shardwise.models.causal import CausalLM

BLOCK = "block"
HEAD = "loss of the head"


def block_unit(*, is_rotated: bool, has_window: bool) -> str:
    """Return the name of the unit of a block: some models have rotary positions, or a window, in a part of them."""
    rotary = "" if is_rotated else " without rotary positions"
    return f"{BLOCK}{rotary}{' with a window' if has_window else ''}"


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


def products_add(config: Config, device: torch.device) -> bool:
    """True if products of linear layers add to the weights' gradients, or return them, in float32.

    Those of a bit-equal training keep the roundings of its parts, and a model of the user's own may ask autograd for
    gradients of weights, as split backward passes do.
    """
    precision = config.precision.resolved(device.type != "cpu")
    is_plain = config.shapes is None or config.train.bitwise or precision.gradient != "float32"
    return not is_plain and devices.adds_products(device)


def products_add_in_graphs(config: Config, device: torch.device) -> bool:
    """True if products in compiled graphs add to gradients, which one graph takes as inputs in all micro-batches.

    With ZeRO-2 and 3 gradients have no memory before the first one of a step.
    """
    return config.optimizer.zero < 2 and not config.splits_backward and products_add(config, device)


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
    define_add_product()
    for module in model.modules():
        for name in ("group", "context_group"):
            if isinstance(group := getattr(module, name, None), Group):
                group.share_graphs()
    compilation = Compilation()

    @functools.cache
    def traced(function: Callable[..., Any]) -> Callable[..., Any]:
        # One compiled function for all blocks of a class: they share its graphs.
        return torch.compile(
            function,
            fullgraph=True,
            dynamic=False,
            backend=backend_of(settings, device),
            options=settings.options or None,
        )

    has_rotary = any(getattr(module, "rotary", None) is not None for module in model.modules())
    for name, block in _blocks(model):
        attentions = [module for module in block.modules() if isinstance(module, Attention)]
        kind = block_unit(
            is_rotated=not has_rotary or any(attention.rotates for attention in attentions),
            has_window=any(attention.core.window is not None for attention in attentions),
        )
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
            module.is_compiled = only != HEAD
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
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))
    return ".".join(parts[0] for parts in common)


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
        with graph_gradients(hidden):
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
