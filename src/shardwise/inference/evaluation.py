"""The losses of a model over all of a text.

Shapes: K = objectives of the loss.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from shardwise import comm
from shardwise import device as devices
from shardwise.config import ParallelConfig
from shardwise.data import Batch, Batches
from shardwise.errors import ConfigError
from shardwise.inference.passes import Passes
from shardwise.mesh import Mesh
from shardwise.models import Bert, gives_losses

_REPORT_SECONDS = 10.0


@dataclass(frozen=True)
class Evaluation:
    """What a model makes of a text.

    Attributes:
        losses: mean loss in nats of each objective's targets. counted: how many these are.
        accuracies: of objectives with a few right answers, the part of the targets that the model finds likeliest.
        tokens: tokens that were read, padding left out. sequences: samples that they came in. seconds: without start.
    """

    losses: dict[str, float]
    counted: dict[str, int]
    accuracies: dict[str, float]
    tokens: int
    sequences: int
    seconds: float

    @property
    def loss(self) -> float:
        """The sum of the objectives' means, which training minimises."""
        return sum(self.losses.values())

    @property
    def perplexity(self) -> float | None:
        """exp(loss) of the next token; None where that is not what the model predicts."""
        loss = self.losses.get("lm")
        return None if loss is None else math.exp(loss) if loss < 700 else math.inf


class _Sums:
    """What the micro-batches of one rank add up to: in float64, which no order of additions changes much."""

    def __init__(self, objectives: int, device: torch.device) -> None:
        self._device = device
        self._losses_K, self._correct_K = torch.zeros(2, objectives, dtype=torch.float64, device=device).unbind()
        self._counts_K, self._tokens = torch.zeros(objectives, dtype=torch.float64), 0

    def add(self, batch: Batch, losses_K: Tensor, correct_K: Tensor | None) -> None:
        self._losses_K += losses_K
        if correct_K is not None:
            self._correct_K += correct_K
        self._counts_K += torch.from_numpy(batch.counts)
        self._tokens += _tokens(batch)

    def over(self, mesh: Mesh) -> list[float]:
        """Losses, right answers and counts by objective, then tokens, of all ranks: the last stage alone has some."""
        read = torch.tensor([float(self._tokens)], dtype=torch.float64)
        own = torch.cat((self._losses_K, self._correct_K, torch.cat((self._counts_K, read)).to(self._device)))
        found: list[float] = comm.all_reduce_(comm.all_reduce_(own, mesh.dp), mesh.pp).tolist()
        return found


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Batches,
    mesh: Mesh,
    micro_batch: int,
    progress: Callable[[int, int], None] | None = None,
    parallel: ParallelConfig | None = None,
) -> Evaluation:
    """Mean losses over every sample of `batches`, each once; collective, equal on every rank.

    Sums are kept in float64 and divided once by their counts over all ranks: how samples are cut into micro-batches and
    over ranks changes no more than float32's own rounding inside of one. `progress` is called now and then with the
    samples done and all samples. `parallel` says how a model in pipeline stages is cut; as many micro-batches as there
    are pipeline ranks are held at a time.
    """
    model.eval()
    start = reported = time.perf_counter()
    names, portion = batches.objectives, mesh.dp.size * micro_batch
    sums, passes = _Sums(len(names), mesh.device), Passes(model, parallel, mesh)
    cut = mesh.tp.size if parallel is not None and parallel.sequence else 1
    rounds, done = -(-batches.num_samples // portion), 0
    waiting = batches.eval_batches(rounds, portion, mesh.dp.rank, mesh.dp.size, micro_batch)
    while at_once := list(islice(waiting, mesh.pp.size)):

        def compute(part: nn.Module, x: Tensor | None, number: int, at_once: list[Batch] = at_once) -> Tensor:
            batch = at_once[number]
            found, right = _scores(part, batch, mesh.device, x)
            if gives_losses(part):
                sums.add(batch, found, right)
            return found

        passes.run(compute, [(len(ids) // cut, ids.shape[1]) for ids in (b.inputs["ids_SB"] for b in at_once)])
        done += len(at_once)
        if progress is not None and time.perf_counter() - reported > _REPORT_SECONDS:
            reported = time.perf_counter()
            progress(min(done * portion, batches.num_samples), batches.num_samples)
    *sums_by, all_tokens = sums.over(mesh)
    devices.synchronize(mesh.device)
    count, knows_likeliest = len(names), isinstance(passes.parts[0], Bert)
    losses, correct, counted = (dict(zip(names, sums_by[i * count :], strict=False)) for i in range(3))
    return Evaluation(
        losses={name: losses[name] / max(counted[name], 1.0) for name in names},
        counted={name: int(counted[name]) for name in names},
        accuracies={name: correct[name] / max(counted[name], 1.0) for name in names if knows_likeliest},
        tokens=int(all_tokens),
        sequences=batches.num_samples,
        seconds=time.perf_counter() - start,
    )


def _scores(part: nn.Module, batch: Batch, device: torch.device, x: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Sums of the losses `[K]`, and how many targets are likeliest `[K]` where the model knows.

    Of a pipeline stage that is not the last: what the next one takes. x: what the stage before gave.
    """
    inputs = {name: torch.from_numpy(array).to(device) for name, array in batch.inputs.items()}
    if x is not None:
        inputs["x"] = x
    if isinstance(part, Bert) and part.part.is_last:
        return part.scores(**inputs)
    takes = inspect.signature(part.forward).parameters
    if "lengths_B" in takes and batch.lengths is not None and (batch.lengths < len(inputs["ids_SB"])).any():
        inputs["lengths_B"] = torch.from_numpy(batch.lengths).to(device)
    sums: object = part(**inputs, **({"dropout": None} if "dropout" in takes else {}))
    if isinstance(sums, Tensor) and not gives_losses(part):
        return sums, None
    if not isinstance(sums, Tensor) or sums.numel() != len(batch.counts):
        raise ConfigError(f"{type(part).__name__}.forward must return the sum of its targets' losses, not {sums!r}")
    return sums.reshape(-1), None


def _tokens(batch: Batch) -> int:
    """Tokens of a micro-batch that are no padding."""
    mask = batch.inputs.get("mask_SB")
    if mask is None:
        return int(batch.counts.sum())
    # A sample that counts nothing is made of special tokens alone.
    real_B = batch.inputs["next_sentence_B"] >= 0
    return int(mask[:, real_B].sum())
