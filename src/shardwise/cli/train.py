"""Pretrain a model from a recipe.

The command starts the local ranks: one per accelerator, rounded down to whole copies of the model, or on CPU one copy
(parallel.tensor × parallel.context × parallel.pipeline ranks). It also works when launched by torchrun, srun or mpirun.
Configuration and data are checked before any rank starts.

If --run-dir holds a run, this run is resumed from its newest intact checkpoint, or from that of checkpoint.resume=STEP;
without RECIPE, with the configuration that the run has recorded and, on the machine where it ran, with as many ranks.
Ctrl-C, SIGTERM, SIGUSR1 or `shardwise stop` end a run after the current step, with a checkpoint (exit code 75).
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.base.errors import ConfigError, EndedError, Problems, raise_problems
from shardwise.base.files import user_path
from shardwise.base.hardware import accelerators, torch_type
from shardwise.base.registered import imported, provided
from shardwise.base.terminal import fit_to_terminal
from shardwise.base.units import counted
from shardwise.cli import output
from shardwise.cli.help import RECIPE_HELP, add_overrides
from shardwise.config import (
    Config,
    Layout,
    Matmul,
    ParallelConfig,
    check_changes,
    check_layout,
    kept_batch,
    load_config,
    recipe_name,
    recipe_names,
    require_data,
    size_stages_of,
)
from shardwise.config.recipe_files import is_model_recipe
from shardwise.launch import rank_output as stdio
from shardwise.launch.environment import is_launched, joined, launches_node
from shardwise.runs.folder import RunDirectory, run_folder

if TYPE_CHECKING:
    # Costly to import, for the option --device alone.
    from shardwise.cli.run_preparation import PreparedFolder
    from shardwise.models.parameter_counts import OwnShapes
    from shardwise.train.summary import Cluster

_Rows = list[tuple[str, str]]
_BUILT_IN_VOCABULARIES = range(512, 1025)
"""Vocabularies of a byte-level tokenizer that can be trained on any built-in data."""
_COMPILER = ("torch._dynamo.aot_compile", "torch._inductor.compile_fx", "torch.utils.cpp_extension")
"""Modules that import torch's compiler."""


def configure(parser: argparse.ArgumentParser) -> None:
    recipe_help = f"{RECIPE_HELP} (default: the configuration of the run in --run-dir)"
    add = parser.add_argument
    add("recipe", metavar="RECIPE", nargs="?", help=recipe_help)
    add_overrides(parser, "train.steps=100")
    add("--nproc", metavar="N", type=int, help="number of local ranks (default: see above)")
    run_dir_help = "the run's folder: a new one, or that of a run to resume (default: runs/RECIPE-YYYYMMDD-HHMMSS)"
    add("--run-dir", metavar="DIR", type=run_folder, help=run_dir_help)
    change_help = "a key, such as data.stages, that may differ from the run that is continued; may be repeated"
    add("--change", metavar="KEY", action="append", default=[], help=change_help)
    add(
        "--dry-run",
        action="store_true",
        help="print layout, batch, memory and disk needed, and the keys that differ from their defaults; check that "
        "data, tokenizer and weights can be read; start nothing; of a run in --run-dir, tell where it would go on and "
        "what changes",
    )
    add("--full", action="store_true", help="with --dry-run: print every key, not only those that differ from defaults")
    device_help = "with --dry-run: size for this device, which this machine need not have, with N devices on a node"
    add("--device", metavar="DEVICE[:N]", help=device_help)
    add("--nodes", metavar="N", type=int, help="with --device: machines (default: launch.nodes, else 1)")
    add("--json", action="store_true", help="with --dry-run: print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    _complete_recipe(arguments)
    if launches_node():
        return _on_node(arguments)
    recipe: str = arguments.recipe
    run_path: Path | None = arguments.run_dir
    with ExitStack() as claims:
        if (arguments.nproc or 1) > 1 and not arguments.dry_run and joined() is None:
            from shardwise.launch.local import agent_ahead

            claims.enter_context(agent_ahead(arguments.nproc))
        config = _config(arguments)
        cluster = _cluster(arguments, config.launch.node_range)
        if arguments.dry_run:
            return _dry_run(arguments, config, cluster)
        from shardwise.launch.rank_process import as_rank, enter_job

        place = enter_job(arguments.nproc)
        world = place.world if place is not None else _local_ranks(arguments, config.parallel)
        # Only now, as a batch that is given by a rule follows from the number of ranks.
        config = with_batch(config, world, run_path)
        check_layout(config, world, is_new=run_path is None)
        require_data(config, recipe)
        check_user_code(config)
        if place is None:
            from shardwise.launch.rank_process import check_accelerators

            check_accelerators(world, accelerators()[1])
            if sys.stdout.isatty():
                # It takes seconds until the ranks have imported torch and print.
                output.line(f"starting {counted(world, 'rank')} …")
        # These two keep the user's terminal; other ranks write to their logs.
        if place is None or place.rank == 0:
            stdio.survive_lost_reader()
        folder: PreparedFolder | None = None
        # A launched rank finds the folder claimed and the data prepared by the process that launched it.
        if not is_launched():
            from shardwise.cli.run_preparation import is_finished_run, prepare_run

            if run_path is not None and is_finished_run(claims, config, run_path, place):
                return 0
            folder = prepare_run(claims, config, recipe, run_path, place)
            run_path = folder.path
        if place is None and world > 1:
            assert folder is not None, "a rank that was launched has a place"
            arguments.run_dir = run_path
            with folder.removed_if_refused():
                return _launch(arguments, world, config)
        with as_rank(place, run_path, None if folder is None else folder.remove_refused) as ending:
            # Imported inside, with torch: what fails there is told as a failure of this rank.
            imported("shardwise.train.run").run(config, run_path, recipe_name(recipe))
        return ending.code


def _complete_recipe(arguments: argparse.Namespace) -> None:
    """Take the recorded configuration of the run in `--run-dir` if no recipe is named; ConfigError without either."""
    recipe: str | None = arguments.recipe
    run_path: Path | None = arguments.run_dir
    if recipe is not None and "=" in recipe and not Path(recipe).is_file():
        # Without a recipe, the first override stands in its place.
        arguments.overrides.insert(0, recipe)
        recipe = None
    if recipe is None and run_path is None:
        raise ConfigError("missing RECIPE, e.g. `shardwise train llama2-tiny` (list: `shardwise recipes`)")
    if recipe is None and run_path is not None:
        recorded = RunDirectory(run_path).config
        if not recorded.is_file():
            raise ConfigError(
                f"--run-dir ({run_path}) must hold a run if RECIPE is left out, and it holds no config.yaml: "
                "`shardwise train --run-dir RUN` continues the run in RUN, and `shardwise train RECIPE --run-dir DIR` "
                "begins one in DIR"
            )
        recipe = str(recorded)
    arguments.recipe = recipe


def _cluster(arguments: argparse.Namespace, node_range: tuple[int, int] | None) -> Cluster | None:
    if arguments.full and not arguments.dry_run:
        raise ConfigError("--full must go with --dry-run: a run's config.yaml has every key")
    if arguments.json and not arguments.dry_run:
        raise ConfigError("--json must go with --dry-run: `shardwise monitor` prints the state of a run as JSON")
    if arguments.device is None:
        if arguments.nodes is not None:
            raise ConfigError("--nodes must go with --device: the nodes of a run are those of its launcher")
        return None
    if not arguments.dry_run or arguments.nproc is not None:
        raise ConfigError(
            f"--device {arguments.device} must go with --dry-run and without --nproc, --nodes gives the machines: it "
            "starts nothing; a run takes the machine's accelerators, or its CPU where there are none or "
            "CUDA_VISIBLE_DEVICES= hides them"
        )
    _, most = node_range or (1, 1)
    cluster: Cluster = provided("cluster")(arguments.device, most if arguments.nodes is None else arguments.nodes)
    return cluster


def check_user_code(config: Config) -> None:
    """Import code of the user's own before the command starts ranks: its errors are told once, as a ConfigError."""
    if config.model.is_own:
        from shardwise.models.user_model import check_user_model

        check_user_model(config)
    if config.hooks.paths and all(":" in path for path in config.hooks.paths.values()):  # else a rule refuses it
        from shardwise.train.hooks import check_hooks

        check_hooks(config.hooks, config.optimizer)


def _dry_run(arguments: argparse.Namespace, config: Config, cluster: Cluster | None) -> int:
    """Print the dry run. Problems of the files are last: the numbers are of use on a machine without the files too.

    ConfigError: with all problems of ranks, batch, layout, code, data, tokenizer and weights.
    """
    run_path: Path | None = arguments.run_dir
    problems = Problems()
    layout = None
    with problems:
        place = joined()
        world = cluster.world if cluster else place.world if place else _local_ranks(arguments, config.parallel)
        # A new run's batch where that of the run in the folder is refused: the layout is checked too.
        given, config = config, config.with_batch_for(world)
        with problems:
            config = with_batch(given, world, run_path)
        layout = check_layout(config, world, is_new=run_path is None)
    with problems:
        check_user_code(config)
    with problems:
        _check_products(config.precision.matmul, cluster)
    chosen = config
    rows: _Rows = []
    # A configuration that is refused has no stages.
    if layout is not None:
        with problems:
            chosen, rows = _neediest_stage(config, layout, cluster)
    input_rows, input_problems = glance_at_inputs(arguments.recipe, chosen, run_path)
    continued: _Rows = []
    if run_path is not None:
        from shardwise.cli.continued_run import continuation_rows

        continued, reasons = continuation_rows(chosen, layout, run_path)
        input_problems += reasons
    if problems:
        raise ConfigError([*problems, *input_problems])
    assert layout is not None, "a layout that is refused is a problem"
    from shardwise.train.summary import training_summary

    counts, sized, rows = _counted(chosen, cluster, [*rows, *input_rows])
    predicted = provided("predicted_step")(sized, layout, cluster) if cluster else None
    input_problems += predicted.problems if predicted else []
    is_recorded = run_path is not None and arguments.recipe == str(RunDirectory(run_path).config)
    text = training_summary(
        run_path.name if run_path is not None and is_recorded else recipe_name(arguments.recipe),
        chosen,
        layout,
        accelerators()[0],
        _has_accelerator(cluster),
        rows,
        predicted,
        continued=continued,
        full=arguments.full,
        recipe_config=config,
        counts=counts,
        as_json=arguments.json,
    )
    output.raw(output.text(text) if arguments.json else fit_to_terminal(output.text(text), sys.stdout))
    raise_problems(ConfigError, input_problems)
    return 0


def _counted(config: Config, cluster: Cluster | None, rows: _Rows) -> tuple[OwnShapes | None, Config, _Rows]:
    if not config.model.is_own:
        return None, config, rows
    from shardwise.estimates.memory import config_for_memory_estimate
    from shardwise.models.own_shapes import own_shapes  # costly to import, as torch is

    accelerator = _has_accelerator(cluster)
    try:
        counts = own_shapes(config, accelerator)
    except ConfigError as error:
        return None, config, [("not counted", str(error)), *rows]
    return counts, config_for_memory_estimate(config, counts, accelerator), rows


def _has_accelerator(cluster: Cluster | None) -> bool:
    return accelerators()[1] > 0 if cluster is None else cluster.device.is_accelerator


def _check_products(matmul: Matmul | None, cluster: Cluster | None) -> None:
    if matmul is None:
        return
    if cluster is not None:
        cluster.device.require_fp8()
        return
    # Costly to import, and the only way to learn it.
    from shardwise.distributed import devices
    from shardwise.train.device_checks import require_matmul_support

    require_matmul_support(matmul, devices.local_device())


def _neediest_stage(config: Config, layout: Layout, cluster: Cluster | None) -> tuple[Config, _Rows]:
    """The stage of a run that needs most memory, fitted like all of them, and a row on that."""
    stages = size_stages_of(config)
    if len(stages) == 1:
        return _fitted(config, layout, cluster)
    from shardwise.estimates.memory import neediest_stage

    fitted = [_fitted(stage, layout, cluster) for stage in stages]
    neediest = neediest_stage([stage for stage, _ in fitted], layout, _has_accelerator(cluster))
    return next((stage, rows) for stage, rows in fitted if stage is neediest)


def _fitted(config: Config, layout: Layout, cluster: Cluster | None) -> tuple[Config, _Rows]:
    """`config` with what its keys leave to the memory of a rank, of a cluster or of this machine, and a row on it."""
    from shardwise.estimates.memory import RESERVED, leaves_to_memory
    from shardwise.estimates.memory_choice import fitted_to_memory, memory_choice_text

    accelerator = _has_accelerator(cluster)
    if not leaves_to_memory(config, layout, accelerator):
        return config, []
    device = "this machine"
    room: float | None
    if cluster is not None:
        device = cluster.device.name
        room = cluster.device.memory * (1 - RESERVED)
    else:
        import torch

        from shardwise.train.device_checks import memory_for_steps

        kind = torch.device(torch_type(accelerators()[0]), 0) if accelerator else torch.device("cpu")
        room = memory_for_steps(kind, layout.world)
    chosen = fitted_to_memory(config, layout, room, accelerator=accelerator, device=device)
    choice = memory_choice_text(chosen, config)
    return chosen, [] if choice is None else [("chosen", f"{choice}, by the memory of a rank")]


def glance_at_inputs(recipe: str, config: Config, run_path: Path | None = None) -> tuple[_Rows, list[str]]:
    """Rows of a dry run or a submission on the files that the run would read, and problems of what it cannot read."""
    rows: _Rows = []
    problems = Problems()
    load = config.checkpoint.load
    weight_rows: _Rows = []
    is_absent = load is not None and not Path(load).exists()
    if is_absent and recipe in recipe_names() and load_config(recipe).checkpoint.load == load:
        # A shipped recipe itself names the weights of an earlier run.
        weight_rows = [("weights", f"{load}: not there yet; the run that saves it comes first")]
    elif load is not None:
        config, weight_rows, problems = _glance_at_weights(load, config, run_path)
    is_built_in = config.data.is_built_in and config.hooks.data is None
    has_tokenizer = config.data.tokenizer is None and load is None
    # Built-in data with a tokenizer that fits need no look, for which the data rooms would be imported.
    if (
        is_built_in
        and has_tokenizer
        and config.model.vocab_size in _BUILT_IN_VOCABULARIES
        and not config.data.packs_documents
    ):
        rows.append(("held out", config.held_out_text))
    else:
        from shardwise.data.preview import preview_data

        glanced = preview_data(config)
        rows += glanced.rows
        problems[:0] = glanced.problems
    if config.evaluation.sets or config.evaluation.tasks_every:
        from shardwise.data.preview import preview_evaluation

        glanced = preview_evaluation(config)
        rows += glanced.rows
        problems += glanced.problems
    if config.log.trackers:
        from shardwise.train.experiment_trackers import require_trackers

        with problems:
            rows += [("trackers", note) for note in require_trackers(config.log.trackers)]
    if config.log.notify:
        from shardwise.launch import notices

        rows += [("warning", problem) for problem in notices.problems(config.log.notify)]
    if config.companions is not None:
        from shardwise.checkpoint.storage.checkpoint_folders import companions_folder

        with problems:
            rows.append(("special tokens", f"those of {companions_folder(config.companions)}"))
    return [*rows, *weight_rows], problems


def _glance_at_weights(load: str, config: Config, run_path: Path | None) -> tuple[Config, _Rows, Problems]:
    """`config` with the tokenizer of the weights that a run would load; rows on them; and problems of loading.

    Rows tell the changes of their model by the recipe. A run that continues loads none.
    """
    from shardwise.base.errors import StoreError
    from shardwise.checkpoint.format.model_files import model_differences
    from shardwise.checkpoint.storage.checkpoint_folders import loaded_weights_text
    from shardwise.checkpoint.storage.model_tokenizer import other_tokenizer_text, with_loaded_tokenizer
    from shardwise.checkpoint.storage.run_identity import continued_checkpoint

    problems = Problems()
    rows: _Rows = []
    with problems:
        try:
            if (continued := continued_checkpoint(config.checkpoint, run_path)) is not None:
                return with_loaded_tokenizer(config, continued), rows, problems
            text, folder = loaded_weights_text(load, config.checkpoint.revision)
            rows.append(("weights", text))
            if folder is None:
                revision = config.checkpoint.revision
                return with_loaded_tokenizer(config, load if revision is None else f"{load}@{revision}"), rows, problems
            difference = model_differences(config.model, folder)
            rows += [("  changed", change) for change in difference.changes]
            problems += difference.problems
            tokenizer = config.data.tokenizer
            warning = other_tokenizer_text(folder, None if tokenizer is None else user_path(tokenizer))
            rows += [] if warning is None else [("warning", warning)]
            config = with_loaded_tokenizer(config, folder)
        except StoreError as error:
            problems.append(f"checkpoint.load: {error}")
    return config, rows, problems


def _local_ranks(arguments: argparse.Namespace, parallel: ParallelConfig) -> int:
    """The number of ranks to start here: by default that of a run continued without its recipe, if it still fits."""
    nproc: int | None = arguments.nproc
    run_path: Path | None = arguments.run_dir
    if nproc is None and run_path is not None and arguments.recipe == str(RunDirectory(run_path).config):
        # Costly to import, for a run that goes on alone.
        from shardwise.runs.events import local_ranks

        nproc = local_ranks(RunDirectory(run_path))
        _, count = accelerators()
        if nproc is not None and (nproc % parallel.ranks or 0 < count < nproc):
            nproc = None
    return number_of_ranks(parallel, nproc)


def number_of_ranks(parallel: ParallelConfig, nproc: int | None) -> int:
    """The ranks that `shardwise train` starts: `--nproc`, else one per accelerator in whole copies, on CPU one copy."""
    if nproc is not None:
        return nproc
    _, count = accelerators()
    degree = parallel.ranks
    if count == 0:
        return degree
    if count < degree:
        fix = "lower one of them, or start it on several nodes by torchrun"
        if degree == parallel.tensor:
            fix = f"set parallel.tensor={count} or less"
        raise ConfigError(f"{parallel.keys_text} must be at most the number of accelerators ({count}): {fix}")
    # Ranks beyond whole copies of the model would have no work.
    return count // degree * degree


def with_batch(config: Config, world: int, run_path: Path | None) -> Config:
    """The configuration of a command with a number where its batch is a rule: that of the run in the folder, if any."""
    if config.train.rule is None:
        return config
    from shardwise.checkpoint.storage.run_identity import earlier_run

    earlier = None if run_path is None else earlier_run(RunDirectory(run_path), config)
    # The run keeps the batch with which it began, on any number of ranks: its schedule counts steps of that size.
    kept = None if earlier is None else kept_batch(earlier, config.train)
    if kept is None:
        return config.with_batch_for(world)
    return config.with_batch(kept)


def load_recipe(recipe: str, overrides: list[str]) -> Config:
    """The configuration of a command's recipe; of a model, with a line for the user on what is taken of it.

    A rank opens a hub id from the cache, which the process that launched it has filled.
    """
    launched = is_launched()
    config = load_config(recipe, overrides, cached=launched)
    place = joined()
    if not launched and (place is None or place.rank == 0) and is_model_recipe(recipe):
        from shardwise.config.model_recipes import model_recipe_remark  # costly to import, for a model alone

        output.progress(model_recipe_remark(recipe, config))
    return config


def _config(arguments: argparse.Namespace) -> Config:
    config = load_recipe(arguments.recipe, arguments.overrides)
    config.let_change(check_changes(arguments.change))
    return config


def _on_node(arguments: argparse.Namespace) -> int:
    """Train on the ranks of this node of a job; --nproc is their number on each of its nodes."""
    from shardwise.launch.node import launch_on_node, this_node

    node = this_node()
    nproc = arguments.nproc
    run_path = arguments.run_dir
    world = nproc * node.attempt.nodes

    def prepare() -> None:
        from shardwise.cli.run_preparation import fetch_inputs
        from shardwise.launch.rank_process import check_accelerators

        config = _config(arguments)
        check_layout(with_batch(config, world, run_path), world, is_new=False)
        check_accelerators(nproc, accelerators()[1])
        fetch_inputs(config, run_path, output.progress if node.number == 0 else None)

    return launch_on_node(node, _command_of_rank(arguments, world), nproc, os.environ, prepare)


def _command_of_rank(arguments: argparse.Namespace, world: int) -> list[str]:
    # -P: the folder that the user is in must not put its files before installed packages.
    command = [sys.executable, "-P", "-m", "shardwise", "train"]
    command += [f"--change={key}" for key in arguments.change]
    return [*command, arguments.recipe, *arguments.overrides, "--nproc", str(world), f"--run-dir={arguments.run_dir}"]


def _launch(arguments: argparse.Namespace, world: int, config: Config) -> int:
    from shardwise.launch import notices
    from shardwise.launch.local import TRAINING, agent_ahead, launch
    from shardwise.runs.events import newest_recorded_checkpoint

    notices.set_up(config.log.notify)
    # Both import torch's compiler, which takes as long as torch.
    imports = [*TRAINING, *["shardwise.pipeline.schedule"] * (config.parallel.pipeline > 1)]
    imports += [*_COMPILER, "shardwise.train.compile.run_graphs"] * config.compile.enabled
    try:
        with agent_ahead(world, imports):
            launch(_command_of_rank(arguments, world), world, arguments.run_dir)
    except EndedError as error:
        raise EndedError(f"{error}; {newest_recorded_checkpoint(arguments.run_dir)}", error.exit_code) from None
    return 0
