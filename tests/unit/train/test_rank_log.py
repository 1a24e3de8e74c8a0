"""Rank 0's own log: what the terminal is told, as plain lines, and why a run failed."""

from pathlib import Path

import pytest
from rich.console import Console

from shardwise.train import reporter as report
from shardwise.train.reporter import Reporter
from tests.unit.train.test_report import held_out, lines, record, reporter

STEPS = 100


def train(made: Reporter) -> None:
    with made:
        made.start()
        for step in range(1, STEPS + 1):
            made.step(record(step))
        made.evaluation(STEPS, held_out(1.5))
        made.warning("slow disk")
        made.finish()


def test_off_a_terminal_the_log_repeats_what_is_printed(tmp_path: Path) -> None:
    made, stream = reporter(tmp_path)
    train(made)
    log = (tmp_path / "run/logs/rank-0000.log").read_text()
    assert log == stream.getvalue(), "run/logs/rank-0000.log must hold the lines that standard output got"
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
    log = (tmp_path / "run/logs/rank-0000.log").read_text()
    assert "\x1b" not in log, "rank 0's log holds terminal control codes"
    steps = [line[len("step ") :].split("/")[0].strip() for line in log.splitlines() if line.startswith("step ")]
    assert steps == [str(step) for step in (1, *range(5, STEPS + 1, 5))]
    assert max(map(len, log.splitlines())) > 100, "lines of the log are folded to the terminal's width"


def test_the_log_says_why_the_run_failed(tmp_path: Path) -> None:
    made, _ = reporter(tmp_path)

    def fail() -> None:
        with made:
            made.start()
            raise RuntimeError("loss is nan\nat layer 3")

    with pytest.raises(RuntimeError):
        fail()
    assert (tmp_path / "run/logs/rank-0000.log").read_text().endswith("failed: RuntimeError: loss is nan\nat layer 3\n")
    assert lines(tmp_path / "run/metrics.jsonl")[-1]["reason"] == "failed: RuntimeError: loss is nan"
