"""One training run on one rank, from joining the job to the final weights."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from shardwise.base import units
from shardwise.base.errors import ConfigError, LostPeerError, RunError, StoppedError, error_text, listing, see
from shardwise.base.registered import provided
from shardwise.checkpoint.storage.checkpoint_choice import goes_back
from shardwise.checkpoint.storage.checkpoint_folders import step_name
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config, Layout, UserModelConfig, check_layout, size_stage_after, size_stages_of
from shardwise.data.samples.batch import MANY_EPOCHS, REPEATED_TEXT, Batches, BlendedBatches
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh, calls_of_groups, join, leave
from shardwise.estimates.memory import neediest_stage
from shardwise.launch import heartbeat, notices, stop_requests
from shardwise.launch.stop_requests import continuing_command
from shardwise.optim.learning_rate import learning_rate_change_text
from shardwise.train.build import build_checkpoints, build_memory_copies, build_run_trainer
from shardwise.train.checkpoint_saving import CheckpointSaver
from shardwise.train.device_checks import config_for_device_memory, out_of_memory_text, require_device
from shardwise.train.observers import Observer, SteppedCollection, build_observers, run_observers
from shardwise.train.profiler_trace import Trace
from shardwise.train.rank_agreement import require_same_on_ranks
from shardwise.train.reporter import Reporter
from shardwise.train.resume import (
    Resumed,
    continue_data_from,
    continue_progress_from,
    restore_first_intact,
    set_later_checkpoints_aside,
)
from shardwise.train.start import OpenedRun, open_run
from shardwise.train.step_record import Progress, StartTotals
from shardwise.train.trainer import Trainer

if TYPE_CHECKING:
    from shardwise.train.compile.run_graphs import RunGraphs
    from shardwise.train.memory_copies import MemoryCopies

_EPOCHS_WITHOUT_WARNING = 3


def run(config: Config, run_path: Path | None, recipe: str) -> Path:
    """Train as one rank of the job that the launcher describes; every rank calls this with the same configuration.

    Args:
        run_path: folder of the run; None lets rank 0 name a new one after the recipe.

    Returns:
        the run's folder, on every rank.

    Raises:
        ConfigError: the configuration, the data or the folder is wrong.
        RunError: training failed.
        StoppedError: the run was asked to stop, and all is saved.
    """
    notices.set_up(config.log.notify)
    devices.use_expandable_segments()
    join(timeout=config.launch.timeout)
    mesh = Mesh(**config.parallel.degrees, grains=config.grains)
    # Before any rank reads or writes: ranks of several machines may differ in files and software.
    config = _with_one_batch(config, mesh)
    require_same_on_ranks(config.model_dump(mode="json"), mesh, run_path)
    layout = check_layout(config, mesh.world.size)
    # Each stage with sizes of its own begins as a run that is resumed.
    turn = _Turn(size_stages_of(config)[0], run_path)
    while not turn.is_last:
        with _opened_stage(turn, layout, mesh, recipe) as stage:
            if isinstance(stage, _Turn):
                turn = stage
                continue
            turn = _end_stage(stage, _train(stage))
        if not turn.is_last:
            # The model, whose parts refer to each other, and its compiled code make room for those of the next stage.
            del stage
            gc.collect()
            torch.compiler.reset()
    leave()
    assert turn.path is not None
    return turn.path


def _train(stage: _OpenedStage) -> str | None:
    """Train to the last step of a stage; returns who asked the run to stop before it."""
    config = stage.opened.config
    trainer = stage.trainer
    with closing(Trace(config.log, trainer.mesh, stage.reporter.run)) as trace, SteppedCollection() as garbage:
        observers = [
            Observer(1, lambda *_: garbage.after_step()),
            *build_observers(trainer, stage.reporter, stage.checkpoints, stage.graphs),
        ]
        return trainer.run(partial(run_observers, observers), stage.checkpoints, trace.step)


@dataclass(frozen=True)
class _Turn:
    """A stage of a run that begins, or the end of the run."""

    config: Config
    path: Path | None  # folder of the run; None before rank 0 has named it
    step: int | None = None  # steps that are done; None before anybody has looked
    # Time at which the stage before ended, by `time.perf_counter`; None for the first one of a process.
    began: float | None = None
    totals: StartTotals | None = None  # totals of the stages before in this process; None in the first one
    is_last: bool = False  # True if the run has ended


@dataclass(frozen=True)
class _OpenedStage:
    opened: OpenedRun
    trainer: Trainer
    reporter: Reporter
    checkpoints: CheckpointSaver
    graphs: RunGraphs | None


@contextmanager
def _opened_stage(turn: _Turn, layout: Layout, mesh: Mesh, recipe: str) -> Iterator[_OpenedStage | _Turn]:
    """Restore the state that a stage begins with, or find that the run goes on in another one. Collective."""
    progress = Progress(phase="preparation of the data")
    config, choice = config_for_device_memory(turn.config, layout, mesh)
    # Before the first step of the process, the memory must suffice for each stage.
    stages = [config]
    if turn.began is None:
        stages = [config_for_device_memory(stage, layout, mesh)[0] for stage in size_stages_of(config)]
    neediest = neediest_stage(stages, layout, mesh.device.type != "cpu")

    def doing() -> dict[str, Any]:
        """The facts of a heartbeat. Another thread calls this."""
        place = {"device": str(mesh.device), "stage": mesh.pp.rank, "step": progress.step}
        return {**place, "doing": _phase(progress), "called": calls_of_groups()}

    with heartbeat.beating(doing), _explained(config, layout, mesh, progress):
        shortage = require_device(neediest, layout, mesh.world.rank, mesh.device)
        opened = open_run(config, layout, mesh, progress, turn.path, recipe)
        directory = opened.folder.directory
        newest = max((candidate.step for candidate in opened.folder.checkpoints.candidates), default=0)
        if turn.step is None and not config.has_next_step(newest):
            yield _Turn(size_stage_after(config, newest), directory.path, newest)
            return
        # Inside of the reporter too, so that it records the same sentence that the user reads.
        reporter = Reporter(directory, config, layout, mesh.world.rank, device_name=devices.name(mesh.device))
        with reporter, _explained(config, layout, mesh, progress), ExitStack() as stack:
            progress.phase = "construction of the model"
            trainer = build_run_trainer(opened, reporter)
            if opened.followed is not None:
                opened.followed.follow()
            # From here on all ranks make files in the folder, which rank 0 has made, and followed if it was renamed.
            collectives.barrier(mesh.world)
            copies = build_memory_copies(opened, trainer)
            resumed = _restore(opened, trainer, reporter, copies)
            if not config.has_next_step(progress.step):
                # Later checkpoints were damaged, and this one is of an earlier stage.
                yield _Turn(size_stage_after(config, progress.step), directory.path, progress.step)
                return
            _begin(opened, trainer, reporter, copies, resumed, turn)
            if shortage is not None:
                reporter.warning(shortage)
            if choice is not None:
                reporter.message(f"chosen for the memory of the devices: {choice}")
            graphs = None
            if trainer.compilation is not None:
                from shardwise.train.compile.run_graphs import RunGraphs

                # After the start is reported: this tells which graphs have to be compiled. The sample may need one.
                graphs = stack.enter_context(RunGraphs(config, layout, mesh, trainer.compilation, reporter.message))
            with build_checkpoints(opened, trainer, reporter, resumed, copies) as checkpoints:
                if resumed is not None and resumed.damage:
                    checkpoints.save_again(resumed.manifest)
                checkpoints.follow()  # also tells the user
                # Only now: a signal during the start ends the run at once, as there is nothing to save. One that came
                # between two stages counts after the first step.
                if turn.began is None:
                    stop_requests.install()
                yield _OpenedStage(opened, trainer, reporter, checkpoints, graphs)
        # A program that called `shardwise.train` reads the results on any rank.
        collectives.barrier(mesh.world)


def _end_stage(stage: _OpenedStage, stopped_by: str | None) -> _Turn:
    opened = stage.opened
    config = opened.config
    progress = opened.progress
    progress.phase = "wait for the checkpoint"
    stage.checkpoints.finish()
    copies = stage.checkpoints.copies
    if copies is not None:
        copies.remove()
        if copies.count:
            wait = f"{1000 * copies.seconds / copies.count:.1f} ms"
            stage.reporter.message(f"copies in memory: {copies.count:,}, for each of which training waited {wait}")
    if stopped_by is not None:
        _stop(opened, stopped_by, stage.reporter)
    path = opened.folder.directory.path
    following = _following(config, progress)
    if following is None:
        _finish(opened, stage.trainer, stage.reporter)
        return _Turn(config, path, progress.step, is_last=True)
    from shardwise.runs.events import NEXT_STAGE

    stage.reporter.stop(NEXT_STAGE)
    return _Turn(following, path, progress.step, time.perf_counter(), stage.reporter.totals)


def _following(config: Config, progress: Progress) -> Config | None:
    """The stage that follows the last step of this one; None where the run ends."""
    following = size_stage_after(config, progress.step)
    stop_after = config.train.stop_after
    left = None if stop_after is None else stop_after - (progress.step - progress.before)
    if progress.step >= config.train.steps or left == 0:
        return None
    return following.with_keys(train={"stop_after": left})


def _phase(progress: Progress) -> str:
    return f"{progress.phase} of step {progress.step + 1:,}" if progress.step else progress.phase


def _with_one_batch(config: Config, mesh: Mesh) -> Config:
    """`config` with rank 0's global batch, where the recipe has a rule for it. Collective."""
    # A run that is resumed keeps the number in its folder, which other machines may not see.
    if config.train.rule is None:
        return config
    return config.with_batch(collectives.broadcast_object(config.train.global_batch, mesh.world))


@contextmanager
def _explained(config: Config, layout: Layout, mesh: Mesh, progress: Progress) -> Iterator[None]:
    """Raise a sentence instead of a library's error where another rank has ended or memory ran out."""
    try:
        yield
    except ConfigError as error:
        if progress.step == progress.before:
            raise
        # The exit code of a ConfigError would say that no step was taken.
        raise RunError(str(error)) from error
    except SystemExit as error:
        raise RunError(
            f"rank {mesh.world.rank} was ended during {_phase(progress)}: {error_text(error)}; a training ends after "
            f"its last step ({config.train.steps:,}), or with a checkpoint before it, where a function of "
            "hooks.callbacks returns True"
        ) from error
    except Exception as error:
        if devices.is_lost_connection(error):
            raise LostPeerError(
                f"rank {mesh.world.rank} lost the connection to another rank during {progress.phase}"
                f"{see('training#lost-connection')}"
            ) from error
        if devices.is_shared_device(error):
            raise ConfigError(
                f"rank {mesh.world.rank} must have an accelerator of its own, and shares {mesh.device} with another "
                "rank: start at most one rank on each, and set LOCAL_RANK as torchrun does"
                f"{see('runs#local-rank')}"
            ) from error
        if not devices.is_out_of_memory(error):
            raise
        raise RunError(out_of_memory_text(config, layout, mesh.world.rank, mesh.device, progress, error)) from error


def _begin(
    opened: OpenedRun,
    trainer: Trainer,
    reporter: Reporter,
    copies: MemoryCopies | None,
    resumed: Resumed | None,
    turn: _Turn,
) -> None:
    config = opened.config
    end = opened.progress.position + (config.last_step - opened.progress.step) * config.train.global_batch
    if resumed is not None:
        continue_data_from(resumed.manifest, opened.data, trainer)
    reporter.start(
        loaded=None if opened.weights is None else str(opened.weights),
        steps_before=opened.progress.step,
        epochs=trainer.feed.batches.epochs(end),
        seconds_before=None if turn.began is None else time.perf_counter() - turn.began,
        totals=turn.totals,
        went_back=resumed is not None and goes_back(config, resumed.manifest),
    )
    if turn.began is None and opened.mesh.world.rank == 0:
        notices.begin(opened.folder.directory.path)
        for problem in notices.problems(config.log.notify):
            reporter.warning(problem)
    reporter.message(f"data: {opened.data.summary}")
    _warn_of_repeats(trainer.feed.batches, end, reporter)
    shapes = config.shapes
    if shapes is not None and shapes.ignore:
        reporter.message(f"model.ignore: config.json is read without {listing(shapes.ignore)}")
    for note in (opened.folder.batch_note, *opened.companions.notes, opened.sets.note):
        if note is not None:
            reporter.message(note)
    for note in [*opened.folder.notes, *config.optimizer.steps_without_rate(config.train.steps)]:
        reporter.warning(note)
    if copies is not None:
        reporter.message(copies.summary)
    if resumed is None:
        _report_weights(opened, reporter)
        return
    _report_resumption(opened, resumed, reporter, is_border=turn.began is not None)
    received = resumed.received
    if received is not None:
        sent = f"; that of {units.counted(received, 'rank')} from another node" if received else ""
        reporter.message(f"the state was in the memory of the nodes{sent}, and loaded in {resumed.seconds:.2f} s")


def _warn_of_repeats(batches: Batches, samples: int, reporter: Reporter) -> None:
    if not isinstance(batches, BlendedBatches):
        epochs = samples / batches.num_samples
        if epochs > MANY_EPOCHS:
            reporter.warning(
                f"the data ({units.counted(batches.num_samples, 'sample')}) are read {epochs:,.1f} times by the last "
                f"step, and {REPEATED_TEXT}: lower train.steps, or give more data"
            )
        return
    for name, epochs in batches.repeated(samples).items():
        if epochs > _EPOCHS_WITHOUT_WARNING:
            reporter.warning(
                f"the source {name} is read {epochs:.1f} times by the last step, and {REPEATED_TEXT}: lower its "
                "weight, or give it more text"
            )


def _restore(opened: OpenedRun, trainer: Trainer, reporter: Reporter, copies: MemoryCopies | None) -> Resumed | None:
    """Restore the newest state, of the nodes' memory or of the disk; None where a training begins. Collective."""
    start = time.perf_counter()
    candidates = opened.folder.checkpoints.candidates
    newest = max((candidate.step for candidate in candidates), default=0)
    # A step that the user names is one of the disk. At equal steps the copy is taken: memory is read faster.
    if copies is not None and opened.config.checkpoint.resume == "auto":
        copy = copies.restore(newest)
        if copy is not None:
            manifest, received = copy
            continue_progress_from(manifest, opened.progress, opened.config)
            return Resumed(manifest, Root.of(copies.folder), (), received, time.perf_counter() - start)
    resumed = restore_first_intact(candidates, trainer, reporter)
    return None if resumed is None else replace(resumed, seconds=time.perf_counter() - start)


def _report_resumption(opened: OpenedRun, resumed: Resumed, reporter: Reporter, *, is_border: bool) -> None:
    """Set the checkpoints aside that are later than the one that was restored, and record the resumption."""
    checkpoints = opened.folder.checkpoints
    manifest = resumed.manifest
    resume = opened.config.checkpoint.resume
    is_back = goes_back(opened.config, manifest)
    for name in set_later_checkpoints_aside(
        checkpoints.root, checkpoints.saved, manifest.step, opened.mesh, damaged=not is_back
    ):
        reporter.message(f"set aside: {name}")
    if resume != "auto" and not is_back and not is_border:
        reporter.message(
            f"the run went back to step {resume:,} before, and continues from there; to go "
            "back once more, move the later checkpoints away"
        )
    reporter.resumed(manifest, str(resumed.folder), opened.folder.changes, resumed.seconds)
    if opened.folder.former_steps is not None:
        moved_end = learning_rate_change_text(
            opened.config.optimizer, opened.config.train.steps, opened.folder.former_steps, manifest.step
        )
        if moved_end is not None:
            reporter.message(f"learning rate: {moved_end}")


def _report_weights(opened: OpenedRun, reporter: Reporter) -> None:
    weights = opened.weights
    changes = opened.folder.changes
    # Rank 0 alone prints: no other rank reads the configuration of the weights, which may be far away.
    if weights is not None and opened.mesh.world.rank == 0:
        from shardwise.checkpoint.format.model_files import model_differences

        changes = (*changes, *model_differences(opened.config.model, weights).changes)
    reporter.changed(changes)
    if weights is None:
        return
    reporter.message(f"weights: those of {weights}")
    from shardwise.checkpoint.storage.model_tokenizer import other_tokenizer_text

    warning = other_tokenizer_text(weights, opened.data.tokenizer_path)
    if warning is not None:
        reporter.warning(warning)


def _stop(opened: OpenedRun, stopped_by: str, reporter: Reporter) -> NoReturn:
    """Record the stop, and end the run by an error whose exit code tells a stop from a failure."""
    reporter.stop(f"stopped by {stopped_by}")
    step = opened.progress.step
    checkpoint = opened.folder.checkpoints.root / step_name(step)
    raise StoppedError(
        f"the run was stopped by {stopped_by} after step {step:,}; checkpoint: {checkpoint}; "
        f"{continuing_command(opened.folder.directory.path)} continues it"
    )


def _finish(opened: OpenedRun, trainer: Trainer, reporter: Reporter) -> None:
    config = opened.config
    data = opened.data
    progress = opened.progress
    progress.phase = "generation of the sample"
    reason_to_stop = stop_requests.make_stop_check(opened.folder.directory.path)
    optimizer = trainer.optimizer
    with optimizer.gathered(all_units=False):
        sample = provided("draw_sample")(
            config, trainer.model, opened.mesh, data, reason_to_stop, in_step=optimizer.gathers_in_passes
        )
    collectives.barrier(opened.mesh.world)
    folder = str(opened.folder.checkpoints.root / step_name(progress.step))
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
        family = f" model.family={config.model.family}" if isinstance(config.model, UserModelConfig) else ""
        reporter.message(f"chat: shardwise chat {opened.folder.directory.path}{family}")
    elif sample.stopped_by is not None:
        reporter.message(f"sample: none, as the run was stopped by {sample.stopped_by}; all its steps are saved")
    elif data.tokenizer_path is None and config.log.sample_tokens and config.model.causal:
        reporter.message("sample: none, as the data hold only tokens: data.tokenizer names the one that made them")
