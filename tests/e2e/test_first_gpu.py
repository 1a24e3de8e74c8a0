"""`make bench-gpu` with tiny shapes: each question and the report, on any device."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.arch.source import ROOT
from tests.strict import build

PROGRAM = ROOT / "benchmarks" / "first_gpu" / "run.py"
NOT_ON_A_CPU = ("No viable backend", "from the 'CPU' backend")
"""Parts of the errors of kernels that only a GPU has."""
OF_THE_STRICT_DEVICE = (
    *("Autocast", "histogram_cpu", "No backend type associated", "fake_process_group", "grad_scale and"),
    *("FlexAttention", "takes as one graph"),
)
"""Parts of the errors of what torch has for no device in software."""


def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


def lines(folder: Path) -> list[dict[str, Any]]:
    """What was measured, without the marks of what is answered."""
    found = [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]
    return [line for line in found if "answered" not in line]


@pytest.mark.slow
def test_the_questions_are_answered_on_the_strict_device(tmp_path: Path) -> None:
    if reason := build.missing():
        pytest.skip(reason)
    build.library()
    variables = build.variables() | {"STRICT_DELAY": "0"}
    outcome = run("--tiny", "--deadline", 270, "--out", tmp_path, **variables)
    assert outcome.returncode == 0, outcome.stderr
    found = lines(tmp_path)
    errors = [line for line in found if "error" in line or "stopped" in line]
    known = (*NOT_ON_A_CPU, *OF_THE_STRICT_DEVICE)
    assert [line for line in errors if not any(part in line.get("error", "") for part in known)] == []
    answered = {line["question"] for line in found if line not in errors}
    assert answered >= {"correctness", "side_by_side", "fp8", "experts", "switches", "training"}
    (tests,) = (line for line in found if line["question"] == "correctness" and "passed" in line)
    assert (tests["passed"], tests["failed"]) == (1, 0)


@pytest.mark.slow
def test_every_question_has_figures_and_the_report_a_table_for_each(tmp_path: Path) -> None:
    outcome = run("--tiny", "--deadline", 260, "--out", tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    found = lines(tmp_path)
    errors = [line for line in found if "error" in line or "stopped" in line]
    assert not [line for line in errors if not any(part in line.get("error", "") for part in NOT_ON_A_CPU)]
    with_figures = {line["question"] for line in found if line not in errors}
    trainings = [line for line in found if line["question"] == "training"]
    assert all(line["tokens_per_second"] > 0 for line in trainings)
    assert {line["program"] for line in trainings} == {"eager", "compiled"}
    beside = [line["program"] for line in found if line["question"] == "side_by_side" and "step_ms" in line]
    assert beside == ["shardwise, compiled", "transformers, compiled", "shardwise, eager", "transformers, eager"]
    (tests,) = (line for line in found if line["question"] == "correctness" and "passed" in line)
    assert (tests["passed"] + tests["skipped"], tests["failed"]) == (1, 0), "it needs an accelerator"
    outcome = run("--report", tmp_path, "--results", tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    report = (tmp_path / "first_gpu.md").read_text(encoding="utf-8")
    assert report.count("\n**") == len(with_figures) == 16
    measured = (tmp_path / "lines.jsonl").read_text()
    cut = measured.index('"question": "experts"')
    (tmp_path / "lines.jsonl").write_text(measured[: measured.index("\n", cut) + 20])
    outcome = run("--tiny", "--deadline", 260, "--out", tmp_path, "environment", "training", "experts")
    again = [json.loads(line)["question"] for line in outcome.stdout.splitlines()]
    assert again.count("environment") == 0, "what an earlier session answered is not measured again"
    assert again.count("experts") == 2
    assert again.count("training") == len(trainings)
