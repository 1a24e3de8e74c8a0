"""Rules that read more than one key: they decide if a configuration can run on a number of ranks.

Rules of one key, and those of a section that nothing changes after it was read, are validators of the section. The
rules here also hold for configurations that a program derives from another one, such as the planner's candidates.

Three groups: the rules of a layout, those of `parallel.pipeline`, and those of `train.bitwise`.
"""

from __future__ import annotations

from collections.abc import Collection

from shardwise.base.errors import ConfigError, listing
from shardwise.config import key_rules
from shardwise.config.base_section import RuleTable, broken_rules, divisors, nearest_numbers
from shardwise.config.layout import Layout
from shardwise.config.model import ModelConfig
from shardwise.config.optimizer import OptimizerConfig
from shardwise.config.pipeline_schedule_specs import DEFAULT_SCHEDULE, DEFAULT_WITH_SEVERAL_STAGES, SCHEDULES
from shardwise.config.run_config import Config
from shardwise.config.sections import LogConfig, ParallelConfig, TrainConfig
from shardwise.config.size_stages import size_stage_problems, size_stages_of


def check_layout(config: Config, world: int, *, is_new: bool = False) -> Layout:
    """The layout of `config` on `world` ranks.

    Args:
        is_new: True if the run's folder is new, so that it starts at its first step.

    Raises:
        ConfigError: `config` cannot run on `world` ranks; with every reason.
    """
    parallel = config.parallel
    sequence = parallel.sequence and parallel.tensor > 1
    problems: list[str] = []
    layout = None
    micro_batches = None
    # A layout or a batch that cannot be is one problem of several: the other rules are checked without it.
    try:
        layout = Layout(
            world,
            parallel.tensor,
            sequence,
            parallel.pipeline,
            parallel.stages_per_rank,
            parallel.context,
            parallel.expert,
        )
        micro_batches = layout.accumulation(config.train)
    except ConfigError as error:
        problems = error.problems
    problems += _pipeline_problems(parallel, config.train, config.model, micro_batches)
    problems += key_rules.tensor_problems(config.model, parallel, config.train.sequence_length)
    problems += key_rules.context_problems(config, sequence)
    if config.precision.matmul is not None:
        problems += key_rules.fp8_problems(config.model, parallel, config.train)
    problems += config.data.late_stage_problems(config.train.steps)
    problems += length_problems(config.model, config.train, config.optimizer) + key_rules.key_problems(
        config, micro_batches
    )
    problems += _trace_problems(config.log, config.train, config.checkpoint.resume, is_new) + config.log.name_problems()
    if layout is not None:
        problems += _rank_problems(config.log, parallel, layout) + _bitwise_problems(config, layout)
        problems += key_rules.expert_problems(config, layout)
    problems += _problems_of_stages(config, world, problems, is_new=is_new)
    if layout is None or problems:
        raise ConfigError(problems)
    return layout


def _problems_of_stages(config: Config, world: int, known: Collection[str], *, is_new: bool) -> list[str]:
    if config.run is not config:
        return []
    try:
        stages = size_stages_of(config)
    except ConfigError as error:
        return error.problems
    problems = size_stage_problems(stages)
    for stage in stages[1:]:
        try:
            check_layout(stage, world, is_new=is_new)
        except ConfigError as error:
            place = f"from step {stage.steps_before + 1:,} on (data.stages): "
            problems += [place + problem for problem in error.problems if problem not in known]
    return problems


def _trace_problems(log: LogConfig, train: TrainConfig, resume: str | int, is_new: bool) -> list[str]:
    """Refuse traces of steps that the run never does. The step from which an old run resumes is not known here."""
    steps = log.profile_steps
    if steps is None:
        return []
    first = resume + 1 if isinstance(resume, int) else 1
    last = train.steps
    if is_new and train.stop_after is not None:
        last = min(last, train.stop_after)
    if (steps.start <= last and steps[-1] >= first) or first > last:
        return []
    return [
        f"log.profile ({log.profile}) must have one of the steps of this run ({first} to {last}): set "
        f"log.profile={last}:{last + 1}"
    ]


def _rank_problems(log: LogConfig, parallel: ParallelConfig, layout: Layout) -> list[str]:
    """Refuse to trace ranks that the job does not have, and copies that do not divide its data-parallel ranks."""
    problems = []
    missing = [rank for rank in log.profile_ranks or () if rank >= layout.world]
    if missing:
        problems.append(f"log.profile_ranks ({listing(missing)}) must be below the number of ranks ({layout.world})")
    replicate = parallel.replicate
    if layout.replicas % replicate:
        near = listing(nearest_numbers(replicate, divisors(layout.replicas)), "or")
        degree = f"the data-parallel degree ({layout.data})"
        if layout.context > 1:
            degree = f"the data-parallel degree × parallel.context ({layout.data} × {layout.context})"
        problems.append(f"parallel.replicate ({replicate}) must divide {degree}: set it to {near}")
    return problems


def length_problems(model: ModelConfig, train: TrainConfig, optimizer: OptimizerConfig) -> list[str]:
    """Refuse sequences, and parts of the schedule of learning rates, that are too long."""
    problems = []
    limit = model.max_position_embeddings
    if limit is not None and train.sequence_length > limit and not model.extends_positions:
        unless = " without model.rope_scaling" if model.rotary_dim else ""
        problems.append(
            f"train.sequence_length ({train.sequence_length}) must be at most model.max_position_embeddings ({limit})"
            f"{unless}"
        )
    # The warmup, or without one the first step, comes before the decay, and that before the constant steps.
    before_decay = max(1, optimizer.warmup_steps)
    constant = optimizer.constant_steps
    limits = {
        "warmup_steps": (0, ""),
        "constant_steps": (before_decay, ", after the warmup and a step at optimizer.lr"),
        "decay_steps": (
            before_decay + constant,
            f", after the warmup, a step at optimizer.lr and {constant} constant steps",
        ),
    }
    problems += [
        f"optimizer.{key} ({steps}) must be at most {max(0, train.steps - before)}, as train.steps is {train.steps}"
        f"{after}: lower it, or keep train.steps and end early with train.stop_after"
        for key, (before, after) in limits.items()
        if (steps := getattr(optimizer, key) or 0) > max(0, train.steps - before)
    ]
    return problems


# ---- the rules of `parallel.pipeline`


def _pipeline_problems(
    parallel: ParallelConfig, train: TrainConfig, model: ModelConfig, micro_batches: int | None
) -> list[str]:
    """Return every reason why the model cannot be cut into these stages, or the schedule cannot run them.

    Args:
        micro_batches: number of micro-batches of a step on each rank; None if the batch cannot be divided into them.
    """
    if parallel.pipeline == 1:
        if parallel.stages is None:
            return []
        return [
            f"parallel.stages ({list(parallel.stages)}) must be left out with parallel.pipeline (1), which cuts no "
            "model: leave it out, or set parallel.pipeline"
        ]
    layers = model.num_hidden_layers
    if layers is None or model.hidden_size is None:
        return [
            f"parallel.pipeline ({parallel.pipeline}) must be 1 with a model of your own (model.family "
            f"{model.family}) without model.num_hidden_layers and model.hidden_size: set both, and make the class by "
            "shardwise.pipelined"
        ]
    # Each rule assumes those before it: with a wrong number of stages, the numbers of blocks mean nothing.
    problems = _virtual_stages_problems(parallel) or _stage_problems(parallel, layers)
    if not problems and micro_batches is not None:
        problems = _micro_batch_problems(parallel, train, micro_batches)
    return problems


def _virtual_stages_problems(parallel: ParallelConfig) -> list[str]:
    spec = SCHEDULES[parallel.schedule]
    number = parallel.virtual_stages
    if number in (None, spec.stages_per_rank) or (spec.allows_more_stages and parallel.stages_per_rank > 1):
        return []
    valid = "at least 2" if spec.allows_more_stages else spec.stages_per_rank
    alternative = DEFAULT_WITH_SEVERAL_STAGES if spec.is_single_stage else DEFAULT_SCHEDULE
    return [
        f"parallel.virtual_stages ({number}) must be {valid} with parallel.schedule {spec.name}: leave it out, or set "
        f"parallel.schedule={alternative}"
    ]


def _stage_problems(parallel: ParallelConfig, layers: int) -> list[str]:
    per_rank = parallel.stages_per_rank
    stages = parallel.pipeline * per_rank
    product = f"parallel.pipeline ({parallel.pipeline})"
    if per_rank > 1:
        product = f"parallel.pipeline × stages on each rank ({parallel.pipeline} × {per_rank} = {stages})"
    has_equal_stages = per_rank > 1 and parallel.stages is None
    # Without a degree that fits, one stage on each rank may do.
    fix = f"set parallel.schedule={DEFAULT_SCHEDULE}, without parallel.virtual_stages"
    degrees = [n for n in range(1, layers // per_rank + 1) if not (has_equal_stages and layers % (n * per_rank))]
    if degrees and max(degrees) > 1:
        fix = f"set parallel.pipeline={listing(nearest_numbers(parallel.pipeline, degrees), 'or')}"
    if stages > layers:
        return [f"{product} must be at most model.num_hidden_layers ({layers}), as each stage has a block: {fix}"]
    if parallel.stages is not None:
        return _stage_size_problems(parallel.stages, stages, product, layers)
    if not has_equal_stages or layers % stages == 0:
        return []
    return [
        f"{product} must divide model.num_hidden_layers ({layers}) with parallel.schedule {parallel.schedule}, which "
        f"has equal stages: {fix}, or name unequal ones by parallel.stages"
    ]


def _stage_size_problems(sizes: tuple[int, ...], stages: int, product: str, layers: int) -> list[str]:
    if len(sizes) == stages and min(sizes) > 0 and sum(sizes) == layers:
        return []
    smallest, larger_stages = divmod(layers, stages)
    example = [smallest + (stage >= stages - larger_stages) for stage in range(stages)]
    return [
        f"parallel.stages ({list(sizes)}) must have a number of blocks, at least 1, for each of {stages} stages, by "
        f"{product}, and their sum ({sum(sizes)}) must be model.num_hidden_layers ({layers}), such as {example}"
    ]


def fits_schedule(parallel: ParallelConfig, micro_batches: int) -> bool:
    """Return whether the schedule can run with that many micro-batches in a step."""
    return SCHEDULES[parallel.schedule].unmet_requirement(parallel.pipeline, micro_batches) is None


def _micro_batch_problems(parallel: ParallelConfig, train: TrainConfig, micro_batches: int) -> list[str]:
    requirement = SCHEDULES[parallel.schedule].unmet_requirement(parallel.pipeline, micro_batches)
    if requirement is None:
        return []
    # 2p micro-batches suit every schedule, so the range holds numbers that fit.
    fitting = (n for n in range(1, micro_batches + 2 * parallel.pipeline + 1) if fits_schedule(parallel, n))
    nearest = nearest_numbers(micro_batches, fitting)
    batches = listing((n * (train.global_batch // micro_batches) for n in nearest), "or")
    smaller = f", or lower train.micro_batch ({train.micro_batch})" if train.micro_batch > 1 else ""
    return [
        f"the micro-batches of a step on each rank ({micro_batches}) must be {requirement} with parallel.schedule "
        f"{parallel.schedule}: set train.global_batch={batches}{smaller}"
    ]


# ---- `train.bitwise`, which gives the bits of one process at any layout by dividing sums into parts of them


_RULES: RuleTable = {
    "": (
        "{parallel.tensor_overlap} must be null with train.bitwise: it multiplies pieces whose size depends on the "
        "layout",
    ),
    "passes_keys": (
        "parallel.context_keys (ring) must be gather with train.bitwise (true): the order of its sums follows the "
        "ranks",
    ),
    "parallel.cuts_sequence": (
        "{precision.matmul} must be left out with parallel.context_grain ({=parallel.sequence_parts}): its scales are "
        "those of all tokens of a rank",
        "{compile.enabled} must be false with parallel.context_grain ({=parallel.sequence_parts}): compiled blocks "
        "take all tokens of a rank at once",
    ),
    "model.has_dropout": (
        "{train.dropout_mode=fast} must be invariant with train.bitwise (true): other masks depend on the layout",
    ),
    "optimizer.cuts_gradients !splits_backward": (
        "{optimizer.reduce=micro_batch} must be step with train.bitwise (true), whose sum adds the micro-batches of a "
        "rank before the ranks: leave it out",
    ),
}


def _bitwise_problems(config: Config, layout: Layout) -> list[str]:
    if not config.is_bit_equal:
        return []
    train = config.train
    grain = config.parallel.grain
    problems = _grain_problems("parallel.grain", grain, "parallel.tensor", layout.tensor)
    misfits = key_rules.tensor_misfits(config.model, grain, train.sequence_length)
    if misfits and _is_power_of_two(grain):
        valid = [2**n for n in range(grain.bit_length())]
        fitting = [part for part in valid if not key_rules.tensor_misfits(config.model, part, train.sequence_length)]
        problems += [
            f"parallel.grain ({grain}) must {reason} with train.bitwise (true): set parallel.grain={fitting[-1]}"
            for reason in misfits
        ]
    cuts = config.parallel.sequence_parts
    problems += _grain_problems("parallel.context_grain", cuts, "parallel.context", layout.context)
    problems += _grain_problems("train.data_grain", train.gradient_groups, "the data-parallel degree", layout.data)
    groups = train.gradient_groups
    if train.micro_batches % groups and _is_power_of_two(groups):
        problems.append(
            f"train.data_grain ({groups}) must divide the micro-batches of a step, train.global_batch / "
            f"train.micro_batch ({train.micro_batches}): leave it out"
        )
    precision = config.precision.resolved(accelerator=False)
    if precision.reduce != precision.gradient:
        problems.append(
            f"precision.reduce ({precision.reduce}) must be precision.gradient ({precision.gradient}) with "
            "train.bitwise (true): sums within a rank and sums over ranks would round differently, set "
            f"precision.reduce={precision.gradient}"
        )
    return problems + broken_rules(_RULES, config)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _grain_problems(key: str, grain: int, degree_key: str, degree: int) -> list[str]:
    if not _is_power_of_two(grain):
        nearest = listing([2 ** (grain.bit_length() - 1), 2 ** grain.bit_length()], "or")
        return [f"{key} ({grain}) must be a power of two with train.bitwise (true): set {key}={nearest}"]
    if grain % degree:
        valid = [2**n for n in range(grain.bit_length())]
        nearest = listing(nearest_numbers(degree, valid), "or")
        return [
            f"{degree_key} ({degree}) must divide {key} ({grain}) with train.bitwise (true): nearest {nearest}, or "
            f"another {key} from the run's first step on"
        ]
    return []
