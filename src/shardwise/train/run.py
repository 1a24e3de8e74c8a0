"""One run on one rank, from joining the job to the final weights."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError

from shardwise import __version__, comm, hub
from shardwise import device as devices
from shardwise.checkpoint import differ_in_tokens, export_hugging_face
from shardwise.config import Config, Layout, dump_yaml
from shardwise.cost.memory import expected_memory, final_weights_bytes
from shardwise.cost.params import parameter_count
from shardwise.data import PreparedData, Tokenizer, prepare
from shardwise.errors import ConfigError, RunError
from shardwise.hardware import cpu_count
from shardwise.launch import stdio
from shardwise.mesh import Mesh, join
from shardwise.runlog import RunDirectory, new_run_path
from shardwise.train.build import build_trainer
from shardwise.train.memory import out_of_memory_text
from shardwise.train.own import StateMemory, count_parameters
from shardwise.train.report import Reporter
from shardwise.train.sample import Generator, continue_text
from shardwise.train.trainer import Progress, Trainer


def run(config: Config, run_path: Path | None, recipe: str) -> int:
    """Train as this rank of the job that the launcher describes, and return the exit code.

    `run_path`: the run directory; None lets rank 0 name one. Every rank calls this with the same configuration.

    Raises:
        ConfigError: the configuration, the data or the run directory is wrong. RunError: training failed.
    """
    join()
    mesh = Mesh(tensor=config.parallel.tensor)
    layout = config.check(mesh.world.size)
    progress = Progress(phase="preparation of the data")
    try:
        data = prepare(config)
        weights = _weights(config, mesh)
        directory = _open_directory(config, run_path, recipe, mesh)
        _train(config, layout, mesh, data, weights, directory, progress)
    except Exception as error:
        if not devices.is_out_of_memory(error):
            raise
        text = out_of_memory_text(config, layout, mesh.world.rank, mesh.device, progress, error)
        raise RunError(text) from error
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _weights(config: Config, mesh: Mesh) -> Path | None:
    """The folder of `checkpoint.load`, which lies here by now; all ranks have the same, or all fail."""
    load, revision = config.checkpoint.load, config.checkpoint.revision
    if load is None:
        return None
    folder, problems = Path(), []
    try:
        folder = hub.resolve(load, revision, cached=True)
    except ConfigError as error:
        problems = error.problems
    answers = comm.all_gather_objects((problems, folder.name), mesh.world)
    found = [problem for each, _ in answers for problem in each]
    commits = sorted({name for _, name in answers})
    if not found and len(commits) > 1:
        found = [f"checkpoint.load ({load}) must be one commit on every machine: set checkpoint.revision={commits[0]}"]
    if found:
        raise ConfigError(list(dict.fromkeys(found)))
    return folder


def _open_directory(config: Config, run_path: Path | None, recipe: str, mesh: Mesh) -> RunDirectory:
    """Rank 0 names and makes the run directory; all ranks agree on it, or all fail."""
    problem, chosen = None, run_path
    if mesh.world.rank == 0:
        try:
            chosen = run_path or new_run_path(recipe)
            directory = RunDirectory(chosen).create()
            weights_bytes = final_weights_bytes(config, mesh.device.type != "cpu")
            if weights_bytes is not None:
                directory.require_room(weights_bytes)
            directory.write_config(dump_yaml(config.model_dump(mode="json")))
            directory.write_environment(_versions(), [devices.name(mesh.device)], cpu_count())
            directory.mark_latest()
        except ConfigError as error:
            problem = error.problems
    problem, chosen = comm.all_gather_objects((problem, chosen), mesh.world)[0]
    if problem:
        raise ConfigError(problem)
    assert chosen is not None
    directory = RunDirectory(chosen)
    stdio.redirect(mesh.world.rank, directory.log(mesh.world.rank))
    return directory


def _require_room(directory: RunDirectory, weights_bytes: int, mesh: Mesh) -> None:
    """Rank 0 looks for room for the final weights; all ranks go on, or all fail."""
    problem = None
    if mesh.world.rank == 0:
        try:
            directory.require_room(weights_bytes)
        except ConfigError as error:
            problem = error.problems
    problem = comm.all_gather_objects(problem, mesh.world)[0]
    if problem:
        raise ConfigError(problem)


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
    weights: Path | None,
    directory: RunDirectory,
    progress: Progress,
) -> None:
    accelerator = mesh.device.type != "cpu"
    with Reporter(
        directory,
        config,
        layout,
        mesh.world.rank,
        device_name=devices.name(mesh.device),
        precision=config.precision.resolved(accelerator),
        parameters=parameter_count(config.model),
        memory=expected_memory(config, layout, accelerator),
    ) as reporter:
        progress.phase = "construction of the model"
        trainer = build_trainer(config, layout, mesh, data, reporter, progress, weights)
        if reporter.parameters is None:
            reporter.parameters = count_parameters(trainer.model)
            reporter.memory = StateMemory.of(trainer.model, trainer.optimizer)
            _require_room(directory, reporter.parameters * next(trainer.model.parameters()).itemsize, mesh)
        reporter.start(loaded=weights)
        reporter.message(f"data: {data.summary}")
        if weights is not None:
            reporter.message(f"weights: those of {weights}")
            if differ_in_tokens(weights, data.tokenizer_path):
                reporter.warning(
                    f"the tokenizer of the data has other ids than that of the loaded weights ({weights}): to go on "
                    f"with what they learned, set data.tokenizer={weights}"
                )
        trainer.run()
        progress.phase = "export of the weights"
        folder = directory.checkpoint(progress.step)
        try:
            export_hugging_face(trainer.model, config.model, mesh, folder, tokenizer=data.tokenizer_path)
        except (OSError, SafetensorError) as error:
            raise RunError(f"the final weights could not be written to {folder}: {error}") from error
        progress.phase = "generation of the sample"
        sample = _sample(config, trainer, data)
        comm.barrier(mesh.world)
        reporter.finish({"weights": str(folder), "optimizer_bytes": trainer.optimizer.state_bytes(), "sample": sample})
        reporter.message(f"weights: {folder}")
        if sample:
            reporter.message(f"sample: {sample}")


def _sample(config: Config, trainer: Trainer, data: PreparedData) -> str | None:
    """A prompt and its continuation by the trained model.

    None where `log.sample_tokens` is 0, off replica 0, and for a model that gives no logits of the next token.
    """
    log, mesh, model = config.log, trainer.mesh, trainer.model
    if not log.sample_tokens or mesh.dp.rank or not isinstance(model, Generator) or not config.model.causal:
        return None
    tokenizer = Tokenizer.load(data.tokenizer_path)
    trainer.model.eval()
    held_out = data.eval_tokens if len(data.eval_tokens) else data.train_tokens
    prompt = tokenizer.encode(log.sample_prompt) if log.sample_prompt else held_out[:16]
    ids = [int(token) for token in prompt]
    window = config.train.sequence_length
    drawn = continue_text(model, mesh, ids, log.sample_tokens, window=window, seed=config.train.seed)
    return tokenizer.decode(ids + drawn)
