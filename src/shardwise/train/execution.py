"""How the micro-batches of a step go through the model: one after the other, or through the stages of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from shardwise.config import Config, Layout, OwnConfig, ParallelConfig
from shardwise.mesh import Mesh
from shardwise.models import Stages
from shardwise.optim import ZeroRedundancyOptimizer
from shardwise.pipeline import Compute, StepTiming, relay

if TYPE_CHECKING:
    from shardwise.pipeline.schedule import Pipeline


class Execution(Protocol):
    """Runs the model; `compute(model, x, number)` is the work of one part of it on one micro-batch."""

    def step(self, compute: Compute, micro_batches: int, optimizer: ZeroRedundancyOptimizer, *, last: bool) -> None:
        """Forward and backward of all micro-batches of a step; what the last part gives is summed and differentiated.

        last: nothing more is added to these gradients, whose reduction begins as they are complete.
        """
        ...

    def evaluate(self, compute: Compute, micro_batches: int) -> None:
        """The forward pass alone, of any number of micro-batches."""
        ...

    def timing(self) -> StepTiming | None:
        """Of the last step, where ranks may have waited for each other's stages; collective over the pipeline."""
        ...


class Whole:
    """The model is in one piece on this rank."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def step(self, compute: Compute, micro_batches: int, optimizer: ZeroRedundancyOptimizer, *, last: bool) -> None:
        for number in range(micro_batches):
            with optimizer.accumulate(last=last and number == micro_batches - 1):
                with record_function(f"forward, micro-batch {number}"):
                    loss = compute(self._model, None, number).sum()
                with record_function(f"backward, micro-batch {number}"):
                    loss.backward()

    def evaluate(self, compute: Compute, micro_batches: int) -> None:
        for number in range(micro_batches):
            compute(self._model, None, number)

    def timing(self) -> StepTiming | None:
        return None


class Pipelined:
    """The model is cut into stages, of which this rank has some."""

    def __init__(self, stages: Stages, parallel: ParallelConfig, mesh: Mesh, pipeline: Pipeline, x: Tensor) -> None:
        self.pipeline = pipeline
        self._stages, self._parallel, self._mesh, self._x = stages, parallel, mesh, x

    def step(self, compute: Compute, micro_batches: int, optimizer: ZeroRedundancyOptimizer, *, last: bool) -> None:
        with optimizer.accumulate():  # schedules that split the backward pass fire no hooks: they tell
            self.pipeline.step(compute, optimizer.gradient_ready if last else None)

    def evaluate(self, compute: Compute, micro_batches: int) -> None:
        relay(
            self._stages,
            self._parallel,
            self._mesh,
            compute,
            micro_batches,
            lambda _: torch.empty_like(self._x, device=self._mesh.device),
        )

    def timing(self) -> StepTiming | None:
        return self.pipeline.timing()


def make_execution(config: Config, layout: Layout, mesh: Mesh, model: nn.Module, dtype: torch.dtype) -> Execution:
    """How a training runs its model."""
    if not isinstance(model, Stages):
        return Whole(model)
    assert not isinstance(config.model, OwnConfig), "check_layout refuses it"
    from shardwise.pipeline.schedule import Pipeline  # and torch's compiler, which others do without

    train = config.train
    length = train.sequence_length // (layout.tensor if layout.sequence else 1)
    x = torch.empty(length, train.micro_batch, config.model.hidden_size, dtype=dtype, device="meta")
    pipeline = Pipeline(
        model, config.parallel, mesh, layout.accumulation(train), x, losses=len(config.model.objectives)
    )
    return Pipelined(model, config.parallel, mesh, pipeline, x)
