"""A step through a pipeline: torch's schedules (`torch.distributed.pipelining`) over the stages of one rank.

Stages are told beforehand what comes and goes (`input_args`, `output_args`): no extra forward pass finds it out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from shardwise.config import ParallelConfig, Schedule
from shardwise.config.sections import SINGLE_STAGE
from shardwise.cost.stages import Stage
from shardwise.mesh import Group, Mesh
from shardwise.models import Stages
from shardwise.pipeline.clock import Clock
from shardwise.pipeline.simulate import BACKWARD, FORWARD, INPUT, WEIGHTS, Action

Compute: TypeAlias = Callable[[nn.Module, Tensor | None, int], Tensor]
"""(a stage's model, what the stage before gave, micro-batch) → what the stage gives: x, or of the last stage losses."""

_SCHEDULES: dict[Schedule, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}
_KINDS = {"F": FORWARD, "B": BACKWARD, "I": INPUT, "W": WEIGHTS}


def order(parallel: ParallelConfig, micro_batches: int) -> list[list[Action]]:
    """What each pipeline rank does, one after the other."""
    degree = parallel.pipeline
    if parallel.schedule == "1f1b":  # torch's own list for it leaves out the last rank's first forward pass
        return [_one_forward_one_backward(rank, degree, micro_batches) for rank in range(degree)]
    empty = nn.Module()
    stages = [
        SimpleNamespace(num_stages=degree * parallel.stages_per_rank, group_size=degree, group_rank=0, submod=empty)
        for _ in range(parallel.stages_per_rank)
    ]
    by_rank = _schedule(parallel, stages, micro_batches).pipeline_order
    return [list(_actions(by_rank[rank])) for rank in range(degree)]


def _one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Action]:
    ahead = min(stages - stage, micro_batches)
    done: list[Action] = [(FORWARD, stage, number) for number in range(ahead)]
    for number in range(micro_batches):
        done.append((BACKWARD, stage, number))
        if number + ahead < micro_batches:
            done.append((FORWARD, stage, number + ahead))
    return done


def _actions(row: list[Any]) -> Iterator[Action]:
    """The work in a row of torch's; what it overlaps is done one after the other, as torch does."""
    for action in row:
        for each in () if action is None else action.sub_actions or (action,):
            if each.computation_type.value in _KINDS:
                yield _KINDS[each.computation_type.value], each.stage_index, each.microbatch_index


def _schedule(parallel: ParallelConfig, stages: list[Any], micro_batches: int) -> Any:
    """torch's, over a rank's stages."""
    single = parallel.schedule in SINGLE_STAGE
    return _SCHEDULES[parallel.schedule](
        stages[0] if single else stages, micro_batches, loss_fn=_sum, scale_grads=False
    )


class Pipeline:
    """The stages of one rank under a schedule, for steps of always as many micro-batches.

    Args:
        stages: of this rank. x: a tensor like those that go from stage to stage, on any device. losses: how many the
        last stage gives.

    Attributes:
        clock: when this rank worked, in the last step. schedule: torch's.
    """

    def __init__(
        self, stages: Stages, parallel: ParallelConfig, mesh: Mesh, micro_batches: int, x: Tensor, losses: int
    ) -> None:
        self.clock = Clock(mesh.device)
        self._micro_batches = micro_batches
        self._submodules = [_Submodule(stage, model) for stage, model in stages.pairs()]
        self._stages = [_Stage(each, mesh, x, losses, self.clock, self._on_reduction) for each in self._submodules]
        self._has_first = any(each.stage.is_first for each in self._submodules)
        self._has_last = any(each.stage.is_last for each in self._submodules)
        self._waiting: Counter[nn.Parameter] = Counter()
        self._ready: Callable[[nn.Parameter], None] = _ignore
        self.schedule = _schedule(parallel, self._stages, micro_batches)

    def step(self, compute: Compute, ready: Callable[[nn.Parameter], None] | None = None) -> None:
        """Forward and backward of all micro-batches; gradients add up in the parameters. Collective.

        compute: the work of one stage on one micro-batch. The sum of the last stage's losses is what is differentiated.
        ready: is told of each parameter whose gradient is complete, as soon as its stage's last backward is done.
        """
        self.clock.begin()
        self._ready = ready or _ignore
        self._waiting = Counter(p for each in self._submodules for p in each.parameters())
        for each in self._submodules:
            each.compute = compute
        numbers = torch.arange(self._micro_batches)
        try:
            self.schedule.step(
                *([numbers] if self._has_first else []),
                target=numbers if self._has_last else None,
                return_outputs=False,
            )
        finally:
            for each in self._submodules:
                each.compute = None

    def _on_reduction(self, model: nn.Module) -> None:
        """A stage's gradients are complete; what another stage of this rank has too (a tied weight) waits for it."""
        for parameter in model.parameters():
            self._waiting[parameter] -= 1
            if not self._waiting[parameter] and parameter.requires_grad:
                self._ready(parameter)


class _Submodule(nn.Module):
    """What torch takes for a stage's module: it computes what the step's `compute` says."""

    def __init__(self, stage: Stage, model: nn.Module) -> None:
        super().__init__()
        self.stage, self.model = stage, model
        self.compute: Compute | None = None
        self.micro_batch = 0

    def forward(self, x: Tensor) -> Tensor:
        assert self.compute is not None, "only a step of the pipeline runs it"
        return self.compute(self.model, None if self.stage.is_first else x, self.micro_batch)


class _Stage(PipelineStage):
    """Tells the module which micro-batch comes, times the work, counts bytes, and says when gradients are complete."""

    def __init__(
        self,
        module: _Submodule,
        mesh: Mesh,
        x: Tensor,
        losses: int,
        clock: Clock,
        on_reduction: Callable[[nn.Module], None],
    ) -> None:
        stage = module.stage
        like_x = torch.empty_like(x, device="meta", requires_grad=True)
        first, last = torch.empty(1, dtype=torch.int64, device="meta"), torch.empty(losses, device="meta")
        super().__init__(
            module,
            stage.index,
            stage.stages,
            mesh.device,
            input_args=first if stage.is_first else like_x,
            output_args=last if stage.is_last else like_x,
            group=mesh.pp.process_group,
        )
        self._module, self._pp, self._clock = module, mesh.pp, clock
        self._x_bytes = x.numel() * x.element_size()
        self._on_reduction = on_reduction

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        self._module.micro_batch = fwd_chunk_id
        with self._clock.time(FORWARD, self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        kind = BACKWARD if options.get("full_backward", True) else INPUT
        with self._clock.time(kind, self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **options)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        with self._clock.time(WEIGHTS, self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **options)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id), self._pp)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id), self._pp)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self._on_reduction(self._module.model)

    def _counted(self, sends: list[Any], group: Group) -> list[Any]:
        for _ in sends:
            group.count("send", self._x_bytes)
        return sends


def _sum(losses_K: Tensor, _target: Tensor) -> Tensor:
    return losses_K.sum()


def _ignore(_parameter: nn.Parameter) -> None:
    pass
