"""Plans from Python."""

from __future__ import annotations

from collections.abc import Collection

from shardwise.config import Config
from shardwise.devices import cluster
from shardwise.planner import Search, search


def plan(config: Config, device: str, nodes: int = 1, *, best: int = 10, fixed: Collection[str] = ()) -> Search:
    """The fastest layouts of a training on a cluster that need not be here, as `shardwise plan` ranks them.

    Nothing is measured, and torch is not imported. docs/planner.md says how far predictions have been from published
    runs.

    Args:
        config: what is trained, of a family of this package.
        device: a device and how many of them a node has, such as `h100:8`; or a YAML file that describes one.
        nodes: machines.
        best: layouts to return at most.
        fixed: dotted keys of the layout that keep the configuration's values, such as `parallel.tensor`.

    Returns:
        `plans`, fastest first: each has the `config` with its layout, `time.total` in seconds a step, `memory.total` in
        bytes on the rank that needs most, `tokens_per_second`, `mfu`, `seconds` of all steps. It is empty where no
        layout fits; `valid` counts the layouts that the rules allow, `too_large` those that were dropped, by reason.

    Raises:
        ConfigError: there is no such device, or the model is one of your own, whose shapes are not known.
    """
    return search(config, cluster(device, nodes), best=best, fixed=fixed)
