"""The partition of a model's blocks into pipeline stages."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from shardwise.config import Config, FamilyConfig, Layout, ParallelConfig, Schedule
from shardwise.config.layout import LayoutStage
from shardwise.config.pipeline_schedule_specs import SCHEDULES
from shardwise.models.flops import block_multiply_adds, head_work
from shardwise.models.parameter_counts import LocalWidths, elements_by_ranks


def stage_plan(config: Config, layout: Layout) -> tuple[LayoutStage, ...]:
    """Return the stages of the model, in its order: as `parallel.stages` says, else balanced by work.

    If ranks have several stages, all stages have equally many blocks. Without a pipeline there is one stage; of a model
    of your own it has no `layers`, as its blocks may not be known.
    """
    model = config.model
    stages = layout.stages
    blocks = model.num_hidden_layers or 0
    if stages == 1:
        sizes: tuple[int, ...] = (blocks,)
    elif config.parallel.stages is not None:
        sizes = tuple(config.parallel.stages)
    elif layout.virtual > 1:
        sizes = (blocks // stages,) * stages
    else:
        length = config.train.sequence_length
        # The usual block has 12 · H² parameters.
        own_head = model.vocab_size / (12 * (model.hidden_size or 1))
        head = own_head if model.is_own else _head_in_blocks(model, length, config.data.predictions(length))
        sizes = balanced(blocks, stages, head)
    return _stages(sizes, config.parallel.pipeline, config.parallel.schedule)


def partition_by_rank(config: Config, layout: Layout) -> list[tuple[list[LayoutStage], int | None]]:
    """The stages of each rank in a pipeline's partition, and the elements of their parameters with padding, or None."""
    plan = stage_plan(config, layout)
    model = config.shapes
    by_rank = [[stage for stage in plan if stage.rank == rank] for rank in range(layout.pipeline)]
    if model is None:
        return [(stages, None) for stages in by_rank]
    local = LocalWidths.on(layout, model, config.parallel.vocab_multiple)
    return [(stages, elements_by_ranks(model, layout.tensor, local, tuple(stages)).total()) for stages in by_rank]


@lru_cache(maxsize=2**10)
def _stages(sizes: tuple[int, ...], pipeline: int, schedule: Schedule) -> tuple[LayoutStage, ...]:
    parallel = ParallelConfig.model_construct(pipeline=pipeline, schedule=schedule)
    numbered = enumerate(zip(sizes, accumulate(sizes), strict=True))
    return tuple(
        LayoutStage(n, pipeline_rank_of(parallel, n), range(end - size, end), len(sizes)) for n, (size, end) in numbered
    )


def compute_shares(config: Config, layout: Layout) -> tuple[float, ...]:
    """Return each pipeline stage's part of a step's work, in the partition's order. Not for a model of your own."""
    length = config.train.sequence_length
    head = _head_in_blocks(config.known_shapes, length, config.data.predictions(length))
    work = [len(stage.layers) + head * stage.is_last for stage in stage_plan(config, layout)]
    return tuple(share / sum(work) for share in work)


@lru_cache(maxsize=64)
def _head_in_blocks(model: FamilyConfig, length: int, predictions: int | None) -> float:
    """Return the work of all that follows the last block, in units of a block."""
    return head_work(model, length, predictions) / block_multiply_adds(model, length)


@lru_cache(maxsize=2**10)
def balanced(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """Return the number of blocks of each pipeline stage, such that the most expensive stage is as cheap as possible.

    If stages differ by a block, the later ones have more, because earlier stages hold more micro-batches. The embedding
    has no matrix product and counts as no work.

    Args:
        layers: blocks of the model.
        stages: number of stages.
        head: work of all that follows the last block, in units of a block.
    """
    if stages == 1:
        return (layers,)
    other_stages = stages - 1

    def slowest_stage(last_blocks: int) -> float:
        most_blocks = -(-(layers - last_blocks) // other_stages)
        return max(most_blocks, last_blocks + head)

    # Among equals, more blocks in the last stage: it holds the fewest micro-batches.
    candidates = range(1, layers - other_stages + 1)
    last_blocks = min(candidates, key=lambda blocks: (slowest_stage(blocks), -blocks))
    fewest, larger_stages = divmod(layers - last_blocks, other_stages)
    sizes = [fewest + (stage >= other_stages - larger_stages) for stage in range(other_stages)]
    return (*sizes, last_blocks)


def pipeline_rank_of(parallel: ParallelConfig, stage: int) -> int:
    """Return the pipeline rank that holds a stage, given by its index in the order of the model.

    Stages are dealt out in rounds, one to each rank. In a V-shaped schedule every second round goes from the last rank
    to the first, so that rank r of p holds the stages r and 2p-1-r.
    """
    round_number, place = divmod(stage, parallel.pipeline)
    if SCHEDULES[parallel.schedule].is_v_shaped and round_number % 2 == 1:
        return parallel.pipeline - 1 - place
    return place
