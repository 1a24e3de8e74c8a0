"""What a run prints and writes, with one rank and with another, on a terminal and off it."""

import io
import json
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardwise.checkpoint.save import SavedCheckpoint
from shardwise.config import Config, Layout, config_from_sections, size_stages_of
from shardwise.estimates.device_peaks import peak_flops
from shardwise.models.flops import flops_per_token
from shardwise.models.parameter_counts import parameter_count
from shardwise.pipeline.clock import StageSeconds, StepTiming
from shardwise.runs.folder import RunDirectory
from shardwise.train import reporter as report
from shardwise.train.evaluation_losses import EvaluationLosses
from shardwise.train.reporter import Reporter
from shardwise.train.step_record import StepRecord, Straggler, Throughput
from shardwise.train.trainer import Trainer

MODEL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4}
STEP_FIELDS = [
    "event", "step", "time", "loss", "lr", "grad_norm", "param_norm", "tokens", "samples", "tokens_per_second",
    "tokens_per_second_per_device", "samples_per_second", "mfu", "peak_tokens_per_second", "step_seconds",
    "peak_memory_bytes", "loss_spike", "split_seconds", "waited_seconds", "communication_bytes", "memory_bytes",
    "straggler",
]  # fmt: skip


def config(**log: Any) -> Config:
    return config_from_sections(
        {
            "model": {"family": "llama", **MODEL, "num_hidden_layers": 8},
            "parallel": {"tensor": 2, "sequence": True},
            "train": {"steps": 100, "global_batch": 8, "micro_batch": 2, "sequence_length": 32},
            "optimizer": {"lr": 1e-3},
            "precision": {"mode": "float32"},
            "log": log,
        }
    )


def record(step: int, **changes: Any) -> StepRecord:
    values = {
        "step": step, "loss": 1 / 3, "mean_loss": 0.5, "mean_steps": min(step, 20), "lr": 1e-3, "grad_norm": 0.5,
        "param_norm": 10.0, "tokens": step * 256, "samples": step * 8, "seconds": 0.5, "input_seconds": 0.125,
        "peak_memory_bytes": 1000,
    }  # fmt: skip
    return StepRecord(**(values | changes))


def held_out(loss: float) -> EvaluationLosses:
    return EvaluationLosses({"lm": loss}, {"lm": 8}, {}, 8, 1.0)


def reporter(
    path: Path,
    chosen: Config | None = None,
    *,
    rank: int = 0,
    device_name: str = "cpu",
    layout: Layout = Layout(4, tensor=2, sequence_parallel=True),  # noqa: B008  frozen
    **options: Any,
) -> tuple[Reporter, io.StringIO]:
    chosen = chosen or config()
    stream = io.StringIO()
    made = Reporter(RunDirectory(path / "run"), chosen, layout, rank, device_name=device_name, stream=stream, **options)
    return made, stream


@contextmanager
def begun(
    path: Path, chosen: Config | None = None, *, before: int = 0, **options: Any
) -> Iterator[tuple[Reporter, io.StringIO]]:
    """The reporter of a run that goes on after some steps, and what it prints."""
    made, stream = reporter(path, chosen, **options)
    with made:
        made.start(steps_before=before)
        yield made, stream


def take(made: Reporter, steps: Iterable[int], **changes: Any) -> None:
    for step in steps:
        made.step(record(step, **changes))


def stopping_after(steps: int, **log: Any) -> Config:
    chosen = config(**log)
    return chosen.model_copy(update={"train": chosen.train.model_copy(update={"stop_after": steps})})


def scalars(path: Path, name: str) -> list[tuple[int, float]]:
    """Steps and values of a curve of TensorBoard."""
    events = EventAccumulator(str(path / "run/tensorboard")).Reload()
    return [(each.step, each.value) for each in events.Scalars(name)]


def printed_steps(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("step ")]


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """One number: what the clock shows."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The width of a terminal on which reporters print."""
    given = {"force_terminal": True, "width": request.param}
    monkeypatch.setattr(report, "Console", lambda file, **options: Console(file=file, **(given | options)))
    return request.param


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_summary_names_every_quantity_and_mfu_is_that_of_a_known_device(tmp_path: Path) -> None:
    made, stream = reporter(tmp_path)
    with made:
        made.start(epochs="1.60 epochs of 500 samples")
    text = stream.getvalue()
    for expected in (
        f"({parameter_count(config().model):,})",
        "800 × 32 tokens = 25,600 tokens, 1.60 epochs of 500 samples\n",
        "2 micro batch × 2 accumulation × 2 DP = 8 global batch",
        "TP 2 + SP × PP 1 × DP 2 = 4 ranks, ZeRO-1",
        "cpu, float32",
        " per rank, plus about 300 MiB for Python and torch: ",
        "not shown: the peak FLOP/s of this CPU is unknown",
        str(tmp_path / "run"),
    ):
        assert expected in text
    with begun(tmp_path / "h100", device_name="NVIDIA H100 80GB HBM3") as (made, stream):
        made.step(record(1))
    expected = flops_per_token(config().model, 32) * 512 / (4 * 67e12)
    assert lines(tmp_path / "h100/run/metrics.jsonl")[1]["mfu"] == pytest.approx(expected)
    assert f" tokens/s  MFU {expected:.1%}  memory 1000 B  " in stream.getvalue()


def test_metrics_and_log_have_what_is_not_finite_and_why_the_run_ended(tmp_path: Path) -> None:
    with begun(tmp_path) as (made, _):
        made.warning("slow disk")
        made.step(record(2, loss=math.nan))
        made.stop("signal SIGTERM")
    _, warning, step, stop = lines(tmp_path / "run/metrics.jsonl")
    assert warning["text"] == "slow disk"
    assert list(step) == STEP_FIELDS
    assert step["loss"] == "nan"
    assert (step["tokens_per_second"], step["samples_per_second"], step["mfu"]) == (512.0, 16.0, None)
    assert (stop["step"], stop["reason"]) == (2, "signal SIGTERM")
    with pytest.raises(RuntimeError), begun(tmp_path / "failed"):
        raise RuntimeError("loss is nan\nat layer 3")
    assert (
        (tmp_path / "failed/run/logs/rank-0000.log")
        .read_text()
        .endswith("failed: RuntimeError: loss is nan\nat layer 3\n")
    )
    assert lines(tmp_path / "failed/run/metrics.jsonl")[-1]["reason"] == "failed: RuntimeError: loss is nan"


def test_other_ranks_and_pipelines_write_what_they_measured(tmp_path: Path) -> None:
    with begun(tmp_path, rank=3) as (made, stream):
        made.step(record(1))
        made.evaluation(1, held_out(2.5))
        made.warning("slow disk")
        made.message("hello")
        made.finish()
    assert stream.getvalue() == ""
    files = [path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert files == ["ranks/rank-0003.jsonl"]
    start, step = lines(tmp_path / "run/ranks/rank-0003.jsonl")
    assert (start["event"], start["rank"], start["place"], start["pid"]) == (
        "start",
        3,
        {"pp": 0, "dp": 1, "tp": 1},
        os.getpid(),
    )
    facts = {"step": 1, "step_seconds": 0.5, "input_seconds": 0.125, "peak_memory_bytes": 1000}
    assert {key: step[key] for key in facts} == facts
    assert 0 <= step["host_cpu"] <= 1, "the first rank of a node tells what the node uses"
    stages = (StageSeconds(1, 0.125, 0.25), StageSeconds(2, 0.0625, 0.125))
    with begun(tmp_path) as (made, stream):
        made.step(record(1, timing=StepTiming(stages, bubble=0.25, mean_bubble=0.375)))
    step = lines(tmp_path / "run/ranks/rank-0000.jsonl")[1]
    assert {key: step[key] for key in ("stage_seconds", "bubble")} == {
        "stage_seconds": [
            {"stage": 1, "forward": 0.125, "backward": 0.25},
            {"stage": 2, "forward": 0.0625, "backward": 0.125},
        ],
        "bubble": 0.25,
    }
    metrics = lines(tmp_path / "run/metrics.jsonl")[1]
    assert set(metrics) == {*STEP_FIELDS, "bubble"}
    assert metrics["bubble"] == 0.375
    assert "8 samples  bubble 37.5%" in stream.getvalue()
    assert scalars(tmp_path, "train/bubble") == [(1, 0.375)]


@pytest.mark.parametrize(("every", "steps"), [(30, [30, 60, 90, 100]), (1, [*range(1, 101)])])
def test_log_every_is_the_distance_of_lines_and_records(tmp_path: Path, every: int, steps: list[int]) -> None:
    trainer: Any = SimpleNamespace(log_every=every, _last=100)
    with begun(tmp_path, config(every=every, tensorboard=False)) as (made, stream):
        for step in range(1, 101):
            made.step(record(step, is_logged=Trainer.is_logged(trainer, step)))
    for name in ("metrics.jsonl", "ranks/rank-0000.jsonl"):
        events = lines(tmp_path / "run" / name)
        assert [event["step"] for event in events if event.get("event", "step") == "step"] == steps, name
    for text in (stream.getvalue(), (tmp_path / "run/logs/rank-0000.log").read_text()):
        assert [int(line[5:8]) for line in printed_steps(text)] == steps


def test_about_twenty_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    with begun(tmp_path) as (made, stream):
        take(made, range(1, 101))
    printed = printed_steps(stream.getvalue())
    assert [line.split("/")[0] for line in printed] == [f"step {step:>3}" for step in (1, *range(5, 101, 5))]
    assert "\x1b" not in stream.getvalue()
    assert "  1-step mean 0.5000  " in printed[0], "the label must say how many steps there are"
    numbers = ("loss 0.3333  20-step mean 0.5000  lr 1.00e-03", "512 tokens/s  memory 1000 B  800 samples")
    for expected in ("100/100", "done", "500 ms/step", *numbers):
        assert expected in printed[-1]


@pytest.mark.parametrize("terminal", [60, 160], indirect=True)
def test_a_terminal_gets_lines_that_fit(tmp_path: Path, terminal: int) -> None:
    with begun(tmp_path) as (made, _):
        shown = Console(width=terminal, file=io.StringIO(), record=True)
        made.before_steps("evaluation before the first step")
        shown.print(made._progress[0])
        assert "evaluation before the first step" in shown.export_text()
        made.step(record(50))
        shown.print(made._progress[0])
    printed = shown.export_text().splitlines()
    assert len(printed) == (1 if terminal == 160 else 2)
    assert max(map(len, printed)) <= terminal
    assert printed[0].startswith("step  50/100")
    assert "loss 0.3333" in printed[-1]


def test_results(tmp_path: Path) -> None:
    with begun(tmp_path) as (made, stream):
        take(made, range(1, 51), seconds=1.0)
        take(made, range(51, 101), seconds=0.25)
        made.evaluation(100, held_out(1.5))
        returned = made.finish({"sample": "def f():"})
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results == json.loads(json.dumps(returned))
    assert results["layout"] == {
        "ranks": 4, "tensor": 2, "sequence": True, "pipeline": 1, "data": 2, "zero": 1,
    }  # fmt: skip
    assert (results["final_loss"], results["final_eval_loss"]) == (1 / 3, 1.5)
    assert results["samples_per_second"] == {"average": 800 / 62.5, "peak": 32.0}
    assert results["tokens_per_second"] == {"average": 800 * 32 / 62.5, "peak": 1024.0}
    assert results["sample"] == "def f():"
    assert results["time_to_train_seconds"] > 0
    assert "evaluation perplexity 4.48" in stream.getvalue()
    assert lines(tmp_path / "run/metrics.jsonl")[-1]["reason"] == "finished"


@pytest.mark.parametrize(
    ("trace", "before", "stop_after", "told"),
    [
        ("10:12", 0, 20, "trace of steps 10 to 11: {} and so on for each of 4 ranks; ui.perfetto.dev shows it"),
        ("10:12", 0, 5, "no trace: log.profile (10:12) has no step of this run, which takes the steps 1 to 5"),
        (None, 0, 20, ""),
    ],
)
def test_a_trace_or_its_absence_is_told(
    tmp_path: Path, trace: str | None, before: int, stop_after: int, told: str
) -> None:
    chosen = stopping_after(stop_after, profile=trace, every=7)
    with begun(tmp_path, chosen, before=before) as (made, stream):
        take(made, range(before + 1, min(before + stop_after, 100) + 1))
        made.finish()
    said = [line for line in stream.getvalue().splitlines() if line.startswith(("trace", "no trace"))]
    assert said == ([told.format(tmp_path / "run/traces/rank-0000.json")] if told else [])


def test_results_of_a_run_that_had_taken_its_steps(tmp_path: Path) -> None:
    """Killed after the last save, before the results: the next start has no step to take."""
    evaluation = EvaluationLosses({"lm": 2.5}, {"lm": 8}, {}, 8, 1.0, bytes=20)
    with begun(tmp_path) as (made, _):
        for step in (99, 100):
            made.step(record(step, loss=step / 7))
        made.evaluation(100, held_out(1.5))
        made.evaluation(100, evaluation, "code")
        made.tasks(100, {"places": {"alias": "places", "acc,none": 0.75, "acc_stderr,none": "N/A"}})
        first = made.finish()
    with begun(tmp_path, before=100) as (made, _):
        results = made.finish({"tokens": 25600, "samples": 800})
    assert (results["steps"], results["final_loss"]) == (100, 100 / 7)
    assert (results["final_eval_loss"], results["final_perplexity"]) == (1.5, math.exp(1.5))
    expected = {"code": {"loss": 2.5, "perplexity": math.exp(2.5), "bits_per_byte": 1.0 / math.log(2)}}
    assert first["evaluation_sets"] == results["evaluation_sets"] == expected
    assert first["tasks"] == results["tasks"] == {"places": {"acc,none": 0.75}}
    assert json.loads((tmp_path / "run/results.json").read_text())["samples"] == 800


def test_the_time_of_a_run_that_went_on_has_what_it_took_over(tmp_path: Path, seconds: list[float]) -> None:
    """30 s to the checkpoint of step 40, 20 s more that are lost, 5 s to the end; its rates are those of the end."""
    with begun(tmp_path) as (made, _):
        made.step(record(40))
        seconds[0] = 32.0
        made.saved(SavedCheckpoint(40, "step-00000040", 7, 0.5, 2.0, None))
        seconds[0] = 50.0
        made.step(record(60))
    seconds[0] = 100.0
    with begun(tmp_path, before=40) as (made, stream):
        take(made, range(41, 101), seconds=0.25)
        seconds[0] = 105.0
        results = made.finish()
    assert (results["steps"], results["steps_before"]) == (100, 40)
    assert results["time_to_train_seconds"] == 35.0
    assert results["samples_per_second"]["average"] == 32.0
    assert "steps 41 to 100 in 5.0 s" in stream.getvalue()


def test_throughput_is_a_mean_over_the_last_ten_steps() -> None:
    throughput = Throughput({"samples": 8})
    assert [rate("samples") for rate in (throughput.recent, throughput.average, throughput.peak)] == [0.0, 0.0, 0.0]
    throughput.add(10.0)
    assert throughput.peak("samples") == throughput.average("samples") == 0.8
    for _ in range(9):
        throughput.add(1.0)
    assert throughput.recent("samples") == 80 / 19
    throughput.add(1.0)
    assert throughput.recent("samples") == 8.0
    assert throughput.peak("samples") == 8.0
    assert throughput.average("samples") == 88 / 20


def test_a_later_stage_reports_the_whole_run(tmp_path: Path, seconds: list[float]) -> None:
    """Stages of 60 and 40 steps in 30 s and 10 s, with 5 s between them; a step of the second has twice the tokens."""
    sections = ("model", "parallel", "train", "optimizer", "precision")
    recipe: dict[str, Any] = {name: getattr(config(), name).model_dump() for name in sections}
    recipe |= {"data": {"stages": [{"at": 60, "sequence_length": 64}]}, "log": {"profile": "70:71"}}
    totals = None
    for stage, before, each, end in zip(
        size_stages_of(config_from_sections(recipe)), (0, 60), (0.5, 0.25), (60, 100), strict=True
    ):
        made, stream = reporter(tmp_path, stage, device_name="NVIDIA H100 80GB HBM3")
        with made:
            made.start(steps_before=before, totals=totals, seconds_before=0.0)
            for step in range(before + 1, end + 1):
                seconds[0] += each
                made.step(record(step, seconds=each))
            totals = made.totals
            seconds[0] += 5.0
            results = made.finish()
        assert "no trace" not in stream.getvalue()
    assert (results["steps"], results["steps_before"], results["time_to_train_seconds"]) == (100, 0, 50.0)
    tokens = 60 * 256 + 40 * 512
    assert results["samples_per_second"] == {"average": 800 / 40, "peak": 32.0}
    assert results["tokens_per_second"] == {"average": tokens / 40, "peak": 2048.0}
    flops = sum(steps * 8 * length * flops_per_token(config().model, length) for steps, length in ((60, 32), (40, 64)))
    assert results["mfu"] == pytest.approx(flops / 40 / (4 * peak_flops("NVIDIA H100 80GB HBM3", "float32")))
    printed = stream.getvalue()
    assert "step  61/100  35.2 s elapsed  9.8 s left  250 ms/step" in printed
    assert "\n100 steps in 50.0 s, " in printed


def test_a_spike_and_a_slow_rank_are_warned_of_once(tmp_path: Path) -> None:
    """The start of the slow rank's file tells where it is."""
    with begun(tmp_path, rank=3):
        pass
    slow, equal = Straggler(3, 2.5, 2.0), Straggler(3, 1.1, 1.0)
    with begun(tmp_path) as (made, stream):
        for step, (spike, straggler) in enumerate([(7.0, slow), (8.0, slow), (0.0, equal), (0.0, slow)], 1):
            made.step(record(step, loss_spike=spike, straggler=straggler))
    events = lines(tmp_path / "run/metrics.jsonl")
    told = [event["text"].split(":")[0] for event in events if event["event"] == "warning"]
    place = f"rank 3 ({platform.node()}, cpu, stage 0) is slow"
    assert told == ["step 1", place, place], "again only once it had ended"
    for text in (
        "step 1: the loss",
        "7 standard deviations above the mean of the 20 steps before",
        "is slow: its own work, without waiting, takes 2.5 times that of the fastest rank of its stage, and 2.0 times "
        "what its own fastest 20 steps took",
    ):
        assert text in stream.getvalue()


@pytest.mark.parametrize("terminal", [100], indirect=True)
def test_on_a_terminal_the_log_has_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: int) -> None:
    """Off a terminal it is what is printed: tests/e2e/test_run_directory.py."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with begun(tmp_path) as (made, stream):
        take(made, range(1, 101))
        made.evaluation(100, held_out(1.5))
        made.warning("slow disk")
        made.finish()
    log = (tmp_path / "run/logs/rank-0000.log").read_text()
    assert "\x1b" in stream.getvalue(), "the terminal's progress line is not drawn, so this test shows nothing"
    assert "\x1b" not in log
    for part in ("model    llama", "step 100/100", "evaluation at step", "warning: slow disk", "run: "):
        assert part in log
    steps = [line[len("step ") :].split("/")[0].strip() for line in printed_steps(log)]
    assert steps == [str(step) for step in (1, *range(5, 101, 5))]
    assert max(map(len, log.splitlines())) > terminal, "lines of the log are folded to the terminal's width"
