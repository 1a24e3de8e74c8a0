"""Rank 0's own log: what the terminal is told, as plain lines, and why a run failed."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.config import Layout, load_config
from shardwise.estimates.memory import expected_memory
from shardwise.models.parameter_counts import parameter_count
from shardwise.runs.folder import RunDirectory
from shardwise.train import reporter as report
from shardwise.train.evaluation import Evaluation
from shardwise.train.reporter import Reporter
from shardwise.train.step_record import StepRecord

CONFIG = load_config("llama2-tiny", [])
STEPS = CONFIG.train.steps


def reporter(path: Path, rank: int = 0) -> tuple[Reporter, io.StringIO]:
    stream = io.StringIO()
    made = Reporter(
        RunDirectory(path),
        CONFIG,
        Layout(1),
        rank,
        device_name="cpu",
        precision=CONFIG.precision.resolved(False),
        parameters=parameter_count(CONFIG.model),
        memory=dict(expected_memory(CONFIG, Layout(1)).rows()),
        stream=stream,
    )
    return made, stream


def record(step: int) -> StepRecord:
    return StepRecord(step, 1 / 3, 1 / 3, 1, 1e-3, 0.5, 10.0, step * 512, step * 8, 0.5, 0.0, 1000)


def train(made: Reporter) -> None:
    with made:
        made.start()
        for step in range(1, STEPS + 1):
            made.step(record(step))
        made.evaluation(STEPS, Evaluation({"lm": 1.5}, {"lm": 8}, {}, 8, 1.0))
        made.warning("slow disk")
        made.finish()


def test_off_a_terminal_the_log_repeats_what_is_printed(tmp_path: Path) -> None:
    made, stream = reporter(tmp_path)
    train(made)
    log = (tmp_path / "logs/rank-0000.log").read_text()
    assert log == stream.getvalue(), "logs/rank-0000.log must hold the lines that standard output got"
    for part in ("model    llama", f"step {STEPS}/{STEPS}", "evaluation at step", "warning: slow disk", "run: "):
        assert part in log, f"{part!r} is missing in rank 0's log"


def test_on_a_terminal_the_log_stays_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(
        report,
        "Console",
        lambda file, **options: Console(file=file, **({"force_terminal": True, "width": 100} | options)),
    )
    made, stream = reporter(tmp_path)
    train(made)
    assert "\x1b" in stream.getvalue(), "the terminal's progress line is not drawn, so this test shows nothing"
    log = (tmp_path / "logs/rank-0000.log").read_text()
    assert "\x1b" not in log, "rank 0's log holds terminal control codes"
    steps = [line[len("step ") :].split("/")[0].strip() for line in log.splitlines() if line.startswith("step ")]
    assert steps == [str(step) for step in range(1, STEPS + 1)]
    assert max(map(len, log.splitlines())) > 100, "lines of the log are folded to the terminal's width"


def test_the_log_says_why_the_run_failed(tmp_path: Path) -> None:
    made, _ = reporter(tmp_path)

    def fail() -> None:
        with made:
            made.start()
            raise RuntimeError("loss is nan\nat layer 3")

    with pytest.raises(RuntimeError):
        fail()
    assert (tmp_path / "logs/rank-0000.log").read_text().endswith("failed: RuntimeError: loss is nan\nat layer 3\n")
