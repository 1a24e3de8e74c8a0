"""The printed and recorded output of a run: the summary at its start, the progress line, and its files.

Rank 0 prints and writes the shared files (metrics.jsonl, tensorboard/, results.json); every rank writes its own
ranks/rank-NNNN.jsonl. A terminal shows progress as one line that is redrawn, a notebook as one display. Elsewhere, and
always in rank 0's log, progress is a line every `log.every` steps; without that key about twenty lines per run.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from shardwise.base import units
from shardwise.base.errors import see, visible
from shardwise.base.redaction import redacted
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.save import SavedCheckpoint
from shardwise.config import Config, Layout
from shardwise.estimates.device_peaks import peak_flops
from shardwise.estimates.memory import expected_memory
from shardwise.launch import notices
from shardwise.models.flops import flops_per_token, model_flops_utilization
from shardwise.models.parameter_counts import parameter_count
from shardwise.runs.folder import JsonLines, RunDirectory, now, open_log
from shardwise.train.experiment_trackers import ExperimentTrackers
from shardwise.train.hooks import MetricsWithCallbacks
from shardwise.train.mean_loss import perplexity
from shardwise.train.model_checks import mean_text
from shardwise.train.profiler_trace import no_trace_text, trace_text
from shardwise.train.progress_line import NotebookProgress, ProgressLine, parts_of_loss
from shardwise.train.rank_file import RankFile, WarningOnce, place_of_rank, process_seconds
from shardwise.train.step_meters import STRAGGLER_STEPS
from shardwise.train.step_record import SMOOTHED_STEPS, StartTotals, StepRecord, Throughput
from shardwise.train.summary import start_rows

if TYPE_CHECKING:
    from shardwise.optim.state_digest import StateHash
    from shardwise.train.compile.compiled_units import CapturedGraph
    from shardwise.train.evaluation_losses import EvaluationLosses

_SPIKE = 6.0
"""Standard deviations from which on a loss is reported as a spike: normal noise gives one in about 10^9 steps."""
_SLOW = 1.5  # times the best rank's work from which on a rank is reported as slow


class Reporter:
    """Prints and records one run on one rank. A context manager: leaving it closes every file.

    Args:
        rank: number of this process in the world; rank 0 prints and writes the shared files.
        device_name: product name of a rank's device, by which its peak FLOPs are looked up.
        stream: text stream that rank 0 prints to; default: standard output.

    Attributes:
        parameters: number of the whole model's parameters; None for a user's own model, until it is set before
            `start`.
        memory: expected bytes by kind on the rank that needs most; None like `parameters`.
        totals: totals of this start of the run, with the stages before.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: Config,
        layout: Layout,
        rank: int,
        *,
        device_name: str,
        stream: IO[str] | None = None,
    ) -> None:
        self.run = run
        self.config = config
        self.layout = layout
        self.rank = rank
        self.device_name = device_name
        accelerator = not device_name.startswith("cpu")
        expected = expected_memory(config, layout, accelerator)
        self.precision = config.precision.resolved(accelerator)
        self.parameters = parameter_count(config.model)
        self.memory: Mapping[str, int] | None = None if expected is None else dict(expected.rows())
        train = config.train
        self._steps_before = 0
        length = train.sequence_length
        self._token_flops = flops_per_token(config.model, length, config.data.predictions(length))
        self._peak_flops = peak_flops(device_name, self.precision.parameter)
        if config.model.is_own and self._peak_flops is not None:
            from shardwise.models.own_shapes import own_token_flops  # costly to import, for MFU alone

            self._token_flops = own_token_flops(config)
        self.totals = StartTotals(0, 0.0, time.perf_counter(), self._new_throughput())
        self._rank_file = RankFile(run, rank, layout, device_name)
        self._waited = {"data": 0.0, "checkpoint": 0.0}
        self._spike = WarningOnce(_SPIKE, _SPIKE / 2)
        self._slow = WarningOnce(_SLOW, (1 + _SLOW) / 2)
        self._metrics = MetricsWithCallbacks(run.metrics, config.hooks.callbacks) if rank == 0 else None
        self._files: dict[str, JsonLines] = {}
        self._trackers: ExperimentTrackers | None = None
        self._log: IO[str] | None = None
        self._consoles: list[Console] = []
        self._in_notebook = False
        if rank == 0:
            self._log = open_log(run.log(0))
            # In a notebook rich would make a display of each line, whatever the file.
            self._in_notebook = stream is None and Console().is_jupyter
            shown = _plain_console(sys.stdout)
            if not self._in_notebook:
                shown = Console(file=stream or sys.stdout, force_jupyter=False, highlight=False)
            self._consoles = [shown, _plain_console(self._log)]
        self._progress: list[ProgressLine] = []
        self._last: StepRecord | None = None
        self._evaluation: dict[str, float] = {}
        self._last_of_sets: dict[str, dict[str, float]] = {}
        self._last_of_tasks: dict[str, dict[str, float]] = {}
        self._names_are_recorded = False
        self._stopped = False

    def start(
        self,
        *,
        loaded: str | None = None,
        steps_before: int = 0,
        epochs: str = "",
        seconds_before: float | None = None,
        totals: StartTotals | None = None,
        went_back: bool = False,
    ) -> None:
        """Print the summary and begin the progress line.

        Args:
            loaded: folder of the weights; None where they were drawn.
            seconds_before: time of all that came before the training; None: since the process began.
            totals: totals of the stages before in this process; None in the first one.
            went_back: this start undoes steps, as `checkpoint.resume` asks.
        """
        began = time.perf_counter()
        self._steps_before = steps_before
        end_of_all = self.config.train.last_step(steps_before)
        if totals is None:
            # Up to the checkpoint that is continued from, as recorded: the time of steps that were lost does not count.
            recorded = self._recorded("checkpoint", steps_before) if steps_before else {"time_to_train_seconds": 0.0}
            earlier = recorded.get("time_to_train_seconds")
            self.totals = StartTotals(steps_before, earlier, began, self._new_throughput())
        else:
            self.totals = replace(totals, throughput=self._new_throughput(totals.throughput))
        self._rank_file.start()
        if self._metrics is None:
            return
        returns = went_back + sum(event.get("went_back") is True for event in self.run.events("start"))
        recorded = self.config.recorded()
        self._trackers = ExperimentTrackers(
            self.config.log, recorded, self.run, self.run.stored_id(), steps_before + 1, self.warning, returns
        )
        self._event(
            "start",
            **self._facts(),
            went_back=went_back,
            memory_expected_bytes=self.memory,
            steps=self.config.train.steps,
            steps_before=steps_before,
            seconds_before_training=process_seconds() if seconds_before is None else seconds_before,
            ranks=self.layout.world,
            # FLOPs of a token, with the way attention is counted, and the denominator.
            mfu_terms={
                "flops_per_token": self._token_flops,
                "attention": "causal" if self.config.model.causal else "full",
                "peak_flops_per_device": self._peak_flops,
                "devices": self.layout.world,
            },
            loaded=loaded,
        )
        self._show_start(steps_before, end_of_all, epochs)
        if self.config.log.tensorboard:
            self.message(f"TensorBoard: tensorboard --logdir {shlex.quote(str(self.run.tensorboard.absolute()))}")
        if totals is None and (text := no_trace_text(self.config.log, steps_before, end_of_all)) is not None:
            self.message(text)

    def _show_start(self, done: int, end: int, epochs: str) -> None:
        assert self.parameters is not None
        assert self.memory is not None
        rows = start_rows(
            self.config,
            self.layout,
            device_name=self.device_name,
            parameters=self.parameters,
            memory=self.memory,
            token_flops=self._token_flops,
            steps=(done, end),
            epochs=epochs,
            run_path=self.run.path,
        )
        every_update = self.config.log.every is not None
        for console in self._consoles:
            for name, value in rows:
                # As `Text`, since rich reads square brackets in a plain string, such as a path, as markup.
                console.print(Text(f"{name:<8} ", "dim").append(value, "default"), soft_wrap=True)
            if self.layout.pipeline > 1:
                from shardwise.train.pipeline_table import print_pipeline

                print_pipeline(console, self.config, self.layout, not self.device_name.startswith("cpu"))
            is_display = self._in_notebook and console is self._consoles[0]
            kind = NotebookProgress if is_display else ProgressLine
            self._progress.append(kind(console, self.totals, done, end, every_update=every_update))

    def before_steps(self, doing: str) -> None:
        """Show what the run does before its first step is done."""
        for progress in self._progress:
            progress.before_steps = doing

    def resumed(self, manifest: Manifest, folder: str, changes: Sequence[str], load_seconds: float) -> None:
        """Record that the training continues from a checkpoint, with changes of its configuration."""
        loaded = {"checkpoint": folder, "written_by": manifest.layout, "load_seconds": load_seconds}
        self._event("resume", step=manifest.step, **loaded, changes=list(changes))
        self.message(f"resumed after step {manifest.step:,} from {folder}")
        self.changed(changes)

    def changed(self, changes: Sequence[str]) -> None:
        """Print differences of the configuration from the earlier run of this folder, or from the loaded weights."""
        for change in changes:
            self.message(f"changed: {change}")

    def saved(self, saved: SavedCheckpoint, *, continues: bool = True) -> None:
        """Record a complete checkpoint, or warn that saving failed."""
        if saved.warning is not None:
            self.warning(f"what is left of other checkpoints could not be removed: {saved.warning}")
        if saved.problem is not None:
            suffix = "; the run continues" if continues else ""
            self.warning(
                f"no checkpoint of step {saved.step:,}: {saved.problem}{suffix}{see('checkpoints#save-failed')}"
            )
            return
        self._event(
            "checkpoint",
            step=saved.step,
            path=saved.folder,
            bytes=saved.bytes,
            seconds=saved.seconds,
            blocked_seconds=saved.blocked,
            removed=list(saved.removed),
            time_to_train_seconds=self._time_to_train(time.perf_counter() - saved.seconds),
        )
        self.message(
            f"checkpoint of step {saved.step:,}: {saved.folder}, {units.size(saved.bytes)} in {saved.seconds:.1f} s, "
            f"of which training waited {saved.blocked:.2f} s"
        )

    def step(self, record: StepRecord) -> None:
        """Record a finished step; called after every step, of which those of `log.every` are written."""
        self.totals.throughput.add(record.seconds)
        self._last = record
        # Waits of all steps, also of those that are not logged.
        self._waited["data"] += record.split.get("data", record.input_seconds)
        self._waited["checkpoint"] += record.checkpoint_seconds
        self._warn(record)
        steps = self.config.log.profile_steps
        if steps is not None and record.step == steps[-1]:
            self._report_trace()
        if not record.is_logged:
            return
        self._rank_file.step(record)
        if self._metrics is None:
            return
        numbers = self._numbers(record)
        parts: dict[str, float] = {}
        if record.split:
            parts = {**record.split, "checkpoint": record.checkpoint_seconds}
        facts: dict[str, Any] = {
            "split_seconds": parts,
            "waited_seconds": dict(self._waited),
            "communication_bytes": dict(record.communication_bytes),
            "memory_bytes": dict(record.memory),
            "straggler": None if record.straggler is None else asdict(record.straggler),
        }
        for detail in record.details:
            facts |= detail.facts
            for name, entries in detail.lines.items():
                if name not in self._files:
                    self._files[name] = JsonLines(self.run.path / f"{name}.jsonl")
                self._files[name].write({"step": record.step, **entries})
        self._metrics.write({"event": "step", "step": record.step, "time": now(), **numbers, **facts})
        clock = time.perf_counter()  # once: the log and standard output show the same time
        for progress in self._progress:
            progress.update(record, self.totals.throughput.step_seconds, numbers, clock)
        del numbers["peak_memory_bytes"]  # the trackers have it as memory/peak
        self._scalars(record.step, {"train": numbers, **_further_scalars(record, parts)})

    def _numbers(self, record: StepRecord) -> dict[str, float | None]:
        return {
            "loss": record.loss,
            **_by_objective(record.losses),
            "lr": record.lr,
            "grad_norm": record.grad_norm,
            "param_norm": record.param_norm,
            "tokens": record.tokens,
            "samples": record.samples,
            **self._rates(self.totals.throughput.recent),
            "peak_tokens_per_second": self.totals.throughput.peak("tokens"),
            "step_seconds": record.seconds,
            "peak_memory_bytes": record.peak_memory_bytes,
            # A run without a pipeline has no bubble; one of 0 would be a claim.
            **({} if record.timing is None else {"bubble": record.timing.mean_bubble}),
            **{name: number for detail in record.details for name, number in detail.numbers.items()},
            "loss_spike": record.loss_spike,
        }

    def _warn(self, record: StepRecord) -> None:
        """Warn of a loss that is far off, of a slow rank, once each time that it begins, and of notices that failed."""
        for problem in notices.problems():
            self.warning(problem)
        if record.step == 1 and (text := mean_text(self.config.model, self.config.hooks.loss, record.loss)) is not None:
            self.warning(text)
        if self._spike.begins(record.loss_spike):
            self.warning(
                f"step {record.step:,}: the loss ({record.loss:.4f}) is {record.loss_spike:.0f} standard deviations "
                f"above the mean of the {SMOOTHED_STEPS} steps before{see('training#loss-spike')}"
            )
            if self.rank == 0:
                text = f"{record.loss_spike:.0f} standard deviations above the mean of {SMOOTHED_STEPS} steps before"
                notices.send("spike", self.run.path, text, step=record.step, loss=record.loss)
        slow = record.straggler
        if slow is not None and self._slow.begins(slow.relative, slow.rank):
            self.warning(
                f"rank {slow.rank}{place_of_rank(self.run, slow.rank)} is slow: its own work, without waiting, takes "
                f"{slow.relative:.1f} times that of the fastest rank of its stage, and {slow.own:.1f} times what its "
                f"own fastest {STRAGGLER_STEPS} steps took{see('training#slow-rank')}"
            )

    def evaluation(self, step: int, result: EvaluationLosses, name: str | None = None) -> None:
        """Record an evaluation made after `step` steps: of the held-out part, or of a further set by its name."""
        losses = result.losses if len(result.losses) > 1 else {}
        # Of the held-out part it is that of the first objective, which predicts tokens, whatever tokens these are.
        token_perplexity = result.perplexity if name else perplexity(next(iter(result.losses.values())))
        further = {"perplexity": token_perplexity, "bits_per_byte": result.bits_per_byte}
        values = {"loss": result.loss, **_by_objective(losses)}
        values |= {key: value for key, value in further.items() if value is not None}
        shown = f"loss {result.loss:.4f}"
        if name is None:
            self._evaluation = values
            self._event("eval", step=step, **values)
            shown += f" ({parts_of_loss(losses)})" if losses else ""
        else:
            self._last_of_sets[name] = values
            self._event("eval_set", step=step, set=name, **values)
        self._scalars(step, {"eval" if name is None else f"eval/{name}": values})
        shown += f", perplexity {values['perplexity']:,.2f}" if "perplexity" in values else ""
        shown += f", {values['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in values else ""
        self.message(f"evaluation{'' if name is None else f' of {name}'} at step {step:,}: {shown}")

    def tasks(self, step: int, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Record the metrics of tasks, as `lm_eval` names them (`acc,none`), made after `step` steps."""
        for name, result in results.items():
            metrics = {key: value for key, value in result.items() if "," in key and isinstance(value, int | float)}
            self._last_of_tasks[name] = metrics
            self._event("eval_task", step=step, task=name, metrics=metrics)
            # The part after the comma names a filter of answers; most tasks have none.
            scalars = {key.removesuffix(",none").replace(",", "/"): value for key, value in metrics.items()}
            self._scalars(step, {f"tasks/{name}": scalars})
            shown = ", ".join(f"{key} {value:.4f}" for key, value in scalars.items())
            self.message(f"task {name} at step {step:,}: {shown}")

    def state_hash(self, step: int, state_hash: StateHash) -> None:
        """Record the hash of the state after a step, with digests by tensor; the first one names the tensors."""
        names = {} if self._names_are_recorded else {"names": state_hash.names()}
        self._names_are_recorded = True
        self._event("state_hash", step=step, hash=state_hash.text, tensors=state_hash.digests(), **names)

    def captured(self, captured: Sequence[CapturedGraph], problem: str | None) -> None:
        """Record the graphs that all ranks captured, those from the cache and those that were compiled."""
        if problem is not None:
            self.warning(problem)
        if not captured:
            return
        hits = sum(graph.is_hit for graph in captured)
        misses = len(captured) - hits
        seconds = max(graph.seconds for graph in captured)
        self._event("compile", graphs=len(captured), hits=hits, misses=misses, seconds=seconds)
        ranks = f" on {units.counted(self.layout.world, 'rank')}" if self.layout.world > 1 else ""
        graphs = units.counted(len(captured), "graph") + ranks
        self.message(f"compile: {graphs}: {hits:,} from the cache, {misses:,} compiled")

    def warning(self, text: str) -> None:
        """Print a warning above the progress line and record it."""
        # A text may quote a library's error, which may quote a URL with its password.
        text = redacted(text)
        self._event("warning", step=self._step, text=text)
        self.message(f"warning: {text}", style="yellow")

    def message(self, text: str, *, style: str = "") -> None:
        """Print a line above the progress line, on rank 0."""
        for console in self._consoles:
            console.print(Text(visible(text), style=style), soft_wrap=True)

    def finish(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """End a run that did all its steps: write results.json with `extra` added, print the result, and return it."""
        # A run that `train.stop_after` ends has done all its own steps, and not all of the training.
        is_complete = self._step >= self.config.train.steps
        end = time.perf_counter()
        results = self._results(end) | (extra or {})
        if self.rank == 0:
            self.run.write_results(results)
        self.stop("finished" if is_complete else "stop_after")
        if self.rank == 0 and self._last is not None:
            self.message(_result_line(results, end - self.totals.began))
            self.message(f"run: {self.run.path}")
        return results

    def stop(self, reason: str) -> None:
        """End the progress line and record why training ended; later calls do nothing."""
        if self._stopped:
            return
        self._stopped = True
        # First: what is printed while a line is redrawn would be torn.
        for progress in self._progress:
            progress.stop()
        steps = self.config.log.profile_steps
        if steps is not None and self._step < steps[-1]:
            self._report_trace()
        self._event("stop", step=self._step, reason=reason)
        if self.rank == 0:
            notices.end(self.run.path, reason)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            text = redacted(str(error))  # a library's text may hold a secret
            first, _, _ = text.partition("\n")
            self.stop(f"failed: {type(error).__name__}: {first}")
            if self._log is not None:
                self._log.write(f"failed: {type(error).__name__}: {text}\n")
        # Only a run without a reason so far: neither finished, nor stopped, nor failed.
        self.stop("closed")
        # The trackers first: what they could not send is told in the log and the metrics.
        for file in (self._trackers, self._rank_file, self._log, *self._files.values(), self._metrics):
            if file is not None:
                file.close()

    @property
    def _step(self) -> int:
        return self._last.step if self._last is not None else self._steps_before

    def _report_trace(self) -> None:
        text = trace_text(self.config.log, self._steps_before, self._step, self.layout.world, self.run)
        if text is not None:
            self.message(text)

    def _event(self, event: str, **fields: Any) -> None:
        if self._metrics is not None:
            self._metrics.write({"event": event, "time": now(), **fields})

    def _scalars(self, step: int, values: Mapping[str, Mapping[str, float | None]]) -> None:
        if self._trackers is not None:
            self._trackers.add(step, values)

    def _new_throughput(self, former: Throughput | None = None) -> Throughput:
        """The throughput of this stage, which begins, after that of the stages before."""
        samples = self.config.train.global_batch
        tokens = samples * self.config.train.sequence_length
        # The utilization of a step that takes a second: divided by the seconds of a step, it is that of the step.
        mfu = model_flops_utilization(self._token_flops, tokens, self.layout.world, self._peak_flops)
        return Throughput({"samples": samples, "tokens": tokens, "mfu": mfu or 0.0}, former)

    def _rates(self, rate: Callable[[str], float]) -> dict[str, float | None]:
        tokens_per_second = rate("tokens")
        is_known = self._token_flops is not None and self._peak_flops is not None
        return {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": tokens_per_second / self.layout.world,
            "samples_per_second": rate("samples"),
            "mfu": rate("mfu") if is_known else None,
        }

    def _facts(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "layout": {**self.layout.facts(), "zero": self.config.optimizer.zero},
            "device": self.device_name,
            "precision": asdict(self.precision),
        }

    def _time_to_train(self, until: float) -> float | None:
        """Seconds over all runs of this training; None where an earlier one recorded no time."""
        totals = self.totals
        return None if totals.seconds_before is None else totals.seconds_before + until - totals.began

    def _results(self, now: float) -> dict[str, Any]:
        last = self._last
        throughput = self.totals.throughput
        evaluation = self._evaluation
        sets = self._last_of_sets
        tasks = self._last_of_tasks
        final_loss = last.loss if last else None
        if last is None:
            # An earlier run has done all steps, and recorded their loss.
            final_loss = self._recorded("step", self._step).get("loss")
            evaluation = evaluation or self._recorded("eval", self._step)
            facts = ("event", "time", "step", "set")
            for event in self.run.events("eval_set", "eval_task"):
                if event.get("step") != self._step:
                    continue
                if event["event"] == "eval_task":
                    tasks[event["task"]] = event["metrics"]
                else:
                    sets[event["set"]] = {key: value for key, value in event.items() if key not in facts}
        return {
            **self._facts(),
            "steps": self._step,
            "steps_before": self.totals.steps_before,
            "tokens": last.tokens if last else 0,
            "samples": last.samples if last else 0,
            "final_loss": final_loss,
            "final_eval_loss": evaluation.get("loss"),
            "final_perplexity": evaluation.get("perplexity"),
            "evaluation_sets": sets,
            "tasks": tasks,
            "time_to_train_seconds": self._time_to_train(now),
            "samples_per_second": {"average": throughput.average("samples"), "peak": throughput.peak("samples")},
            "tokens_per_second": {"average": throughput.average("tokens"), "peak": throughput.peak("tokens")},
            "mfu": self._rates(throughput.average)["mfu"],
            "peak_memory_bytes": last.peak_memory_bytes if last else None,
        }

    def _recorded(self, name: str, step: int) -> dict[str, Any]:
        """The last event of this name and step in the folder's metrics, read on rank 0; {} where there is none."""
        events = [] if self._metrics is None else self.run.events(name)
        return next((event for event in reversed(list(events)) if event.get("step") == step), {})


def _plain_console(file: IO[str]) -> Console:
    """A console of plain lines, also in a notebook and where the environment forces colours (FORCE_COLOR)."""
    return Console(file=file, force_terminal=False, force_jupyter=False, color_system=None, highlight=False)


def _further_scalars(record: StepRecord, parts: Mapping[str, float]) -> dict[str, Mapping[str, float | None]]:
    slow = record.straggler
    return {
        "seconds": parts,
        "bytes": record.communication_bytes,
        "memory": {**record.memory, "peak": record.peak_memory_bytes},
        "straggler": {} if slow is None else {"relative": slow.relative, "own": slow.own},
        **{prefix: numbers for detail in record.details for prefix, numbers in detail.scalars.items()},
    }


def _by_objective(losses: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}_loss": loss for name, loss in losses.items()}


def _result_line(results: dict[str, Any], seconds: float) -> str:
    steps_before = results["steps_before"]
    steps = f"{results['steps']:,} steps"
    if steps_before:
        steps = f"steps {steps_before + 1:,} to {results['steps']:,}"
    parts = [f"{steps} in {units.duration(seconds)}", f"loss {results['final_loss']:.4f}"]
    if results["final_perplexity"] is not None:
        parts.append(f"evaluation perplexity {results['final_perplexity']:,.2f}")
    parts.append(f"{units.count(results['tokens_per_second']['average'])} tokens/s on average")
    if results["mfu"] is not None:
        parts.append(f"MFU {results['mfu']:.1%}")
    return ", ".join(parts)
