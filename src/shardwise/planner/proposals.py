"""Which of several plans a team may want, and how each depends on what is assumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from shardwise.base.errors import ConfigError, listing
from shardwise.planner.device_specs import Device
from shardwise.planner.plan import Plan

Objective = Literal["time", "cost", "energy"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
_NETWORK = 0.7
_MATMUL = 0.9
_FAILURES = 2.0


def objective_of(plan: Plan, objective: Objective) -> float:
    """Return what a plan needs of the objective, the less the better.

    Raises:
        ConfigError: the device has no price, or its power is unknown.
    """
    device = plan.cluster.device
    if objective == "time":
        return plan.calendar.seconds
    value = plan.cost if objective == "cost" else plan.kilowatt_hours
    if value is not None:
        return value
    if objective == "cost":
        raise ConfigError(
            f"--objective (cost) must have a price of {device.name}: give --price, such as --price '2.50 USD', or "
            "price_per_hour in the device's file"
        )
    raise ConfigError(
        f"--objective (energy) must have the power of {device.name}, which is not published: {device.file_text} watts"
    )


@dataclass(frozen=True)
class Proposal:
    """A plan of the list, and the reasons for it.

    Attributes:
        names: what it is, such as `fastest`.
        plan: the plan.
        reason: why it is proposed, as a part of a sentence.
    """

    names: tuple[str, ...]
    plan: Plan
    reason: str

    @property
    def title(self) -> str:
        return listing(self.names)


def proposals(plans: Sequence[Plan]) -> list[Proposal]:
    """Return the fastest of the plans, the cheapest and the most robust one; equal ones are one proposal."""
    fastest = min(plans, key=lambda plan: plan.calendar.seconds)
    cheapest = min(plans, key=lambda plan: plan.device_hours)
    roomy = [plan for plan in plans if not plan.is_tight]
    robust = min(roomy or plans, key=lambda plan: all_worse(plan).calendar.seconds)
    room = "at least a tenth of the memory free, and the" if roomy else "no layout has a tenth of the memory free; the"
    reasons = {
        "fastest": (fastest, "the shortest time on the calendar"),
        "cheapest": (cheapest, "the fewest device-hours"),
        "most robust": (
            robust,
            f"{room} shortest time if network, matrix products and devices are all worse than assumed",
        ),
    }
    chosen: list[Proposal] = []
    for name, (plan, reason) in reasons.items():
        equal = next((number for number, proposal in enumerate(chosen) if proposal.plan is plan), None)
        if equal is None:
            chosen.append(Proposal((name,), plan, reason))
        else:
            former = chosen[equal]
            chosen[equal] = replace(former, names=(*former.names, name), reason=f"{former.reason}; {reason}")
    return chosen


@dataclass(frozen=True)
class Sensitivity:
    """The time of a plan if an assumption is wrong.

    Attributes:
        assumption: what is different.
        seconds: time on the calendar.
    """

    assumption: str
    seconds: float


def _slower_network(device: Device) -> Device:
    if device.network is None:
        return device
    return replace(device, network=replace(device.network, bandwidth=_NETWORK * device.network.bandwidth))


def _slower_products(device: Device) -> Device:
    shares = {name: getattr(device, name) for name in ("matmul_share", "fp8_matmul_share", "mxfp8_matmul_share")}
    return replace(device, **{name: _MATMUL * share for name, share in shares.items() if share is not None})


def _more_failures(device: Device) -> Device:
    failures = _FAILURES * device.reliability.failures_per_year
    return replace(device, reliability=replace(device.reliability, failures_per_year=failures))


_CHANGES: tuple[tuple[str, Callable[[Device], Device]], ...] = (
    (f"the network has {1 - _NETWORK:.0%} less bandwidth", _slower_network),
    (f"matrix products reach {1 - _MATMUL:.0%} less of the peak", _slower_products),
    ("devices fail twice as often", _more_failures),
)


def sensitivities(plan: Plan) -> list[Sensitivity]:
    """Return the times of a plan if one assumption is wrong, and if all are."""
    single = [Sensitivity(name, plan.on(changed(plan.cluster.device)).calendar.seconds) for name, changed in _CHANGES]
    return [*single, Sensitivity("all of these", all_worse(plan).calendar.seconds)]


def all_worse(plan: Plan) -> Plan:
    """Return a plan on devices that are worse than assumed in all respects."""
    device = plan.cluster.device
    for _, changed in _CHANGES:
        device = changed(device)
    return plan.on(device)
