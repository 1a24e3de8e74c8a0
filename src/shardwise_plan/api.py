"""Plans from Python."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from shardwise.api.arguments import config_problems
from shardwise.base.errors import ConfigError, count_problems, keys_renamed, listing
from shardwise.base.registered import provided
from shardwise.config import Config
from shardwise.config.stand_in import config_as_given
from shardwise_plan.device_specs import parse_cluster
from shardwise_plan.layout_choices import FIXABLE
from shardwise_plan.search import Search, search_layouts


def plan(config: Config, device: str, nodes: int = 1, *, best: int = 10, fixed: Collection[str] = ()) -> Search:
    """The fastest layouts of a training on a cluster, as `shardwise plan` ranks them; the cluster need not exist.

    Nothing is measured, and torch is not imported. docs/planner.md compares predictions with published runs.

    Args:
        config: what is trained; a model of your own is built without data, for which torch is imported.
        device: a device and the number of devices of a node, such as `h100:8`; or a YAML file that describes a device.
        nodes: machines, at least 1.
        best: layouts to return at most, at least 1.
        fixed: dotted keys of the layout that keep the configuration's values, such as `["parallel.tensor"]`.

    Returns:
        `plans`, fastest first: each has the `config` with its layout, `time.total` in seconds a step, `memory.total` in
        bytes on the rank that needs most, `tokens_per_second`, `mfu`, `seconds` of all steps, and `calendar.seconds`
        with evaluations, checkpoints and failures. It is empty if no layout fits; `valid` counts the layouts that the
        rules allow, `too_large` those that were dropped, by reason, and `refused` those that a rule forbids, by key.

    Raises:
        ConfigError: an argument is wrong, there is no such device, or a model of your own reads values of its input.
    """
    # Programs give values of any type.
    name: Any = device
    keys: Any = fixed
    problems = config_problems(config)
    if not isinstance(name, str):
        problems.append(f"device ({device!r}) must be the name of a device, such as 'h100:8', or of a YAML file")
    problems += count_problems({"nodes": nodes, "best": best})
    if isinstance(keys, str) or not isinstance(keys, Collection):
        problems.append(f"fixed ({fixed!r}) must be a list of keys, such as ['parallel.tensor']")
    else:
        problems += [
            f"fixed: {key!r} is no key of a layout; it may have {listing(FIXABLE)}"
            for key in fixed
            if key not in FIXABLE
        ]
    if problems:
        raise ConfigError(problems)
    with keys_renamed({"--device": "device", "--nodes": "nodes"}):
        devices = parse_cluster(device, int(nodes))
    if not config.model.is_own:
        return search_layouts(config, devices, best=best, fixed=fixed)
    fixed = set(fixed)
    sized, _ = provided("sized_own")(config, fixed)
    result = search_layouts(sized, devices, best=best, fixed=fixed)
    result.plans = [
        replace(plan, config=config_as_given(plan.config), like=plan.config.known_shapes) for plan in result.plans
    ]
    return result
