"""The work of one rank in `shardwise evaluate` and `shardwise generate`, from joining the job to the answer.

Each `run_…` raises a ConfigError where the folder has another model, or what is asked does not fit it, a DamageError
where a checkpoint's bytes do not match their checksums, and a RunError where memory ran out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.base.errors import ConfigError, DataError, RunError
from shardwise.checkpoint.format.manifest import MANIFEST
from shardwise.checkpoint.load_weights import load_checkpoint_weights, load_hugging_face
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config, ParallelConfig, check_layout
from shardwise.data.evaluation_sets import vocabulary_byte_counts
from shardwise.data.formats.prepared_data import make_evaluation_batches
from shardwise.data.open_data import prepare_data
from shardwise.data.rows import Part
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh, join, leave
from shardwise.pipeline.stages import Stages, build_stages
from shardwise.train.evaluation_losses import EvaluationLosses, evaluate
from shardwise_use.generation import Continuation, GenerativeModel, Prompt, answer_prompt


def run_evaluation(config: Config, weights: Root, part: Part, *, shown: bool = False) -> EvaluationLosses:
    """Run `shardwise evaluate` on every rank: the model of a folder on one part of the data."""
    with inference_mesh(config.parallel, config.train.micro_batch) as mesh:
        # A part that is smaller than one training sample can be evaluated.
        data = prepare_data(config, any_size=True)
        batches = make_evaluation_batches(config, data, part)
        if batches is None:
            least = "2 samples" if config.model.objectives != ("lm",) else "2 tokens"
            raise DataError(
                f"the {part} part of the data ({data.count(part):,} tokens at data.split={config.data.split}) must "
                f"hold at least {least}: give more text, another data.split, or --part all"
            )
        model = _load_model(config, weights, mesh)
        bytes_V = vocabulary_byte_counts(config.model, data.tokenizer_path)
        return evaluate(model, batches, mesh, config.train.micro_batch, shown, config.parallel, bytes_V)


def run_generation(
    config: Config, weights: Root, tokenizer: Tokenizer, prompt: Prompt, write: Callable[[str], None]
) -> Continuation:
    """Let the model of a folder continue a prompt, on every rank; `write` gets each piece of text at once."""
    with inference_mesh(config.parallel, config.train.micro_batch) as mesh:
        model = load_generator(config, weights, mesh)
        return answer_prompt(model, mesh, prompt, tokenizer, write, parallel=config.parallel)


def run_evaluation_tasks(
    config: Config, weights: Root, tokenizer: Tokenizer, stops: frozenset[int]
) -> dict[str, Any] | None:
    """Score the model of a folder on `evaluation.tasks`, on every rank; rank 0 gets the results of `lm_eval`."""
    # It imports lm_eval, an extra.
    from shardwise_use.task_evaluation import BOOTSTRAPS, evaluate_tasks

    with inference_mesh(config.parallel, config.train.micro_batch) as mesh:
        model = _load_model(config, weights, mesh)
        return evaluate_tasks(config, model, mesh, tokenizer, stops, bootstraps=BOOTSTRAPS)


@contextmanager
def inference_mesh(parallel: ParallelConfig, micro_batch: int) -> Iterator[Mesh]:
    """Join a job of inference and give its mesh; inside, an out-of-memory error becomes a sentence."""
    join()
    mesh = Mesh(**parallel.degrees)
    try:
        yield mesh
    except Exception as error:
        if not devices.is_out_of_memory(error):
            raise
        raise RunError(
            f"rank {mesh.world.rank} ran out of memory on {mesh.device}: raise parallel.tensor "
            f"({parallel.tensor}) or parallel.pipeline ({parallel.pipeline}), or lower "
            f"train.micro_batch ({micro_batch}) or train.sequence_length in an evaluation, --max-tokens "
            "or the prompt in a generation"
        ) from error
    leave()


def load_generator(config: Config, weights: Root, mesh: Mesh) -> GenerativeModel | Stages:
    """A loaded model that generates text; ConfigError: it gives no logits."""
    model = _load_model(config, weights, mesh)
    if not isinstance(model, GenerativeModel | Stages):
        raise ConfigError(f"model.family ({config.model.family}) has no logits(ids): it cannot continue a text")
    return model


def _load_model(config: Config, weights: Root, mesh: Mesh) -> nn.Module:
    path = str(weights.local().resolve() if weights.is_local else weights)
    # A run that still trains may save between the looks of two ranks for its newest checkpoint.
    folders = sorted(set(collectives.all_gather_objects(path, mesh.world)))
    if len(folders) > 1:
        raise ConfigError(f"the ranks found several checkpoints ({', '.join(folders)}): name one of them")
    # As in training, so that an evaluation has the losses that the run reported.
    precision = config.precision.resolved(mesh.device.type != "cpu")
    dtype: torch.dtype = getattr(torch, precision.parameter)
    model = build_stages(config, check_layout(config, mesh.world.size), mesh, dtype=dtype)
    if collectives.broadcast_object((weights / MANIFEST).exists(), mesh.world):
        load_checkpoint_weights(model, config.model.family, mesh, weights)
    else:
        load_hugging_face(model, config.model, mesh, weights.local())
    return model.eval()
