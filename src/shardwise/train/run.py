"""One run on one rank, from joining the job to the final weights."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from shardwise import __version__, comm, cost, hub
from shardwise import device as devices
from shardwise.checkpoint.agreement import agree, differ_in_tokens
from shardwise.checkpoint.save import Keeping, Saver
from shardwise.checkpoint_format.earlier_run import earlier_run
from shardwise.checkpoint_format.folders import step_name
from shardwise.checkpoint_format.manifest import MANIFEST
from shardwise.checkpoint_format.owner import Owner, take
from shardwise.checkpoint_format.places import newest_of
from shardwise.config import Config, Layout, check_layout, dump_yaml, resume_changes
from shardwise.cost.memory import expected_memory
from shardwise.data import PreparedData, StreamBatches, prepare
from shardwise.errors import ConfigError, LostPeerError, RunError, StoppedError
from shardwise.hardware import cpu_count
from shardwise.launch import stdio, stopping
from shardwise.launch.environment import joined
from shardwise.mesh import Mesh, join
from shardwise.plan.parameters import parameter_count
from shardwise.plan.partition import stage_plan
from shardwise.runlog import RunDirectory, new_run_path
from shardwise.storage.reach import in_time
from shardwise.storage.root import Root, StoreError
from shardwise.train.build import build_trainer
from shardwise.train.memory import out_of_memory_text
from shardwise.train.own import StateMemory, count_parameters
from shardwise.train.record import Progress
from shardwise.train.report import Reporter
from shardwise.train.resume import (
    Resumed,
    Standing,
    goes_back,
    look,
    require_same_data,
    restore_first,
    set_later_aside,
    went_back,
)
from shardwise.train.sample import draw_sample
from shardwise.train.saving import STREAM, Checkpoints
from shardwise.train.trainer import Trainer


def run(config: Config, run_path: Path | None, recipe: str) -> int:
    """Train as this rank of the job that the launcher describes, and return the exit code.

    `run_path`: the run directory; None lets rank 0 name one. Every rank calls this with the same configuration.

    Raises:
        ConfigError: the configuration, the data or the run directory is wrong. RunError: training failed.
    """
    join()
    mesh = Mesh(tensor=config.parallel.tensor, pipeline=config.parallel.pipeline)
    layout = check_layout(config, mesh.world.size)
    progress = Progress(phase="preparation of the data")
    with _explained(config, layout, mesh, progress):
        data = prepare(config)
        weights = _weights(config, mesh)
        opened = _open_directory(config, run_path, recipe, mesh)
        _train(config, layout, mesh, data, weights, opened, progress)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


@contextmanager
def _explained(config: Config, layout: Layout, mesh: Mesh, progress: Progress) -> Iterator[None]:
    """Says what a library's error means where it means that another rank has ended, or that memory ran out.

    What is wrong with the input ends a run as one that failed, once it has taken a step: whoever reads the exit code
    must not believe that nothing was trained.
    """
    try:
        yield
    except ConfigError as error:
        if progress.step == progress.before:
            raise
        raise RunError(str(error)) from error
    except Exception as error:
        if comm.is_lost_connection(error):
            text = f"rank {mesh.world.rank} lost the connection to another rank during {progress.phase}"
            raise LostPeerError(text) from error
        if not devices.is_out_of_memory(error):
            raise
        text = out_of_memory_text(config, layout, mesh.world.rank, mesh.device, progress, error)
        raise RunError(text) from error


def _weights(config: Config, mesh: Mesh) -> Root | None:
    """The folder of `checkpoint.load`, which lies here by now or behind a URL; all ranks have the same, or all fail."""
    load, folder, problems = config.checkpoint.load, Path(), []
    if load is None:
        return None
    try:
        if mesh.world.rank == 0:
            load = newest_of(load)
            if hub.is_url(load):
                _require_checkpoint(Root.of(load))
    except ConfigError as error:
        problems = error.problems
    agree(problems, mesh.world)
    load = comm.broadcast_object(load, mesh.world)
    if hub.is_url(load):
        return Root.of(load)
    try:
        folder = hub.resolve(load, config.checkpoint.revision, cached=True)
    except ConfigError as error:
        problems = error.problems
    agree(problems, mesh.world)
    commits = sorted(set(comm.all_gather_objects(folder.name, mesh.world)))
    if len(commits) > 1:
        raise ConfigError(
            f"checkpoint.load ({load}) must be one commit on every machine: set checkpoint.revision={commits[0]}"
        )
    return Root.of(folder)


def _require_checkpoint(folder: Root) -> None:
    """ConfigError where a URL names no checkpoint."""
    try:
        if in_time(folder, (folder / MANIFEST).exists):
            return
    except StoreError as error:
        raise ConfigError(f"checkpoint.load: {error}") from None
    raise ConfigError(
        f"checkpoint.load ({folder}) must be a checkpoint or hold checkpoints, and it has no {MANIFEST}: copy a "
        "Hugging Face folder to this machine first"
    )


@dataclass(frozen=True)
class _Opened:
    """The run's folder, the checkpoints that it can go on from, its id, what of the configuration has changed, and what
    of its files was rebuilt."""

    directory: RunDirectory
    standing: Standing
    id: str
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _open_directory(config: Config, run_path: Path | None, recipe: str, mesh: Mesh) -> _Opened:
    """Rank 0 names and makes the run directory, or opens that of an earlier run; all ranks agree, or all fail."""
    problems: list[str] = []
    opened: _Opened | None = None
    if mesh.world.rank == 0:
        try:
            opened = _open(config, run_path or new_run_path(recipe), mesh)
        except ConfigError as error:
            problems = error.problems
    agree(problems, mesh.world)
    opened = comm.broadcast_object(opened, mesh.world)
    assert opened is not None
    stdio.redirect(mesh.world.rank, opened.directory.log(mesh.world.rank))
    return opened


def _open(config: Config, run_path: Path, mesh: Mesh) -> _Opened:
    directory = RunDirectory(run_path)
    resolved = config.model_dump(mode="json")
    earlier = earlier_run(directory, config)
    stored = None if earlier is None else earlier.config
    changes = () if stored is None else tuple(resume_changes(stored, resolved))
    # Before anything is written: a folder that is refused must not look like that of a run.
    standing = look(config, directory, stored, None if earlier is None else earlier.id)
    directory.create()
    run = directory.id(None if earlier is None else earlier.id)
    _require_room(directory, config, cost.checkpoint_bytes(config, mesh.device.type != "cpu"))
    directory.set_results_aside()
    directory.write_config(dump_yaml(resolved))
    directory.write_environment(_versions(), [devices.name(mesh.device)], cpu_count())
    directory.mark_latest()
    try:
        take(standing.root, Owner.here(run, directory.path))
    except StoreError as error:
        raise ConfigError(str(error)) from None
    return _Opened(directory, standing, run, changes, () if earlier is None else earlier.notes)


def _require_room(directory: RunDirectory, config: Config, needed: int | None) -> None:
    if needed is not None and config.checkpoint.path is None:
        directory.require_room(needed)


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"shardwise": __version__}
    for package in ("torch", "numpy", "tokenizers", "safetensors", "huggingface_hub", "pydantic"):
        versions[package] = importlib.metadata.version(package)
    return versions


def _train(
    config: Config,
    layout: Layout,
    mesh: Mesh,
    data: PreparedData,
    weights: Root | None,
    opened: _Opened,
    progress: Progress,
) -> None:
    accelerator, directory, root = mesh.device.type != "cpu", opened.directory, opened.standing.root
    if opened.standing.candidates:
        weights = None
    reporter = Reporter(
        directory,
        config,
        layout,
        mesh.world.rank,
        device_name=devices.name(mesh.device),
        precision=config.precision.resolved(accelerator),
        parameters=parameter_count(config.model),
        memory=expected_memory(config, layout, accelerator),
    )
    with reporter, _explained(config, layout, mesh, progress):  # the run's files have the sentence that the user reads
        progress.phase = "construction of the model"
        trainer = build_trainer(config, mesh, data, reporter, progress, weights)
        if reporter.parameters is None:
            _count_own_model(trainer, reporter, opened, config)
        stream = trainer.batches if isinstance(trainer.batches, StreamBatches) else None
        restored = _begin(config, trainer, data, weights, opened, stream, reporter)
        saver = _saver(config, layout, trainer, data, opened)
        told = went_back(config, restored.manifest if restored is not None else None)
        with Checkpoints(saver, config, reporter, mesh, _asker(directory), told, stream) as saving:
            trainer.saving = saving
            if restored is not None and restored.damage:
                saving.save_again(restored.manifest)
            stopping.install()
            stopped_by = trainer.run()
            progress.phase = "wait for the checkpoint"
            saving.finish()
        folder = root / step_name(progress.step)
        if stopped_by is not None:
            _stop(stopped_by, progress.step, folder, directory, reporter)
        _finish(config, trainer, data, directory, str(folder), reporter)


def _begin(
    config: Config,
    trainer: Trainer,
    data: PreparedData,
    weights: Root | None,
    opened: _Opened,
    stream: StreamBatches | None,
    reporter: Reporter,
) -> Resumed | None:
    """Take the training up where it was saved, and report how it begins; the checkpoint that was read, if any."""
    mesh, progress, standing = trainer.mesh, trainer.progress, opened.standing
    restored = restore_first(standing.candidates, config, trainer.model, trainer.optimizer, mesh, progress, reporter)
    if restored is not None:
        require_same_data(restored.manifest, data)
        if stream is not None:
            stream.restore(restored.manifest.rng[STREAM])
    reporter.start(loaded=None if weights is None else str(weights), steps_before=progress.step)
    reporter.message(f"data: {data.summary}")
    for note in opened.notes:
        reporter.warning(note)
    if restored is not None:
        _set_aside_and_report(restored, config, opened, mesh, reporter)
        return restored
    reporter.changed(opened.changes)
    if weights is not None:
        _tell_of_weights(weights, data, reporter)
    return None


def _set_aside_and_report(restored: Resumed, config: Config, opened: _Opened, mesh: Mesh, reporter: Reporter) -> None:
    """Set the checkpoints aside that are later than the one that was restored, and record the resumption."""
    back, step = goes_back(config, restored.manifest), restored.manifest.step
    for name in set_later_aside(opened.standing.root, opened.standing.found, step, mesh, damaged=not back):
        reporter.message(f"set aside: {name}")
    if config.checkpoint.resume != "auto" and not back:
        reporter.message(
            f"the run went back to step {config.checkpoint.resume:,} before, and goes on from there; to go "
            "back once more, move the later checkpoints away"
        )
    reporter.resumed(restored.manifest, str(restored.folder), opened.changes)


def _saver(config: Config, layout: Layout, trainer: Trainer, data: PreparedData, opened: _Opened) -> Saver:
    mesh, settings = trainer.mesh, config.checkpoint
    return Saver(
        opened.standing.root,
        trainer.model,
        trainer.optimizer,
        config,
        mesh,
        mesh.host_group("checkpoint"),
        described={
            "layout": _facts_of(layout, config),
            "data": {"fingerprint": data.fingerprint, "summary": data.summary, "run": opened.id},
            "versions": _versions(),
        },
        tokenizer=data.tokenizer_path,
        buffer_bytes=None if settings.buffer_mib is None else int(settings.buffer_mib * 2**20),
        keeping=Keeping(settings.keep, settings.keep_every),
    )


def _facts_of(layout: Layout, config: Config) -> dict[str, Any]:
    """What the manifests of a run say of the layout that wrote them; of a pipeline the blocks of its stages too."""
    facts = {**asdict(layout), "data": layout.data, "zero": config.optimizer.zero}
    if layout.pipeline == 1:
        del facts["virtual"]
        return facts
    blocks = [len(stage.layers) for stage in stage_plan(config, layout)]
    return facts | {"schedule": config.parallel.schedule, "blocks": blocks}


def _asker(directory: RunDirectory) -> Callable[[], str | None]:
    """Why this rank thinks that the run shall stop; one rank of each machine looks into the run's folder for it."""
    place = joined()
    folder = directory.path if place is None or place.local_rank == 0 else None
    return lambda: stopping.requested(folder)


def _stop(by: str, step: int, folder: Root, directory: RunDirectory, reporter: Reporter) -> NoReturn:
    reporter.stop(f"stopped by {by}")
    raise StoppedError(
        f"the run was stopped by {by} after step {step:,}; checkpoint: {folder}; the same command with --run-dir "
        f"{directory.path} goes on"
    )


def _count_own_model(trainer: Trainer, reporter: Reporter, opened: _Opened, config: Config) -> None:
    """What no formula knows of a model of the user's own."""
    reporter.parameters = count_parameters(trainer.model)
    reporter.memory = memory = StateMemory.of(trainer.model, trainer.optimizer)
    problems: list[str] = []
    if trainer.mesh.world.rank == 0:
        each = next(trainer.model.parameters()).itemsize + memory.optimizer // max(memory.parameters, 1)
        try:
            _require_room(opened.directory, config, reporter.parameters * each)
        except ConfigError as error:
            problems = error.problems
    agree(problems, trainer.mesh.world)


def _tell_of_weights(weights: Root, data: PreparedData, reporter: Reporter) -> None:
    reporter.message(f"weights: those of {weights}")
    if data.tokenizer_path is None or not weights.is_local:
        return
    if differ_in_tokens(weights.local(), data.tokenizer_path):
        reporter.warning(
            f"the tokenizer of the data has other ids than that of the loaded weights ({weights}): to go on "
            f"with what they learned, set data.tokenizer={weights}"
        )


def _finish(
    config: Config, trainer: Trainer, data: PreparedData, directory: RunDirectory, folder: str, reporter: Reporter
) -> None:
    """The sample and the results of a run that came to its end."""
    trainer.progress.phase = "generation of the sample"
    sample = draw_sample(config, trainer.model, trainer.mesh, data, _asker(directory))
    comm.barrier(trainer.mesh.world)
    progress = trainer.progress
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
        reporter.message("sample: none, as the data hold tokens alone: data.tokenizer names the one that made them")
