"""Sentences above the figures of `shardwise plan`: the steps of each cluster, and devices that are better unused."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from shardwise.base import units
from shardwise.base.errors import ConfigError
from shardwise.config import Config, tokens_of_run
from shardwise_plan.plan import Plan
from shardwise_plan.search import search


def steps_text(plans: Sequence[Plan]) -> str:
    """Return the steps on each number of devices where they follow a batch that grows; empty where they do not."""
    train = plans[0].config.train
    if not plans[0].config.steps_follow_batch:
        return ""
    steps_of_world = {plan.cluster.world: plan.config.train.steps for plan in plans}
    (world, steps), *further = sorted(steps_of_world.items())
    texts = [f"{steps:,} steps on {world:,} devices", *(f"{steps:,} on {world:,}" for world, steps in further)]
    tokens = units.count(tokens_of_run(plans[0].config))
    return (
        f"The batch grows with the devices ({train.batch_rule}), and the steps follow, for {tokens} tokens in all: "
        f"{', '.join(texts)}"
    )


def unused_devices_text(best: Plan, config: Config, device: str, fixed: Collection[str]) -> str:
    """Return that fewer devices of each node need fewer device-hours; empty where they do not.

    Only a power of two is tried, and only where the batch lacks the odd factor that the devices of a node have.

    Args:
        best: fastest plan on the whole nodes.
        config: the recipe's configuration.
        device: value of `--device`.
        fixed: keys that keep the recipe's values.
    """
    cluster = best.cluster
    power = 1 << (cluster.per_node.bit_length() - 1)
    odd = cluster.per_node // (cluster.per_node & -cluster.per_node)
    batch = config.train.global_batch
    if config.train.rule is not None or batch % odd == 0:
        return ""
    try:
        plans = search(config, replace(cluster, per_node=power), best=1, fixed=fixed).plans
    except ConfigError:
        # No layout of the recipe is valid on so many devices.
        return ""
    if not plans or plans[0].device_hours >= best.device_hours:
        return ""
    fewer = plans[0]
    name = re.sub(r":\d+$", "", device)
    return (
        f"The {cluster.per_node} devices of a node do not divide the batch of {batch}: with {power} of each (--device "
        f"{name}:{power}) the training takes {fewer.device_hours:,.0f} device-hours in place of "
        f"{best.device_hours:,.0f}, and {units.duration(fewer.calendar.seconds)} in place of "
        f"{units.duration(best.calendar.seconds)}"
    )
