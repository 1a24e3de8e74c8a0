"""What is measured of a step on one rank, and read on the host together with its losses and norms.

Shapes: K = objectives of the loss, N = terms of the global batch's losses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.data.samples.batch import Batches, BlendedBatches
from shardwise.distributed import devices
from shardwise.distributed.mesh import Mesh
from shardwise.optim.zero import ZeroRedundancyOptimizer
from shardwise.train.rank_agreement import largest_of_ranks
from shardwise.train.source_losses import SourceLosses
from shardwise.train.step_clock import StepClock, memory_by_kind, state_by_kind
from shardwise.train.step_record import Progress, StepRecord
from shardwise.train.straggler import Straggler, Stragglers

if TYPE_CHECKING:
    from shardwise.pipeline.schedule import Pipeline  # imports torch's compiler, which is slow


class StepNumbers(NamedTuple):
    """Numbers of a step that the host reads, equal on every rank.

    Attributes:
        parameter_norm: None in steps that are not logged.
        losses: mean loss of each objective over the global batch.
        agreed_flags: largest of all ranks' flags, in their order; None where there are no flags.
        source_sums: sums by source of a mixture (`SourceLosses.take`); empty in steps that are not logged.
    """

    gradient_norm: float
    parameter_norm: float | None
    losses: tuple[float, ...]
    agreed_flags: tuple[float, ...] | None
    straggler: Straggler | None
    source_sums: tuple[float, ...]


class StepMeters:
    """The meters of one rank: times by part, the slowest rank, losses by source, and bytes in use.

    Attributes:
        clock: times by part of the step.
        sources: losses by source; None without a mixture.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: nn.Module,
        optimizer: ZeroRedundancyOptimizer,
        batches: Batches,
        pipeline: Pipeline | None,
    ) -> None:
        self._mesh = mesh
        self._model = model
        self._optimizer = optimizer
        self._objectives = batches.objectives
        self._pipeline = pipeline
        self.clock = StepClock(mesh, None if pipeline is None else pipeline.clock)
        self.sources = SourceLosses(batches, mesh) if isinstance(batches, BlendedBatches) else None
        self._stragglers = Stragglers(mesh)

    def read(
        self, losses_NK: Tensor, norms: tuple[Tensor, ...], flags: Sequence[float] | None, *, is_logged: bool
    ) -> StepNumbers:
        """Read a step's numbers on the host, which waits here for all work before. Collective.

        All travel in one tensor, the ranks' flags too: a transfer of their own would stop the host a second time in
        each step, with nothing queued on the device, and their all-reduce is queued behind the backward pass.

        Args:
            losses_NK: terms of the global batch's losses; their sum is rounded once, whatever their order.
            norms: norm of the gradients, and that of the parameters where it was computed.
            flags: flags of this rank, of which the largest of all ranks are read, and with them the slowest rank;
                None reads neither.
        """
        parts = {"losses": losses_NK, "norms": torch.stack(norms)}
        if self.sources is not None and is_logged:
            parts["sources"] = self.sources.take()
        if flags is not None:
            agreed = largest_of_ranks([*flags, *self._stragglers.numbers()], self._mesh)
            parts["flags"], parts["slowest"] = agreed.tensor_split([len(flags)])
        numbers = _read_together(parts)
        # The host has waited for the device, so the marks around the passes can be read without another wait.
        self.clock.read()
        gradient_norm, *parameter_norm = numbers["norms"]
        objectives = losses_NK.shape[1]
        losses = (numbers["losses"][number::objectives] for number in range(objectives))
        return StepNumbers(
            gradient_norm=gradient_norm,
            parameter_norm=parameter_norm[0] if parameter_norm else None,
            losses=tuple(math.fsum(terms) for terms in losses),
            agreed_flags=None if flags is None else tuple(numbers["flags"]),
            straggler=None if flags is None else self._stragglers.take(numbers["slowest"]),
            source_sums=tuple(numbers.get("sources", ())),
        )

    def record(
        self,
        numbers: StepNumbers,
        progress: Progress,
        *,
        lr: float,
        spike: float | None,
        seconds: float,
        input_seconds: float,
        is_logged: bool,
    ) -> StepRecord:
        """The record of the step that was just counted in `progress`.

        Args:
            is_logged: bytes in use and the timing of a pipeline are measured too.
        """
        device = self._mesh.device
        is_timed = is_logged and self._pipeline is not None
        record = StepRecord(
            step=progress.step,
            loss=sum(numbers.losses),
            mean_loss=progress.mean_loss,
            mean_steps=len(progress.losses),
            lr=lr,
            grad_norm=numbers.gradient_norm,
            param_norm=numbers.parameter_norm,
            tokens=progress.tokens,
            samples=progress.samples,
            seconds=seconds,
            input_seconds=input_seconds,
            peak_memory_bytes=devices.peak_memory(device),
            losses=self._by_objective(numbers.losses),
            allocator=devices.allocator_bytes(device),
            agreed_flags=numbers.agreed_flags,
            split=self.clock.split(seconds),
            communication_bytes=self.clock.sent(),
            loss_spike=spike,
            straggler=numbers.straggler,
            sources={}
            if self.sources is None or not numbers.source_sums
            else self.sources.records(numbers.source_sums, progress.position),
            timing=self._pipeline.timing() if self._pipeline is not None and is_timed else None,
            memory=memory_by_kind(self._state_by_kind, device) if is_logged else {},
        )
        if record.work_seconds is not None:
            self._stragglers.add(record.work_seconds)
        return record

    @cached_property
    def _state_by_kind(self) -> dict[str, int]:
        """Bytes of the state, which is complete after the first step. Added up once, as that takes a millisecond."""
        return state_by_kind(self._model, self._optimizer)

    def _by_objective(self, losses: Sequence[float]) -> dict[str, float]:
        """The losses by their names, where there are several."""
        return dict(zip(self._objectives, losses, strict=True)) if len(losses) > 1 else {}


def _read_together(parts: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """The elements of several tensors on the host, in one transfer."""
    numbers = iter(torch.cat([part.flatten() for part in parts.values()]).tolist())
    return {name: list(islice(numbers, part.numel())) for name, part in parts.items()}
