"""What a run prints and records: the summary at its start, one progress line, and its files.

Rank 0 prints and writes the shared files (metrics.jsonl, tensorboard/, results.json); every rank writes its own
ranks/rank-NNNN.jsonl. On a terminal progress is one line that is redrawn; elsewhere it is about twenty lines a run,
which rank 0's log has too, whatever the terminal shows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from shardwise import units
from shardwise.checkpoint.save import Saved
from shardwise.checkpoint_format.manifest import Manifest
from shardwise.config import Config, Layout, Precision
from shardwise.cost import flops_per_token, model_flops_utilization
from shardwise.hardware import peak_flops
from shardwise.redaction import redacted
from shardwise.runlog import JsonLines, RunDirectory
from shardwise.train.console import open_log, plain, print_summary, result_line
from shardwise.train.picture import print_pipeline
from shardwise.train.progress import ProgressLine, parts_of_loss
from shardwise.train.record import StepRecord, Throughput, end_of_run
from shardwise.train.summary import start_rows

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Reporter:
    """Prints and records one run, as seen by one rank. A context manager: leaving it closes every file.

    Args:
        run: the run's folder.
        config: of the run.
        layout: of its ranks.
        rank: of this process in the world; rank 0 prints and writes the shared files.
        device_name: product name of a rank's device, from which its peak is looked up.
        precision: as resolved.
        parameters: of the whole model. Of a model of the user's own it is None, until it is set before `start`.
        memory: bytes by kind, expected on the rank that needs most; None likewise.
        stream: where rank 0 prints; default: standard output.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: Config,
        layout: Layout,
        rank: int,
        *,
        device_name: str,
        precision: Precision,
        parameters: int | None,
        memory: Mapping[str, int] | None,
        stream: IO[str] | None = None,
    ) -> None:
        self.run, self.config, self.layout, self.rank = run, config, layout, rank
        self.device_name, self.precision = device_name, precision
        self.parameters, self.memory = parameters, memory
        train = config.train
        self._before, self._end = 0, end_of_run(config, 0)
        length = train.sequence_length
        self._token_flops = flops_per_token(config.model, length, config.data.predictions(length))
        self._peak_flops = peak_flops(device_name, precision.parameter)
        self._throughput = Throughput(train.global_batch)
        self._rank_file = JsonLines(run.rank_metrics(rank))
        self._metrics = JsonLines(run.metrics) if rank == 0 else None
        self._tensorboard: SummaryWriter | None = None
        self._log = open_log(run.log(0)) if rank == 0 else None
        self._consoles = [Console(file=stream or sys.stdout, highlight=False), plain(self._log)] if self._log else []
        self._progress: list[ProgressLine] = []
        self._last: StepRecord | None = None
        self._evaluation: tuple[float, float] | None = None
        self._started = time.perf_counter()
        self._seconds_before: float | None = 0.0
        self._stopped = self._has_reported_trace = False

    def start(self, *, loaded: str | None = None, steps_before: int = 0) -> None:
        """Print the summary and begin the progress line.

        Args:
            loaded: the folder of the weights; None where they were drawn.
            steps_before: steps that earlier runs of this training took.
        """
        self._started = time.perf_counter()
        self._before, self._end = steps_before, end_of_run(self.config, steps_before)
        self._seconds_before = self._seconds_until(steps_before)
        if self._metrics is None:
            return
        if self.config.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(self.run.tensorboard), purge_step=steps_before + 1)
        self._event(
            "start",
            parameters=self.parameters,
            layout=self._layout(),
            device=self.device_name,
            precision=asdict(self.precision),
            memory_expected_bytes=self.memory,
            steps=self.config.train.steps,
            loaded=loaded,
        )
        assert self.parameters is not None
        assert self.memory is not None
        rows = start_rows(
            self.config,
            self.layout,
            device_name=self.device_name,
            precision=self.precision,
            parameters=self.parameters,
            memory=self.memory,
            steps=(steps_before, self._end),
            run_path=self.run.path,
        )
        for console in self._consoles:
            print_summary(console, rows)
            if self.layout.pipeline > 1:
                print_pipeline(console, self.config, self.layout, not self.device_name.startswith("cpu"))
            progress = ProgressLine(console, steps_before, self._end)
            progress.start(self._started)
            self._progress.append(progress)
        steps = self.config.log.trace_steps
        if steps is not None and not self._traced(self._end):
            end = f"the steps {self._before + 1:,} to {self._end:,}" if self._end > self._before else "no step"
            self.message(f"no trace: log.trace ({self.config.log.trace}) has no step of this run, which takes {end}")

    def resumed(self, manifest: Manifest, folder: str, changes: Sequence[str]) -> None:
        """Record that the training continues from a checkpoint, and what of the configuration is new."""
        self._event("resume", step=manifest.step, checkpoint=folder, written_by=manifest.layout, changes=list(changes))
        self.message(f"resumed after step {manifest.step:,} from {folder}")
        self.changed(changes)

    def changed(self, changes: Sequence[str]) -> None:
        """Print what of the configuration is new since the earlier run of this folder."""
        for change in changes:
            self.message(f"changed: {change}")

    def saved(self, saved: Saved, *, continues: bool = True) -> None:
        """Record a checkpoint that is complete, or warn that there is none. `continues`: the run does, without it."""
        if saved.warning is not None:
            self.warning(f"what is left of other checkpoints could not be removed: {saved.warning}")
        if saved.problem is not None:
            then = "; the run goes on" if continues else ""
            self.warning(f"no checkpoint of step {saved.step:,}: {saved.problem}{then}")
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

    def is_logged(self, step: int) -> bool:
        """Whether something is written of a step; the same on every rank."""
        return step % self.config.log.every == 0 or step == self._end

    def step(self, record: StepRecord) -> None:
        """Record a finished step; called for every step, `log.every` decides what is written."""
        self._throughput.add(record.seconds)
        self._last = record
        steps = self.config.log.trace_steps
        if steps is not None and record.step == steps[-1]:
            self._report_trace()
        if not self.is_logged(record.step):
            return
        timing = record.timing
        here: dict[str, Any] = {"step": record.step, "step_seconds": record.seconds}
        here["input_seconds"] = record.input_seconds
        here["peak_memory_bytes"] = record.peak_memory_bytes
        if timing is not None:
            here |= {"stage_seconds": [asdict(each) for each in timing.stages], "bubble": timing.bubble}
        self._rank_file.write(here)
        if self._metrics is None:
            return
        rates = self._rates(self._throughput.recent)
        bubble = {} if timing is None else {"bubble": timing.mean_bubble}
        self._metrics.write(
            {
                "event": "step",
                "step": record.step,
                "loss": record.loss,
                **_by_objective(record.losses),
                "lr": record.lr,
                "grad_norm": record.grad_norm,
                "param_norm": record.param_norm,
                "tokens": record.tokens,
                "samples": record.samples,
                **rates,
                "step_seconds": record.seconds,
                "peak_memory_bytes": record.peak_memory_bytes,
                **bubble,
            }
        )
        scalars = {"loss": record.loss, "lr": record.lr, "grad_norm": record.grad_norm, "param_norm": record.param_norm}
        scalars |= _by_objective(record.losses)
        self._scalars("train", record.step, {**scalars, **rates, **bubble, "step_seconds": record.seconds})
        now = time.perf_counter()  # once: the log and standard output show the same time
        for progress in self._progress:
            progress.update(record, self._throughput.step_seconds, rates["tokens_per_second"] or 0.0, now)

    def evaluation(self, step: int, loss: float, perplexity: float, losses: Mapping[str, float] | None = None) -> None:
        """Record the evaluation made after `step` steps. `losses`: of each objective, where there are several."""
        self._evaluation = (loss, perplexity)
        if self._metrics is None:
            return
        values = {"loss": loss, **_by_objective(losses or {}), "perplexity": perplexity}
        self._metrics.write({"event": "eval", "step": step, **values})
        self._scalars("eval", step, values)
        shown = f" ({parts_of_loss(losses)})" if losses else ""
        self.message(f"evaluation at step {step:,}: loss {loss:.4f}{shown}, perplexity {perplexity:,.2f}")

    def warning(self, text: str) -> None:
        """Print a warning above the progress line and record it."""
        text = redacted(text)
        self._event("warning", step=self._step, text=text)
        self.message(f"warning: {text}", style="yellow")

    def message(self, text: str, *, style: str = "") -> None:
        """Print a line above the progress line, on rank 0."""
        for console in self._consoles:
            console.print(Text(text, style=style), soft_wrap=True)

    def finish(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """End a run that did all its steps: write results.json with `extra` added, print the result, and return it."""
        whole = self._step >= self.config.train.steps
        now = time.perf_counter()
        results = self._results(now) | (extra or {})
        if self.rank == 0:
            self.run.write_results(results)
        self.stop("finished" if whole else "stop_after")
        if self.rank == 0 and self._last is not None:
            self.message(result_line(results, now - self._started))
            self.message(f"run: {self.run.path}")
        return results

    def stop(self, reason: str) -> None:
        """End the progress line and record why training ended; the first reason counts."""
        if self._stopped:
            return
        self._stopped = True
        for progress in self._progress:
            progress.stop()
        self._report_trace()
        self._event("stop", step=self._step, reason=reason)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            text = redacted(str(error))  # of a library, perhaps
            first, _, _ = text.partition("\n")
            self.stop(f"failed: {type(error).__name__}: {first}")
            if self._log is not None:
                self._log.write(f"failed: {type(error).__name__}: {text}\n")
        self.stop("closed")
        self._rank_file.close()
        if self._log is not None:
            self._log.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    @property
    def _step(self) -> int:
        return self._last.step if self._last is not None else self._before

    def _traced(self, last: int) -> range:
        """The steps of `log.trace` that this run has taken once `last` is done."""
        steps = self.config.log.trace_steps or range(0)
        return range(max(steps.start, self._before + 1), min(steps.stop, last + 1))

    def _report_trace(self) -> None:
        """Print, once, where the trace is that was written with the last step."""
        steps = self._traced(self._step)
        if self._has_reported_trace or not steps:
            return
        self._has_reported_trace = True
        named = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
        others = f" and so on for each of {self.layout.world:,} ranks" if self.layout.world > 1 else ""
        self.message(f"trace of {named}: {self.run.trace(0)}{others}; ui.perfetto.dev shows it")

    def _event(self, event: str, **fields: Any) -> None:
        if self._metrics is not None:
            self._metrics.write({"event": event, "time": datetime.now(UTC).isoformat(timespec="seconds"), **fields})

    def _scalars(self, prefix: str, step: int, values: Mapping[str, float | None]) -> None:
        if self._tensorboard is None:
            return
        for name, value in values.items():
            if value is not None:
                self._tensorboard.add_scalar(f"{prefix}/{name}", value, step)

    def _rates(self, samples_per_second: float) -> dict[str, float | None]:
        tokens_per_second = samples_per_second * self.config.train.sequence_length
        return {
            "tokens_per_second": tokens_per_second,
            "samples_per_second": samples_per_second,
            "mfu": model_flops_utilization(self._token_flops, tokens_per_second, self.layout.world, self._peak_flops),
        }

    def _layout(self) -> dict[str, Any]:
        return {**self.layout.facts(), "zero": self.config.optimizer.zero}

    def _time_to_train(self, until: float) -> float | None:
        """Over all runs of this training; None where an earlier one recorded no time."""
        return None if self._seconds_before is None else self._seconds_before + until - self._started

    def _seconds_until(self, step: int) -> float | None:
        """What training took up to the checkpoint of `step`, as the run that saved it wrote; without what was lost."""
        if not step or self._metrics is None:
            return None if step else 0.0
        saved = [event for event in self.run.events("checkpoint") if event.get("step") == step]
        return saved[-1].get("time_to_train_seconds") if saved else None

    def _results(self, now: float) -> dict[str, Any]:
        last, throughput = self._last, self._throughput
        evaluation: Mapping[str, Any]
        if self._evaluation is None:
            evaluation = self._recorded("eval")
        else:
            evaluation = dict(zip(("loss", "perplexity"), self._evaluation, strict=True))
        length = self.config.train.sequence_length
        return {
            "parameters": self.parameters,
            "layout": self._layout(),
            "device": self.device_name,
            "precision": asdict(self.precision),
            "steps": self._step,
            "steps_before": self._before,
            "tokens": last.tokens if last else 0,
            "samples": last.samples if last else 0,
            "final_loss": last.loss if last else self._recorded("step").get("loss"),
            "final_eval_loss": evaluation.get("loss"),
            "final_perplexity": evaluation.get("perplexity"),
            "time_to_train_seconds": self._time_to_train(now),
            "samples_per_second": {"average": throughput.average, "peak": throughput.peak},
            "tokens_per_second": {"average": throughput.average * length, "peak": throughput.peak * length},
            "mfu": self._rates(throughput.average)["mfu"],
            "peak_memory_bytes": last.peak_memory_bytes if last else None,
        }

    def _recorded(self, event: str) -> Mapping[str, Any]:
        """Where this run had no step to take, what an earlier one of the folder wrote of the last; else nothing."""
        if self._last is not None or self._metrics is None:
            return {}
        recorded = [found for found in self.run.events(event) if found.get("step") == self._step]
        return recorded[-1] if recorded else {}


def _by_objective(losses: Mapping[str, float]) -> dict[str, float]:
    """The losses by the names that the run's files give them."""
    return {f"{name}_loss": loss for name, loss in losses.items()}
