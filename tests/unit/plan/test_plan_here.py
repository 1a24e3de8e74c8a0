"""`shardwise plan --calibrate` and `plan RUN`: a run beside its prediction, and this machine's figures."""

import datetime
import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from shardwise.config import check_layout, load_config
from shardwise_plan import calibration_fit, device_seconds
from shardwise_plan.calibration_fit import Measurements, calibration_trainings
from shardwise_plan.device_seconds import DeviceConstants, device_constants
from shardwise_plan.device_specs import Cluster, Device, device_yaml, load_device, parse_device, sourced_figure
from shardwise_plan.step_time import step_time
from tests.command_line import CommandLine
from tests.e2e.command import metrics, shardwise

SHORT = ("train.steps=6", "train.eval_every=0", "log.sample_tokens=0", "log.tensorboard=false")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("run")
    shardwise("train", "llama2-tiny", *SHORT, "--run-dir", "run", at=at).succeeded()
    return at / "run"


def test_a_run_beside_its_prediction(run: Path, tmp_path: Path, cli: CommandLine) -> None:
    """And the corrected device explains the run."""
    written = tmp_path / "corrected.yaml"
    found = cli.facts("plan", run, "--device", "cpu:1", "--write", written)
    steps = [event["step_seconds"] for event in metrics(run, "step")][2:]
    assert found["steps"] == len(steps) == 4
    assert min(steps) <= found["step_seconds"]["measured"] <= max(steps)
    for kind, rel in (("predicted", 1e-6), ("measured", 0.5)):  # medians of the parts are about the median step
        parts = sum(pair[kind] for pair in found["parts_seconds"].values())
        assert parts == pytest.approx(found["step_seconds"][kind], rel=rel)
    for kind, pair in found["memory_bytes"].items():
        assert pair["predicted"] == pair["measured"], kind
    config = load_config("llama2-tiny", SHORT)
    time = step_time(config, check_layout(config, 1), Cluster(load_device(str(written)), 1, 1))
    computed = time.total - time.optimizer - time.communication
    assert computed == pytest.approx(found["parts_seconds"]["computation"]["measured"], rel=0.25)
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


DAY = datetime.date(2026, 1, 2)


def machine() -> Device:
    """A CPU with constants of its own."""
    cpu = load_device("cpu")
    figures = {"host": 2e-5, "memory": 0.5, "matmul": 0.8, "wait": 3e-4, "step": 1e-3, "action": 2e-4}
    return replace(cpu, constants=tuple(figures.items()))


def found(device: Device, ranks: int) -> Measurements:
    """What that machine would measure."""
    constants = device_constants(device)
    seconds = []
    for config in calibration_trainings(ranks):
        time = step_time(config, check_layout(config, ranks), Cluster(device, 1, ranks))
        seconds.append(time.total)
    shapes = calibration_fit.PRODUCTS
    products = [device_seconds.matmul(device, constants, device.float32, *shape) + constants.host for shape in shapes]
    link = device.node
    sums = [(size, 2 * (size / 2 / link.bandwidth + link.latency)) for size in (64.0, 2.0**24)]
    return Measurements(
        "a processor", "cpu", "2.13.0", 1, ranks, device.memory, 1, shapes,
        {"float32": products, "bfloat16": products}, (2.0**29, 2.0**29 / device.memory_bandwidth), constants.host,
        sums if ranks > 1 else [], seconds,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_device_file_predicts_what_was_measured(ranks: int) -> None:
    measured = found(machine(), ranks)
    text = calibration_fit.measured_device_file(measured, DAY)
    device = parse_device("here", text, "here.yaml")
    assert not device.is_accelerator
    assert device.per_node == ranks
    for config, seconds in zip(calibration_trainings(ranks), measured.steps, strict=True):
        time = step_time(config, check_layout(config, ranks), Cluster(device, 1, ranks))
        assert time.total == pytest.approx(seconds, rel=0.1), config
    source = f"measured 2026-01-02: torch 2.13.0, 1 thread(s), {ranks} rank(s)"
    assert device.figures["float32_tflops"]["source"] == source
    assert ("assumption" in device.figures["node_link.latency_us"]["source"]) == (ranks == 1)
    if ranks == 2:
        assert device.node.bandwidth == pytest.approx(machine().node.bandwidth, rel=0.02)
        assert device.node.latency == pytest.approx(machine().node.latency, rel=0.02)


def test_the_search_finds_the_constants_of_the_least_error() -> None:
    start = device_constants(load_device("cpu"))
    wanted = replace(start, host=start.host * 3, step=start.step / 2)

    def badness(tried: DeviceConstants) -> float:
        return math.log(tried.host / wanted.host) ** 2 + math.log(tried.step / wanted.step) ** 2

    fitted = calibration_fit._coordinate_search(start, badness)
    assert (fitted.host, fitted.step) == pytest.approx((wanted.host, wanted.step), rel=0.05)
    assert fitted.matmul == start.matmul


def test_what_else_runs_makes_no_figure() -> None:
    """Half of the steps are disturbed."""
    found = [calibration_fit.undisturbed_seconds(seconds) for seconds in ([1.0, 5.0] * 10, [2.0])]
    assert found == [1.0, 2.0]


@pytest.mark.parametrize("value", [2e-05, 1.5e-07, 0.25, 3e16])
def test_figures_of_any_size_are_numbers_in_yaml(value: float) -> None:
    assert yaml.safe_load(device_yaml({"host": sourced_figure(value, "measured")}))["host"]["value"] == value
