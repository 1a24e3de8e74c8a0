"""Rules of what tensor parallelism communicates during its matmuls and gathers again."""

from __future__ import annotations

from shardwise.config.run_config import Config
from shardwise.config.schedules import DEFAULT_SCHEDULE, SCHEDULES


def overlap_problems(config: Config) -> list[str]:
    parallel = config.parallel
    how = parallel.tensor_overlap
    problems = []
    if how is not None and parallel.pipeline > 1 and SCHEDULES[parallel.schedule].splits_backward:
        problems.append(
            f"parallel.tensor_overlap ({how}) must be null with parallel.schedule {parallel.schedule}, which computes "
            f"the gradients that it overlaps apart from each other: choose another schedule, such as {DEFAULT_SCHEDULE}"
        )
    if how == "symmetric_memory" and not parallel.sequence:
        problems.append(
            f"parallel.tensor_overlap ({how}) must go with parallel.sequence (true): its operators gather and scatter "
            "the sequence"
        )
    if how is not None and config.precision.matmul is not None:
        problems.append(
            f"parallel.tensor_overlap ({how}) must be null with precision.matmul ({config.precision.matmul}), whose "
            "scales need the whole input before the first product: leave out one of the two"
        )
    return problems


def regather_problems(config: Config) -> list[str]:
    parallel = config.parallel
    if not config.regathers:
        return []
    problems = []
    if config.splits_backward:
        problems.append(
            f"parallel.sequence_regather (true) must be false with parallel.schedule {parallel.schedule}, which "
            "computes the gradients of inputs and weights apart from each other, and would gather twice: choose "
            f"another schedule, such as {DEFAULT_SCHEDULE}"
        )
    if config.compile.enabled:
        problems.append(
            "parallel.sequence_regather (true) must be false with compile.enabled (true): the compiler chooses what "
            "a compiled block keeps"
        )
    if config.precision.matmul is not None:
        problems.append(
            f"parallel.sequence_regather (true) must be false with precision.matmul ({config.precision.matmul}), which "
            "keeps gathered inputs in one byte an element: leave it out"
        )
    return problems
