"""The partition of a model's blocks into pipeline stages."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from shardwise.config import Config, FamilyConfig, Layout
from shardwise.config.layout import Stage, rank_of
from shardwise.models.parameter_counts import block_work, head_work


def stage_plan(config: Config, layout: Layout) -> tuple[Stage, ...]:
    """Return the stages of the model, in its order: as `parallel.stages` says, else balanced by work.

    If ranks have several stages, all stages have equally many blocks. Without a pipeline there is one stage. A model of
    your own has one stage with no `layers`: its blocks are not known.
    """
    model = config.model
    stages = layout.stages
    if model.is_own:
        return (Stage(0, 0, range(0), 1),)
    if stages == 1:
        sizes = [model.num_hidden_layers]
    elif config.parallel.stages is not None:
        sizes = list(config.parallel.stages)
    elif layout.virtual > 1:
        sizes = [model.num_hidden_layers // stages] * stages
    else:
        length = config.train.sequence_length
        head = _head_in_blocks(model, length, config.data.predictions(length))
        sizes = balanced(model.num_hidden_layers, stages, head)
    ends = list(accumulate(sizes))
    ranks = [rank_of(config.parallel, index) for index in range(stages)]
    layers = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return tuple(Stage(index, ranks[index], layers[index], stages) for index in range(stages))


def compute_shares(config: Config, layout: Layout) -> tuple[float, ...]:
    """Return the part of a step's work that each stage does, in the order of the model. Not for a model of your own."""
    length = config.train.sequence_length
    head = _head_in_blocks(config.known_shapes, length, config.data.predictions(length))
    work = [len(stage.layers) + head * stage.is_last for stage in stage_plan(config, layout)]
    return tuple(share / sum(work) for share in work)


@lru_cache(maxsize=64)
def _head_in_blocks(model: FamilyConfig, length: int, predictions: int | None) -> float:
    """Return the work of all that follows the last block, in units of a block."""
    return head_work(model, length, predictions) / block_work(model, length)


def balanced(layers: int, stages: int, head: float) -> list[int]:
    """Return the number of blocks of each stage, such that the most expensive stage is as cheap as possible.

    If stages differ by a block, the later ones have more, because earlier stages hold more micro-batches. The embedding
    has no matrix product and counts as no work.

    Args:
        layers: blocks of the model.
        stages: number of stages.
        head: work of all that follows the last block, in units of a block.
    """
    if stages == 1:
        return [layers]
    other_stages = stages - 1

    def slowest_stage(last_blocks: int) -> float:
        most_blocks = -(-(layers - last_blocks) // other_stages)
        return max(most_blocks, last_blocks + head)

    # Among equals, more blocks in the last stage: it holds the fewest micro-batches.
    candidates = range(1, layers - other_stages + 1)
    last_blocks = min(candidates, key=lambda blocks: (slowest_stage(blocks), -blocks))
    fewest, larger_stages = divmod(layers - last_blocks, other_stages)
    sizes = [fewest + (stage >= other_stages - larger_stages) for stage in range(other_stages)]
    return [*sizes, last_blocks]
