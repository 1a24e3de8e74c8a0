"""The units of a model that are compiled: its blocks, and the loss of its output head.

Each kind of unit is one function with one graph for training and one for evaluation, whatever the number of blocks,
pipeline stages and ranks: what differs between them enters as a tensor. The rest of a model stays eager: an embedding
is one lookup, and the optimizer's update one fused kernel.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.errors import ConfigError, listing, nearest_name, see
from shardwise.base.hardware import cpu_count
from shardwise.config import CompileConfig, FamilyConfig, ModelConfig
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import placements
from shardwise.distributed.torch_private import (
    compiler_counts,
    inductor_options_problem,
    kept_function,
    prepare_compiler,
    trace_problem,
)
from shardwise.layers.dropout import DropoutKey, Place, define_dropout
from shardwise.layers.loss import ChunkLosses, VocabularyShard, chunk_losses
from shardwise.layers.matmul import define_add_product, define_linear, graph_gradients
from shardwise.models.blocks import BlockContext

BLOCK = "block"
HEAD = "loss of the head"


def compiled_unit_of_block(model: FamilyConfig, layer: int) -> str:
    """Return the unit to compile of a family's block: in some models a part has rotary positions or a window."""
    rotary = "" if not model.rotary_dim or model.rotates(layer) else " without rotary positions"
    return f"{BLOCK}{rotary}{'' if model.window(layer) is None else ' with a window'}"


@dataclass(frozen=True)
class CapturedGraph:
    """One graph that this process has captured."""

    unit: str  # name of the unit that it computes
    training: bool  # the graph has a backward pass
    is_hit: bool  # the code was in the cache
    seconds: float


class Compilation:
    """Compiles the blocks and the head of a model, or of its pipeline stages, while these are made. Nothing runs yet.

    A block cannot be replaced by a compiled one, as the names of its tensors are paths through modules, and ZeRO-3
    gathers its weights in hooks, which no graph may have: so its `forward` is wrapped.

    Args:
        model: record of the model, which tells what unit a block of a family is.
        groups: the ranks with which layers communicate.
        only: unit that is compiled; None compiles all.

    Attributes:
        folder: the compiler's folder, of the graphs of this run alone; None: functions are not kept.

    Raises:
        ConfigError: torch has no such backend or option.
    """

    def __init__(
        self,
        settings: CompileConfig,
        device: torch.device,
        model: ModelConfig,
        groups: Iterable[Group] = (),
        *,
        only: str | None = None,
    ) -> None:
        check_compiler_backend(settings, device)
        prepare_compiler(threads=max(1, cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        define_linear()
        define_dropout()
        define_add_product()
        for group in groups:
            group.share_graphs()
        self.graphs: list[CapturedGraph] = []
        self.folder: Path | None = None
        self.compiles_blocks = only != HEAD
        self._model = model
        self._only = only

        backend = compiler_backend(settings, device)
        options: Any = {"fullgraph": True, "dynamic": False, "backend": backend, "options": settings.options or None}
        # One compiled function for all blocks of a class: they share its graphs.
        self._traced = functools.cache(functools.partial(torch.compile, **options))
        # Kept functions check less of a block than traced ones. Blocks of one's own may differ in what is left out.
        self._keeps = device.type == "cpu" and not model.is_own and backend == "inductor"
        self._kept: dict[tuple[object, ...], Any] = {}

    def add_block(self, block: nn.Module, path: str, layer: int | None = None) -> None:
        """Let a block call its compiled function. Its key of dropout, which has numbers, becomes tensors."""
        unit = BLOCK if self._model.is_own or layer is None else compiled_unit_of_block(self._model, layer)
        if self._only not in (None, unit):
            return
        candidates = [getattr(module, "place", None) for module in block.modules()]
        places = [place for place in candidates if isinstance(place, Place)]
        parameters = list(block.parameters())
        name = _canonical(block) or path
        eager = block.forward
        traced = self._traced(type(block).forward)

        def forward(block: nn.Module, *args: Any, **options: Any) -> Any:
            if len(args) == 2 and isinstance(context := args[1], BlockContext):
                # A prompt has any length, and a graph is for one length.
                if context.cache is not None:
                    return eager(*args)
                if isinstance(context.dropout, DropoutKey):
                    args = (args[0], replace(context, dropout=context.dropout.of_block(places)))
            with self._watched(unit, name, torch.is_grad_enabled()), _without_gradients(parameters):
                return self._function(unit, traced, block, *args)(block, *args, **options)

        block.forward = MethodType(forward, block)

    def losses(self) -> ChunkLosses:
        """Return the compiled form of `chunk_losses`."""
        if self._only not in (None, HEAD):
            return chunk_losses
        traced = self._traced(_chunk_losses)

        def losses(
            logits: Tensor,
            bias: Tensor | None,
            target: Tensor,
            shard: VocabularyShard,
            with_gradient: bool,
            *args: bool,
        ) -> Any:
            with self._watched(HEAD, HEAD, with_gradient):
                inputs = (logits, bias, target, shard.in_tensors(logits.device), with_gradient, *args)
                return self._function(HEAD, traced, *inputs)(*inputs)

        return losses

    def _function(self, unit: str, traced: Any, *args: Any) -> Any:
        """Return the compiled function for these arguments: the one that the folder keeps, if it fits them."""
        if self.folder is None or not self._keeps:
            return traced
        kind = (unit, torch.is_grad_enabled(), *(arg for arg in args if isinstance(arg, bool)))
        if kind not in self._kept:
            # The scale of a weight is its attribute, which a kept function does not know.
            scales = isinstance(args[0], nn.Module) and any(hasattr(p, "fp8_scale") for p in args[0].parameters())
            path = self.folder / f"{'-'.join(map(str, kind))}.traced"
            self._kept[kind] = None if scales else kept_function(path, traced, args)
        kept = self._kept[kind]
        return kept.fn if kept is not None and kept.guard_check(*args) else traced

    @contextmanager
    def _watched(self, unit: str, description: str, training: bool) -> Iterator[None]:
        """Record the graph that a call of a unit captures, if it does; ConfigError if it cannot be one graph."""
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


def compiler_backend(settings: CompileConfig, device: torch.device) -> str:
    """The backend of `torch.compile`: the configuration's, or the device's own."""
    return settings.backend or ("neuron" if device.type == "neuron" else "inductor")


def check_compiler_backend(settings: CompileConfig, device: torch.device) -> None:
    """Refuse a backend, or options of the default one, that torch does not know; ConfigError names the nearest."""
    backend = compiler_backend(settings, device)
    valid = torch.compiler.list_backends(())
    if backend not in valid:
        near = nearest_name(backend, valid)
        hint = f"one of {listing(torch.compiler.list_backends(), 'or')}"
        if near:
            hint = f"did you mean {near}?"
        raise ConfigError(f"compile.backend ({backend}) must be a backend that torch has: {hint}")
    if backend == "inductor" and (problem := inductor_options_problem(settings.options)) is not None:
        raise ConfigError(f"compile.options: {problem}")


def _canonical(block: nn.Module) -> str:
    """The common beginning of the canonical names of a block's tensors; "" without one."""
    names = [piece.name.split(".") for _, _, record in placements(block) for piece in record.pieces]
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*names, strict=False))
    return ".".join(parts[0] for parts in common)


@contextmanager
def _without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Hide gradients, with which torch.compile describes parameters, and which it takes to have their dtype."""
    hidden = [(p, p.grad) for p in parameters if p.grad is not None]
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
