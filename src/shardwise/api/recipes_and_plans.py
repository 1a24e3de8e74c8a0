"""Configurations and plans from Python."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from shardwise.api.arguments import config_problems
from shardwise.base.errors import ConfigError, count_problems, keys_renamed, listing
from shardwise.config import Config, load_with
from shardwise.planner.device_specs import cluster
from shardwise.planner.layout_choices import FIXABLE
from shardwise.planner.search import Search, search


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
        devices = cluster(device, int(nodes))
    return search(config, devices, best=best, fixed=fixed)


def load_recipe(recipe: str | os.PathLike[str] | Mapping[str, Any] | Config, /, **overrides: Any) -> Config:
    """The checked configuration of a recipe, with keys replaced.

        load_recipe("llama2-tiny", train={"steps": 100}, parallel={"tensor": 2})
        load_recipe("my.yaml", **{"train.steps": 100, "data.path": Path("corpus.jsonl")})

    Both spellings of a key mean the same, and the same as `train.steps=100` on the command line; give each key once. A
    section replaces only the keys that it names; `model={"config": PATH}` replaces the whole model by that of a Hugging
    Face `config.json`. Paths, tuples and numbers of numpy are taken as the text, lists and numbers that YAML has.

    Args:
        recipe: a shipped recipe's name (`shardwise recipes` lists them), a YAML file, a mapping of sections, or a
            configuration, of which a changed copy is returned.
        overrides: sections with keys, or dotted keys. docs/configuration.md has all of them.

    Returns:
        a frozen `shardwise.Config`: `config.train.steps`; `config.model_dump()` gives plain values.

    Raises:
        ConfigError: there is no such recipe, or a key or value is wrong; every problem at once, with dotted keys.
    """
    if isinstance(recipe, Config):
        recipe = recipe.model_dump(mode="json", exclude_unset=True)
    if not isinstance(recipe, Mapping | str | os.PathLike):
        raise ConfigError(f"recipe ({recipe!r}) must be a recipe's name, a YAML file or a mapping of sections")
    return load_with(recipe if isinstance(recipe, Mapping) else str(os.fspath(recipe)), overrides)
