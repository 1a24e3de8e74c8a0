"""The price of a training: of a device, a chip or a node, and for each of several devices."""

import json
import re
from dataclasses import replace

import pytest

from shardwise.base.prices import Price
from shardwise_plan.cli.wording import _PUBLISHED_ERROR
from shardwise_plan.device_specs import load_device, parse_cluster
from tests.command_line import CommandLine

LEAST_RATIO, MOST_RATIO = 1 / (1 + _PUBLISHED_ERROR), 1 / (1 - _PUBLISHED_ERROR)


def test_a_price_for_each_device_or_one_for_all(cli: CommandLine) -> None:
    small = ["plan", "llama2-7b", "train.global_batch=64", "parallel.pipeline=1", "--device", "h100:8,b200:8"]
    for price, each in (("2.50 USD,5.00USD", [2.5, 5.0]), ("4 usd", [4.0, 4.0])):
        plans = cli.facts(*small, "--price", price)["devices"].values()
        assert [plan["cost"] / plan["device_hours"] for plan in plans] == pytest.approx(each)
        assert {plan["currency"] for plan in plans} == {"USD"}
    said = cli.refused(*small, "--price", "2.50 USD,5.00 EUR")
    assert "--price (EUR and USD) must have one currency for all devices" in said


@pytest.mark.slow
def test_a_price_is_of_a_device_a_chip_or_a_node(cli: CommandLine) -> None:
    command = ["plan", "llama2-7b", "train.global_batch=64", "parallel.tensor=8", "--device", "trn2", "--nodes", "2"]
    alike = dict.fromkeys(("1 USD", "1 USD/hour", "1 USD/device", "4 USD/chip"), 128)
    for price, an_hour in {**alike, "40 USD/node/hour": 80}.items():
        plan = cli.facts(*command, "--price", price)["plans"][0]
        assert plan["cost"] == pytest.approx(an_hour * plan["device_hours"] / 128)
    out = " ".join(cli(*command, "--price", "40 USD/node").out.split())
    assert "Price: 40 USD an hour for a node, 80 USD an hour for 2 nodes. A node has 64 devices." in out


@pytest.mark.parametrize(("per_node", "chips"), [(2, 1), (6, 2), (8, 2)])
def test_a_chip_is_paid_as_a_whole(per_node: int, chips: int) -> None:
    device = replace(load_device("trn2"), price=Price.of("2 USD/chip", "--price"))
    machines = replace(parse_cluster("trn2", 3), device=device, per_node=per_node)
    assert (machines.priced_units, machines.price_per_hour) == (3 * chips, 6 * chips)


def test_a_price_of_one_device_adds_a_column(cli: CommandLine) -> None:
    small = ["plan", "llama2-7b", "train.global_batch=64", "parallel.pipeline=1", "--device", "h100:8"]
    out = cli(*small, "train.steps=1000000", "--price", "2 CHF").out
    assert re.search(r"^layouts .* +time +CHF$", out, re.MULTILINE)
    (proposed,) = re.findall(r"^Fastest and cheapest.*: layout (\d+) on 8 devices, \d+ d \d+ h, [\d,]+ CHF$", out, re.M)
    (price,) = re.findall(rf"^ *{proposed}  .* ([\d,.]+)$", out, re.MULTILINE)
    low, high = re.findall(r"([\d,]+) to ([\d,]+) CHF", out.replace("\n", " "))[0]
    price, least, most = (float(number.replace(",", "")) for number in (price, low, high))
    assert (least / LEAST_RATIO, most / MOST_RATIO) == pytest.approx((price, price), rel=1e-3)


def test_a_price_of_the_recipe_is_that_of_one_device_alone(cli: CommandLine) -> None:
    """Other devices that are compared have other prices; `--price` replaces it."""
    small = ["plan", "llama2-7b", "train.global_batch=64", "parallel.pipeline=1", "log.price=2.50 USD", "--json"]
    for device, more, each in (("h100:8", [], 2.5), ("h100:8", ["--price", "3 EUR"], 3.0), ("h100:8,b200:8", [], None)):
        found = json.loads(cli(*small, "--device", device, *more).out)
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
def test_other_prices_are_refused(price: str, message: str, cli: CommandLine) -> None:
    assert re.search(message, cli.refused("plan", "llama2-7b", "--device", "h100:8,b200:8", f"--price={price}"))
