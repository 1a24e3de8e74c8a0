"""The forward and backward passes of a step over its micro-batches.

Shapes: K = objectives of the loss; N = terms of a rank's losses: 1, or in bit-equal training one for each micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from shardwise.base.errors import RunError, see
from shardwise.distributed import collectives, devices
from shardwise.distributed.collectives import Pending
from shardwise.layers.units import WeightScales, parameters_by_unit
from shardwise.models.blocks import ModelPart, gives_losses
from shardwise.models.build import build_balance
from shardwise.pipeline.action_order import BACKWARD, FORWARD
from shardwise.pipeline.stages import Compute, relay
from shardwise.train.mean_loss import MicroBatch, count_targets, mean_over_targets
from shardwise.train.model_checks import find_non_finite
from shardwise.train.step_meters import PIPELINE, StepMeters
from shardwise.train.training import Training

if TYPE_CHECKING:
    from shardwise.layers.balance import Balance
    from shardwise.layers.bitwise.replicated import ReplicatedParameters

_WHOLE_MODEL = (-2, 0)
"""A place in the model, for `DropoutKey`: layer and site; the shard is the first block of a pipeline stage."""


class Passes:
    """Computes the losses and gradients of global batches on one rank."""

    def __init__(self, training: Training, meters: StepMeters) -> None:
        config = training.config
        self._config = config
        self._mesh = training.mesh
        self._model = training.model
        self._optimizer = training.optimizer
        self._pipeline = training.pipeline
        self._clock = meters.clock
        self._sources = meters.sources
        # A backward pass in two parts computes the gradient of each parameter by itself.
        self._replicated: dict[nn.Module, ReplicatedParameters] | None = None
        if self._mesh.tp.grain is not None and not config.splits_backward:
            from shardwise.layers.bitwise.replicated import ReplicatedParameters

            self._replicated = defaultdict(ReplicatedParameters)
        self._weight_scales = WeightScales(self._model) if config.precision.matmul is not None else None
        self._groups = config.train.groups_apart(self._mesh.dp.size)
        self._layout = training.layout
        self._balance = build_balance(config, training.layout, self._mesh)
        self._captured = devices.captured_call(self._mesh.device) if "cuda_graphs" in config.train.switches else None

    def run(self, micro_batches: list[MicroBatch], step: int, *, last: bool = True) -> Tensor:
        """Add the gradients of the global mean loss; returns this rank's terms of each objective's mean, [N, K].

        A stage without a loss has the terms 0. With `last` the gradients are complete afterwards, and each bucket's
        reduction starts during the backward pass. Collective.
        """
        # New weights may still be on their way on the same communicator: the forward pass waits for each as it needs
        # it, and only the loss waits for these numbers, which come behind all weights.
        counts = count_targets(micro_batches, self._mesh.replicas)
        sums: list[Tensor] = []

        def compute(part: nn.Module, x: Tensor | None, number: int, only_counts: bool = False) -> Tensor:
            batch = micro_batches[number]
            dropout = batch.dropout_key(self._config.train, step)
            # Random numbers of a user's own layers are a function of step and samples too.
            recording = nullcontext() if self._sources is None or only_counts else self._sources.of_batch(batch)
            replicated = nullcontext() if self._replicated is None else self._replicated[part].forward_pass()
            stage = getattr(part, "part", None)
            first = stage.layers.start if isinstance(stage, ModelPart) and stage.layers else 0
            with dropout.seeded(self._mesh.device, *_WHOLE_MODEL, first), replicated, recording:
                # Captured passes and others share the graphs of blocks.
                out = batch.result(part, batch.call_of(part, x, None if self._captured else dropout)())
            if only_counts or not gives_losses(part):
                return out
            # Divided by the targets of the global batch, not of this micro-batch: gradients need no factor afterwards.
            sums.append(out.detach())
            return mean_over_targets(out, counts.wait())

        group_length = len(micro_batches) // self._groups

        def end_group(number: int, leaves: Iterable[Tensor] | None = None) -> None:
            if (number + 1) % group_length == 0 and number + 1 < len(micro_batches):
                self._optimizer.end_group(leaves)

        with nullcontext() if self._weight_scales is None else self._weight_scales.kept():
            if self._balance is not None and self._balance.needs_counts:
                self._count_rows(self._balance, partial(compute, only_counts=True), micro_batches)
            if self._pipeline is not None:
                # Schedules that split the backward pass fire no hooks: the pipeline says which gradients are complete.
                if self._config.splits_backward:
                    self._optimizer.provide_gradients()
                ready = self._optimizer.gradient_ready if last and not self._optimizer.reduces_each_pass else None
                with self._optimizer.accumulate(), self._clock.phase(PIPELINE):
                    self._pipeline.step(compute, ready, end_group)
                return self._loss_terms(sums, counts.wait(), len(micro_batches))
            if self._captured is not None:
                # The hooks of the last pass begin reductions.
                sums += self._replayed(micro_batches[: len(micro_batches) - last], counts)
            for number in range(len(sums), len(micro_batches)):
                with self._optimizer.accumulate(last=last and number == len(micro_batches) - 1):
                    with record_function(f"forward, micro-batch {number}"), self._clock.phase(FORWARD):
                        loss = compute(self._model, None, number).sum()
                    with record_function(f"backward, micro-batch {number}"), self._clock.phase(BACKWARD):
                        loss.backward()
                    if self._groups > 1:
                        end_group(number)
            return self._loss_terms(sums, counts.wait(), len(micro_batches))

    def _replayed(self, micro_batches: list[MicroBatch], counts: Pending) -> list[Tensor]:
        """Add gradients of micro-batches by one graph, all of it BACKWARD to the clock; return sums of losses [K]."""
        assert self._captured is not None

        def both_passes(tensors: dict[str, Tensor]) -> Tensor:
            inputs = {name: tensor for name, tensor in tensors.items() if name != "counts_K"}
            sums_K = batch.result(self._model, replace(batch, inputs=inputs).call_of(self._model)())
            mean_over_targets(sums_K, tensors["counts_K"]).sum().backward()
            return sums_K.detach()

        self._optimizer.gathers.wait()
        sums = []
        for batch in micro_batches:
            with self._clock.phase(BACKWARD):
                sums.append(self._captured(both_passes, {**batch.inputs, "counts_K": counts.wait()}))
        return sums

    def _count_rows(self, balance: Balance, compute: Compute, micro_batches: list[MicroBatch]) -> None:
        """Count the loads of the global batch, which objectives of routers need beforehand. Collective."""
        from shardwise.layers.balance import counted

        parts = self._mesh.tp.size if self._layout.sequence_parallel else 1
        shapes = [batch.inputs["ids_SB"].shape for batch in micro_batches]
        local = [(length // parts, samples) for length, samples in shapes]
        with record_function("forward, only counts"), self._clock.phase(FORWARD), counted(self._model, balance):
            relay(self._model, self._config.parallel, self._mesh, compute, local)

    def over_ranks(self, losses_NK: Tensor) -> Tensor:
        """The terms of the global batch's losses from those of `run`, whose sum is rounded once. Collective."""
        self._rank_losses_NK = losses_NK.clone()
        # Each replica has the losses of its samples, and in a pipeline only the last stage has them.
        if self._mesh.dp.grain is None:
            losses = collectives.all_reduce_(losses_NK, self._mesh.replicas)
        else:
            losses = collectives.all_gather(losses_NK, self._mesh.dp)
        return collectives.all_reduce_(losses, self._mesh.pp)

    def gathers_behind_forward(self) -> AbstractContextManager[None]:
        """Let new parameters travel during the next forward pass, where the device computes during its collectives.

        A model of the user's own may read a parameter wherever it likes: its gathers end with the step.
        """
        if self._mesh.device.type == "cpu" or self._config.model.is_own:
            return nullcontext()
        return self._optimizer.gathers.behind_forward(parameters_by_unit(self._model), self._optimizer.buckets)

    def non_finite_error(
        self, micro_batches: list[MicroBatch], step: int, loss: float, gradient_norm: float
    ) -> RunError:
        """The error on a loss or norm that is not finite, with the rank and parameter at fault. Collective.

        The reduction has mixed the ranks' gradients, so each rank computes and examines its own once more.
        """
        place = "each rank's own part is: their sum overflowed"
        fix = "No update was made. Lower optimizer.lr, lengthen optimizer.warmup_steps or set optimizer.max_norm"
        if "update_in_backward" in self._config.train.switches:
            # Weights are others by now: only the loss that this rank had is left.
            non_finite = find_non_finite(nn.Module(), float(self._rank_losses_NK.sum()))
            place = "each rank's own loss is"
            fix = "Some weights are updated: go on from a checkpoint, without update_in_backward"
        else:
            self._optimizer.zero_grad()
            with self._optimizer.local_gradients(), self._optimizer.gathered():
                non_finite = find_non_finite(self._model, float(self.run(micro_batches, step, last=False).sum()))
        faults = collectives.all_gather_objects(non_finite, self._mesh.world)
        # In a pipeline a value that is not finite travels on: of all ranks' findings the nearest cause counts.
        for _, rank, text in sorted((order, rank, text) for rank, (order, text) in enumerate(faults) if text)[:1]:
            place = f"on rank {rank}, {text}"
        return RunError(
            f"step {step}: the loss ({loss}) and the gradient norm ({gradient_norm}) must be finite; {place}. "
            f"{fix}{see('training#loss-not-finite')}"
        )

    def _loss_terms(self, sums: list[Tensor], counts_K: Tensor, micro_batches: int) -> Tensor:
        missing = torch.zeros_like(counts_K, dtype=torch.float32)
        if self._mesh.dp.grain is None:
            return mean_over_targets(torch.stack([missing, *sums]), counts_K).sum(dim=0, keepdim=True)
        sums_NK = torch.stack(sums or [missing] * micro_batches).float()
        return mean_over_targets(collectives.all_reduce_(sums_NK, self._mesh.cp), counts_K)
