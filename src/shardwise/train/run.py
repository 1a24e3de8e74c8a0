"""One training run on one rank, from joining the job to the final weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from shardwise.base import units
from shardwise.base.errors import ConfigError, LostPeerError, RunError, StoppedError, listing, see
from shardwise.base.user_code import error_text
from shardwise.checkpoint.agreement import differ_in_tokens
from shardwise.checkpoint.format.model_file import differences
from shardwise.checkpoint.storage.root import Root
from shardwise.checkpoint.storage.step_folders import step_name
from shardwise.config import Config, Layout, OwnConfig, check_layout
from shardwise.data.samples.streaming import StreamBatches
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh, calls_of_groups, join, leave
from shardwise.launch import heartbeat, stop_requests
from shardwise.train.build import build_checkpoints, build_memory_copies, build_reporter, build_run_trainer
from shardwise.train.compile.run_graphs import Keeper
from shardwise.train.memory import out_of_memory_text, require_device
from shardwise.train.memory_copies import MemoryCopies
from shardwise.train.reporter import Reporter
from shardwise.train.resume import Resumed, continue_from, goes_back, require_same_data, restore_first, set_later_aside
from shardwise.train.sample_text import draw_sample
from shardwise.train.saving import STREAM, make_stop_check
from shardwise.train.start import Run, open_run, require_same
from shardwise.train.step_record import Progress
from shardwise.train.trainer import Trainer


def run(config: Config, run_path: Path | None, recipe: str) -> Path:
    """Train as one rank of the job that the launcher describes; every rank calls this with the same configuration.

    Args:
        run_path: the run's folder; None: rank 0 names one after the recipe.

    Returns:
        the run's folder, on every rank.

    Raises:
        ConfigError: the configuration, the data or the folder is wrong.
        RunError: training failed.
        StoppedError: the run was asked to stop, and all is saved.
    """
    join(timeout=config.launch.timeout)
    mesh = Mesh(tensor=config.parallel.tensor, pipeline=config.parallel.pipeline)
    config = _with_one_batch(config, mesh)
    require_same(config, mesh, run_path)
    layout, progress = check_layout(config, mesh.world.size), Progress(phase="preparation of the data")
    with heartbeat.beating(lambda: _doing(mesh, progress)), _explained(config, layout, mesh, progress):
        shortage = require_device(config, layout, mesh.world.rank, mesh.device)
        here = open_run(config, layout, mesh, progress, run_path, recipe)
        # Inside of the reporter too, so that it records the same sentence that the user reads.
        with build_reporter(here) as reporter, _explained(config, layout, mesh, progress), ExitStack() as held:
            progress.phase = "construction of the model"
            trainer = build_run_trainer(here, reporter)
            if here.followed is not None:
                here.followed.follow()
            collectives.barrier(mesh.world)  # from here on all ranks make files in the folder
            copies = build_memory_copies(here, trainer)
            resumed = _begin(here, trainer, reporter, copies)
            if shortage is not None:
                reporter.warning(shortage)
            if trainer.compilation is not None:
                keeper = Keeper(config, layout, mesh, trainer.compilation, reporter.message)
                trainer.keeper = held.enter_context(keeper)
            with build_checkpoints(here, trainer, reporter, resumed, copies) as checkpoints:
                if resumed is not None and resumed.damage:
                    checkpoints.save_again(resumed.manifest)
                checkpoints.follow()  # also tells the user
                stop_requests.install()
                stopped_by = trainer.run(checkpoints)
                progress.phase = "wait for the checkpoint"
                checkpoints.finish()
            if copies is not None:
                _end_copies(copies, reporter)
            if stopped_by is not None:
                _stop(here, stopped_by, reporter)
            _finish(here, trainer, reporter)
        collectives.barrier(mesh.world)  # a program reads the results on any rank
    leave()
    return here.folder.directory.path


def _doing(mesh: Mesh, progress: Progress) -> dict[str, Any]:
    """What a heartbeat tells. Another thread calls it."""
    place = {"device": str(mesh.device), "stage": mesh.pp.rank}
    return {**place, "step": progress.step, "doing": _phase(progress), "called": calls_of_groups()}


def _phase(progress: Progress) -> str:
    """The phase of the run, with its step, as the user reads it."""
    return f"{progress.phase} of step {progress.step + 1:,}" if progress.step else progress.phase


def _with_one_batch(config: Config, mesh: Mesh) -> Config:
    """`config` with rank 0's global batch, where the recipe has a rule for it.

    A run that is resumed keeps the number in its folder, which other machines may not see.
    """
    if config.train.rule is None:
        return config
    return config.with_batch(collectives.broadcast_object(config.train.global_batch, mesh.world))


@contextmanager
def _explained(config: Config, layout: Layout, mesh: Mesh, progress: Progress) -> Iterator[None]:
    """Raise a sentence instead of a library's error where another rank has ended or memory ran out.

    After the first step of a run a ConfigError becomes a RunError: its exit code must not say that no step was taken.
    """
    try:
        yield
    except ConfigError as error:
        if progress.step == progress.before:
            raise
        raise RunError(str(error)) from error
    except SystemExit as error:
        raise RunError(
            f"rank {mesh.world.rank} was ended during {_phase(progress)}: {error_text(error)}; a training ends after "
            f"its last step ({config.train.steps:,}), or with a checkpoint before it, where a function of "
            "hooks.callbacks returns True"
        ) from error
    except Exception as error:
        if collectives.is_lost_connection(error):
            text = (
                f"rank {mesh.world.rank} lost the connection to another rank during {progress.phase}"
                f"{see('training#lost-connection')}"
            )
            raise LostPeerError(text) from error
        if collectives.is_shared_device(error):
            raise ConfigError(
                f"rank {mesh.world.rank} must have an accelerator of its own, and shares {mesh.device} with another "
                "rank: start at most one rank on each, and set LOCAL_RANK as torchrun does"
                f"{see('runs#local-rank')}"
            ) from error
        if not devices.is_out_of_memory(error):
            raise
        text = out_of_memory_text(config, layout, mesh.world.rank, mesh.device, progress, error)
        raise RunError(text) from error


def _begin(run: Run, trainer: Trainer, reporter: Reporter, copies: MemoryCopies | None) -> Resumed | None:
    """Restore the state that the run continues from, if any, and report the start."""
    candidates, began = run.folder.checkpoints.candidates, time.perf_counter()
    newest = max((candidate.step for candidate in candidates), default=0)
    loaded = copies.restore(newest) if copies is not None and run.config.checkpoint.resume == "auto" else None
    if loaded is not None:
        continue_from(loaded.manifest, run.progress, run.config)
        resumed: Resumed | None = Resumed(loaded.manifest, Root.of(loaded.folder), ())
    else:
        resumed = restore_first(
            candidates, run.config, trainer.model, trainer.optimizer, run.mesh, run.progress, reporter
        )
    load_seconds = time.perf_counter() - began
    if resumed is not None:
        require_same_data(resumed.manifest, run.data)
        if isinstance(trainer.batches, StreamBatches):
            trainer.batches.restore(resumed.manifest.rng[STREAM])
    reporter.start(
        loaded=None if run.weights is None else str(run.weights),
        steps_before=run.progress.step,
        epochs=trainer.batches.epochs(run.config.train.steps * run.config.train.global_batch),
    )
    reporter.message(f"data: {run.data.summary}")
    if not isinstance(run.config.model, OwnConfig) and run.config.model.ignore:
        reporter.message(f"model.ignore: config.json is read without {listing(run.config.model.ignore)}")
    if run.folder.batch is not None:
        reporter.message(run.folder.batch)
    for note in run.companions.notes:
        reporter.message(note)
    for note in run.folder.notes:
        reporter.warning(note)
    if copies is not None:
        reporter.message(copies.summary)
    if resumed is not None:
        _report_resumption(run, resumed, reporter, load_seconds)
        if loaded is not None:
            sent = f"; that of {units.counted(loaded.received, 'rank')} from another node" if loaded.received else ""
            reporter.message(f"the state was in the memory of the nodes{sent}, and loaded in {load_seconds:.2f} s")
    else:
        reporter.changed(_changes(run))
        _report_weights(run, reporter)
    return resumed


def _end_copies(copies: MemoryCopies, reporter: Reporter) -> None:
    """Forget the copies of a run whose state the disk has, and tell what they cost."""
    copies.remove()
    if copies.count:
        each = f"{1000 * copies.seconds / copies.count:.1f} ms"
        reporter.message(f"copies in memory: {copies.count:,}, for each of which training waited {each}")


def _report_resumption(run: Run, resumed: Resumed, reporter: Reporter, load_seconds: float) -> None:
    """Set the checkpoints aside that are later than the one that was restored, and record the resumption."""
    checkpoints, manifest = run.folder.checkpoints, resumed.manifest
    back = goes_back(run.config, manifest)
    for name in set_later_aside(checkpoints.root, checkpoints.found, manifest.step, run.mesh, damaged=not back):
        reporter.message(f"set aside: {name}")
    if run.config.checkpoint.resume != "auto" and not back:
        reporter.message(
            f"the run went back to step {run.config.checkpoint.resume:,} before, and continues from there; to go "
            "back once more, move the later checkpoints away"
        )
    reporter.resumed(manifest, str(resumed.folder), run.folder.changes, load_seconds)


def _changes(run: Run) -> tuple[str, ...]:
    """How a run that begins differs from the earlier run of its folder, and, on rank 0, from the weights' model."""
    if run.weights is None or run.mesh.world.rank > 0:
        return run.folder.changes
    return (*run.folder.changes, *differences(run.config.model, run.weights).changes)


def _report_weights(run: Run, reporter: Reporter) -> None:
    weights, tokenizer = run.weights, run.data.tokenizer_path
    if weights is None:
        return
    reporter.message(f"weights: those of {weights}")
    if tokenizer is not None and weights.is_local and differ_in_tokens(weights.local(), tokenizer):
        reporter.warning(
            f"the tokenizer of the data has other ids than that of the loaded weights ({weights}): to keep "
            f"what they learned, set data.tokenizer={weights}"
        )


def _stop(run: Run, by: str, reporter: Reporter) -> NoReturn:
    reporter.stop(f"stopped by {by}")
    step, directory = run.progress.step, run.folder.directory
    checkpoint = run.folder.checkpoints.root / step_name(step)
    raise StoppedError(
        f"the run was stopped by {by} after step {step:,}; checkpoint: {checkpoint}; the same command with --run-dir "
        f"{directory.path} continues it"
    )


def _finish(run: Run, trainer: Trainer, reporter: Reporter) -> None:
    """Draw the sample and report the results of a run that did all its steps."""
    config, data, progress = run.config, run.data, run.progress
    progress.phase = "generation of the sample"
    sample = draw_sample(config, trainer.model, run.mesh, data, make_stop_check(run.folder.directory))
    collectives.barrier(run.mesh.world)
    folder = str(run.folder.checkpoints.root / step_name(progress.step))
    reporter.finish(
        {
            "tokens": progress.tokens,
            "samples": progress.samples,
            "weights": folder,
            "optimizer_bytes": trainer.optimizer.state_bytes(),
            "sample": sample.text,
        }
    )
    reporter.message(f"weights: {folder}")
    if sample.text:
        reporter.message(f"sample: {sample.text}")
    elif sample.stopped_by is not None:
        reporter.message(f"sample: none, as the run was stopped by {sample.stopped_by}; all its steps are saved")
    elif data.tokenizer_path is None and config.log.sample_tokens and config.model.causal:
        reporter.message("sample: none, as the data hold only tokens: data.tokenizer names the one that made them")
