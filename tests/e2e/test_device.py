"""The commands on this machine's accelerator: `make test-device` (on CPU ranks other files test the same)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.arch.source import ROOT
from tests.conftest import device_count
from tests.e2e.command import Outcome, metrics, miniature, shardwise
from tests.strict import build

ONE = ("--nproc", "1", "--run-dir", "run")


@pytest.fixture(autouse=True)
def accelerator(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--device") == "cpu":
        pytest.skip("needs an accelerator: make test-device")


def test_a_run_resumes_on_the_accelerator(tmp_path: Path) -> None:
    def train(*keys: str) -> Outcome:
        return shardwise("train", miniature(tmp_path), *keys, *ONE, at=tmp_path).succeeded()

    train("train.stop_after=2")
    assert "cpu" not in train().out.partition("step")[0].lower(), "the summary at the start names the CPU"
    steps = metrics(tmp_path / "run", "step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_layouts_train_like_one_process_there_and_on_the_cpu(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """With a single device, that is the accelerator against the CPU."""
    nproc = str(min(2, device_count(pytestconfig.getoption("--device"))))
    options = ("--devices", "cpu", "accelerator", "--nproc", nproc, "--steps", "2")
    done = shardwise("verify", "llama2-tiny", *options, at=tmp_path)
    assert done.code == 0, done.out + done.err


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents, by FlexAttention"])
def test_training_finds_the_graphs_of_the_command(documents: bool, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    if pytestconfig.getoption("--device") == "strict":
        pytest.skip("torch compiles nothing for the strict device")
    kept = ("compile.cache_dir=graphs", f"data.reset_attention_mask={str(documents).lower()}")
    recipe = miniature(tmp_path)
    kept += ("model.hidden_size=64",)  # FlexAttention on CUDA takes heads of at least 16 elements
    shardwise("compile", recipe, *kept, "--nproc", "1", at=tmp_path).succeeded()
    required = ("compile.enabled=true", "compile.require_cached=true")
    shardwise("train", recipe, *kept, *required, *ONE, at=tmp_path).succeeded()
    (event,) = metrics(tmp_path / "run", "compile")
    assert event["misses"] == 0
    shardwise("train", recipe, *kept[1:], "--nproc", "1", "--run-dir", "eager", at=tmp_path).succeeded()
    compiled, eager = ([each["loss"] for each in metrics(tmp_path / run, "step")] for run in ("run", "eager"))
    assert compiled == pytest.approx(eager, rel=1e-3), "in mixed precision a compiler rounds less often"


def test_bitwise_training_has_the_same_bits_again_and_on_two(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    # So wide and long that attention takes the kernels of real trainings.
    sizes = ("model.hidden_size=128", "model.max_position_embeddings=256", "train.sequence_length=256")
    keys = ("train.bitwise=true", "parallel.grain=2", "log.state_hash_every=2", *sizes)
    layouts = {"one": ("--nproc", "1"), "again": ("--nproc", "1")}
    if device_count(pytestconfig.getoption("--device")) >= 2:
        layouts["two"] = ("--nproc", "2", "parallel.tensor=2", "parallel.sequence=true")
    for run, options in layouts.items():
        shardwise("train", miniature(tmp_path), *keys, *options, "--run-dir", run, at=tmp_path).succeeded()

    def numbers(run: str) -> list[tuple[object, ...]]:
        return [(event["step"], event["loss"], event["grad_norm"]) for event in metrics(tmp_path / run, "step")]

    def hashes(run: str) -> list[object]:
        return [event["hash"] for event in metrics(tmp_path / run, "state_hash")]

    assert len(hashes("one")) == 2
    for run in layouts:
        assert numbers(run) == numbers("one"), run
        assert hashes(run) == hashes("one"), run


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
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done


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
    run("--tiny", "--deadline", 270, "--out", tmp_path, **variables)
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
    run("--tiny", "--deadline", 260, "--out", tmp_path)
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
    run("--report", tmp_path, "--results", tmp_path)
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
