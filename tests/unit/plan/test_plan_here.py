"""`shardwise plan --calibrate` and `plan RUN`: what is refused, and a run beside its prediction."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.config import check_layout, load_config
from shardwise_plan.device_specs import Cluster, load_device
from shardwise_plan.step_time import step_time
from tests.command_line import CommandLine
from tests.e2e.command import metrics, shardwise

SHORT = ("train.steps=6", "train.eval_every=0", "log.sample_tokens=0", "log.tensorboard=false")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--calibrate", "-o", "here.txt"], "-o (here.txt) must end in .yaml, by which --device knows a file"),
        (["--calibrate", "-o", "there.yaml"], "-o there.yaml: the file exists already"),
        ([], "RECIPE must be named, or the folder of a run, or --calibrate or --show-device given"),
        (["llama2-tiny"], "--device must name a device, such as h100:8, or a YAML file, as --calibrate writes it"),
    ],
)
def test_what_cannot_be_is_told_before_the_work(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.yaml").write_text("name: a device\n")
    assert text in cli.refused("plan", *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["there.yaml"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("run")
    shardwise("train", "llama2-tiny", *SHORT, "--run-dir", "run", at=at).succeeded()
    return at / "run"


def test_a_run_beside_its_prediction(run: Path, tmp_path: Path, cli: CommandLine) -> None:
    found = cli.facts("plan", run, "--device", "cpu:1")
    steps = [event["step_seconds"] for event in metrics(run, "step")][2:]
    assert found["steps"] == len(steps) == 4
    assert min(steps) <= found["step_seconds"]["measured"] <= max(steps)
    for kind, rel in (("predicted", 1e-6), ("measured", 0.5)):  # medians of the parts are about the median step
        parts = sum(pair[kind] for pair in found["parts_seconds"].values())
        assert parts == pytest.approx(found["step_seconds"][kind], rel=rel)
    for kind, pair in found["memory_bytes"].items():
        assert pair["predicted"] == pair["measured"], kind


def test_the_corrected_device_explains_the_run(run: Path, tmp_path: Path, cli: CommandLine) -> None:
    written = tmp_path / "corrected.yaml"
    found = cli.facts("plan", run, "--device", "cpu:1", "--write", written)
    config = load_config("llama2-tiny", SHORT)
    time = step_time(config, check_layout(config, 1), Cluster(load_device(str(written)), 1, 1))
    computed = time.total - time.optimizer - time.communication
    assert computed == pytest.approx(found["parts_seconds"]["computation"]["measured"], rel=0.25)


def test_a_run_of_other_ranks_is_refused(run: Path, cli: CommandLine) -> None:
    said = cli.refused("plan", run, "--device", "cpu:2")
    assert "--device must name as many devices as the run had ranks (1)" in said
    assert "key=value must be left out: RUN" in cli.refused("plan", run, "train.steps=3", "--device", "cpu:1")


@pytest.mark.slow
def test_this_machine_is_measured(tmp_path: Path) -> None:
    """For about a minute, by two ranks."""
    done = shardwise("plan", "--calibrate", "-o", "here.yaml", at=tmp_path)
    assert done.code == 0, done.err
    assert "link between 2 ranks" in done.out
    device = load_device(str(tmp_path / "here.yaml"))
    sources = [entry["source"] for entry in device.figures.values() if isinstance(entry, dict)]
    assert all(source.startswith(("measured", "assumption", "torch", "the r")) for source in sources)
    shown = shardwise("plan", "llama2-tiny", "--device", "here.yaml:2", at=tmp_path).succeeded().out
    assert "layouts, these were dropped" in shown
