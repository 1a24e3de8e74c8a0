"""How a model is cut into pipeline stages, and how long a schedule leaves its ranks idle.

Legend: p pipeline ranks, v stages on each rank, m micro-batches of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from shardwise.config import Config, FamilyConfig, Layout, OwnConfig, ParallelConfig
from shardwise.config.sections import V_SHAPED
from shardwise.cost.flops import flops_per_token, head_flops_per_token


@dataclass(frozen=True)
class Stage:
    """A run of consecutive blocks, with the embedding before the first one and the head behind the last one.

    Attributes:
        index: from 0, in the order of the model. rank: the pipeline rank that has it. layers: its blocks. stages: how
        many there are.
    """

    index: int
    rank: int
    layers: range
    stages: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1


def stage_plan(config: Config, layout: Layout) -> tuple[Stage, ...]:
    """The stages of the model, in its order: as `parallel.stages` says, else by what blocks and head cost.

    With several stages on a rank all have equally many blocks. One stage without a pipeline, and for a model of your
    own, whose blocks are not known: there `layers` is empty.
    """
    model, stages = config.model, layout.stages
    if isinstance(model, OwnConfig):
        return (Stage(0, 0, range(0), 1),)
    if stages == 1:
        sizes = [model.num_hidden_layers]
    elif config.parallel.stages is not None:
        sizes = list(config.parallel.stages)
    elif layout.virtual > 1:
        sizes = [model.num_hidden_layers // stages] * stages
    else:
        sizes = balanced(model.num_hidden_layers, stages, _head_in_blocks(config, model))
    ends = list(accumulate(sizes))
    ranks = [rank_of(config.parallel, index) for index in range(stages)]
    return tuple(
        Stage(index, rank, range(end - size, end), stages)
        for index, (rank, end, size) in enumerate(zip(ranks, ends, sizes, strict=True))
    )


def compute_shares(config: Config, layout: Layout) -> tuple[float, ...]:
    """The part of a step's work that each stage does, in the order of the model; not of a model of your own."""
    model = config.model
    assert not isinstance(model, OwnConfig)
    head = _head_in_blocks(config, model)
    work = [len(stage.layers) + head * stage.is_last for stage in stage_plan(config, layout)]
    return tuple(one / sum(work) for one in work)


def _head_in_blocks(config: Config, model: FamilyConfig) -> float:
    """How many blocks cost as much as what follows the last one."""
    length = config.train.sequence_length
    predictions = config.data.predictions(length)
    one = model.model_copy(update={"num_hidden_layers": 1})
    head, total = head_flops_per_token(one, length, predictions), flops_per_token(one, length, predictions)
    assert total is not None
    return head / (total - head)


def rank_of(parallel: ParallelConfig, stage: int) -> int:
    """The pipeline rank of a stage: stages are dealt out round after round, in a V there and back."""
    degree = parallel.pipeline
    round_, place = divmod(stage, degree)
    return degree - 1 - place if parallel.schedule in V_SHAPED and round_ % 2 else place


def balanced(layers: int, stages: int, head: float) -> list[int]:
    """Blocks of each stage so that the most expensive one is as cheap as can be; the head costs as many as `head`.

    Where stages differ by a block the later ones have more: the earlier a stage, the more micro-batches it holds. An
    embedding multiplies nothing and counts nothing.
    """
    if stages == 1:
        return [layers]
    others = stages - 1
    last = min(range(1, layers - others + 1), key=lambda last: (max(-(-(layers - last) // others), last + head), -last))
    each, more = divmod(layers - last, others)
    return [each + (stage >= others - more) for stage in range(others)] + [last]


def bubble(parallel: ParallelConfig, micro_batches: int) -> float | None:
    """The part of a step in which a rank waits for others, where stages are equal and messages take no time.

    (p-1) / (m+p-1) with GPipe (arXiv:1811.06965 §2.3) and 1F1B (arXiv:2104.04473 §2.2.1); (p-1) / (v·m+p-1) where it is
    interleaved (§2.2.2) and a round has as many micro-batches as there are ranks, or more. None with fewer, and for
    schedules that move weight gradients into the gaps: there it follows from the order of their work.
    """
    p, m = parallel.pipeline, micro_batches
    if p == 1:
        return 0.0
    match parallel.schedule:
        case "gpipe" | "1f1b":
            return (p - 1) / (m + p - 1)
        case "interleaved" if m >= p:
            return (p - 1) / (parallel.stages_per_rank * m + p - 1)
        case _:
            return None
