"""The price of a training: of a device, a chip or a node, and for each of several devices."""

import json
import re
from dataclasses import replace

import pytest

from shardwise.base.units import Price
from shardwise_plan.device_specs import load_device, parse_cluster
from tests.command_line import CommandLine

SMALL = ("plan", "llama2-7b", "train.global_batch=64", "parallel.pipeline=1", "train.micro_batch=1", "optimizer.zero=1")


def test_a_price_for_each_device_or_one_for_all(cli: CommandLine) -> None:
    small = [*SMALL, "--device", "h100:8,b200:8"]
    for price, each in (("2.50 USD,5.00USD", [2.5, 5.0]), ("4 usd", [4.0, 4.0])):
        plans = cli.facts(*small, "--price", price)["devices"].values()
        assert [plan["cost"] / plan["device_hours"] for plan in plans] == pytest.approx(each)
        assert {plan["currency"] for plan in plans} == {"USD"}
    said = cli.refused(*small, "--price", "2.50 USD,5.00 EUR")
    assert "--price (EUR and USD) must have one currency for all devices" in said


@pytest.mark.parametrize(("per_node", "chips"), [(2, 1), (6, 2), (8, 2)])
def test_a_chip_is_paid_as_a_whole(per_node: int, chips: int) -> None:
    device = replace(load_device("trn2"), price=Price.of("2 USD/chip", "--price"))
    machines = replace(parse_cluster("trn2", 3), device=device, per_node=per_node)
    assert (machines.priced_units, machines.price_per_hour) == (3 * chips, 6 * chips)


def test_a_price_of_the_recipe_is_that_of_one_device_alone(cli: CommandLine) -> None:
    """Other devices that are compared have other prices; `--price` replaces it."""
    small = [*SMALL, "log.price=2.50 USD", "--json"]
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
