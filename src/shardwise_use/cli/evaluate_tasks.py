"""`shardwise evaluate MODEL --tasks`: the tasks of `lm_eval`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, keys_renamed
from shardwise.base.hardware import accelerators
from shardwise.cli import output
from shardwise.cli.model_argument import (
    ARGUMENTS,
    LAYOUT_KEYS,
    ModelFolder,
    launch_command,
    open_tokenizer,
    ranks_and_config,
    tasks_config,
)
from shardwise.config import Config, Layout, check_layout
from shardwise.launch.environment import Rank, is_launched
from shardwise.launch.rank_process import as_rank, check_accelerators

KEYS = (
    *LAYOUT_KEYS, "parallel.sequence", "parallel.schedule", "parallel.virtual_stages", "precision.mode",
    "train.sequence_length", "train.micro_batch", "data.tokenizer", "model.family", "model.ignore",
    "checkpoint.revision",
)  # fmt: skip
_OPTIONS = {
    **ARGUMENTS,
    "evaluation.tasks_path": "--tasks-path",
    "evaluation.tasks": "--tasks",
    "evaluation.limit": "--limit",
}


def evaluate_on_tasks(
    arguments: argparse.Namespace,
    place: Rank | None,
    values: dict[str, Any],
    folder: ModelFolder,
    announce: Callable[[str], None] | None,
) -> int:
    """Run the command on the folder that was opened; returns the exit code."""
    if arguments.part is not None:
        raise ConfigError(f"--part ({arguments.part}) must be left out with --tasks, whose files name their data")
    tasks = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    if not tasks:
        raise ConfigError(f"--tasks ({arguments.tasks!r}) must name tasks: --tasks arc_easy,lambada_openai")
    settings = {"tasks": tasks, "tasks_path": arguments.tasks_path, "limit": arguments.limit}
    with keys_renamed(_OPTIONS):
        world, config = ranks_and_config(
            lambda replicas: tasks_config(folder, values, replicas, settings), place, arguments.nproc
        )
        layout = check_layout(config, world)
        tokenizer = open_tokenizer(config, folder, cached=is_launched(), announce=announce)
        # Once, before the ranks start: rank 0 then finds the data in the cache.
        if not is_launched():
            from shardwise.data.evaluation_tasks import require_tasks

            require_tasks(config.evaluation, config.model, config.train, Path(str(config.data.tokenizer)))
    if place is None:
        check_accelerators(world, accelerators()[1])
        if world > 1:
            return launch_command("evaluate", arguments, folder, world)
    with as_rank(place) as ending:
        from shardwise_use.inference_jobs import run_tasks

        with folder, keys_renamed(_OPTIONS):
            results = run_tasks(config, folder.weights, tokenizer, folder.stops(tokenizer))
        if results is not None:
            _print(arguments, folder, config, layout, results)
    return ending.code


def _print(
    arguments: argparse.Namespace, folder: ModelFolder, config: Config, layout: Layout, results: dict[str, Any]
) -> None:
    """Print the results: one JSON object, or the tables that `lm_eval` prints."""
    tables = [name for name in ("results", "groups") if name in results]
    if arguments.json:
        facts: dict[str, Any] = {
            "model": folder.name,
            "family": config.model.family,
            **{name: results[name] for name in tables},
            "limit": arguments.limit,
            "layout": layout.facts(),
            "precision": config.precision.resolved(accelerators()[1] > 0).parameter,
        }
        output.json(facts, indent=None)
        return
    from lm_eval.utils import make_table  # type: ignore[import-untyped]

    for name in tables:
        for line in make_table(results, name).splitlines():
            output.line(line)
