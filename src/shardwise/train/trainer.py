"""The training loop: steps, and the evaluations, comparisons of replicas and checkpoints between them.

Shapes: K = objectives of the loss.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.profiler import record_function

from shardwise.base.errors import RunError, see
from shardwise.config import Config, Layout
from shardwise.data.samples.batch import Batches, BlendedBatches
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.distributed import collectives, devices
from shardwise.distributed.collectives import Pending
from shardwise.distributed.mesh import Mesh
from shardwise.layers.replicated import ReplicatedParameters
from shardwise.layers.units import units
from shardwise.models.blocks import gives_losses
from shardwise.models.fp8_blocks import WeightScales
from shardwise.optim.learning_rate import learning_rate
from shardwise.optim.zero import ZeroRedundancyOptimizer
from shardwise.pipeline.clock import BACKWARD, FORWARD
from shardwise.train.compile.run_graphs import RunGraphs
from shardwise.train.compile.units import Compilation
from shardwise.train.evaluation import Evaluation, evaluate_rounds
from shardwise.train.feed import Feed
from shardwise.train.garbage import SteppedCollection
from shardwise.train.loss import MicroBatch, count_targets, mean_over_targets, perplexity
from shardwise.train.model_checks import check_replicas, find_non_finite
from shardwise.train.reporter import Reporter
from shardwise.train.saving import Checkpoints, largest_of_ranks
from shardwise.train.source_losses import SourceLosses, SourceRecord
from shardwise.train.state_hashes import StateHashes
from shardwise.train.step_clock import DATA, OPTIMIZER, PIPELINE, StepClock, memory_by_kind, state_by_kind
from shardwise.train.step_record import Progress, StepRecord, end_of_stage, loss_spike
from shardwise.train.straggler import Straggler, Stragglers
from shardwise.train.trace import Trace

if TYPE_CHECKING:
    from shardwise.pipeline.schedule import Pipeline  # imports torch's compiler, which is slow

_WHOLE_MODEL = (-2, 0, 0)
"""A place in the model, for `DropoutKey`: layer, site and shard."""
_FAR_BELOW_A_GUESS = 10
"""A first loss that is lower by this factor is no sum over targets: a model that was just drawn knows only to guess."""


class _StepNumbers(NamedTuple):
    """Numbers of a step that the host reads, equal on every rank.

    Attributes:
        parameter_norm: None in steps that are not logged.
        losses: mean loss of each objective over the global batch.
        agreed_flags: largest of all ranks' flags, in their order.
        source_sums: sums by source of a mixture (`SourceLosses.take`); empty in steps that are not logged.
    """

    gradient_norm: float
    parameter_norm: float | None
    losses: tuple[float, ...]
    agreed_flags: tuple[float, ...]
    straggler: Straggler | None
    source_sums: tuple[float, ...]


@dataclass(kw_only=True, eq=False, repr=False)
class Trainer:
    """Trains one model on one rank of a mesh; every rank runs the same steps.

    Attributes:
        feed: micro-batches of this rank, for training and evaluation.
        pipeline: runs the stages of this rank, where the model is cut into stages.
        compilation: the compiled units of the model, if it is compiled.
        state_hashes: hashes of the state, if the run has some.
        tokenizer_path: folder of the data's tokenizer, which tasks need; None if it is not known.
    """

    config: Config
    layout: Layout
    mesh: Mesh
    model: nn.Module
    optimizer: ZeroRedundancyOptimizer
    feed: Feed
    progress: Progress
    reporter: Reporter | None = None
    pipeline: Pipeline | None = None
    compilation: Compilation | None = None
    state_hashes: StateHashes | None = None
    tokenizer_path: Path | None = None

    def __post_init__(self) -> None:
        self.clock = StepClock(self.mesh, None if self.pipeline is None else self.pipeline.clock)
        self.stragglers = Stragglers(self.mesh)
        self._checkpoint_seconds = 0.0
        batches = self.feed.batches
        self._sources = SourceLosses(batches, self.mesh) if isinstance(batches, BlendedBatches) else None
        self._replicated: dict[nn.Module, ReplicatedParameters] = defaultdict(ReplicatedParameters)
        self._weight_scales = WeightScales(self.model)

    def run(self, checkpoints: Checkpoints | None = None, graphs: RunGraphs | None = None) -> str | None:
        """Train to the last step, with evaluations, comparisons of replicas and checkpoints.

        Args:
            checkpoints: saves after steps, and knows who asks the run to stop; None saves nothing.
            graphs: keeps the compiled graphs for later runs; None keeps none.

        Returns:
            who asked the run to stop before its last step; None if nobody did.
        """
        first = self.progress.step + 1
        last = end_of_stage(self.config, self.progress.step)
        with (
            closing(self.feed),
            closing(self._open_trace()) as trace,
            self._gathers_behind_forward(),
            SteppedCollection() as garbage,
        ):
            # Whatever made the weights: ranks that begin with others would train another model.
            self._compare_replicas()
            if self.config.train.eval_every and not self.progress.step:
                self._evaluate_before_steps()
            for step in range(first, last + 1):
                with trace.step(step):
                    record = self.step(None if checkpoints is None else checkpoints.flags)
                garbage.after_step()
                stopped_by = self._after_step(record, checkpoints, graphs, is_last=step == last)
                if stopped_by is not None and step < last:
                    return stopped_by
        return None

    def _gathers_behind_forward(self) -> AbstractContextManager[None]:
        """Let new parameters travel during the next forward pass, where the device computes during its collectives.

        A model of the user's own may read a parameter wherever it likes: its gathers end with the step.
        """
        if self.mesh.device.type == "cpu" or self.config.shapes is None:
            return nullcontext()
        return self.optimizer.gathers.behind_forward(units(self.model), self.optimizer.buckets)

    def _open_trace(self) -> Trace:
        steps = self.config.log.profile_steps
        ranks = self.config.log.profile_ranks
        rank = self.mesh.world.rank
        if self.reporter is None or steps is None or (ranks is not None and rank not in ranks):
            return Trace(range(0), None, pipelined=False)
        return Trace(steps, self.reporter.run.trace(rank), pipelined=self.mesh.pp.size > 1)

    def _after_step(
        self, record: StepRecord, checkpoints: Checkpoints | None, graphs: RunGraphs | None, *, is_last: bool
    ) -> str | None:
        """Report a step, and do what is due after it; returns who asked the run to stop."""
        step = record.step
        eval_every = self.config.train.eval_every
        drift_every = self.config.log.drift_every
        agreed_flags: tuple[float, ...] | None = record.agreed_flags
        # All graphs of training are captured in a run's first step, and those of evaluation in its first evaluation.
        if step == self.progress.before + 1:
            self._keep_graphs(graphs)
        if self.reporter is not None:
            self.reporter.step(self._with_amounts(record) if self.reporter.is_logged(step) else record)
            self._warn_of_a_mean(record)
        if self.state_hashes is not None:
            self.state_hashes.after_step(self.progress, is_last=is_last)
        if drift_every and (is_last or step % drift_every == 0):
            self._compare_replicas()
            # Much time has passed since the flags were read: the checkpoints ask all ranks again.
            agreed_flags = None
        if eval_every and (is_last or step % eval_every == 0):
            self._evaluate_texts()
            self._keep_graphs(graphs)
            agreed_flags = None
        tasks_every = self.config.evaluation.tasks_every
        if tasks_every and (is_last or step % tasks_every == 0):
            self._evaluate_tasks()
            agreed_flags = None
        if checkpoints is None:
            return None
        self.progress.phase = "checkpoint"
        start = time.perf_counter()
        stopped_by = checkpoints.after_step(self.progress, is_last, agreed_flags)
        self._checkpoint_seconds += time.perf_counter() - start
        return stopped_by

    def _compare_replicas(self) -> None:
        self.progress.phase = "comparison of replicas"
        # Parameters that are still under way would differ without a fault.
        self.optimizer.gathers.wait()
        check_replicas(self.model, self.mesh, self.progress.step, self.optimizer)

    def _keep_graphs(self, graphs: RunGraphs | None) -> None:
        """Keep the graphs that were compiled since the last call, and report all that were captured."""
        if graphs is None:
            return
        captured = graphs.keep_new()
        if self.reporter is not None:
            self.reporter.captured(captured)

    def _warn_of_a_mean(self, record: StepRecord) -> None:
        """Warn that a model or a loss of the user's own may return a mean: the first loss is far below a guess's."""
        model = self.config.model
        source = (
            f"forward of {model.family}, which gets ids and targets [sequence, batch],"
            if self.config.shapes is None
            else self.config.hooks.loss
        )
        if self.reporter is None or source is None or record.step != 1:
            return
        # Equal probabilities of all V tokens give a loss of ln V.
        guess = math.log(model.vocab_size)
        if record.loss < guess / _FAR_BELOW_A_GUESS:
            self.reporter.warning(
                f"the first loss ({record.loss:.3g}) is far below that of a guess, ln(model.vocab_size) ({guess:.3g}): "
                f"{source} must return the sum of its targets' losses, not their mean"
                f"{see('training#first-loss-too-low')}"
            )

    def step(self, rank_flags: Callable[[], Sequence[float]] | None = None) -> StepRecord:
        """One optimizer step on the next global batch.

        The host waits for the device once: it reads loss and norms before the update, which a loss that is not finite
        must prevent. The update is still under way when this returns.

        Args:
            rank_flags: gives flags of this rank, such as a request to stop. The largest of all ranks, `agreed_flags`
                of the result, are read in the same transfer as loss and norms, and so is the slowest rank.
        """
        start = time.perf_counter()
        train = self.config.train
        step = self.progress.step + 1
        # Marks around the update are read in the next step, so the step before a logged one is measured too.
        self.clock.begin(measures=self._is_logged(step) or self._is_logged(step + 1))
        self.progress.phase = "reading of data"
        self.feed.seconds = 0.0
        with self.clock.phase(DATA):
            micro_batches = self.feed.at(self.progress.position, following=self.config.last_step - step)
        self.progress.phase = "forward and backward"
        # New weights may still be on their way on the same communicator: the forward pass waits for each as it needs
        # it, and only the loss waits for these numbers, which come behind all weights.
        counts = count_targets(micro_batches, self.mesh.replicas)
        with self._weight_scales.kept():
            losses_NK = self._forward_backward(micro_batches, counts)
        self.progress.phase = "gradient reduction"
        # Each replica has the losses of its samples, and in a pipeline only the last stage has them.
        if self.mesh.dp.grain is None:
            losses = collectives.all_reduce_(losses_NK, self.mesh.replicas)
        else:
            losses = collectives.all_gather(losses_NK, self.mesh.dp)
        losses = collectives.all_reduce_(losses, self.mesh.pp)
        numbers = self._read_numbers(losses, None if rank_flags is None else rank_flags())
        loss = sum(numbers.losses)
        if not (math.isfinite(loss) and math.isfinite(numbers.gradient_norm)):
            self._stop_non_finite(step, loss, numbers.gradient_norm, micro_batches, counts)
        self.progress.phase = "optimizer update"
        lr = learning_rate(self.config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        # The loss and the norms are finite: from here on the parameters change.
        with record_function("optimizer"), self.clock.phase(OPTIMIZER):
            self.optimizer.step()
        if any(stage.at == self.progress.step for stage in self.config.data.stages):
            # Other data have another loss: its first steps are no spike.
            self.progress.losses.clear()
        spike = loss_spike(loss, self.progress.losses)
        self.progress.advance(loss, train.global_batch, train.sequence_length)
        return self._record(numbers, lr, spike, time.perf_counter() - start)

    def _record(self, numbers: _StepNumbers, lr: float, spike: float | None, seconds: float) -> StepRecord:
        """The record of the step that was just counted in `progress`."""
        record = StepRecord(
            step=self.progress.step,
            loss=sum(numbers.losses),
            mean_loss=self.progress.mean_loss,
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
            agreed_flags=numbers.agreed_flags,
            split=self.clock.split(seconds),
            communication_bytes=self.clock.sent(),
            loss_spike=spike,
            straggler=numbers.straggler,
            sources=self._source_records(numbers.source_sums),
        )
        if record.work_seconds is not None:
            self.stragglers.add(record.work_seconds)
        return record

    def _source_records(self, sums: Sequence[float]) -> dict[str, SourceRecord]:
        if self._sources is None or not sums:
            return {}
        return self._sources.records(sums, self.progress.position)

    def _read_numbers(self, losses_NK: Tensor, flags: Sequence[float] | None) -> _StepNumbers:
        """Read a step's numbers on the host, which waits here for all work before.

        All travel in one tensor, the ranks' flags too: a transfer of their own would stop the host a second time in
        each step, with nothing queued on the device, and their all-reduce is queued behind the backward pass.

        Args:
            losses_NK: terms of the global batch's losses; their sum is rounded once, whatever their order.
            flags: flags of this rank, of which the largest of all ranks are read, and with them the slowest rank;
                None reads neither.
        """
        terms = losses_NK.numel()
        parts = [losses_NK.flatten()]
        objectives = losses_NK.shape[1]
        sources = None
        if self._sources is not None and self._is_logged(self.progress.step + 1):
            sources = self._sources.take()
            parts.append(sources.flatten())
        if flags is not None:
            parts.append(largest_of_ranks([*flags, *self.stragglers.numbers()], self.mesh))
        with self.clock.phase(OPTIMIZER):
            # A trainer without a reporter gives its records to a caller, who may read all of it.
            is_measured = self.reporter is None or self._is_logged(self.progress.step + 1)
            norms = self.optimizer.norms() if is_measured else (self.optimizer.gradient_norm(),)
        numbers = torch.cat((torch.stack(norms), *parts)).tolist()
        # The host has waited for the device, so the marks around the passes can be read without another wait.
        self.clock.read()
        losses_start = len(norms)
        sources_start = losses_start + terms
        flags_start = sources_start + (0 if sources is None else sources.numel())
        flags_stop = flags_start + len(flags or ())
        return _StepNumbers(
            gradient_norm=numbers[0],
            parameter_norm=numbers[1] if is_measured else None,
            losses=tuple(
                math.fsum(numbers[losses_start + number : sources_start : objectives]) for number in range(objectives)
            ),
            agreed_flags=tuple(numbers[flags_start:flags_stop]),
            straggler=self.stragglers.take(numbers[flags_stop:]),
            source_sums=tuple(numbers[sources_start:flags_start]),
        )

    def _by_objective(self, losses: Sequence[float]) -> dict[str, float]:
        """The losses by their names, where there are several."""
        if len(losses) == 1:
            return {}
        return dict(zip(self.feed.batches.objectives, losses, strict=True))

    def _is_logged(self, step: int) -> bool:
        return self.reporter is not None and self.reporter.is_logged(step)

    def _with_amounts(self, record: StepRecord) -> StepRecord:
        """A step that is logged, with bytes of memory and the waits for checkpoints since the one before."""
        waited = self._checkpoint_seconds
        self._checkpoint_seconds = 0.0
        timing = None if self.pipeline is None else self.pipeline.timing()
        memory = memory_by_kind(self._state_by_kind, self.mesh.device)
        return replace(record, timing=timing, memory=memory, checkpoint_seconds=waited)

    @cached_property
    def _state_by_kind(self) -> dict[str, int]:
        """Bytes of the state, which is complete after the first step. Added up once, as that takes a millisecond."""
        return state_by_kind(self.model, self.optimizer)

    def _forward_backward(self, micro_batches: list[MicroBatch], counts: Pending, *, last: bool = True) -> Tensor:
        """Add the gradients of the global mean loss; returns this rank's terms of each objective's mean, [N, K].

        There is one term, or in a bit-equal training one for each micro-batch (0 on stages that have no loss). `counts`
        gives the targets of the global batch, [K].

        With `last` the gradients are complete afterwards, and each bucket's reduction starts during the backward pass.
        """
        sums: list[Tensor] = []

        def compute(part: nn.Module, x: Tensor | None, number: int) -> Tensor:
            batch = micro_batches[number]
            dropout = batch.dropout_key(self.config.train, self.progress.step + 1)
            # Random numbers of a user's own layers are a function of step and samples too.
            recording = nullcontext() if self._sources is None else self._sources.record(batch)
            with dropout.seeded(self.mesh.device, *_WHOLE_MODEL), self._forward_pass(part), recording:
                out = batch.result(part, batch.call(part, x, dropout))
            if not gives_losses(part):
                return out
            # Divided by the targets of the global batch, not of this micro-batch: gradients need no factor afterwards.
            sums.append(out.detach())
            return mean_over_targets(out, counts.wait())

        groups = self.config.train.groups_apart(self.mesh.dp.size) if self.config.train.bitwise else 1
        group_length = len(micro_batches) // groups

        def ends_group(number: int) -> bool:
            return (number + 1) % group_length == 0 and number + 1 < len(micro_batches)

        def end_group(number: int, leaves: Iterable[Tensor]) -> None:
            if ends_group(number):
                self.optimizer.end_group(leaves)

        if self.pipeline is not None:
            # Schedules that split the backward pass fire no hooks: the pipeline says which gradients are complete.
            if self.config.splits_backward:
                self.optimizer.provide_gradients()
            ready = self.optimizer.gradient_ready if last and not self.optimizer.reduces_each_pass else None
            with self.optimizer.accumulate(), self.clock.phase(PIPELINE):
                self.pipeline.step(compute, ready, end_group)
            return self._loss_terms(sums, counts.wait(), len(micro_batches))
        for number in range(len(micro_batches)):
            with self.optimizer.accumulate(last=last and number == len(micro_batches) - 1):
                with record_function(f"forward, micro-batch {number}"), self.clock.phase(FORWARD):
                    loss = compute(self.model, None, number).sum()
                with record_function(f"backward, micro-batch {number}"), self.clock.phase(BACKWARD):
                    loss.backward()
                if ends_group(number):
                    self.optimizer.end_group()
        return self._loss_terms(sums, counts.wait(), len(micro_batches))

    def _forward_pass(self, part: nn.Module) -> AbstractContextManager[None]:
        # A backward pass in two parts computes the gradient of each parameter by itself.
        if self.config.splits_backward:
            return nullcontext()
        return self._replicated[part].forward_pass()

    def _loss_terms(self, sums: list[Tensor], counts_K: Tensor, micro_batches: int) -> Tensor:
        missing = torch.zeros_like(counts_K, dtype=torch.float32)
        if self.mesh.dp.grain is None:
            shares = [mean_over_targets(sums_K, counts_K) for sums_K in sums]
            return torch.stack([missing, *shares]).sum(dim=0, keepdim=True)
        sums_NK = torch.stack(sums or [missing] * micro_batches).float()
        return mean_over_targets(collectives.all_reduce_(sums_NK, self.mesh.cp), counts_K)

    def evaluate(self) -> tuple[float, float]:
        """Mean loss and perplexity over the first `eval_batches` global batches of the evaluation part, on every rank.

        The loss is the sum over the objectives; the perplexity is that of the first, which predicts tokens.
        """
        batches = self.feed.evaluation_batches
        assert batches is not None, "where train.eval_every asks for evaluations, data without them are refused"
        self.progress.phase = "evaluation"
        self.optimizer.gathers.wait()
        result = self._evaluate_batches(batches)
        token_perplexity = perplexity(result.losses[batches.objectives[0]])
        if self.reporter is not None:
            losses = result.losses if len(result.losses) > 1 else {}
            self.reporter.evaluation(self.progress.step, result.loss, token_perplexity, losses)
        return result.loss, token_perplexity

    def _evaluate_batches(self, batches: Batches, bytes_V: npt.NDArray[np.int64] | None = None) -> Evaluation:
        """Evaluate the first `eval_batches` global batches of a text."""
        rounds = self.feed.evaluation(batches, self.layout.accumulation(self.config.train))
        with self.optimizer.gathered(all_units=False):
            result = evaluate_rounds(
                self.model, rounds, batches.objectives, self.mesh, self.config.parallel, bytes_V=bytes_V
            )
        self.model.train()
        return result

    def _evaluate_texts(self) -> None:
        """Evaluate the held-out part, and each of `evaluation.sets`."""
        if self.config.evaluates_held_out:
            self.evaluate()
        self.progress.phase = "evaluation"
        self.optimizer.gathers.wait()
        sets = self.feed.sets
        for name, batches in sets.batches.items():
            result = self._evaluate_batches(batches, sets.bytes_V)
            if self.reporter is not None:
                self.reporter.evaluation_set(self.progress.step, name, result)

    def _evaluate_before_steps(self) -> None:
        if self.reporter is not None:
            self.reporter.before_steps("evaluation before the first step")
        self._evaluate_texts()
        if self.reporter is not None:
            self.reporter.before_steps("first step under way")

    def _evaluate_tasks(self) -> None:
        """Score `evaluation.tasks`."""
        # It imports lm_eval, an extra.
        from shardwise.train.task_evaluation import evaluate_tasks

        assert self.tokenizer_path is not None, "tasks without a tokenizer are refused before a run starts"
        self.progress.phase = "evaluation on tasks"
        tokenizer = Tokenizer.load(self.tokenizer_path)
        stop = frozenset(() if tokenizer.end_of_document_id is None else (tokenizer.end_of_document_id,))
        with self.optimizer.gathered(all_units=False):
            results = evaluate_tasks(
                self.config, self.model.eval(), self.mesh, tokenizer, stop, in_step=self.optimizer.gathers_in_passes
            )
        self.model.train()
        if results is not None and self.reporter is not None:
            self.reporter.tasks(self.progress.step, results["results"])

    def _stop_non_finite(
        self, step: int, loss: float, gradient_norm: float, micro_batches: list[MicroBatch], counts: Pending
    ) -> None:
        """Raise with the rank and parameter at fault.

        The reduction has mixed the ranks' gradients, so each rank computes and examines its own once more.
        """
        self.optimizer.zero_grad()
        with self.optimizer.local_gradients(), self.optimizer.gathered(), self._weight_scales.kept():
            rank_loss = float(self._forward_backward(micro_batches, counts, last=False).sum())
            faults = collectives.all_gather_objects(find_non_finite(self.model, rank_loss), self.mesh.world)
        place = "each rank's own part is: their sum overflowed"
        # In a pipeline a value that is not finite travels on: of all ranks' findings the nearest cause counts.
        for _, rank, text in sorted((order, rank, text) for rank, (order, text) in enumerate(faults) if text)[:1]:
            place = f"on rank {rank}, {text}"
        raise RunError(
            f"step {step}: the loss ({loss}) and the gradient norm ({gradient_norm}) must be finite; {place}. "
            "No update was made. Lower optimizer.lr, lengthen optimizer.warmup_steps or set optimizer.max_norm"
            f"{see('training#loss-not-finite')}"
        )
