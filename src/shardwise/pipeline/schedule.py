"""A step through a pipeline: torch's schedules (`torch.distributed.pipelining`) over the stages of one rank.

Stages know the shapes of their inputs and outputs beforehand (`input_args`, `output_args`), so that torch needs no
extra forward pass to find them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from shardwise.base.errors import ConfigError, LostPeerError, see
from shardwise.config import ParallelConfig
from shardwise.config.layout import LayoutStage
from shardwise.config.pipeline_schedule_specs import SCHEDULES
from shardwise.distributed import devices
from shardwise.distributed.mesh import Mesh
from shardwise.distributed.torch_private import mend_split_backward, open_connections_to_others
from shardwise.layers.embedding import head_leaf
from shardwise.pipeline.action_order import BACKWARD, FORWARD, INPUT, WEIGHTS
from shardwise.pipeline.clock import Clock, StepTiming, name_stage_messages
from shardwise.pipeline.stages import Compute, Stages

TORCH_SCHEDULES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}


def _make_schedule(parallel: ParallelConfig, stages: Sequence[Any], micro_batches: int) -> Any:
    torch_class = TORCH_SCHEDULES[parallel.schedule]
    # Classes for one stage on each rank take the stage itself.
    stage_argument = stages[0] if SCHEDULES[parallel.schedule].is_single_stage else stages
    return torch_class(stage_argument, micro_batches, loss_fn=lambda losses_K, _: losses_K.sum(), scale_grads=False)


class Pipeline:
    """The stages of one rank under a schedule, for steps of a fixed number of micro-batches.

    Args:
        stages: stages of this rank.
        parallel: degrees and schedule of the pipeline.
        mesh: mesh of the ranks.
        micro_batches: number of micro-batches of a step.
        x: a tensor like those that go from stage to stage, on any device.
        losses: number of losses that the last stage gives.

    Attributes:
        clock: times at which this rank worked in the last step.
        stages: torch's stages.
        schedule: torch's schedule over `stages`.
    """

    def __init__(
        self, stages: Stages, parallel: ParallelConfig, mesh: Mesh, micro_batches: int, x: Tensor, losses: int
    ) -> None:
        self.clock = Clock(mesh.device)
        self._micro_batches = micro_batches
        self._mesh = mesh
        self._submodules = [_Submodule(stage, model) for stage, model in stages.pairs()]
        self.stages = [_Stage(module, mesh, x, losses, self.clock, self._on_reduction) for module in self._submodules]
        self._has_first = any(module.stage.is_first for module in self._submodules)
        self._has_last = any(module.stage.is_last for module in self._submodules)
        # Stages whose gradient of a parameter is not complete yet; a tied weight may be in two.
        self._incomplete: Counter[nn.Parameter] = Counter()
        self._ready: Callable[[nn.Parameter], None] = _ignore
        mend_split_backward()
        open_connections_to_others(self.stages)
        self.schedule = _make_schedule(parallel, self.stages, micro_batches)

    def step(
        self,
        compute: Compute,
        ready: Callable[[nn.Parameter], None] | None = None,
        ended: Callable[[int, Iterable[Tensor]], None] | None = None,
    ) -> None:
        """Forward and backward of all micro-batches; gradients add up in the parameters. Collective.

        Args:
            compute: the forward pass of one stage on one micro-batch. The sum of the last stage's losses is
                differentiated.
            ready: called with each parameter whose gradient is complete, as soon as its stage's last backward pass is
                done.
            ended: called after each backward pass of a stage, with the micro-batch's number and the tensors to whose
                gradients it added.

        Raises:
            LostPeerError: a message did not come, or could not be sent: another rank has ended.
            Exception: any error of `compute`, as it is.
        """
        self.clock.begin()
        self._ready = ready or _ignore
        for module in self._submodules:
            module.ended = ended
        self._incomplete = Counter(p for module in self._submodules for p in module.model.parameters())
        for module in self._submodules:
            module.compute = compute
        numbers = torch.arange(self._micro_batches)
        failure: Exception | None = None
        try:
            with _unlogged():
                self.schedule.step(
                    *([numbers] if self._has_first else []),
                    target=numbers if self._has_last else None,
                    return_outputs=False,
                )
            self.clock.end()
        except Exception as error:  # noqa: BLE001  torch wraps what a stage raised in a text of its own
            failure = next((module.raised for module in self._submodules if module.raised is not None), None)
            if failure is None and devices.lacks_messages(error):
                key = f"parallel.pipeline ({self._mesh.pp.size})"
                failure = ConfigError(devices.without_messages(key, self._mesh.device, "parallel.pipeline=1", error))
            failure = failure or self._lost(error) or error
        finally:
            for module in self._submodules:
                module.compute = None
                module.ended = None
        if failure is not None:
            raise failure

    def _lost(self, error: Exception) -> LostPeerError | None:
        """Return an error that names the message that this rank waited for, or None if messages are not what failed."""
        if not devices.is_lost_connection(error):
            return None
        awaited = [text for stage in self.stages for text in stage.awaited]
        message = awaited[0] if awaited else "another stage to take what was sent"
        lost = LostPeerError(
            f"rank {self._mesh.world.rank} waited for {message}, and lost the connection"
            f"{see('training#lost-connection')}"
        )
        lost.__cause__ = error
        return lost

    def timing(self) -> StepTiming:
        """Return the timing of the last step. Collective over the pipeline."""
        return self.clock.timing([module.stage.index for module in self._submodules], self._mesh)

    def _on_reduction(self, model: nn.Module) -> None:
        """Report a stage's complete gradients; that of a weight of two stages of this rank waits for the second one."""
        for parameter in model.parameters():
            self._incomplete[parameter] -= 1
            if not self._incomplete[parameter] and parameter.requires_grad:
                self._ready(parameter)


class _Submodule(nn.Module):
    """The module that torch calls for a stage: it runs the step's `compute` on the stage's model."""

    def __init__(self, stage: LayoutStage, model: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.model = model
        self.compute: Compute | None = None
        self.ended: Callable[[int, Iterable[Tensor]], None] | None = None
        self.micro_batch = 0
        self.raised: Exception | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.compute is not None, "only a step of the pipeline runs it"
        with self.remembering():
            return self.compute(self.model, None if self.stage.is_first else x, self.micro_batch)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The tensors whose gradients torch computes for the stage."""
        return cast(Iterator[nn.Parameter], self.leaves())

    def leaves(self) -> Iterator[Tensor]:
        """The parameters, and the leaves of a head, to whose gradients a backward pass of this stage adds."""
        for parameter in self.model.parameters():
            leaf = head_leaf(parameter)
            if leaf is None or self.stage.is_first:
                yield parameter
            if leaf is not None and self.stage.is_last:
                yield leaf

    def report_end(self, micro_batch: int) -> None:
        """Report that a backward pass of a micro-batch has added to all gradients of the stage."""
        if self.ended is not None:
            self.ended(micro_batch, self.leaves())

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Remember an error of this stage's own work, without the error of its own that torch puts around it."""
        try:
            yield
        except Exception as error:
            is_wrapped = "Failed to run stage backward" in str(error)
            cause = error.__cause__
            self.raised = cause if is_wrapped and isinstance(cause, Exception) else error
            raise


class _Stage(PipelineStage):
    """torch's stage, which also sets the module's micro-batch, times the work, counts bytes, and reports complete
    gradients."""

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
        like_number = torch.empty(1, dtype=torch.int64, device="meta")
        like_losses = torch.empty(losses, device="meta")
        super().__init__(
            module,
            stage.index,
            stage.stages,
            mesh.device,
            input_args=like_number if stage.is_first else like_x,
            output_args=like_losses if stage.is_last else like_x,
            group=mesh.pp.process_group,
            # Each weight's gradient by itself would compute a block that is recomputed again for each of its weights.
            dw_builder=_nothing_left if getattr(module.model, "recompute", None) == "full" else None,
        )
        self._message = like_x
        self._module = module
        self._pp = mesh.pp
        self._clock = clock
        self._x_bytes = x.numel() * x.element_size()
        self._on_reduction = on_reduction
        # torch drops the outputs between the two parts of a backward pass. In torch 2.11 an autograd function written
        # in Python at which the second part begins (the loss) then is freed too early, so its graph is held here. torch
        # 2.15 keeps outputs elsewhere, and needs none of this.
        self._graphs: dict[int, list[Any]] = {}
        self._losses: dict[int, Tensor] = {}
        self.awaited: list[str] = []
        """Names of the messages that this rank has asked for and not yet used, the oldest first."""

    def _prepare_forward_infra(self, *args: Any, **options: Any) -> Any:
        prepared = super()._prepare_forward_infra(*args, **options)
        for receives in self.args_recv_info.values():
            _free_buffers(receives, self._message)
        return prepared

    def _prepare_backward_infra(self, *args: Any, **options: Any) -> Any:
        prepared = super()._prepare_backward_infra(*args, **options)
        for receives in self.grad_recv_info.values():
            _free_buffers(receives, self._message)
        return prepared

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        self._module.micro_batch = fwd_chunk_id
        self._arrived(self._name("x", fwd_chunk_id, -1))
        with self._clock.time(FORWARD, self.stage_index, fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        _free_buffers(self.args_recv_info[fwd_chunk_id], self._message)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        self._arrived(self._name("the gradient of x", bwd_chunk_id, 1))
        kind = BACKWARD if options.get("full_backward", True) else INPUT
        if kind == INPUT and self.dw_builder is None and hasattr(self, "fwd_cache"):
            outputs = self.fwd_cache[bwd_chunk_id][0] if options.get("loss") is None else (options["loss"],)
            self._graphs[bwd_chunk_id] = [output.grad_fn for output in outputs]
        with self._clock.time(kind, self.stage_index, bwd_chunk_id), self._module.remembering():
            super().backward_one_chunk(bwd_chunk_id, *args, **options)
        _free_buffers(self.grad_recv_info[bwd_chunk_id], self._message)
        if (loss := options.get("loss")) is not None:
            self._losses[bwd_chunk_id] = loss
            if kind == BACKWARD:
                self._free_graph(bwd_chunk_id)
        # With `dw_builder` this pass computes all gradients, and the second one none.
        if kind == BACKWARD or self.dw_builder is not None:
            self._module.report_end(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        with self._clock.time(WEIGHTS, self.stage_index, bwd_chunk_id), self._module.remembering():
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **options)
        self._graphs.pop(bwd_chunk_id, None)
        self._free_graph(bwd_chunk_id)
        if self.dw_builder is None:
            self._module.report_end(bwd_chunk_id)

    def _free_graph(self, micro_batch: int) -> None:
        """Release the input of a micro-batch whose loss was differentiated.

        The schedule holds the losses until the end of the step, and the graph of a loss ends at the input.
        """
        if (loss := self._losses.pop(micro_batch, None)) is not None:
            loss.detach_()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        _allocate_buffers(self.args_recv_info[fwd_chunk_id], self._message, self.device)
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        receives = name_stage_messages(ops, "receive", self.stage_index, fwd_chunk_id)
        return self._awaiting(receives, self._name("x", fwd_chunk_id, -1))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        _allocate_buffers(self.grad_recv_info[bwd_chunk_id], self._message.detach(), self.device)
        ops = super().get_bwd_recv_ops(bwd_chunk_id)
        receives = name_stage_messages(ops, "receive of the gradient", self.stage_index, bwd_chunk_id)
        return self._awaiting(receives, self._name("the gradient of x", bwd_chunk_id, 1))

    def _name(self, tensor: str, micro_batch: int, step: int) -> str:
        """Return the words for a tensor from the next stage (step 1) or from the one before (-1)."""
        stage = self.stage_index + step
        rank = self.stage_index_to_group_rank.get(stage)
        sender = "" if rank is None else f" (rank {self._pp.ranks[rank]})"
        return f"{tensor} of micro-batch {micro_batch} from stage {stage}{sender}"

    def _awaiting(self, receives: list[Any], message: str) -> list[Any]:
        if receives:
            self.awaited.append(message)
        return receives

    def _arrived(self, message: str) -> None:
        if message in self.awaited:
            self.awaited.remove(message)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        sends = name_stage_messages(super().get_fwd_send_ops(fwd_chunk_id), "send", self.stage_index, fwd_chunk_id)
        return self._counted(sends)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        return self._counted(name_stage_messages(ops, "send of the gradient", self.stage_index, bwd_chunk_id))

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self._on_reduction(self._module.model)

    def _counted(self, sends: list[Any]) -> list[Any]:
        for _ in sends:
            self._pp.count("send", self._x_bytes)
        return sends


def _allocate_buffers(receives: Sequence[Any], message: Tensor, device: torch.device) -> None:
    """Make the tensors into which messages are received; `message` is one of their shape, without memory.

    Releases before torch 2.15 make those of all micro-batches at the first step and keep them, so that their memory
    grows with the global batch. torch 2.15 makes and frees them as is done here.
    """
    for receive in receives:
        if _has_buffer(receive) and receive.buffer.is_meta:
            receive.buffer = torch.empty_like(message, device=device)
            receive.buffer.requires_grad_(message.requires_grad)


def _free_buffers(receives: Sequence[Any], message: Tensor) -> None:
    """Release tensors that messages were received into: code that still needs them holds them."""
    for receive in receives:
        if _has_buffer(receive):
            receive.buffer = message


def _has_buffer(receive: Any) -> bool:
    """Return whether torch gave it a buffer: the first stage's argument has none, and torch 2.15 makes it on use."""
    return getattr(receive, "buffer", None) is not None


@contextmanager
def _unlogged() -> Iterator[None]:
    """Silence what torch logs of an error on each rank, such as the whole schedule: the error itself is raised."""
    logger = logging.getLogger(schedules.__name__)
    was_disabled = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _nothing_left() -> Callable[[], None]:
    """Return the second part of a backward pass that was computed whole: a function that does nothing."""
    return lambda: None


def _ignore(_parameter: nn.Parameter) -> None:
    pass
