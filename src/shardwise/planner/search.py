"""The fastest layouts that fit, in the order of their predicted time.

Each layout has a bound that no schedule can beat: the work of its busiest rank with the update. Layouts are taken by
this bound; only those that may be among the best are simulated, and only these are checked for memory.

All layouts of a recipe on a number of devices that its rules allow.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.base.errors import ConfigError
from shardwise.config import DTYPE_BYTES, Config, Layout, ModelConfig, check_layout
from shardwise.config.schedules import DEFAULT_SCHEDULE, SCHEDULES
from shardwise.config.sections import Recompute, Schedule
from shardwise.config.stages import Stage
from shardwise.models.parameter_counts import local_parameter_count
from shardwise.pipeline.partition import stage_plan
from shardwise.planner.device_specs import Cluster
from shardwise.planner.memory import MemoryEstimate, expected_memory, memory_of, messages_of_a_micro_batch
from shardwise.planner.rank_case import Case, flops_per_token, model_flops_utilization
from shardwise.planner.step_time import StepTime, least_time, step_time

RESERVED = 0.06
"""The part of a device's memory that its context, the collectives' buffers and the allocator's gaps take."""


@dataclass(frozen=True)
class Plan:
    """A layout that fits, with what is predicted of it."""

    choice: Choice
    config: Config
    layout: Layout
    cluster: Cluster
    time: StepTime
    memory: MemoryEstimate

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
    def seconds(self) -> float:
        """Of all steps, without evaluations, checkpoints and restarts."""
        return self.time.total * self.config.train.steps


@dataclass(frozen=True)
class Search:
    """What was found.

    Attributes:
        plans: the fastest that fit, fastest first.
        valid: how many layouts the rules allow.
        too_large: how many were dropped, by the reason.
        smallest: the layout that needs the least memory of those that do not fit, where none fits; with its bytes.
    """

    plans: list[Plan]
    valid: int
    too_large: Counter[str]
    smallest: tuple[Choice, float] | None


def search(config: Config, cluster: Cluster, *, best: int = 10, fixed: Collection[str] = ()) -> Search:
    """The `best` fastest layouts on a cluster; keys in `fixed` keep the recipe's values."""
    if config.shapes is None:
        raise ConfigError(
            f"model.family ({config.model.family}) must be one whose shapes are known: a model of your own is "
            "not known before it is built"
        )
    config = config.with_batch_for(cluster.world)
    limit = cluster.device.memory * (1 - RESERVED)
    waiting: list[tuple[float, int, Choice, Layout]] = []
    too_large: Counter[str] = Counter()
    smallest: tuple[Choice, float] | None = None
    valid = 0
    for choice, layout in choices(config, cluster.world, cluster.per_node, fixed):
        valid += 1
        state = _state_bytes(config, choice, layout, cluster)
        if state > limit:
            too_large["parameters, gradients and optimizer state alone are larger than the device"] += 1
            if smallest is None or state < smallest[1]:
                smallest = (choice, state)
            continue
        bound = least_time(choice.applied(config), layout, cluster)
        waiting.append((bound, valid, choice, layout))
    heapq.heapify(waiting)
    exact: list[tuple[float, int, Plan]] = []
    plans: list[Plan] = []
    while waiting and len(plans) < best:
        if exact and exact[0][0] <= waiting[0][0]:
            plans.append(heapq.heappop(exact)[2])
            continue
        _, number, choice, layout = heapq.heappop(waiting)
        one = choice.applied(config)
        memory = _memory(one, layout, cluster, limit)
        if memory.total > limit:
            too_large["activations do not fit beside parameters, gradients and optimizer state"] += 1
            if smallest is None or memory.total < smallest[1]:
                smallest = (choice, float(memory.total))
            continue
        time = step_time(one, layout, cluster)
        assert time is not None
        heapq.heappush(exact, (time.total, number, Plan(choice, one, layout, cluster, time, memory)))
    while exact and len(plans) < best:
        plans.append(heapq.heappop(exact)[2])
    return Search(plans, valid, too_large, None if plans else smallest)


def predicted(config: Config, layout: Layout, cluster: Cluster) -> Plan | None:
    """What is predicted of a given layout, whether or not it fits; None for a model of your own."""
    time, memory = (
        step_time(config, layout, cluster),
        expected_memory(config, layout, cluster.device.is_accelerator),
    )
    if time is None or memory is None:
        return None
    parallel, train = config.parallel, config.train
    virtual = parallel.stages_per_rank if parallel.stages_per_rank > 1 else None
    choice = Choice(
        layout.tensor, layout.sequence_parallel, layout.pipeline, parallel.schedule, virtual, train.micro_batch,
        train.recompute, config.optimizer.zero,
    )  # fmt: skip
    return Plan(choice, config, layout, cluster, time, memory)


def _state_bytes(config: Config, choice: Choice, layout: Layout, cluster: Cluster) -> float:
    """At least this many bytes: of the blocks of an average pipeline rank."""
    precision = config.precision.resolved(cluster.device.is_accelerator)
    model = config.known_shapes
    layers = max(1, model.num_hidden_layers // layout.pipeline)
    elements = _block_elements(model, layout.tensor) * layers
    kept_tensors = config.optimizer.spec.kept_tensors(separate_masters=precision.parameter != precision.optimizer)
    each = DTYPE_BYTES[precision.parameter] + DTYPE_BYTES[precision.gradient]
    return elements * (each + kept_tensors * DTYPE_BYTES[precision.optimizer] / (layout.data if choice.zero else 1))


@lru_cache(maxsize=256)
def _block_elements(model: ModelConfig, tensor: int) -> int:
    return local_parameter_count(model, tensor, stages=[Stage(1, 0, range(1), 3)]) or 0


def _memory(config: Config, layout: Layout, cluster: Cluster, limit: float) -> MemoryEstimate:
    """The memory of the pipeline rank that needs most, or of the first that is found to need more than `limit` bytes.

    It is computed for a shorter step if the step is long.

    Ranks with equally many blocks that both receive and send differ by what is in flight, which is most on the first
    of them, and where backward passes are split on the last of them. So beside the first and the last rank, the first
    of each number of blocks and the last but one are looked at, those with most blocks first.

    Activations in flight do not depend on the number of micro-batches beyond a few rounds of the schedule, except in
    GPipe, where all are; messages, which are held for all of them, are added.
    """
    accelerator = cluster.device.is_accelerator
    micro_batches, p = layout.accumulation(config.train), layout.pipeline
    whole = micro_batches < 5 * p or SCHEDULES[config.parallel.schedule].holds_all_micro_batches
    few = micro_batches if whole else 3 * p + micro_batches % p
    if p == 1:
        few = min(micro_batches, 2)
    short = config.with_batch(config.train.global_batch // micro_batches * few)
    blocks = Counter[int]()
    for stage in stage_plan(short, layout):
        blocks[stage.rank] += len(stage.layers)
    firsts = {blocks[rank]: rank for rank in range(p - 2, 0, -1)}
    cases = Case.of_ranks(short, layout, accelerator, only={0, max(0, p - 2), p - 1, *firsts.values()})
    found: list[MemoryEstimate] = []
    for case in sorted(cases, key=lambda one: -one.layers):
        memory = memory_of(case)
        longer = (micro_batches - few) * messages_of_a_micro_batch(case)
        found.append(replace(memory, pipeline=memory.pipeline + longer))
        if found[-1].total > limit:
            break
    return max(found, key=lambda one: one.total)


_SCHEDULES = (DEFAULT_SCHEDULE, *(name for name in SCHEDULES if name != DEFAULT_SCHEDULE))
_RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
_MOST_IN_MICRO_BATCH = 16
FIXABLE = (
    "parallel.tensor", "parallel.sequence", "parallel.pipeline", "parallel.schedule", "parallel.virtual_stages",
    "parallel.stages", "train.micro_batch", "train.recompute", "optimizer.zero",
)  # fmt: skip
"""Keys that a layout sets, and that may keep the recipe's value instead."""


@dataclass(frozen=True)
class Choice:
    """The keys that a layout sets."""

    tensor: int
    sequence: bool
    pipeline: int
    schedule: Schedule
    virtual: int | None
    micro_batch: int
    recompute: Recompute
    zero: int

    def applied(self, config: Config) -> Config:
        """The configuration with this layout."""
        pipeline = {"pipeline": self.pipeline, "schedule": self.schedule, "virtual_stages": self.virtual}
        parallel = {"tensor": self.tensor, "sequence": self.sequence, **pipeline}
        if len(config.parallel.stages or ()) != self.pipeline * (self.virtual or 1):
            parallel["stages"] = None
        train = {"micro_batch": self.micro_batch, "recompute": self.recompute}
        return config.model_copy(
            update={
                "parallel": config.parallel.model_copy(update=parallel),
                "train": config.train.model_copy(update=train),
                "optimizer": config.optimizer.model_copy(update={"zero": self.zero}),
            }
        )

    def text(self) -> str:
        """Such as `TP 8 + SP × PP 4 (interleaved, 3 stages a rank), micro-batch 2, recompute none, ZeRO-1`."""
        tensor = f"TP {self.tensor}{' + SP' if self.sequence else ''}"
        stages = f", {self.virtual} stages a rank" if self.virtual else ""
        schedule = f" ({self.schedule}{stages})" if self.pipeline > 1 else ""
        rest = f"micro-batch {self.micro_batch}, recompute {self.recompute}, ZeRO-{self.zero}"
        return f"{tensor} × PP {self.pipeline}{schedule}, {rest}"


def choices(config: Config, world: int, per_node: int, fixed: Collection[str] = ()) -> Iterator[tuple[Choice, Layout]]:
    """Every layout on `world` devices. A key in `fixed` keeps the recipe's value.

    Tensor parallelism stays within a node, unless the recipe's own degree is larger.
    """
    base = config.model_copy(update={"parallel": config.parallel.model_copy(update={"stages": None})})
    if "parallel.stages" in fixed:
        base = config
    for one in _shapes(config, world, per_node, fixed):
        for micro_batch in _micro_batches(config, fixed):
            first = Choice(*one, micro_batch, "none", 1)
            data = world // (first.tensor * first.pipeline)
            if config.train.global_batch % (micro_batch * data):
                continue
            try:
                layout = check_layout(first.applied(base), world)
            except ConfigError:
                continue
            zeros = (1, 0) if data > 1 else (config.optimizer.zero,)
            for zero in (config.optimizer.zero,) if "optimizer.zero" in fixed else zeros:
                recompute: Recompute
                for recompute in (config.train.recompute,) if "train.recompute" in fixed else _RECOMPUTES:
                    yield Choice(*one, micro_batch, recompute, zero), layout


def _micro_batches(config: Config, fixed: Collection[str]) -> list[int]:
    if "train.micro_batch" in fixed:
        return [config.train.micro_batch]
    own = config.train.micro_batch
    return sorted({own, *(2**n for n in range(_MOST_IN_MICRO_BATCH.bit_length()))})


def _shapes(
    config: Config, world: int, per_node: int, fixed: Collection[str]
) -> Iterator[tuple[int, bool, int, Schedule, int | None]]:
    """Tensor degree, sequence parallelism, pipeline degree, schedule and virtual stages."""
    parallel, model = config.parallel, config.known_shapes
    most = per_node if "parallel.tensor" not in fixed else parallel.tensor
    tensors = [n for n in range(1, most + 1) if world % n == 0 and model.num_attention_heads % n == 0]
    if "parallel.tensor" in fixed:
        tensors = [parallel.tensor]
    for tensor in tensors:
        sequences = (True, False) if tensor > 1 else (False,)
        if "parallel.sequence" in fixed:
            sequences = (parallel.sequence and tensor > 1,)
        rest = world // tensor
        pipelines = [n for n in range(1, model.num_hidden_layers + 1) if rest % n == 0]
        for pipeline in [parallel.pipeline] if "parallel.pipeline" in fixed else pipelines:
            for schedule, virtual in _schedules(config, pipeline, fixed):
                for sequence in sequences:
                    yield tensor, sequence, pipeline, schedule, virtual


def _schedules(config: Config, pipeline: int, fixed: Collection[str]) -> Iterator[tuple[Schedule, int | None]]:
    if pipeline == 1:
        yield (DEFAULT_SCHEDULE, None)
        return
    for schedule in (config.parallel.schedule,) if "parallel.schedule" in fixed else _SCHEDULES:
        if SCHEDULES[schedule].is_single_stage:
            yield schedule, None
        elif SCHEDULES[schedule].is_v_shaped:
            yield schedule, 2
        elif "parallel.virtual_stages" in fixed:
            yield schedule, config.parallel.virtual_stages
        else:
            layers = config.known_shapes.num_hidden_layers
            yield from (
                (schedule, virtual)
                for virtual in range(2, layers // pipeline + 1)
                if layers % (pipeline * virtual) == 0
            )
