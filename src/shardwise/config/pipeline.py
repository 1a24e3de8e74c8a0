"""Whether a model and its micro-batches suit a pipeline and its schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.config.model import OwnConfig
from shardwise.config.sections import SINGLE_STAGE, V_SHAPED, ParallelConfig
from shardwise.errors import listing, nearest_numbers

if TYPE_CHECKING:
    from shardwise.config.root import Config


def pipeline_problems(config: Config, micro_batches: int | None) -> list[str]:
    """Every reason why the model cannot be cut into these stages, or the schedule cannot run with `micro_batches`.

    `micro_batches`: of a step, on each rank; None where they are no whole number.
    """
    parallel = config.parallel
    if parallel.pipeline == 1:
        return []
    if isinstance(config.model, OwnConfig):
        return [
            f"parallel.pipeline ({parallel.pipeline}) must be 1 with a model of your own "
            f"(model.family {config.model.family}): nothing is known of how to cut it into stages"
        ]
    problems = _stage_count_problems(parallel)
    if not problems:
        problems = _layer_problems(parallel, config.model.num_hidden_layers)
    if micro_batches is not None:
        problems += _micro_batch_problems(config, micro_batches)
    return problems


def _stage_count_problems(parallel: ParallelConfig) -> list[str]:
    schedule, given = parallel.schedule, parallel.virtual_stages
    if given is None:
        return []
    if schedule in SINGLE_STAGE and given > 1:
        return [
            f"parallel.virtual_stages ({given}) must be 1 with parallel.schedule {schedule}, which has one stage on each "
            "rank: set parallel.schedule=interleaved, or leave parallel.virtual_stages out"
        ]
    if schedule in V_SHAPED and given != 2:
        return [f"parallel.virtual_stages ({given}) must be 2 with parallel.schedule {schedule}, or left out"]
    if schedule not in SINGLE_STAGE and given == 1:
        return [
            f"parallel.virtual_stages (1) must be at least 2 with parallel.schedule {schedule}: set "
            "parallel.schedule=1f1b for one stage on each rank"
        ]
    return []


def _layer_problems(parallel: ParallelConfig, layers: int) -> list[str]:
    per_rank, schedule = parallel.stages_per_rank, parallel.schedule
    stages = parallel.pipeline * per_rank
    product = f"parallel.pipeline ({parallel.pipeline})" + (f" × {per_rank} stages on each rank" if per_rank > 1 else "")
    if stages > layers:
        most = layers // per_rank
        fix = f"set parallel.pipeline={most} or less" if most > 1 else "set parallel.pipeline=1"
        return [f"the stages ({product} = {stages}) must be at most model.num_hidden_layers ({layers}): {fix}"]
    by_hand = parallel.stages
    if by_hand is not None:
        shown, problems = list(by_hand), []
        if len(by_hand) != stages:
            problems.append(f"parallel.stages {shown} must name {stages} stages ({product}), not {len(by_hand)}")
        if min(by_hand, default=1) < 1:
            problems.append(f"parallel.stages {shown} must give each stage at least 1 block")
        if sum(by_hand) != layers:
            problems.append(
                f"the sum of parallel.stages {shown} ({sum(by_hand)}) must be model.num_hidden_layers ({layers})"
            )
        return problems
    if per_rank == 1 or layers % stages == 0:
        return []
    valid = [degree for degree in range(2, layers // per_rank + 1) if layers % (degree * per_rank) == 0]
    degrees = f"set parallel.pipeline={listing(nearest_numbers(parallel.pipeline, valid), 'or')}, " if valid else ""
    return [
        f"model.num_hidden_layers ({layers}) must be a multiple of {product} = {stages} with parallel.schedule "
        f"{schedule}, whose stages are equal: {degrees}name unequal ones by parallel.stages, or set "
        "parallel.schedule=1f1b"
    ]


def fits_schedule(parallel: ParallelConfig, micro_batches: int) -> bool:
    """Whether the schedule can run with that many micro-batches in a step.

    Interleaved schedules deal them out in equal rounds, of as many as there are ranks or more; fewer are one round.
    """
    degree = parallel.pipeline
    match parallel.schedule:
        case "gpipe" | "zbv":
            return True
        case "1f1b":
            return micro_batches >= degree
        case "dualpipev":
            return micro_batches >= 2 * degree
        case "interleaved" | "interleaved_zero_bubble":
            return micro_batches % max(1, micro_batches // degree) == 0


def _micro_batch_problems(config: Config, micro_batches: int) -> list[str]:
    parallel, train = config.parallel, config.train
    if fits_schedule(parallel, micro_batches):
        return []
    degree, schedule = parallel.pipeline, parallel.schedule
    fitting = (n for n in range(1, micro_batches + 2 * degree + 1) if fits_schedule(parallel, n))
    near = nearest_numbers(micro_batches, fitting)
    match schedule:
        case "1f1b":
            needs = f"at least parallel.pipeline ({degree})"
        case "dualpipev":
            needs = f"at least 2 × parallel.pipeline (2 × {degree} = {2 * degree})"
        case _:
            count = micro_batches // degree
            needs = f"a multiple of the {count} rounds of parallel.pipeline ({degree}) or more that they are dealt out in"
    batches = listing((n * (train.global_batch // micro_batches) for n in near), "or")
    smaller = f", or lower train.micro_batch ({train.micro_batch})" if train.micro_batch > 1 else ""
    return [
        f"the micro-batches of a step on each rank ({micro_batches}) must be {needs} with parallel.schedule {schedule}: "
        f"set train.global_batch={batches}{smaller}"
    ]
