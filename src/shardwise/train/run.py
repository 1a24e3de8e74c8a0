"""One run on one rank, from joining the job to the final weights."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError

from shardwise import __version__, comm
from shardwise import device as devices
from shardwise.checkpoint import export_hugging_face
from shardwise.config import Config, Layout, dump_yaml
from shardwise.cost.memory import MemoryEstimate, expected_memory, final_weights_bytes
from shardwise.cost.params import parameter_count
from shardwise.data import PreparedData, Tokenizer, prepare
from shardwise.errors import ConfigError, RunError
from shardwise.hardware import cpu_count
from shardwise.launch import stdio
from shardwise.mesh import Mesh, join
from shardwise.runlog import RunDirectory, new_run_path
from shardwise.train.build import build_trainer
from shardwise.train.memory import out_of_memory_text
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
        directory = _open_directory(config, run_path, recipe, mesh)
        _train(config, layout, mesh, data, directory, progress)
    except Exception as error:
        if not devices.is_out_of_memory(error):
            raise
        text = out_of_memory_text(config, layout, mesh.world.rank, mesh.device, progress, error)
        raise RunError(text) from error
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _open_directory(config: Config, run_path: Path | None, recipe: str, mesh: Mesh) -> RunDirectory:
    """Rank 0 names and makes the run directory; all ranks agree on it, or all fail."""
    problem, chosen = None, run_path
    if mesh.world.rank == 0:
        try:
            chosen = run_path or new_run_path(recipe)
            directory = RunDirectory(chosen).create()
            directory.require_room(final_weights_bytes(config, mesh.device.type != "cpu"))
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


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"shardwise": __version__}
    for package in ("torch", "numpy", "tokenizers", "safetensors", "pydantic"):
        versions[package] = importlib.metadata.version(package)
    return versions


def _train(
    config: Config, layout: Layout, mesh: Mesh, data: PreparedData, directory: RunDirectory, progress: Progress
) -> None:
    accelerator = mesh.device.type != "cpu"
    memory: MemoryEstimate = expected_memory(config, layout, accelerator)
    with Reporter(
        directory,
        config,
        layout,
        mesh.world.rank,
        device_name=devices.name(mesh.device),
        precision=config.precision.resolved(accelerator),
        parameters=parameter_count(config.model),
        memory=memory,
    ) as reporter:
        progress.phase = "construction of the model"
        trainer = build_trainer(config, layout, mesh, data, reporter, progress)
        reporter.start()
        reporter.message(f"data: {data.summary}")
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
    held_out = data.eval_tokens if len(data.eval_tokens) else data.train_tokens
    prompt = tokenizer.encode(log.sample_prompt) if log.sample_prompt else held_out[:16]
    ids = [int(token) for token in prompt]
    window = config.train.sequence_length
    drawn = continue_text(model, mesh, ids, log.sample_tokens, window=window, seed=config.train.seed)
    return tokenizer.decode(ids + drawn)
