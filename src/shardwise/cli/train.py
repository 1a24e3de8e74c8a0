"""Pretrain a model from a recipe.

Started by itself it starts the local ranks: one per accelerator, rounded down to whole copies of the model, or on CPU
one copy: parallel.tensor × parallel.pipeline ranks. Inside torchrun it joins. Everything that can be wrong is checked
before any rank starts.

A --run-dir that holds a run goes on with it: at its newest intact checkpoint, or at that of checkpoint.resume=STEP.
Ctrl-C, SIGTERM, SIGUSR1 or `shardwise stop` end a run after the step under way, with a checkpoint (exit code 75).
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

from shardwise.cli import output
from shardwise.config import Config, Layout, OwnConfig, check_layout, load_config, recipe_name
from shardwise.errors import ConfigError
from shardwise.hardware import accelerators
from shardwise.launch.environment import joined, unjoined


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a shipped recipe's name, or a YAML file")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="replaces a key of the recipe, such as train.steps=100"
    )
    parser.add_argument("--nproc", metavar="N", type=int, help="number of local ranks (default: see above)")
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        type=Path,
        help="the run's folder, new or to go on in (default: runs/RECIPE-YYYYMMDD-HHMMSS)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print configuration, layout, batch arithmetic, memory and disk needed, look whether data and tokenizer "
        "can be read, and start nothing",
    )


def run(arguments: argparse.Namespace) -> int:
    recipe: str = arguments.recipe
    nproc: int | None = arguments.nproc
    config = load_config(recipe, arguments.overrides)
    place, problem = joined(), unjoined()
    if problem is not None and not arguments.dry_run:
        raise ConfigError(problem)
    if place is not None and not arguments.dry_run:
        from shardwise.cli.rank import run_rank

        if nproc is not None and nproc != place.world:
            raise ConfigError(f"--nproc ({nproc}) must be left out inside torchrun: the world size is {place.world}")
        _check(config, place.world, arguments.run_dir)
        return run_rank(config, recipe_name(recipe), arguments.run_dir, place)
    kind, count = accelerators()
    world = place.world if place is not None else _default_nproc(config, count) if nproc is None else nproc
    layout = _check(config, world, arguments.run_dir)
    if arguments.dry_run:
        return _show(recipe_name(recipe), config, layout, kind, count > 0)
    if 0 < count < world:
        raise ConfigError(f"--nproc ({world}) must be at most the number of accelerators ({count})")
    return _start(config, recipe, arguments.overrides, world, arguments.run_dir)


def _show(recipe: str, config: Config, layout: Layout, device: str, accelerator: bool) -> int:
    """The dry run. What is wrong with the data comes last: the numbers are of use on a machine that has no data."""
    from shardwise.cli.inputs import look_at_inputs
    from shardwise.cli.summary import dry_run

    found = look_at_inputs(config)
    output.line(dry_run(recipe, config, layout, device, accelerator, [] if found is None else found.rows))
    if found is not None and found.problems:
        raise ConfigError(found.problems)
    return 0


def _check(config: Config, world: int, run_dir: Path | None) -> Layout:
    """The layout, once everything agrees with it that can be asked before a rank starts."""
    layout = check_layout(config, world, is_new=run_dir is None)
    if isinstance(config.model, OwnConfig):
        from shardwise.models import check_own

        check_own(config)
    return layout


def _default_nproc(config: Config, count: int) -> int:
    """One rank per accelerator, rounded down to whole copies of the model; on CPU one copy."""
    tensor, pipeline = config.parallel.tensor, config.parallel.pipeline
    degree = tensor * pipeline
    if count == 0:
        return degree
    if count < degree:
        keys, fix = f"parallel.tensor ({tensor})", f"set parallel.tensor={count} or less"
        if pipeline > 1:
            keys = f"parallel.tensor × parallel.pipeline ({tensor} × {pipeline} = {degree})"
            fix = "lower one of them, or start it on several nodes by torchrun"
        raise ConfigError(f"{keys} must be at most the number of accelerators ({count}): {fix}")
    return count // degree * degree


def _start(config: Config, recipe: str, overrides: list[str], nproc: int, run_dir: Path | None) -> int:
    """Claim the run directory and prepare inputs, then train: here on one rank, through torchrun on several."""
    from shardwise.cli.claim import claim, finished
    from shardwise.cli.ending import what_is_saved
    from shardwise.cli.inputs import prepare_inputs
    from shardwise.launch import stdio
    from shardwise.launch.local import EndedError, launch
    from shardwise.runlog import RunDirectory, new_run_path

    stdio.survive_hangup()
    with ExitStack() as held:
        is_there = run_dir is not None and run_dir.is_dir()
        if run_dir is not None and is_there:
            claim(held, run_dir)
        said = finished(config, run_dir) if run_dir is not None else None
        if said is not None:
            output.line(said)
            return 0
        prepare_inputs(config, output.progress)
        run_path = run_dir if run_dir is not None else new_run_path(recipe)
        RunDirectory(run_path).create()
        if not is_there:
            claim(held, run_path)
        if nproc == 1:
            from shardwise.cli.rank import run_alone

            return run_alone(config, recipe_name(recipe), run_path)
        command = [sys.executable, "-P", "-m", "shardwise", "train", recipe, *overrides]
        try:
            launch([*command, "--nproc", str(nproc), "--run-dir", str(run_path)], nproc, run_path)
        except EndedError as error:
            raise EndedError(f"{error}; {what_is_saved(run_path)}") from None
    return 0
