"""Devices as data: each figure with its source, one's own file, and what is refused."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from shardwise.base.errors import ConfigError
from shardwise.base.prices import Price
from shardwise_plan import device_specs
from shardwise_plan.cli.wording import _PUBLISHED_ERROR
from shardwise_plan.device_specs import Device, Reliability, load_device, parse_cluster
from tests.arch.source import ROOT

TABLES = yaml.safe_load(Path(__file__).with_name("devices.yaml").read_text(encoding="utf-8"))
OWN = TABLES["own"]
FAULTS = TABLES["faults"]


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], Device]:
    """Load a device from a file of this text."""

    def loaded(text: str) -> Device:
        (tmp_path / "ours.yaml").write_text(text)
        return load_device(str(tmp_path / "ours.yaml"))

    return loaded


@pytest.mark.parametrize("name", device_specs.device_names())
def test_every_figure_has_a_source(name: str) -> None:
    figures = {key: entry for key, entry in load_device(name).figures.items() if key in device_specs.FIGURES}
    assert all(entry["source"] for key, entry in figures.items() if key != "compared_runs")


def test_a_file_may_have_a_price_and_rates_of_fp8(load: Callable[[str], Device]) -> None:
    device = load(f"{OWN}price_per_hour: 2.50 EUR\nfailures_per_year: 0.5\nfp8_tflops: 1979\n")
    assert (device.price, device.fp8, device.watts) == (Price(2.5, "EUR"), 1979e12, None)
    assert device.reliability == Reliability(failures_per_year=0.5)
    again = load(device_specs.changed_device_text(device, {"matmul": 1.0}, "measured"))
    assert again.constants == (("matmul", 1.0),)
    assert replace(again, constants=()) == device
    of_chips = load(f"{OWN}price_per_hour: 0.3351 USD/chip\ndevices_per_chip: 4\n")
    assert (of_chips.price, of_chips.per_chip) == (Price(0.3351, "USD", "chip"), 4)
    shares = "fp8_matmul_share: 0.6\nmxfp8_matmul_share: 0.5\nfp8_backward_share: 0.9\n"
    device = load(f"{OWN}fp8_tflops: 2000\n{shares}")
    reached = [device.matmul_peak("bfloat16", "fp8", block_scales=scales) * 0.8 for scales in (False, True)]
    assert reached == pytest.approx([0.6 * 2000e12, 0.5 * 2000e12])
    assert device.matmul_peak("bfloat16", None) == device.bfloat16
    assert device.fp8_backward_share == 0.9


def test_clusters_have_a_known_device_and_a_network(load: Callable[[str], Device], tmp_path: Path) -> None:
    alone = "\n".join(line for line in OWN.splitlines() if not line.startswith("network"))
    assert "network" not in device_specs.changed_device_text(load(alone), {}, "measured")
    device = str(tmp_path / "ours.yaml:8")
    assert parse_cluster(device).device.network is None
    refused = r"network\.gb_per_second of Our GPU \(unknown\) must be given for several nodes: add to its device"
    with pytest.raises(ConfigError, match=refused):
        parse_cluster(device, 2)
    nearest = r"did you mean h100\? .*; a file with the figures of your own ends with .yaml"
    with pytest.raises(ConfigError, match=nearest):
        parse_cluster("h10:8", 2)
    with pytest.raises(ConfigError, match="at least one device"):
        parse_cluster("h100:8", 0)
    with pytest.raises(ConfigError, match="must name a device"):
        parse_cluster("")
    assert (parse_cluster("a100", 2).world, parse_cluster("a100:4", 2).world) == (16, 8)


def test_a_base_gives_the_figures_that_a_file_leaves_out(load: Callable[[str], Device]) -> None:
    h100 = load_device("h100")
    price = "price_per_hour: {value: 3 USD, source: our contract}"
    ours = load(f"base: h100\nnetwork: {{gb_per_second: 25}}\n{price}\n")
    assert (ours.name, ours.accuracy) == ("NVIDIA H100 SXM (ours)", "")
    assert ours.network == replace(h100.require_network(), bandwidth=25e9)
    changed = {"key": "ours", "name": ours.name, "network": ours.network, "price": Price(3, "USD")}
    assert ours == replace(h100, **changed, accuracy="", compared_runs=0)
    priced = load("base: h100\nprice_per_hour: 3 USD\n")
    assert priced.compared_runs == h100.compared_runs, "a step takes as long at any price"
    cpu = load("base: cpu\nname: Ours\n")
    assert (cpu.name, cpu.is_accelerator) == ("Ours", False)


def test_the_page_has_the_accuracy_of_a_device_and_every_key() -> None:
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    row = r"^\| all sources that were never used for the fit \| .* ([\d.]+)% \|$"
    (published,) = re.findall(row, page, re.MULTILINE)
    assert math.ceil(float(published)) == round(100 * _PUBLISHED_ERROR)
    trn1 = load_device("trn1")
    assert f"| AWS Neuron, Trainium1 | {trn1.compared_runs} | 8.9% | {trn1.compared_error:.1%} |" in page
    (measured,) = re.findall(r"on one NVIDIA H200.*?predicted within ([\d.]+)%", page, re.DOTALL)
    for name in ("h100", "h200"):
        told = f"steps on one H200 were predicted within {math.ceil(float(measured))}%"
        assert load_device(name).accuracy == told
    keys = [part for key in device_specs.FIGURES for part in key.split(".")]
    assert not [key for key in (*keys, "base", "accuracy", "price_per_hour", "type") if f"`{key}`" not in page]


def test_impossible_figures_are_refused(load: Callable[[str], Device]) -> None:
    for old, new, message in FAULTS:
        with pytest.raises(ConfigError, match=message):
            load(OWN.replace(old, new))
    for base in ("h10", "ours.yaml"):
        with pytest.raises(ConfigError, match=r"ours\.yaml: base: unknown device .* devices are "):
            load(f"base: {base}\n")
