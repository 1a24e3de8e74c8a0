"""The rules of `parallel.pipeline`: whether a model can be cut into stages, and micro-batches suit the schedule."""

from __future__ import annotations

from shardwise.config.model import OwnConfig
from shardwise.config.sections import SINGLE_STAGE, V_SHAPED, Config, ParallelConfig
from shardwise.errors import listing, nearest_numbers


def pipeline_problems(config: Config, micro_batches: int | None) -> list[str]:
    """Every reason why the model cannot be cut into these stages, or why the schedule cannot run with `micro_batches`.

    Args:
        config: the whole configuration.
        micro_batches: of a step, on each rank; None if that is no whole number.
    """
    parallel = config.parallel
    if parallel.pipeline == 1:
        return _uncut_problems(parallel, is_own=isinstance(config.model, OwnConfig))
    if isinstance(config.model, OwnConfig):
        return [
            f"parallel.pipeline ({parallel.pipeline}) must be 1 with a model of your own (model.family "
            f"{config.model.family}): shardwise does not know how to cut it into stages"
        ]
    problems = _stage_count_problems(parallel)
    if not problems:
        problems = _layer_problems(parallel, config.model.num_hidden_layers)
    if not problems and micro_batches is not None:
        problems = _micro_batch_problems(config, micro_batches)
    return problems


def _uncut_problems(parallel: ParallelConfig, *, is_own: bool) -> list[str]:
    """`parallel.stages` must be left out without a pipeline."""
    if parallel.stages is None:
        return []
    per_rank = parallel.model_copy(update={"pipeline": len(parallel.stages)}).stages_per_rank
    degree, rest = divmod(len(parallel.stages), per_rank)
    fix = "leave it out"
    if degree > 1 and not rest and not is_own:
        fix += f", or set parallel.pipeline={degree}"
        if per_rank > 1:
            fix += f", which with parallel.schedule {parallel.schedule} has {per_rank} stages on each rank"
    return [
        f"parallel.stages ({list(parallel.stages)}) must be left out with parallel.pipeline (1), which cuts no model: "
        f"{fix}"
    ]


def _stage_count_problems(parallel: ParallelConfig) -> list[str]:
    schedule, given = parallel.schedule, parallel.virtual_stages
    if given is None:
        return []
    must = f"parallel.virtual_stages ({given}) must be"
    if schedule in SINGLE_STAGE and given > 1:
        return [
            f"{must} 1 with parallel.schedule {schedule}, which has one stage on each rank: set "
            "parallel.schedule=interleaved, or leave parallel.virtual_stages out"
        ]
    if schedule in V_SHAPED and given != 2:
        return [
            f"{must} 2 with parallel.schedule {schedule}, whose stages go to the last rank and back: leave "
            "parallel.virtual_stages out"
        ]
    if schedule not in SINGLE_STAGE and given == 1:
        return [
            f"{must} at least 2 with parallel.schedule {schedule}: leave parallel.virtual_stages out, or set "
            "parallel.schedule=1f1b, which has one stage on each rank"
        ]
    return []


def _layer_problems(parallel: ParallelConfig, layers: int) -> list[str]:
    per_rank, schedule = parallel.stages_per_rank, parallel.schedule
    stages = parallel.pipeline * per_rank
    product = f"parallel.pipeline ({parallel.pipeline})"
    if per_rank > 1:
        product = f"parallel.pipeline × stages on each rank ({parallel.pipeline} × {per_rank} = {stages})"
    if stages > layers:
        fix = _fewer(parallel, layers)
        return [f"{product} must be at most model.num_hidden_layers ({layers}), as each stage has a block: {fix}"]
    if parallel.stages is not None:
        return _named_problems(parallel.stages, stages, product, layers)
    if per_rank == 1 or layers % stages == 0:
        return []
    valid = _equal_degrees(per_rank, layers)
    degrees = f"set parallel.pipeline={listing(nearest_numbers(parallel.pipeline, valid), 'or')}, " if valid else ""
    return [
        f"{product} must divide model.num_hidden_layers ({layers}) with parallel.schedule {schedule}, which has equal "
        f"stages: {degrees}name unequal ones by parallel.stages, or {_one_stage(parallel, layers)}"
    ]


def _equal_degrees(per_rank: int, layers: int) -> list[int]:
    """Pipeline degrees that cut the model into equal stages, `per_rank` on each rank."""
    return [degree for degree in range(2, layers // per_rank + 1) if layers % (degree * per_rank) == 0]


def _fewer(parallel: ParallelConfig, layers: int) -> str:
    """The fix for more stages than blocks."""
    per_rank = parallel.stages_per_rank
    most = layers // per_rank
    if layers == 1:
        return "set parallel.pipeline=1"
    if most > 1 and (per_rank == 1 or parallel.stages is not None):
        return f"set parallel.pipeline={most} or less"
    valid = _equal_degrees(per_rank, layers)
    if not valid:
        return _one_stage(parallel, layers)
    return f"set parallel.pipeline={listing(nearest_numbers(parallel.pipeline, valid), 'or')}"


def _one_stage(parallel: ParallelConfig, layers: int) -> str:
    """The fix that has one stage on each rank."""
    changes = ["set parallel.schedule=1f1b"]
    if parallel.virtual_stages is not None:
        changes.append("leave parallel.virtual_stages out")
    if parallel.pipeline > layers:
        changes.append(f"set parallel.pipeline={layers} or less")
    return listing(changes)


def _named_problems(named: tuple[int, ...], stages: int, product: str, layers: int) -> list[str]:
    shown, problems = list(named), []
    if len(named) != stages:
        problems.append(f"the length of parallel.stages {shown} ({len(named)}) must be {product}")
    if min(named, default=1) < 1:
        problems.append(f"each number of parallel.stages {shown} must be at least 1: a stage has a block")
    if sum(named) != layers:
        problems.append(f"the sum of parallel.stages {shown} ({sum(named)}) must be model.num_hidden_layers ({layers})")
    if problems:
        equal, more = divmod(layers, stages)
        example = [equal + (stage >= stages - more) for stage in range(stages)]
        problems = [f"{problem}, such as {example}" for problem in problems]
    return problems


def fits_schedule(parallel: ParallelConfig, micro_batches: int) -> bool:
    """Whether the schedule can run with that many micro-batches in a step."""
    return _required(parallel, micro_batches) is None


def _required(parallel: ParallelConfig, micro_batches: int) -> str | None:
    """What the number of micro-batches must be for the schedule; None if it is so.

    Interleaved schedules take micro-batches in equal rounds, each of at least as many as there are ranks; if there are
    fewer micro-batches than ranks, all are one round.
    """
    degree = parallel.pipeline
    match parallel.schedule:
        case "gpipe" | "zbv":
            return None
        case "1f1b":
            fits, required = micro_batches >= degree, f"at least parallel.pipeline ({degree})"
        case "dualpipev":
            fits = micro_batches >= 2 * degree
            required = f"at least 2 × parallel.pipeline (2 × {degree} = {2 * degree})"
        case "interleaved" | "interleaved_zero_bubble":
            rounds = max(1, micro_batches // degree)
            fits = micro_batches % rounds == 0
            required = f"a multiple of the {rounds} rounds that parallel.pipeline ({degree}) takes them in"
    return None if fits else required


def _micro_batch_problems(config: Config, micro_batches: int) -> list[str]:
    parallel, train = config.parallel, config.train
    required = _required(parallel, micro_batches)
    if required is None:
        return []
    fitting = (n for n in range(1, micro_batches + 2 * parallel.pipeline + 1) if fits_schedule(parallel, n))
    near = nearest_numbers(micro_batches, fitting)
    batches = listing((n * (train.global_batch // micro_batches) for n in near), "or")
    smaller = f", or lower train.micro_batch ({train.micro_batch})" if train.micro_batch > 1 else ""
    return [
        f"the micro-batches of a step on each rank ({micro_batches}) must be {required} with parallel.schedule "
        f"{parallel.schedule}: set train.global_batch={batches}{smaller}"
    ]
