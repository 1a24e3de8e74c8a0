"""Plans from Python."""

from __future__ import annotations

from collections.abc import Collection

from shardwise.api.arguments import config_problems
from shardwise.base.errors import ConfigError, count_problems, keys_renamed, listing, nearest_name
from shardwise.config import Config
from shardwise_plan.device_specs import cluster
from shardwise_plan.layout_choices import FIXABLE
from shardwise_plan.search import Search, search


def plan(config: Config, device: str, nodes: int = 1, *, best: int = 10, fixed: Collection[str] = ()) -> Search:
    """The fastest layouts of a training on a cluster, as `shardwise plan` ranks them; the cluster need not exist.

    Nothing is measured, and torch is not imported. docs/planner.md compares predictions with published runs.

    Args:
        config: what is trained, of a family of this package.
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
        ConfigError: an argument is wrong, there is no such device, or the model is one of your own, whose shapes are
            not known.
    """
    _require_plan_arguments(config, device, nodes, best, fixed)
    with keys_renamed({"--device": "device", "--nodes": "nodes"}):
        devices = cluster(device, int(nodes))
    return search(config, devices, best=best, fixed=fixed)


def _require_plan_arguments(config: object, device: object, nodes: object, best: object, fixed: object) -> None:
    """Raise ConfigError, with every problem, where an argument is none that `plan` has."""
    problems = config_problems(config)
    if not isinstance(device, str):
        problems.append(f"device ({device!r}) must be the name of a device, such as 'h100:8', or of a YAML file")
    problems += count_problems({"nodes": nodes, "best": best})
    if isinstance(fixed, str) or not isinstance(fixed, Collection):
        problems.append(f"fixed ({fixed!r}) must be a list of keys, such as ['parallel.tensor']")
    else:
        problems += [_unknown_key_problem(key) for key in fixed if key not in FIXABLE]
    if problems:
        raise ConfigError(problems)


def _unknown_key_problem(key: object) -> str:
    """The sentence on a key that no layout has, with the one that may be meant."""
    # A key without its section, such as `tensor`, is the most likely slip.
    meant = next((known for known in FIXABLE if known.partition(".")[2] == key), None)
    meant = meant or nearest_name(str(key), FIXABLE, cutoff=0.75)
    hint = f"did you mean {meant}?" if meant else f"it may have {listing(FIXABLE)}"
    return f"fixed: {key!r} is no key of a layout; {hint}"
