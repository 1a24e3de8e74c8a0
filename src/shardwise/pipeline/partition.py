"""How the blocks of a model are partitioned into pipeline stages."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from shardwise.config import Config, FamilyConfig, Layout
from shardwise.config.stages import Stage, rank_of
from shardwise.models.parameter_counts import block_work, head_work


def stage_plan(config: Config, layout: Layout) -> tuple[Stage, ...]:
    """The stages of the model, in its order: as `parallel.stages` says, else balanced by the work of blocks and head.

    If ranks have several stages, all stages have equally many blocks. Without a pipeline there is one stage. A model of
    your own has one stage with no `layers`: its blocks are not known.
    """
    model, stages = config.shapes, layout.stages
    if model is None:
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
    """The part of a step's work that each stage does, in the order of the model. Not for a model of your own."""
    head = _head_in_blocks(config, config.known_shapes)
    work = [len(stage.layers) + head * stage.is_last for stage in stage_plan(config, layout)]
    return tuple(share / sum(work) for share in work)


def _head_in_blocks(config: Config, model: FamilyConfig) -> float:
    """The work of what follows the last block, in blocks."""
    length = config.train.sequence_length
    return _head_share(model, length, config.data.predictions(length))


@lru_cache(maxsize=64)
def _head_share(model: FamilyConfig, length: int, predictions: int | None) -> float:
    return head_work(model, length, predictions) / block_work(model, length)


def balanced(layers: int, stages: int, head: float) -> list[int]:
    """The number of blocks of each stage, such that the most expensive stage is as cheap as possible.

    If stages differ by a block, the later ones have more, because earlier stages hold more micro-batches. The embedding
    has no matrix product and counts as no work.

    Args:
        layers: blocks of the model.
        stages: the number of stages.
        head: the work of what follows the last block, in blocks.
    """
    if stages == 1:
        return [layers]
    others = stages - 1
    last = min(range(1, layers - others + 1), key=lambda last: (max(-(-(layers - last) // others), last + head), -last))
    fewest, more = divmod(layers - last, others)
    return [fewest + (stage >= others - more) for stage in range(others)] + [last]
