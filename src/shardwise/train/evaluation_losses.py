"""The losses of a model on a text: evaluations within a training, and those of `shardwise evaluate`.

Shapes: K = objectives of the loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from shardwise.base.progress import progress
from shardwise.config import ParallelConfig
from shardwise.data.samples.batch import Batches
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Mesh
from shardwise.models.bert import Bert
from shardwise.models.blocks import gives_losses
from shardwise.pipeline.stages import Stages, relay
from shardwise.train.mean_loss import MicroBatch, mean_over_targets, perplexity


@dataclass(frozen=True)
class EvaluationLosses:
    """The losses and accuracies of an evaluation."""

    losses: dict[str, float]  # mean loss of each objective's targets, in nats
    counted: dict[str, int]  # number of each objective's targets
    # Share of the targets that the model finds likeliest, for each objective of BERT; else empty.
    accuracies: dict[str, float]
    tokens: int  # targets of the next token, or for BERT tokens read, without padding; 0 where they were not counted
    seconds: float
    sequences: int = 0  # samples read; 0 where they were not counted
    bytes: int | None = None  # UTF-8 bytes of the text of the targets; None where they are not known

    @property
    def loss(self) -> float:
        """The sum of the objectives' means, which training minimises."""
        return sum(self.losses.values())

    @property
    def perplexity(self) -> float | None:
        """The perplexity of the next token; None for a model that predicts something else."""
        loss = self.losses.get("lm")
        return None if loss is None else perplexity(loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Sum of the next tokens' losses / (ln 2 · bytes of their text); None where the bytes are not known, or 0."""
        if not self.bytes or "lm" not in self.losses:
            return None
        return self.losses["lm"] * self.counted["lm"] / (math.log(2) * self.bytes)


@torch.no_grad()
def evaluate_rounds(
    model: nn.Module,
    rounds: Iterable[Sequence[MicroBatch]],
    objectives: Sequence[str],
    mesh: Mesh,
    parallel: ParallelConfig | None = None,
    *,
    is_scored: bool = False,
    bytes_V: npt.NDArray[np.int64] | None = None,
) -> EvaluationLosses:
    """Mean losses over micro-batches, without dropout; collective, equal on every rank.

    Sums are kept in float64, on the host where the device has none, so that only the rounding of float32 within a
    micro-batch depends on how samples are cut into micro-batches and over ranks.

    Args:
        rounds: micro-batches that go through the model together; every rank has the same number of them.
        parallel: how a model in pipeline stages is cut.
        is_scored: also count tokens, and the right answers of BERT.
        bytes_V: UTF-8 bytes of each id's text; None counts no bytes.
    """
    model.eval()
    start = time.perf_counter()
    K = len(objectives)
    terms_NK: list[Tensor] = []
    # Losses [K], numbers of targets [K], right answers [K], the number of tokens [1] and of bytes [1].
    place = mesh.device if devices.widest_dtype(mesh.device) == torch.float64 else torch.device("cpu")
    sums = torch.zeros(3 * K + 2, dtype=torch.float64, device=place)
    device_bytes_V = None if bytes_V is None else devices.to_device(torch.from_numpy(bytes_V), mesh.device)
    # Sequence parallelism leaves each rank a part of each sample between blocks.
    sequence_parts = mesh.tp.size if parallel is not None and parallel.sequence else 1
    for micro_batches in rounds:

        def compute(
            part: nn.Module, x: Tensor | None, number: int, micro_batches: Sequence[MicroBatch] = micro_batches
        ) -> Tensor:
            batch = micro_batches[number]
            if is_scored and isinstance(part, Bert) and part.part.is_last:
                out, correct_K = part.scores(**batch.inputs, x=x)
                sums[2 * K : 3 * K] += correct_K.to(place)
            else:
                out = batch.result(part, batch.call_of(part, x)())
            if gives_losses(part):
                terms_NK.append(out)
                sums[:K] += out.to(place)
                sums[K : 2 * K] += batch.counts_K.to(place)
                if is_scored:
                    sums[-2] += batch.tokens().to(place)
                if device_bytes_V is not None:
                    sums[-1] += batch.bytes(device_bytes_V).to(place)
            return out

        shapes = [batch.inputs["ids_SB"].shape for batch in micro_batches]
        relay(model, parallel, mesh, compute, [(length // sequence_parts, samples) for length, samples in shapes])
    collectives.all_reduce_(collectives.all_reduce_(sums, mesh.replicas), mesh.pp)
    sums = sums.cpu()  # one transfer for all sums
    if mesh.dp.grain is not None:
        sums[:K] = _exact_sums(terms_NK, K, mesh)
    has_answers = is_scored and isinstance(model[0] if isinstance(model, Stages) else model, Bert)
    return _evaluation(sums, objectives, time.perf_counter() - start, has_answers, bytes_V is not None)


def _evaluation(
    sums: Tensor, objectives: Sequence[str], seconds: float, has_answers: bool, has_bytes: bool
) -> EvaluationLosses:
    """The evaluation whose sums are losses [K], targets [K], right answers [K], tokens [1] and bytes [1]."""
    losses_K, counts_K, answers_K = sums[:-2].chunk(3)
    return EvaluationLosses(
        losses=_by_name(objectives, mean_over_targets(losses_K, counts_K)),
        counted={name: int(count) for name, count in _by_name(objectives, counts_K).items()},
        accuracies=_by_name(objectives, mean_over_targets(answers_K, counts_K)) if has_answers else {},
        tokens=int(sums[-2]),
        seconds=seconds,
        bytes=int(sums[-1]) if has_bytes else None,
    )


def _exact_sums(terms_NK: Sequence[Tensor], objectives: int, mesh: Mesh) -> Tensor:
    """Sums of all ranks' losses, [K], rounded once: the ranks' order does not matter."""
    local = []
    if terms_NK:
        local = collectives.all_reduce_(torch.stack(list(terms_NK)), mesh.cp).tolist()
    by_replica = collectives.all_gather_objects(local, mesh.dp)
    by_stage = collectives.all_gather_objects([row for rows in by_replica for row in rows], mesh.pp)
    rows = [row for rows in by_stage for row in rows]
    return torch.tensor([math.fsum(row[number] for row in rows) for number in range(objectives)], dtype=torch.float64)


def _by_name(objectives: Sequence[str], numbers_K: Tensor) -> dict[str, float]:
    return dict(zip(objectives, numbers_K.tolist(), strict=True))


def evaluate(
    model: nn.Module,
    batches: Batches,
    mesh: Mesh,
    micro_batch: int,
    shown: bool = False,
    parallel: ParallelConfig | None = None,
    bytes_V: npt.NDArray[np.int64] | None = None,
) -> EvaluationLosses:
    """Mean losses over every sample of `batches`, each once; collective, equal on every rank."""
    with progress("evaluating", batches.num_samples, "sequence", shown=shown) as advance:
        rounds = _rounds(batches, mesh, micro_batch, advance)
        evaluation = evaluate_rounds(model, rounds, batches.objectives, mesh, parallel, is_scored=True, bytes_V=bytes_V)
    return replace(evaluation, sequences=batches.num_samples)


def _rounds(
    batches: Batches, mesh: Mesh, micro_batch: int, advance: Callable[[int], None]
) -> Iterator[list[MicroBatch]]:
    """Yield every sample once, as many micro-batches at a time as there are pipeline ranks."""
    portion = mesh.dp.size * micro_batch
    count = -(-batches.num_samples // portion)
    reading = batches.eval_batches(count, portion, mesh.dp.rank, mesh.dp.size, micro_batch)
    while micro_batches := [MicroBatch.on(mesh.device, batch).part(mesh.cp) for batch in islice(reading, mesh.pp.size)]:
        yield micro_batches
        advance(len(micro_batches) * portion)
