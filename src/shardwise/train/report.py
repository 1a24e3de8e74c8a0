"""What a run tells: the summary at its start, one progress line, and its files.

Rank 0 prints and writes the shared files (metrics.jsonl, tensorboard/, results.json); every rank writes its own
ranks/rank-NNNN.jsonl. On a terminal progress is one line that is redrawn; elsewhere it is about twenty lines a run,
which rank 0's log has too, whatever the terminal shows.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardwise import units
from shardwise.config import Config, Layout, Precision
from shardwise.cost import MemoryEstimate, flops_per_token, model_flops_utilization
from shardwise.hardware import peak_flops
from shardwise.runlog import JsonLines, RunDirectory
from shardwise.train.own import StateMemory

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

WINDOW_STEPS = 10
"""Steps over which throughput is averaged."""

_LINES_A_RUN = 20
_LINE_AT_LEAST_EVERY = 300.0
_BAR_MINIMUM, _BAR_MAXIMUM = 10, 40
_GAP = "  "


@dataclass(frozen=True)
class StepRecord:
    """One finished optimizer step.

    Attributes:
        step: number of the step, from 1, over the whole training (a resumed run goes on counting).
        loss: of the global batch, before the update. lr: with which the update was made.
        grad_norm: of the whole model, before clipping. param_norm: of the whole model, after the update.
        tokens, samples: consumed since step 0 by all ranks, this step's included.
        seconds: wall time of this step on this rank, evaluation excluded.
        peak_memory_bytes: of this rank, since it began.
        losses: of each objective, where there are several; `loss` is their sum.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    param_norm: float
    tokens: int
    samples: int
    seconds: float
    peak_memory_bytes: int
    losses: Mapping[str, float] = field(default_factory=dict)


class Throughput:
    """Samples per second: over the last 10 steps, over the run, and the best ten steps of it."""

    def __init__(self, samples_per_step: int) -> None:
        self._samples_per_step = samples_per_step
        self._recent: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._steps = 0
        self._seconds = 0.0
        self._peak = 0.0

    def add(self, seconds: float) -> None:
        self._recent.append(seconds)
        self._steps += 1
        self._seconds += seconds
        if len(self._recent) == WINDOW_STEPS:
            self._peak = max(self._peak, self.recent)

    @property
    def step_seconds(self) -> float:
        """Mean over the window; 0 before the first step."""
        return sum(self._recent) / max(len(self._recent), 1)

    @property
    def recent(self) -> float:
        return _rate(self._samples_per_step * len(self._recent), sum(self._recent))

    @property
    def average(self) -> float:
        return _rate(self._samples_per_step * self._steps, self._seconds)

    @property
    def peak(self) -> float:
        """Best window of the run; a run shorter than a window has its average."""
        return self._peak or self.average


class Reporter:
    """Prints and records one run, as seen by one rank. A context manager: leaving it closes every file.

    Args:
        run: the run's folder. rank: of this process in the world; rank 0 prints and writes the shared files.
        device_name: product name of a rank's device, from which its peak is looked up. precision: as resolved.
        parameters: of the whole model. memory: expected on each rank. Both are set before `start` where they are None
        here, as for a model of the user's own, which is counted when it is built.
        steps_before: steps that earlier runs of this training took.
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
        memory: MemoryEstimate | None,
        steps_before: int = 0,
        stream: IO[str] | None = None,
    ) -> None:
        self.run, self.config, self.layout, self.rank = run, config, layout, rank
        self.device_name, self.precision = device_name, precision
        self.parameters = parameters
        self.memory: MemoryEstimate | StateMemory | None = memory
        train = config.train
        self._end = train.steps if train.stop_after is None else min(train.steps, steps_before + train.stop_after)
        length = train.sequence_length
        self._token_flops = flops_per_token(config.model, length, config.data.predictions(length))
        self._peak_flops = peak_flops(device_name, precision.parameter)
        self._throughput = Throughput(train.global_batch)
        self._rank_file = JsonLines(run.rank_metrics(rank))
        self._metrics = JsonLines(run.metrics) if rank == 0 else None
        self._tensorboard: SummaryWriter | None = None
        self._log = _open_log(run.log(0)) if rank == 0 else None
        self._consoles = [Console(file=stream or sys.stdout, highlight=False), _plain(self._log)] if self._log else []
        self._progress = [_Progress(console, steps_before, self._end) for console in self._consoles]
        self._last: StepRecord | None = None
        self._evaluation: tuple[float, float] | None = None
        self._started = time.perf_counter()
        self._stopped = False

    def start(self, *, loaded: Path | None = None) -> None:
        """Print the summary and begin the progress line. `loaded`: where weights came from that were not drawn."""
        self._started = time.perf_counter()
        if self._metrics is None:
            return
        if self.config.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(self.run.tensorboard))
        self._event(
            "start",
            parameters=self.parameters,
            layout=self._layout(),
            device=self.device_name,
            precision=asdict(self.precision),
            memory_expected_bytes=dict(self.memory.rows()) if self.memory else None,
            steps=self.config.train.steps,
            loaded=None if loaded is None else str(loaded),
        )
        for console, progress in zip(self._consoles, self._progress, strict=True):
            _print_summary(console, self._summary())
            progress.start(self._started)

    def step(self, record: StepRecord) -> None:
        """Record a finished step; called for every step, `log.every` decides what is written."""
        self._throughput.add(record.seconds)
        self._last = record
        if record.step % self.config.log.every and record.step != self._end:
            return
        self._rank_file.write(
            {"step": record.step, "step_seconds": record.seconds, "peak_memory_bytes": record.peak_memory_bytes}
        )
        if self._metrics is None:
            return
        rates = self._rates(self._throughput.recent)
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
            }
        )
        scalars = {"loss": record.loss, "lr": record.lr, "grad_norm": record.grad_norm, "param_norm": record.param_norm}
        scalars |= _by_objective(record.losses)
        self._scalars("train", record.step, {**scalars, **rates, "step_seconds": record.seconds})
        now = time.perf_counter()  # one for all: log and standard output tell the same
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
        shown = f" ({_parts_of_loss(losses)})" if losses else ""
        self.message(f"evaluation at step {step:,}: loss {loss:.4f}{shown}, perplexity {perplexity:,.2f}")

    def warning(self, text: str) -> None:
        """Print a warning above the progress line and record it."""
        self._event("warning", step=self._step, text=text)
        self.message(f"warning: {text}", style="yellow")

    def message(self, text: str, *, style: str = "") -> None:
        """Print a line above the progress line, on rank 0."""
        for console in self._consoles:
            console.print(Text(text, style=style), soft_wrap=True)

    def finish(self, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        """End a run that did all its steps: write results.json with `extra` added, print the result, and return it."""
        whole = self._step >= self.config.train.steps
        results = self._results() | (extra or {})
        if self.rank == 0:
            self.run.write_results(results)
        self.stop("finished" if whole else "stop_after")
        if self.rank == 0 and self._last is not None:
            self.message(_result_line(results))
            self.message(f"run: {self.run.path}")
        return results

    def stop(self, reason: str) -> None:
        """End the progress line and record why training ended; the first reason counts."""
        if self._stopped:
            return
        self._stopped = True
        for progress in self._progress:
            progress.stop()
        self._event("stop", step=self._step, reason=reason)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            lines = str(error).splitlines() or [""]
            self.stop(f"failed: {type(error).__name__}: {lines[0]}")
            if self._log is not None:
                self._log.write(f"failed: {type(error).__name__}: {error}\n")
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
        return self._last.step if self._last is not None else 0

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
        layout = self.layout
        return {
            "ranks": layout.world,
            "tensor": layout.tensor,
            "sequence": layout.sequence,
            "pipeline": layout.pipeline,
            "data": layout.data,
            "zero": self.config.optimizer.zero,
        }

    def _results(self) -> dict[str, Any]:
        last, throughput = self._last, self._throughput
        loss, perplexity = self._evaluation or (None, None)
        length = self.config.train.sequence_length
        return {
            "parameters": self.parameters,
            "layout": self._layout(),
            "device": self.device_name,
            "precision": asdict(self.precision),
            "steps": self._step,
            "tokens": last.tokens if last else 0,
            "samples": last.samples if last else 0,
            "final_loss": last.loss if last else None,
            "final_eval_loss": loss,
            "final_perplexity": perplexity,
            "time_to_train_seconds": time.perf_counter() - self._started,
            "samples_per_second": {"average": throughput.average, "peak": throughput.peak},
            "tokens_per_second": {"average": throughput.average * length, "peak": throughput.peak * length},
            "mfu": self._rates(throughput.average)["mfu"],
            "peak_memory_bytes": last.peak_memory_bytes if last else None,
        }

    def _summary(self) -> list[tuple[str, str]]:
        config, layout, train = self.config, self.layout, self.config.train
        assert self.parameters is not None
        samples = train.steps * train.global_batch
        stop = "" if self._end == train.steps else f", this run stops at {self._end:,}"
        sequence = " + sequence" if layout.sequence else ""
        ranks = f"{layout.world} rank{'s' if layout.world > 1 else ''}"
        precision = self.precision
        dtypes = {role: dtype for role, dtype in asdict(precision).items() if dtype != precision.parameter}
        finer = "".join(f", {role} {dtype}" for role, dtype in dtypes.items())
        return [
            ("model", f"{config.model.family}, {units.count(self.parameters)} parameters ({self.parameters:,})"),
            ("steps", f"{train.steps:,}{stop}"),
            ("samples", f"{samples:,} × {train.sequence_length:,} tokens = {samples * train.sequence_length:,} tokens"),
            (
                "batch",
                f"{train.micro_batch} micro batch × {layout.accumulation(train)} accumulation × {layout.data} DP"
                f" = {train.global_batch} global batch",
            ),
            (
                "layout",
                f"TP {layout.tensor}{sequence} × PP {layout.pipeline} × DP {layout.data} = {ranks}, "
                f"ZeRO-{config.optimizer.zero}",
            ),
            ("device", f"{self.device_name}, {precision.parameter}{finer}"),
            ("memory", self._memory_text()),
            ("run", str(self.run.path)),
        ]

    def _memory_text(self) -> str:
        assert self.memory is not None
        parts = ", ".join(f"{name} {units.size(size)}" for name, size in self.memory.rows() if size)
        if isinstance(self.memory, StateMemory):
            return f"{parts} on each rank; activations are not known for a model of your own"
        return f"{units.size(self.memory.total)} expected on each rank, beside Python and torch: {parts}"


class _Progress:
    """The progress line: redrawn in place on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, first: int, end: int) -> None:
        self._console, self._first, self._end = console, first, end
        self._live = console.is_terminal and not console.is_dumb_terminal
        self._display: Live | None = None
        self._started = self._printed_at = time.perf_counter()
        self._next_line = first + 1
        self._record: StepRecord | None = None
        self._step_seconds = self._tokens_per_second = 0.0

    def start(self, now: float) -> None:
        self._started = self._printed_at = now
        if self._live:
            self._display = Live(self, console=self._console, refresh_per_second=2)
            self._display.start()

    def update(self, record: StepRecord, step_seconds: float, tokens_per_second: float, now: float) -> None:
        self._record, self._step_seconds, self._tokens_per_second = record, step_seconds, tokens_per_second
        if self._live:
            return
        overdue = now - self._printed_at >= _LINE_AT_LEAST_EVERY
        if record.step >= self._next_line or record.step == self._end or overdue:
            self._console.print(Text(_GAP.join(part for parts in self._parts(now) for part in parts)), soft_wrap=True)
            self._printed_at = now
            every = max(1, (self._end - self._first) // _LINES_A_RUN)
            self._next_line = self._first + ((record.step - self._first) // every + 1) * every

    def stop(self) -> None:
        if self._display is not None:
            self._display.refresh()
            self._display.stop()
            self._display = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """One line, or two where the terminal is too narrow: progress with a bar, then the step's numbers."""
        progress, numbers = self._parts(time.perf_counter())
        bar = _BAR_MINIMUM + len(_GAP)
        lines = [[*progress, *numbers]]
        if numbers and bar + len(_GAP.join(lines[0])) > options.max_width:
            lines = [progress, numbers]
        for line in lines:
            head, *rest = line
            room = min(options.max_width - len(_GAP.join(line)) - len(_GAP), _BAR_MAXIMUM)
            row: list[Text | ProgressBar] = [Text(head, style="bold")]
            if line is lines[0] and room >= _BAR_MINIMUM:
                done = self._record.step - self._first if self._record else 0
                row.append(ProgressBar(total=max(self._end - self._first, 1), completed=done, width=room))
            row.append(Text(_GAP.join(rest), no_wrap=True, overflow="ellipsis"))
            grid = Table.grid(padding=(0, len(_GAP)))
            grid.add_row(*row)
            yield grid

    def _parts(self, now: float) -> tuple[list[str], list[str]]:
        """What is shown: how far the run is, and the last step's numbers."""
        elapsed = f"{units.duration(round(now - self._started, 1))} elapsed"
        record = self._record
        if record is None:
            return [f"step {self._first:,}/{self._end:,}", elapsed, "first step under way"], []
        left = (self._end - record.step) * self._step_seconds
        width = len(f"{self._end:,}")
        progress = [
            f"step {record.step:>{width},}/{self._end:,}",
            elapsed,
            f"{units.duration(left)} left" if record.step < self._end else "done",
            f"{units.duration(self._step_seconds)}/step",
        ]
        return progress, [
            f"loss {record.loss:.4f}" + (f" ({_parts_of_loss(record.losses)})" if record.losses else ""),
            f"lr {record.lr:.2e}",
            f"grad norm {record.grad_norm:.3f}",
            f"{units.count(self._tokens_per_second)} tokens/s",
            f"{record.samples:,} samples",
        ]


def _open_log(path: Path) -> IO[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a", encoding="utf-8", buffering=1)


def _plain(file: IO[str]) -> Console:
    """A console that never draws or colours, even where the environment forces others to (FORCE_COLOR)."""
    return Console(file=file, force_terminal=False, color_system=None, highlight=False)


def _print_summary(console: Console, rows: list[tuple[str, str]]) -> None:
    if not console.is_terminal:
        for name, value in rows:
            console.print(Text(f"{name:<8} {value}"), soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    console.print(Panel(table, title="shardwise", title_align="left", border_style="dim", expand=False))


def _result_line(results: dict[str, Any]) -> str:
    parts = [f"{results['steps']:,} steps in {units.duration(results['time_to_train_seconds'])}"]
    parts.append(f"loss {results['final_loss']:.4f}")
    if results["final_perplexity"] is not None:
        parts.append(f"evaluation perplexity {results['final_perplexity']:,.2f}")
    parts.append(f"{units.count(results['tokens_per_second']['average'])} tokens/s")
    if results["mfu"] is not None:
        parts.append(f"MFU {results['mfu']:.1%}")
    return ", ".join(parts)


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _by_objective(losses: Mapping[str, float]) -> dict[str, float]:
    """The losses by the names that the run's files give them."""
    return {f"{name}_loss": loss for name, loss in losses.items()}


def _parts_of_loss(losses: Mapping[str, float]) -> str:
    return ", ".join(f"{name.upper()} {loss:.4f}" for name, loss in losses.items())
