"""The training loop: steps, and the evaluations, comparisons of replicas and checkpoints between them.

Where the time of a step goes on one rank: data, forward, backward, communication, optimizer.

Communication is what the rank waits for in collectives, and in a pipeline for other stages; what runs beside other work
costs nothing here. The rest is the rank's own work, by which a slow rank is found: the ranks that wait for it take as
long as it does for a step, but most of that is communication.

On an accelerator the marks are events in its stream. They are read once the host has waited for the step's numbers, so
the measurement adds no wait. The update of the parameters is still under way then, and counts to the next step, as it
does in `step_seconds`. Collectives within a compiled graph count to the pass that they are in.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from shardwise.base.errors import RunError, see
from shardwise.config import Config, Layout, OwnConfig
from shardwise.data.samples.batch import Batches
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh
from shardwise.distributed.placement import placements
from shardwise.layers.dropout import DropoutKey
from shardwise.models.blocks import Stages, gives_losses, units
from shardwise.optim.learning_rate import learning_rate
from shardwise.optim.zero import ZeroRedundancyOptimizer
from shardwise.pipeline.clock import BACKWARD, FORWARD, Clock
from shardwise.train.compile.run_graphs import Keeper
from shardwise.train.compile.units import Compilation
from shardwise.train.evaluation import evaluate_rounds, perplexity
from shardwise.train.feed import Feed
from shardwise.train.memory import memory_by_kind, state_by_kind
from shardwise.train.micro_batch import MicroBatch
from shardwise.train.replica_check import check_replicas
from shardwise.train.reporter import Reporter
from shardwise.train.saving import Checkpoints, largest_of_ranks
from shardwise.train.step_record import Progress, StepRecord, end_of_run, loss_spike
from shardwise.train.straggler import Straggler, Stragglers
from shardwise.train.trace import Trace

if TYPE_CHECKING:
    from shardwise.pipeline.schedule import Pipeline

_WHOLE_MODEL = (-2, 0, 0)
"""A place in the model, for `DropoutKey`: layer, site and shard."""


class _Numbers(NamedTuple):
    """What is read of a step, on every rank.

    Attributes:
        losses: of each objective, over the global batch.
        asked: the largest of the ranks' flags.
    """

    gradient_norm: float
    parameter_norm: float
    losses: tuple[float, ...]
    asked: tuple[float, ...]
    straggler: Straggler | None


@dataclass(kw_only=True, eq=False, repr=False)
class Trainer:
    """Trains one model on one rank of a mesh; every rank runs the same steps.

    Attributes:
        pipeline: runs the stages of this rank, where the model is cut into stages.
        compilation: the compiled units of the model, if it is compiled.
        keeper: of their graphs.
    """

    config: Config
    layout: Layout
    mesh: Mesh
    model: nn.Module
    optimizer: ZeroRedundancyOptimizer
    batches: Batches
    evaluation: Batches | None
    progress: Progress
    reporter: Reporter | None = None
    pipeline: Pipeline | None = None
    compilation: Compilation | None = None
    keeper: Keeper | None = None

    def __post_init__(self) -> None:
        self.feed = Feed(self.config, self.mesh, self.batches, self.evaluation)
        self.clock = StepClock(self.mesh, None if self.pipeline is None else self.pipeline.clock)
        self.stragglers = Stragglers(self.mesh)
        self._checkpoint_seconds = 0.0

    def run(self, checkpoints: Checkpoints | None = None) -> str | None:
        """Train to the last step, with evaluations, comparisons of replicas and checkpoints.

        Returns:
            who asked the run to stop before its last step; None if nobody did.
        """
        first, last = self.progress.step + 1, end_of_run(self.config, self.progress.step)
        with closing(self.feed), closing(self._trace()) as trace, self._gathers():
            if self.config.train.eval_every and not self.progress.step:
                self.evaluate()
            for step in range(first, last + 1):
                with trace.step(step):
                    record = self.step(None if checkpoints is None else checkpoints.ask)
                stopped_by = self._after_step(record, checkpoints, is_last=step == last)
                if stopped_by is not None and step < last:
                    return stopped_by
        return None

    def _gathers(self) -> AbstractContextManager[None]:
        """Where the device computes beside its collectives, new parameters travel behind the next forward pass.

        A model of the user's own may read a parameter wherever it likes: its gathers end with the step.
        """
        if self.mesh.device.type == "cpu" or isinstance(self.config.model, OwnConfig):
            return nullcontext()
        return self.optimizer.gathers.behind_forward(units(self.model), self.optimizer.buckets)

    def _trace(self) -> Trace:
        steps = self.config.log.profile_steps
        ranks = self.config.log.profile_ranks
        if self.reporter is None or steps is None or (ranks is not None and self.mesh.world.rank not in ranks):
            return Trace(None, Path(), pipelined=False)
        return Trace(steps, self.reporter.run.trace(self.mesh.world.rank), pipelined=self.mesh.pp.size > 1)

    def _after_step(self, record: StepRecord, checkpoints: Checkpoints | None, *, is_last: bool) -> str | None:
        """Report a step, and do what is due after it; returns who asked the run to stop."""
        step, eval_every, drift_every = record.step, self.config.train.eval_every, self.config.log.drift_every
        asked: tuple[float, ...] | None = record.asked
        if step == self.progress.before + 1:
            self._settle()
        if self.reporter is not None:
            self.reporter.step(self._with_amounts(record) if self.reporter.is_logged(step) else record)
            self._warn_of_a_mean(record)
        if drift_every and (is_last or step % drift_every == 0):
            self.progress.phase = "comparison of replicas"
            self.optimizer.gathers.wait()
            check_replicas(self.model, self.mesh, step)
            asked = None  # much time has passed: `checkpoints` asks again
        if eval_every and (is_last or step % eval_every == 0):
            self.evaluate()
            self._settle()
            asked = None
        if checkpoints is None:
            return None
        self.progress.phase = "checkpoint"
        start = time.perf_counter()
        stopped_by = checkpoints.after_step(self.progress, is_last, asked)
        self._checkpoint_seconds += time.perf_counter() - start
        return stopped_by

    def _settle(self) -> None:
        """Report the graphs that were captured since the last call, and keep those that were compiled."""
        if self.keeper is None:
            return
        settled = self.keeper.settle()
        if self.reporter is not None:
            self.reporter.captured(settled)

    def _warn_of_a_mean(self, record: StepRecord) -> None:
        """Warn that a model or a loss of the user's own may return a mean: the first loss is far below a guess's."""
        model, guess = self.config.model, math.log(self.config.model.vocab_size)
        own = f"forward of {model.family}" if isinstance(model, OwnConfig) else self.config.hooks.loss
        if self.reporter is not None and own is not None and record.step == 1 and record.loss < guess / 10:
            self.reporter.warning(
                f"the first loss ({record.loss:.3g}) is far below that of a guess, ln(model.vocab_size) ({guess:.3g}): "
                f"{own} must return the sum of its targets' losses, not their mean"
                f"{see('training#first-loss-too-low')}"
            )

    def step(self, ask: Callable[[], Sequence[float]] | None = None) -> StepRecord:
        """One optimizer step on the next global batch.

        The host waits for the device once: it reads loss and norms before the update, which a loss that is not finite
        must prevent. The update is still under way when this returns.

        Args:
            ask: gives further numbers, of which the largest of all ranks are read with them: `StepRecord.asked`. Who
                is slow travels with these.
        """
        start = time.perf_counter()
        train, step = self.config.train, self.progress.step + 1
        self.clock.begin(measures=self._is_logged(step) or self._is_logged(step + 1))
        self.progress.phase = "reading of data"
        self.feed.seconds = 0.0
        with self.clock.phase(DATA):
            micro_batches = self.feed.at(self.progress.position, more=train.steps - step)
        self.progress.phase = "forward and backward"
        counted_K = self._counted(micro_batches)
        losses_K = self._forward_backward(micro_batches, counted_K)
        self.progress.phase = "gradient reduction"
        # Each replica has the losses of its samples, and in a pipeline only the last stage has them.
        global_losses_K = collectives.all_reduce_(collectives.all_reduce_(losses_K, self.mesh.dp), self.mesh.pp)
        numbers = self._numbers(global_losses_K, None if ask is None else ask())
        loss = sum(numbers.losses)
        if not (math.isfinite(loss) and math.isfinite(numbers.gradient_norm)):
            self._stop_non_finite(step, loss, numbers.gradient_norm, micro_batches, counted_K)
        self.progress.phase = "optimizer update"
        lr = learning_rate(self.config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with record_function("optimizer"), self.clock.phase(OPTIMIZER):
            self.optimizer.step()
        spike = loss_spike(loss, self.progress.losses)
        self.progress.advance(loss, train.global_batch, train.sequence_length)
        seconds = time.perf_counter() - start
        record = StepRecord(
            step=step,
            loss=loss,
            mean_loss=fmean(self.progress.losses),
            mean_steps=len(self.progress.losses),
            lr=lr,
            grad_norm=numbers.gradient_norm,
            param_norm=numbers.parameter_norm,
            tokens=self.progress.tokens,
            samples=self.progress.samples,
            seconds=seconds,
            input_seconds=self.feed.seconds,
            peak_memory_bytes=devices.peak_memory(self.mesh.device),
            losses=self._by_objective(numbers.losses),
            allocator=devices.allocator_bytes(self.mesh.device),
            asked=numbers.asked,
            split=self.clock.split(seconds),
            communication_bytes=self.clock.sent(),
            loss_spike=spike,
            straggler=numbers.straggler,
        )
        if record.work_seconds is not None:
            self.stragglers.add(record.work_seconds)
        return record

    def _numbers(self, global_losses_K: Tensor, flags: Sequence[float] | None) -> _Numbers:
        """What the host reads of a step: the one transfer from the device, at which it waits for all work before.

        Args:
            flags: of this rank; the largest of all ranks are read, and with them who is slow. None: neither.
        """
        flags, shared = (flags, [*flags, *self.stragglers.numbers()]) if flags is not None else ((), [])
        further = [largest_of_ranks(shared, self.mesh)] if shared else []
        with self.clock.phase(OPTIMIZER):
            norms = torch.stack(self.optimizer.norms())
        gradient_norm, parameter_norm, *others = torch.cat((norms, global_losses_K, *further)).tolist()
        self.clock.read()
        losses, others = others[: len(global_losses_K)], others[len(global_losses_K) :]
        straggler = self.stragglers.take(others[len(flags) :])
        return _Numbers(gradient_norm, parameter_norm, tuple(losses), tuple(others[: len(flags)]), straggler)

    def _by_objective(self, losses: Sequence[float]) -> dict[str, float]:
        """The losses by their names, where there are several."""
        return dict(zip(self.batches.objectives, losses, strict=True)) if len(losses) > 1 else {}

    def _is_logged(self, step: int) -> bool:
        return self.reporter is not None and self.reporter.is_logged(step)

    def _with_amounts(self, record: StepRecord) -> StepRecord:
        """A step that is logged, with bytes of memory and the waits for checkpoints since the one before."""
        waited, self._checkpoint_seconds = self._checkpoint_seconds, 0.0
        timing = None if self.pipeline is None else self.pipeline.timing()
        memory = memory_by_kind(self._state_by_kind, self.mesh.device)
        return replace(record, timing=timing, memory=memory, checkpoint_seconds=waited)

    @cached_property
    def _state_by_kind(self) -> dict[str, int]:
        """After the first step all of it is there. It is added up once, as that takes a millisecond."""
        return state_by_kind(self.model, self.optimizer)

    def _counted(self, micro_batches: list[MicroBatch]) -> Tensor:
        """Counted targets of each objective in the global batch: the divisors of its losses."""
        here_K = torch.stack([batch.counts_K for batch in micro_batches]).sum(dim=0)
        return collectives.all_reduce_(here_K, self.mesh.dp).clamp(min=1)

    def _forward_backward(self, micro_batches: list[MicroBatch], counted_K: Tensor, *, last: bool = True) -> Tensor:
        """Add the gradients of the global mean loss; returns this rank's share of each objective's mean.

        With `last` the gradients are complete afterwards, and each bucket's reduction starts during the backward pass.
        """
        shares = [torch.zeros_like(counted_K, dtype=torch.float32)]

        def compute(part: nn.Module, x: Tensor | None, number: int) -> Tensor:
            batch = micro_batches[number]
            dropout = self._dropout_key(batch)
            # What layers of the user's own draw is a function of step and samples too.
            with dropout.seeded(self.mesh.device, *_WHOLE_MODEL):
                out = batch.result(part, part(**batch.arguments(part, x, dropout)))
            if not gives_losses(part):
                return out
            losses_K = out / counted_K.float()
            shares.append(losses_K.detach())
            return losses_K

        if self.pipeline is not None:
            # Schedules that split the backward pass fire no hooks: the pipeline says which gradients are complete.
            with self.optimizer.accumulate(), self.clock.stages():
                self.pipeline.step(compute, self.optimizer.gradient_ready if last else None)
            return torch.stack(shares).sum(dim=0)
        for number in range(len(micro_batches)):
            with self.optimizer.accumulate(last=last and number == len(micro_batches) - 1):
                with record_function(f"forward, micro-batch {number}"), self.clock.phase(FORWARD):
                    loss = compute(self.model, None, number).sum()
                with record_function(f"backward, micro-batch {number}"), self.clock.phase(BACKWARD):
                    loss.backward()
        return torch.stack(shares).sum(dim=0)

    def _dropout_key(self, batch: MicroBatch) -> DropoutKey:
        train = self.config.train
        first = int(batch.samples[0])
        return DropoutKey(train.seed, self.progress.step + 1, batch.samples_B, first, train.dropout_mode)

    def evaluate(self) -> tuple[float, float]:
        """Mean loss and perplexity over the first `eval_batches` global batches of the evaluation part, on every rank.

        The loss is the sum over the objectives; the perplexity is that of the first, which predicts tokens.
        """
        assert self.evaluation is not None, "where train.eval_every asks for evaluations, data without them are refused"
        self.progress.phase = "evaluation"
        self.optimizer.gathers.wait()
        rounds = self.feed.evaluation(self.layout.accumulation(self.config.train))
        result = evaluate_rounds(self.model, rounds, self.evaluation.objectives, self.mesh, self.config.parallel)
        self.model.train()
        of_tokens, *others = result.losses.values()
        if self.reporter is not None:
            losses = result.losses if others else {}
            self.reporter.evaluation(self.progress.step, result.loss, perplexity(of_tokens), losses)
        return result.loss, perplexity(of_tokens)

    def _stop_non_finite(
        self, step: int, loss: float, gradient_norm: float, micro_batches: list[MicroBatch], counted_K: Tensor
    ) -> None:
        """Raise with the rank and parameter at fault.

        The reduction has mixed the ranks' gradients, so each rank computes and examines its own once more.
        """
        self.optimizer.zero_grad()
        total = float(self._forward_backward(micro_batches, counted_K, last=False).sum())
        faults = collectives.all_gather_objects(self._fault(total), self.mesh.world)
        ordered = sorted((order, rank, text) for rank, (order, text) in enumerate(faults) if text)
        where = "each rank's own part is: their sum overflowed"
        if ordered:
            where = f"on rank {ordered[0][1]}, {ordered[0][2]}"
        raise RunError(
            f"step {step}: the loss ({loss}) and the gradient norm ({gradient_norm}) must be finite; {where}. "
            "No update was made. Lower optimizer.lr, lengthen optimizer.warmup_steps or set optimizer.max_norm"
            f"{see('training#loss-not-finite')}"
        )

    def _fault(self, loss: float) -> tuple[tuple[int, int, int], str]:
        """What is not finite on this rank (empty: nothing), and before it a key that sorts the nearest cause first.

        The key has 0 for a weight, 1 for the loss and 2 for a gradient; then stage and parameter in the order of the
        pass that uses them.
        """
        parts = [(0, self.model)]
        if isinstance(self.model, Stages):
            parts = [(stage.index, part) for stage, part in self.model.pairs()]
        pieces = [
            (stage, order, p, piece.name, piece.local.slices)
            for stage, part in parts
            for order, (_, p, record) in enumerate(placements(part))
            for piece in record.pieces
        ]
        for stage, order, parameter, name, where in pieces:
            if not torch.isfinite(parameter[where]).all():
                return (0, stage, order), f"{name} is the first parameter with a value that is not finite"
        text = "" if math.isfinite(loss) else f"its loss is {loss}"
        for stage, order, parameter, name, where in reversed(pieces):
            if parameter.grad is not None and not torch.isfinite(parameter.grad[where]).all():
                first = f"{name} is the first parameter, in backward's order, with a gradient that is not finite"
                return (1 if text else 2, -stage, -order), f"{text} and {first}" if text else first
        return (1, 0, 0), text


DATA, COMMUNICATION, OPTIMIZER, OTHER = "data", "communication", "optimizer", "other"
PARTS = (DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER)
_PIPELINE = "pipeline"


class StepClock:
    """Measures the steps of one rank, phase by phase."""

    def __init__(self, mesh: Mesh, pipeline: Clock | None = None) -> None:
        """`pipeline`: the clock of the stages of this rank, where the model is cut into stages."""
        self._mesh, self._device, self._pipeline = mesh, mesh.device, pipeline
        self._waits: list[tuple[devices.Mark, devices.Mark]] = []
        self._phases: list[tuple[str, devices.Mark, devices.Mark, slice]] = []
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._measures = False
        self._sent_before = Counter[str]()
        if pipeline is not None:
            pipeline.waits = self._waits

    def begin(self, *, measures: bool) -> None:
        """Begin a step. On an accelerator nothing is recorded where `measures` is false."""
        self._measures = measures or self._device.type == "cpu"
        self._seconds = dict.fromkeys(PARTS, 0.0)
        if not self._measures:  # what was not read is too old for the next step that is measured
            self._phases.clear()
            self._waits.clear()
            return
        self._sent_before = self._sent()
        self._collect(self._waits)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the body, which is one of `PARTS`."""
        if not self._measures:
            yield
            return
        start, waits = devices.mark(self._device), len(self._waits)
        yield
        self._phases.append((name, start, devices.mark(self._device), slice(waits, len(self._waits))))

    @contextmanager
    def stages(self) -> Iterator[None]:
        """Measure a step of the pipeline, whose own clock tells the forward from the backward passes."""
        with self.phase(_PIPELINE):
            yield

    def read(self) -> None:
        """Add up what was marked so far. An accelerator must have done that work."""
        for name, start, end, waits in self._phases:
            seconds = devices.seconds_between(start, end) - self._waited(waits)
            if name == _PIPELINE and self._pipeline is not None:
                for kind, own in self._pipeline.own_work().items():
                    self._seconds[kind] += own
                    seconds -= own
                name = COMMUNICATION
            self._seconds[name] += seconds
        self._seconds[COMMUNICATION] += self._waited(slice(None))
        self._phases.clear()
        self._waits.clear()

    def split(self, step_seconds: float) -> dict[str, float]:
        """End the step: its seconds by part, with `other`, so that they sum to `step_seconds`; empty if not measured.

        Collectives between this step and the next, such as those of an evaluation, are no part of either.
        """
        if not self._measures:
            return {}
        self._collect(None)
        if self._device.type == "cpu":
            self.read()
        return {**self._seconds, OTHER: max(0.0, step_seconds - sum(self._seconds.values()))}

    def sent(self) -> dict[str, int]:
        """Bytes that this rank has sent since the step began, by axis of the mesh; empty where not measured."""
        if not self._measures:
            return {}
        return {axis: count - self._sent_before[axis] for axis, count in self._sent().items()}

    def _sent(self) -> Counter[str]:
        sent = Counter[str]()
        for group in self._mesh.groups:
            for meter in group.meters.values():
                sent[group.name] += sum(meter.bytes.values())
        return sent

    def _collect(self, waits: list[tuple[devices.Mark, devices.Mark]] | None) -> None:
        """Have the collectives of the mesh add their waits to this list from now on; None: to none."""
        for group in self._mesh.groups:
            for meter in group.meters.values():
                meter.spans = waits

    def _waited(self, waits: slice) -> float:
        return sum(devices.seconds_between(start, end) for start, end in self._waits[waits])
