"""The plans among several that a team may want, and how each depends on what is assumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from shardwise.base import units
from shardwise.base.errors import ConfigError, listing
from shardwise_plan.plan import Plan

Objective = Literal["time", "cost", "energy"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
_NETWORK = 0.7
_MATMUL = 0.9
_FAILURES = 2.0
_FREED_PARTS = 1.1


def objective_value(plan: Plan, objective: Objective) -> float:
    """Return what a plan needs of the objective, the less the better.

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
    """A plan of the list, and the reasons for it."""

    names: tuple[str, ...]  # what it is, such as `fastest`
    plan: Plan
    reason: str  # why it is proposed, as a part of a sentence

    @property
    def title(self) -> str:
        return listing(self.names)


def recommended_plan(plans: Sequence[Plan]) -> Plan:
    """Return the first of the plans that leaves a tenth of the memory free; the first one where none does."""
    return next((plan for plan in plans if not plan.is_tight), plans[0])


def proposals(plans: Sequence[Plan]) -> list[Proposal]:
    """Return the fastest of the plans, the cheapest and the most robust one; equal ones are one proposal.

    Plans that may not fit, since they leave less than a tenth of the memory, are proposed only where no other one is.
    """
    roomy = [plan for plan in plans if not plan.is_tight]
    candidates = roomy or plans
    fastest = min(candidates, key=lambda plan: plan.calendar.seconds)
    cheapest = min(candidates, key=lambda plan: plan.device_hours)
    room = "at least a tenth of the memory free, and the" if roomy else "no layout has a tenth of the memory free; the"
    shortest = "the shortest time on the calendar"
    first = min(plans, key=lambda plan: plan.calendar.seconds)
    if first.calendar.seconds < fastest.calendar.seconds:
        shortest += (
            f" with a tenth of the memory free: layout {plans.index(first) + 1} takes "
            f"{units.duration(first.calendar.seconds)}, but leaves {units.size(first.headroom)} and may not fit"
        )
    if (likely := min(candidates, key=lambda plan: _longer_steps(plan).calendar.seconds)) is not fastest:
        shortest += (
            f"; if steps with ZeRO-2 or ZeRO-3 take {_FREED_PARTS - 1:.0%} longer, as published runs did, layout "
            f"{plans.index(likely) + 1} is faster"
        )
    reasons = {
        "fastest": (fastest, shortest),
        "cheapest": (cheapest, "the fewest device-hours"),
        "most robust": (
            min(candidates, key=lambda plan: _all_worse(plan).calendar.seconds),
            f"{room} shortest time if network, matrix products, devices and steps with ZeRO-2 or ZeRO-3 are all worse "
            "than assumed",
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
    return [replace(proposal, reason=f"{proposal.reason}{_doubt(proposal.plan)}") for proposal in chosen]


def _doubt(plan: Plan) -> str:
    return f"; it leaves {units.size(plan.headroom)}, which may not suffice" if plan.is_tight else ""


@dataclass(frozen=True)
class _Sensitivity:
    assumption: str
    seconds: float


def _slower_network(plan: Plan) -> Plan:
    device = plan.cluster.device
    if device.network is None:
        return plan
    return plan.on(replace(device, network=replace(device.network, bandwidth=_NETWORK * device.network.bandwidth)))


def _slower_products(plan: Plan) -> Plan:
    device = plan.cluster.device
    shares = {name: getattr(device, name) for name in ("matmul_share", "fp8_matmul_share", "mxfp8_matmul_share")}
    return plan.on(replace(device, **{name: _MATMUL * share for name, share in shares.items() if share is not None}))


def _more_failures(plan: Plan) -> Plan:
    device = plan.cluster.device
    failures = _FAILURES * device.reliability.failures_per_year
    return plan.on(replace(device, reliability=replace(device.reliability, failures_per_year=failures)))


def _longer_steps(plan: Plan) -> Plan:
    return replace(plan, time=plan.time.scaled(_FREED_PARTS)) if plan.frees_parts else plan


# A change of the device computes the step again, so that of the step itself comes last.
_CHANGES: tuple[tuple[str, Callable[[Plan], Plan]], ...] = (
    (f"the network has {1 - _NETWORK:.0%} less bandwidth", _slower_network),
    (f"matrix products reach {1 - _MATMUL:.0%} less of the peak", _slower_products),
    ("devices fail twice as often", _more_failures),
    (f"steps with ZeRO-2 or ZeRO-3 take {_FREED_PARTS - 1:.0%} longer, as published runs did", _longer_steps),
)


def sensitivities(plan: Plan) -> list[_Sensitivity]:
    """Return the times of a plan if one assumption is wrong, and if all are."""
    single = [_Sensitivity(name, changed(plan).calendar.seconds) for name, changed in _CHANGES]
    return [*single, _Sensitivity("all of these", _all_worse(plan).calendar.seconds)]


def _all_worse(plan: Plan) -> Plan:
    for _, changed in _CHANGES:
        plan = changed(plan)
    return plan
