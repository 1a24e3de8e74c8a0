"""The price of a training: of a device, a chip or a node, and for each of several devices."""

import json
import re
from dataclasses import replace

import pytest

from shardwise.base.prices import Price
from shardwise.cli.entry import main
from shardwise_plan.cli.rows import _PUBLISHED_ERROR
from shardwise_plan.device_specs import cluster, load_device

LEAST_RATIO, MOST_RATIO = 1 / (1 + _PUBLISHED_ERROR), 1 / (1 - _PUBLISHED_ERROR)


def test_a_price_for_each_device_or_one_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["plan", "llama2-7b", "train.global_batch=64", "parallel.pipeline=1", "--device", "h100:8,b200:8"]
    for price, each in (("2.50 USD,5.00USD", [2.5, 5.0]), ("4 usd", [4.0, 4.0])):
        assert main([*small, "--price", price, "--json"]) == 0
        plans = json.loads(capsys.readouterr().out)["devices"].values()
        assert [plan["cost"] / plan["device_hours"] for plan in plans] == pytest.approx(each)
        assert {plan["currency"] for plan in plans} == {"USD"}
    assert main([*small, "--price", "2.50 USD,5.00 EUR"]) == 2
    assert "--price (EUR and USD) must have one currency for all devices" in capsys.readouterr().err


@pytest.mark.slow
def test_a_price_is_of_a_device_a_chip_or_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "llama2-7b", "train.global_batch=64", "parallel.tensor=8", "--device", "trn2", "--nodes", "2"]
    for price, an_hour in (
        ("1 USD", 128),
        ("1 USD/hour", 128),
        ("1 USD/device", 128),
        ("4 USD/chip", 128),
        ("40 USD/node/hour", 80),
    ):
        assert main([*command, "--price", price, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)["plans"][0]
        assert plan["cost"] == pytest.approx(an_hour * plan["device_hours"] / 128)
    assert main([*command, "--price", "40 USD/node"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Price: 40 USD an hour for a node, 80 USD an hour for 2 nodes. A node has 64 devices." in out


@pytest.mark.parametrize(("per_node", "chips"), [(2, 1), (6, 2), (8, 2)])
def test_a_chip_is_paid_as_a_whole(per_node: int, chips: int) -> None:
    device = replace(load_device("trn2"), price=Price.of("2 USD/chip", "--price"))
    machines = replace(cluster("trn2", 3), device=device, per_node=per_node)
    assert (machines.priced_units, machines.price_per_hour) == (3 * chips, 6 * chips)


def test_a_price_of_one_device_adds_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["plan", "llama2-7b", "train.global_batch=64", "parallel.pipeline=1", "--device", "h100:8"]
    assert main([*small, "train.steps=1000000", "--price", "2 CHF"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^layouts .* +time +CHF$", out, re.MULTILINE)
    (proposed,) = re.findall(r"^Fastest and cheapest.*: layout (\d+) on 8 devices, \d+ d \d+ h, [\d,]+ CHF$", out, re.M)
    (price,) = re.findall(rf"^ *{proposed}  .* ([\d,.]+)$", out, re.MULTILINE)
    low, high = re.findall(r"([\d,]+) to ([\d,]+) CHF", out.replace("\n", " "))[0]
    price, least, most = (float(number.replace(",", "")) for number in (price, low, high))
    assert (least / LEAST_RATIO, most / MOST_RATIO) == pytest.approx((price, price), rel=1e-3)


def test_a_price_of_the_recipe_is_that_of_one_device_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Other devices that are compared have other prices; `--price` replaces it."""
    small = ["plan", "llama2-7b", "train.global_batch=64", "parallel.pipeline=1", "log.price=2.50 USD", "--json"]
    for device, more, each in (("h100:8", [], 2.5), ("h100:8", ["--price", "3 EUR"], 3.0), ("h100:8,b200:8", [], None)):
        assert main([*small, "--device", device, *more]) == 0
        found = json.loads(capsys.readouterr().out)
        plans = found["devices"].values() if "," in device else found["plans"][:1]
        assert [plan.get("cost") and plan["cost"] / plan["device_hours"] for plan in plans] == pytest.approx(
            [each] * len(plans)
        )


@pytest.mark.parametrize(
    ("price", "message"),
    [
        ("1 USD,2 USD,3 USD", r"--price \(1 USD,2 USD,3 USD\) must be one price, or one for each of the 2 devices"),
        ("2 USD/rack", r"--price \(2 USD/rack\) must be a price of a device, a chip or a node"),
        ("2.50", r"--price \(2\.50\) must name its currency, as in '2\.50 USD'"),
    ],
)
def test_other_prices_are_refused(price: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama2-7b", "--device", "h100:8,b200:8", f"--price={price}"]) == 2
    assert re.search(message, capsys.readouterr().err)
