"""The fastest layouts that fit, in the order of their predicted time.

Each layout has a bound that no schedule can beat: the work of its busiest rank with the update. Layouts are taken by
this bound; only those that may be among the best are simulated, and only these are checked for memory.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import get_args

from shardwise.base.errors import ConfigError
from shardwise.base.mesh_axes import layout_text
from shardwise.config import DTYPE_BYTES, Config, Frequency, Layout, Recompute, Schedule, check_layout
from shardwise.config.layout import Stage
from shardwise.config.optimizer import OptimizerConfig
from shardwise.config.schedules import DEFAULT_SCHEDULE, SCHEDULES
from shardwise.models.parameter_counts import flops_per_token, local_parameter_count, model_flops_utilization
from shardwise.pipeline.partition import stage_plan
from shardwise.planner import device_specs, rank_workload
from shardwise.planner.memory import MemoryEstimate, expected_memory, memory_of, messages_of_a_micro_batch
from shardwise.planner.memory_choice import RESERVED, first_that_fits, fitted
from shardwise.planner.step_time import StepTime, least_times, step_time

_TIGHT = 0.1
_SAME_TIME = 1.04
"""Ratio of two predicted times up to which a difference in details alone is no reason to list both layouts."""

_ROUNDING = 1e-12
"""Relative rounding error of a bound: it adds up the seconds of a step in another order than the step's time does."""


@dataclass(frozen=True)
class Plan:
    """A layout with its prediction.

    Attributes:
        choice: keys that the layout sets.
        config: the configuration with these keys.
        layout: degrees of parallelism.
        cluster: devices that it runs on.
        time: time of a step.
        memory: memory of the rank that needs most.
    """

    choice: Choice
    config: Config
    layout: Layout
    cluster: device_specs.Cluster
    time: StepTime
    memory: MemoryEstimate

    def text(self) -> str:
        """Return the layout in one line."""
        return self.choice.text(self.cluster.world)

    @property
    def tokens_per_second(self) -> float:
        train = self.config.train
        return train.global_batch * train.sequence_length / self.time.total

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over the peak; masked attention and recompute do not count."""
        train = self.config.train
        flops = flops_per_token(
            self.config.model, train.sequence_length, self.config.data.predictions(train.sequence_length)
        )
        precision = self.config.precision.resolved(self.cluster.device.is_accelerator)
        peak = self.cluster.device.peak(precision.parameter)
        return model_flops_utilization(flops, self.tokens_per_second, self.cluster.world, peak)

    @property
    def headroom(self) -> float:
        """Bytes of the device that neither the run nor its context need."""
        return self.cluster.device.memory * (1 - RESERVED) - self.memory.total

    @property
    def is_tight(self) -> bool:
        """True if less than a tenth of the device's memory is free."""
        return self.headroom < _TIGHT * self.cluster.device.memory

    @property
    def seconds(self) -> float:
        """Seconds of all steps, without evaluations, checkpoints and restarts."""
        return self.time.total * self.config.train.steps

    @property
    def device_hours(self) -> float:
        return self.seconds * self.cluster.world / 3600

    @property
    def dollars(self) -> float | None:
        """Price of all steps; None if that of the device is unknown."""
        price = self.cluster.device.dollars_per_hour
        return None if price is None else price * self.device_hours

    def at_price(self, dollars_per_hour: float) -> Plan:
        """Return this plan with another price of a device for an hour."""
        device = replace(self.cluster.device, dollars_per_hour=dollars_per_hour)
        return replace(self, cluster=replace(self.cluster, device=device))


@dataclass
class Search:
    """The result of a search.

    Attributes:
        plans: fastest layouts that fit, fastest first.
        valid: number of layouts that the rules allow.
        too_large: number of layouts that were dropped, by the reason.
        smallest: the dropped layout that needs the least memory, and its bytes.
    """

    plans: list[Plan] = field(default_factory=list)
    valid: int = 0
    too_large: Counter[str] = field(default_factory=Counter)
    smallest: tuple[Choice, float] | None = None

    def drop(self, reason: str, choice: Choice, size: float) -> None:
        """Note a layout that does not fit."""
        self.too_large[reason] += 1
        if self.smallest is None or size < self.smallest[1]:
            self.smallest = (choice, size)


def distinct(plans: Sequence[Plan]) -> list[int]:
    """Return the indices of the plans that differ from each faster one by more than details.

    Details are the schedule, its stages, the micro-batch, recompute and sequence parallelism, where the times differ by
    at most 4%. A plan whose memory is not tight is listed beside a faster one whose memory is.
    """
    listed: dict[tuple[object, ...], Plan] = {}
    indices = []
    for index, plan in enumerate(plans):
        choice = plan.choice
        key = (choice.tensor, choice.context, choice.pipeline, choice.zero, choice.replicate)
        former = listed.get(key)
        is_detail = former is not None and plan.time.total <= _SAME_TIME * former.time.total
        if not is_detail or (former is not None and former.is_tight and not plan.is_tight):
            listed[key] = plan
            indices.append(index)
    return indices


def search(config: Config, cluster: device_specs.Cluster, *, best: int = 10, fixed: Collection[str] = ()) -> Search:
    """Return the `best` fastest layouts on a cluster; keys in `fixed` keep the recipe's values."""
    if config.shapes is None:
        raise ConfigError(
            f"model.family ({config.model.family}) must be one whose shapes are known: a model of your own is "
            "not known before it is built"
        )
    config = config.with_batch_for(cluster.world)
    limit = cluster.device.memory * (1 - RESERVED)
    result = Search()
    # A layout's number keeps the order of `choices` among equal times, and keeps the heap from comparing layouts.
    bounded: list[_Bounded] = []
    reason = "parameters, gradients and optimizer state alone are larger than the device"
    state_bytes = _StateBytes(config, cluster)
    for lists, layout in choices(config, cluster.world, cluster.per_node, fixed):
        fitting: list[list[Choice]] = []
        for shardings in lists:
            result.valid += 1
            states = [state_bytes(choice, layout) for choice in shardings]
            fitting.append([choice for choice, state in zip(shardings, states, strict=True) if state <= limit])
            if not fitting[-1]:
                result.drop(reason, *min(zip(shardings, states, strict=True), key=lambda pair: pair[1]))
        bounds = iter(
            _bounds(config, [choice for fitting_choices in fitting for choice in fitting_choices], layout, cluster)
        )
        for number, fitting_choices in enumerate(fitting, result.valid - len(fitting) + 1):
            if fitting_choices:
                bound = (1 - _ROUNDING) * min(next(bounds) for _ in fitting_choices)
                bounded.append((bound, number, fitting_choices, layout))
    _add_fastest(result, config, cluster, limit, bounded, best, state_bytes)
    return result


_Bounded = tuple[float, int, "list[Choice]", Layout]
"""Bound of the time, number, shardings that may fit, and degrees of a layout."""


def _add_fastest(
    result: Search,
    config: Config,
    cluster: device_specs.Cluster,
    limit: float,
    bounded: list[_Bounded],
    best: int,
    state_bytes: _StateBytes,
) -> None:
    """Add the `best` fastest layouts that fit to a result; only those that a bound cannot rule out are simulated.

    Args:
        result: the search's result, which also gets the layouts that do not fit.
        config: the recipe's configuration.
        cluster: devices that it runs on.
        limit: bytes that a rank may need.
        bounded: the layouts with the bounds of their time.
        best: number of layouts to add.
        state_bytes: bytes of the state of a layout, at least.
    """
    heapq.heapify(bounded)
    simulated: list[tuple[float, int, Plan]] = []
    while len(result.plans) < best and (bounded or simulated):
        # No layout that is still to be simulated can be faster than the lowest bound.
        if simulated and (not bounded or simulated[0][0] <= bounded[0][0]):
            result.plans.append(heapq.heappop(simulated)[2])
            continue
        _, number, shardings, layout = heapq.heappop(bounded)
        # Memory comes first, as a layout that does not fit needs no simulation.
        needed: list[tuple[Choice, float]] = []
        activation_bytes = 0.0
        state_share = 0.0
        for choice in shardings:
            # What activations need beside the state does not depend on the sharding.
            least = activation_bytes + state_share * state_bytes(choice, layout)
            if least > limit:
                needed.append((choice, least))
                continue
            estimated = partial(_memory, layout=layout, cluster=cluster, limit=limit)
            chosen, memory = first_that_fits(compiled(choice.applied(config), cluster.device), layout, estimated, limit)
            choice = replace(choice, regathers=chosen.regathers)
            activation_bytes = memory.total - memory.state - memory.in_flight
            state_share = memory.state / state_bytes(choice, layout)
            if memory.total <= limit:
                time = step_time(chosen, layout, cluster)
                assert time is not None
                heapq.heappush(simulated, (time.total, number, Plan(choice, chosen, layout, cluster, time, memory)))
                break
            needed.append((choice, float(memory.total)))
        else:
            reason = "activations do not fit beside parameters, gradients and optimizer state"
            result.drop(reason, *min(needed, key=lambda pair: pair[1]))


def predicted(config: Config, layout: Layout, cluster: device_specs.Cluster) -> Plan | None:
    """Return the prediction for a given layout, whether or not it fits; None for a model of your own."""
    device = cluster.device
    room = device.memory * (1 - RESERVED)
    config = fitted(config, layout, room, accelerator=device.is_accelerator, device=device.name)
    time = step_time(config, layout, cluster)
    memory = expected_memory(config, layout, cluster.device.is_accelerator)
    if time is None or memory is None:
        return None
    parallel = config.parallel
    choice = Choice(
        tensor=layout.tensor,
        sequence=layout.sequence_parallel,
        context=layout.context,
        pipeline=layout.pipeline,
        schedule=parallel.schedule,
        virtual=parallel.stages_per_rank if parallel.stages_per_rank > 1 else None,
        micro_batch=config.train.micro_batch,
        recompute=config.recompute,
        zero=config.optimizer.zero,
        replicate=parallel.replicate,
        reduce=config.optimizer.reduce,
        regathers=config.regathers,
    )
    return Plan(choice, config, layout, cluster, time, memory)


def _bounds(config: Config, shardings: list[Choice], layout: Layout, cluster: device_specs.Cluster) -> list[float]:
    """Return the bounds of the times of choices that differ only in how data parallelism is sharded."""
    if not shardings:
        return []
    chosen = compiled(shardings[0].applied(config), cluster.device)
    return least_times([chosen, *(choice.sharded(chosen) for choice in shardings[1:])], layout, cluster)


class _StateBytes:
    """Bytes that a rank needs at least: the state of the blocks of an average pipeline rank.

    Some rank has at least the average, and embedding and head, which are left out, only add to it.
    """

    def __init__(self, config: Config, cluster: device_specs.Cluster) -> None:
        self._config = config
        self._precision = config.precision.resolved(cluster.device.is_accelerator)
        self._offloads = config.optimizer.offload and cluster.device.is_accelerator
        self._elements: dict[int, tuple[int, int]] = {}

    def __call__(self, choice: Choice, layout: Layout) -> float:
        model = self._config.known_shapes
        precision = self._precision
        if layout.tensor not in self._elements:
            # A stage between others has blocks alone.
            inner_stage = Stage(index=1, rank=0, layers=range(1), stages=3)
            all_elements, in_matrices = (
                local_parameter_count(model, layout.tensor, stages=(inner_stage,), block_matrices=only) or 0
                for only in (False, True)
            )
            self._elements[layout.tensor] = (all_elements, in_matrices)
        layers = max(1, model.num_hidden_layers // layout.pipeline)
        elements, matrices = (layers * count for count in self._elements[layout.tensor])
        kept = self._config.optimizer.spec.kept_bytes(
            elements, matrices, master=precision.master_bytes, state=DTYPE_BYTES[precision.moments]
        )
        shards = layout.replicas // choice.replicate if choice.zero else 1
        parameters = elements * DTYPE_BYTES[precision.parameter] / (shards if choice.zero == 3 else 1)
        # Gradients that are reduced once a step are whole until then.
        reduces_once = choice.reduce == "step" or (choice.reduce is None and self._config.train.bitwise)
        is_cut = choice.zero >= 2 and not reduces_once and not choice.splits_backward
        gradients = elements * DTYPE_BYTES[precision.gradient] / (shards if is_cut else 1)
        on_device = 0 if self._offloads else kept
        return parameters + gradients + on_device / shards


def _memory(config: Config, layout: Layout, cluster: device_specs.Cluster, limit: float) -> MemoryEstimate:
    """Return the memory of the pipeline rank that needs most, or of the first one that needs more than `limit` bytes.

    It is computed for a shorter step if the step is long.

    Ranks with equally many blocks that both receive and send differ by what is in flight, which is most on the first
    of them, and where backward passes are split on the last of them. So beside the first and the last rank, the first
    of each number of blocks and the last but one are looked at, those with most blocks first.

    Activations in flight do not depend on the number of micro-batches beyond a few rounds of the schedule, unless all
    forward passes come first; messages, which are held for all of them, are added.
    """
    accelerator = cluster.device.is_accelerator
    micro_batches = layout.accumulation(config.train)
    p = layout.pipeline
    holds_all = SCHEDULES[config.parallel.schedule].holds_all_micro_batches
    if p == 1:
        shorter = min(micro_batches, 2)
    elif holds_all or micro_batches < 5 * p:
        shorter = micro_batches
    else:
        shorter = 3 * p + micro_batches % p  # as many more than whole rounds
    short_config = config.with_batch(config.train.global_batch // micro_batches * shorter)
    blocks = Counter[int]()
    for stage in stage_plan(short_config, layout):
        blocks[stage.rank] += len(stage.layers)
    first_with = {blocks[rank]: rank for rank in range(p - 2, 0, -1)}
    ranks = {0, max(0, p - 2), p - 1, *first_with.values()}
    workloads = rank_workload.RankWorkload.of_ranks(short_config, layout, accelerator, only=ranks)
    estimates: list[MemoryEstimate] = []
    for workload in sorted(workloads, key=lambda workload: -workload.layers):
        memory = memory_of(workload)
        messages = (micro_batches - shorter) * messages_of_a_micro_batch(workload)
        estimates.append(replace(memory, pipeline=memory.pipeline + messages))
        if estimates[-1].total > limit:
            break
    return max(estimates, key=lambda memory: memory.total)


# The default comes first: among layouts that take equally long, the first is preferred.
_SCHEDULES: tuple[Schedule, ...] = (
    DEFAULT_SCHEDULE,
    *(name for name in get_args(Schedule) if name != DEFAULT_SCHEDULE),
)
_RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
# An assumption: larger micro-batches take memory and gain little. The recipe's own is tried too.
_MOST_IN_MICRO_BATCH = 16
FIXABLE = (
    "parallel.tensor", "parallel.sequence", "parallel.context", "parallel.pipeline", "parallel.schedule",
    "parallel.virtual_stages", "parallel.stages", "parallel.replicate", "train.micro_batch", "train.recompute",
    "optimizer.zero", "optimizer.reduce",
)  # fmt: skip
"""Keys that a layout sets, and that may keep the recipe's value instead."""


@dataclass(frozen=True)
class Choice:
    """The keys that a layout sets."""

    tensor: int
    sequence: bool
    context: int
    pipeline: int
    schedule: Schedule
    virtual: int | None
    micro_batch: int
    recompute: Recompute
    zero: int
    replicate: int = 1
    reduce: Frequency | None = None
    regathers: bool = False

    def applied(self, config: Config) -> Config:
        """Return the configuration with this layout."""
        parallel = {
            "tensor": self.tensor,
            "sequence": self.sequence,
            "context": self.context,
            "pipeline": self.pipeline,
            "schedule": self.schedule,
            "virtual_stages": self.virtual,
        }
        if self.regathers:
            parallel["sequence_regather"] = True
        # A recipe's sizes of stages are for its own number of stages.
        if len(config.parallel.stages or ()) != self.pipeline * (self.virtual or 1):
            parallel["stages"] = None
        train = {"micro_batch": self.micro_batch, "recompute": self.recompute}
        return self.sharded(
            config.model_copy(
                update={
                    "parallel": config.parallel.model_copy(update=parallel),
                    "train": config.train.model_copy(update=train),
                }
            )
        )

    def sharded(self, config: Config) -> Config:
        """Return a configuration with this sharding over data parallelism alone."""
        optimizer: dict[str, object] = {"zero": self.zero}
        if self.reduce != config.optimizer.reduce:
            optimizer["reduce"] = self.reduce
        update: dict[str, object] = {"optimizer": config.optimizer.model_copy(update=optimizer)}
        if self.replicate != config.parallel.replicate:
            update["parallel"] = config.parallel.model_copy(update={"replicate": self.replicate})
        return config.model_copy(update=update)

    @property
    def splits_backward(self) -> bool:
        """True if gradients of weights are computed apart from those of activations."""
        return self.pipeline > 1 and SCHEDULES[self.schedule].splits_backward

    def text(self, world: int) -> str:
        """Return the choice on `world` ranks, such as `TP 8 + SP × PP 4 × DP 2, 1f1b, micro-batch 2, …`."""
        degrees = {"tensor": self.tensor, "context": self.context, "pipeline": self.pipeline}
        degrees["data"] = world // math.prod(degrees.values())
        words = [layout_text(degrees, sequence=self.sequence)]
        if self.regathers:
            words.append("gathered again")
        if self.pipeline > 1:
            words.append(f"{self.schedule} with {self.virtual} stages a rank" if self.virtual else self.schedule)
        words += [f"micro-batch {self.micro_batch}", f"recompute {self.recompute}", self._sharding_text()]
        return ", ".join(words)

    def _sharding_text(self) -> str:
        settings = OptimizerConfig.model_construct(zero=self.zero, reduce=self.reduce)
        return settings.sharding_text(self.replicate)


def compiled(config: Config, device: device_specs.Device) -> Config:
    """Return the configuration with compiled blocks on CUDA, unless its recipe chooses, or its layout must not."""
    is_able = not (config.splits_backward or config.parallel.tensor_overlap or config.regathers or config.passes_keys)
    if "enabled" in config.compile.model_fields_set or not (device.is_cuda and is_able):
        return config
    return config.model_copy(update={"compile": config.compile.model_copy(update={"enabled": True})})


def choices(
    config: Config, world: int, per_node: int, fixed: Collection[str] = ()
) -> Iterator[tuple[list[list[Choice]], Layout]]:
    """Yield every layout on `world` devices, with lists of shardings, of each of which the first that fits is taken.

    A key in `fixed` keeps the recipe's value. Tensor parallelism stays within a node, unless the recipe's own degree is
    larger.
    """
    base = config
    if "parallel.stages" not in fixed:
        base = config.model_copy(update={"parallel": config.parallel.model_copy(update={"stages": None})})
    is_fixed = "train.recompute" in fixed and config.train.recompute != "auto"
    recomputes = (config.recompute,) if is_fixed else _RECOMPUTES
    for degrees in _degrees(config, world, per_node, fixed):
        for micro_batch in _micro_batches(config, fixed):
            # Recompute and ZeRO change no rule, so that one check serves all of their values.
            replicate = config.parallel.replicate if "parallel.replicate" in fixed else 1
            optimizer = config.optimizer
            first = Choice(*degrees, micro_batch, "none", optimizer.zero, replicate, optimizer.reduce)
            data = world // (first.tensor * first.context * first.pipeline)
            if not data or config.train.global_batch % (micro_batch * data):
                continue
            try:
                layout = check_layout(first.applied(base), world)
            except ConfigError:
                continue
            shardings = list(_shardings(first.applied(base), layout, per_node, fixed))
            for recompute in recomputes:
                yield [[Choice(*degrees, micro_batch, recompute, *cut) for cut in cuts] for cuts in shardings], layout


_Sharding = tuple[int, int, Frequency | None]
"""The stage of ZeRO, the number of copies, and when gradients are reduced."""


def _shardings(config: Config, layout: Layout, per_node: int, fixed: Collection[str]) -> Iterator[list[_Sharding]]:
    """Yield lists of shardings that send more and hold less from one to the next: the first that fits is the fastest.

    Shards are those of all ranks with the same part of the model, or of those of a node with copies on other nodes.
    """
    optimizer = config.optimizer
    if layout.replicas == 1:
        # On one rank all are the same.
        yield [(optimizer.zero, config.parallel.replicate, optimizer.reduce)]
        return
    replicates = [1]
    replicas = layout.replicas
    in_node = per_node // layout.tensor
    if "parallel.replicate" in fixed:
        replicates = [config.parallel.replicate]
    elif in_node > 1 and per_node % layout.tensor == 0 and replicas % in_node == 0 and replicas > in_node:
        replicates.append(replicas // in_node)
    for replicate in replicates:
        stages = [(zero, replicate, reduce) for zero, reduce in _stages(config, layout, fixed)]
        if stages:
            yield stages
    if "optimizer.zero" not in fixed or optimizer.zero == 0:
        yield [(0, config.parallel.replicate, optimizer.reduce)]


def _stages(config: Config, layout: Layout, fixed: Collection[str]) -> Iterator[tuple[int, Frequency | None]]:
    """Yield stages of ZeRO above 0, each with the time of its reductions, which hold less and less memory.

    Stage 2 holds all gradients where it reduces them once a step, and stage 3 all weights where it gathers them once a
    step: neither then holds less than stage 1.
    """
    optimizer = config.optimizer
    stages = (optimizer.zero,) if "optimizer.zero" in fixed else (1, 2, 3)
    for zero in stages:
        if zero == 0 or (zero > 1 and len(stages) > 1 and config.gather == "step"):
            continue
        if zero == 1 or "optimizer.reduce" in fixed:
            yield zero, optimizer.reduce
            continue
        if zero == 3 and layout.accumulation(config.train) > 1:
            yield zero, "step"
        if len(stages) == 1 or not config.train.bitwise:
            yield zero, None


def _micro_batches(config: Config, fixed: Collection[str]) -> list[int]:
    recipes = config.train.micro_batch
    if "train.micro_batch" in fixed:
        return [recipes]
    powers = [2**n for n in range(_MOST_IN_MICRO_BATCH.bit_length())]
    return sorted({recipes, *powers})


_Degrees = tuple[int, bool, int, int, Schedule, int | None]
"""Tensor degree, sequence parallelism, context degree, pipeline degree, schedule and virtual stages."""
# An assumption: with shorter chunks of a sample, matrices are small, and the other axes are the better ones.
_LEAST_CHUNK = 1024


def _degrees(config: Config, world: int, per_node: int, fixed: Collection[str]) -> Iterator[_Degrees]:
    """Yield the degrees that divide the world and the model; `check_layout` has further rules."""
    parallel = config.parallel
    model = config.known_shapes
    if "parallel.tensor" in fixed:
        tensors = [parallel.tensor]
    else:
        tensors = [n for n in range(1, per_node + 1) if world % n == 0 and model.num_attention_heads % n == 0]
    for tensor in tensors:
        if "parallel.sequence" in fixed:
            sequences = [parallel.sequence and tensor > 1]
        else:
            sequences = [True, False] if tensor > 1 else [False]
        for context in _contexts(config, world // tensor, fixed):
            ranks = world // (tensor * context)
            if "parallel.pipeline" in fixed:
                pipelines = [parallel.pipeline]
            else:
                pipelines = [n for n in range(1, model.num_hidden_layers + 1) if ranks % n == 0]
            for pipeline in pipelines:
                for schedule, virtual in _schedules(config, pipeline, fixed):
                    for sequence in sequences:
                        yield tensor, sequence, context, pipeline, schedule, virtual


def _contexts(config: Config, ranks: int, fixed: Collection[str]) -> list[int]:
    """Return the degrees of context parallelism: the recipe's, and powers of two that leave long chunks."""
    recipes = config.parallel.context
    if "parallel.context" in fixed:
        return [recipes]
    most = max(1, config.train.sequence_length // (2 * _LEAST_CHUNK))
    powers = [2**n for n in range(most.bit_length()) if ranks % 2**n == 0]
    return sorted({recipes, *powers}) if ranks % recipes == 0 else powers


def _schedules(config: Config, pipeline: int, fixed: Collection[str]) -> Iterator[tuple[Schedule, int | None]]:
    """Yield schedules with their virtual stages; those with any number of stages have equal ones."""
    model = config.known_shapes
    if pipeline == 1:
        yield DEFAULT_SCHEDULE, None
        return
    for schedule in (config.parallel.schedule,) if "parallel.schedule" in fixed else _SCHEDULES:
        spec = SCHEDULES[schedule]
        if spec.is_single_stage:
            yield schedule, None
        elif spec.is_v_shaped:
            yield schedule, spec.stages_per_rank
        elif "parallel.virtual_stages" in fixed:
            yield schedule, config.parallel.virtual_stages
        else:
            layers = model.num_hidden_layers
            for virtual in range(spec.stages_per_rank, layers // pipeline + 1):
                if layers % (pipeline * virtual) == 0:
                    yield schedule, virtual
