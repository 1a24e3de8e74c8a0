"""How long an optimizer step takes on a cluster, and what it is spent on. Deterministic; nothing is measured.

Legend: see `planner/rank_case.py`. Ranks are [pipeline, data, tensor], tensor fastest, and nodes take consecutive
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

from shardwise.config import DTYPE_BYTES, Config, Layout, ModelConfig, Precision
from shardwise.config.stages import Stage
from shardwise.models.parameter_counts import LocalWidths, local_parameter_count
from shardwise.optim.bucket_layout import bucket_bytes
from shardwise.pipeline.makespan import makespan
from shardwise.pipeline.partition import stage_plan
from shardwise.pipeline.timeline import StageTimes, Timeline, timeline
from shardwise.planner import block_seconds, device_seconds
from shardwise.planner.block_seconds import Parts, Program, Shape, Times
from shardwise.planner.device_seconds import Constants, constants_of, group
from shardwise.planner.device_specs import Cluster

_NO = Parts()
# That a block of ours starts in its forward pass, as torch's dispatcher counts them: plain, for rotary positions, for a
# gate. An accelerator starts no kernel for a view of a tensor; the host of a CPU's rank spends time on each.
_KERNELS, _OPERATORS = (18, 8, 5), (37, 8, 7)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of the pipeline rank that works longest, by what they are spent on; they sum to `total`.

    Attributes:
        matmul: matrix products of blocks, forward and backward, without recompute.
        attention: its core.
        memory_bound: norms, activations, dropout and sums, which memory limits.
        launch: the device waits for the host.
        head: output head and loss, and the embedding.
        recompute: what is computed a second time.
        tensor: collectives of tensor and sequence parallelism.
        messages: what the rank waits for while it sends to other stages.
        bubble: it waits for other stages.
        reduction: gradients over data parallelism, as far as no backward pass hides it.
        gather: ZeRO's parameters.
        optimizer: the update, with the gradient norm.
    """

    matmul: float
    attention: float
    memory_bound: float
    launch: float
    head: float
    recompute: float
    tensor: float
    messages: float
    bubble: float
    reduction: float
    gather: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(seconds for _, seconds in self.rows())

    @property
    def communication(self) -> float:
        """Seconds that nothing hides."""
        return self.tensor + self.messages + self.reduction + self.gather

    def rows(self) -> list[tuple[str, float]]:
        """(part, seconds) in the order in which they are shown."""
        return [(one.name, getattr(self, one.name)) for one in fields(self)]


@dataclass(frozen=True)
class StageWork:
    """What a stage does with one micro-batch; `action`: seconds of the schedule beside each pass."""

    stage: Stage
    block: Times
    rest: tuple[Times, ...]
    action: float = 0.0

    @cached_property
    def times(self) -> StageTimes:
        layers, rest = len(self.stage.layers), self.rest
        return StageTimes(
            layers * self.block.forward.total + sum(one.forward.total for one in rest) + self.action,
            layers * self.block.backward.total + sum(one.backward.total for one in rest) + self.action,
            layers * self.block.weight + sum(one.weight for one in rest),
        )


def step_time(
    config: Config,
    layout: Layout,
    cluster: Cluster,
    program: Program | None = None,
    constants: Constants | None = None,
) -> StepTime | None:
    """The time of one step. None for a model of your own.

    Args:
        program: how it is computed; None: as this package does it.
        constants: None: those of the device, else those that were fitted.
    """
    if config.shapes is None:
        return None
    c, how = constants or constants_of(cluster.device), program or ours(config, cluster)
    precision = config.precision.resolved(cluster.device.is_accelerator)
    micro_batches = layout.accumulation(config.train)
    works = stage_works(config, layout, cluster, how, c)
    sent = _message(config, layout, cluster, how, c, precision)
    waits = sent + c.wait if how.waits_for_messages and layout.pipeline > 1 else 0.0
    times = tuple(_waiting(work.times, waits) for work in works)
    of_ranks = [[work for work in works if work.stage.rank == rank] for rank in range(layout.pipeline)]
    busy = [sum(t.forward + t.backward for w, t in zip(works, times, strict=True) if w.stage.rank == rank)
            for rank in range(layout.pipeline)]  # fmt: skip
    longest = max(range(layout.pipeline), key=busy.__getitem__)
    span = makespan(config.parallel, micro_batches, times, 0.0 if waits else sent, config.train.recompute)
    ahead, back, head, again = _sums(of_ranks[longest])
    update = _update(config, layout, cluster, how, c, precision, works)
    m = micro_batches
    kept = ahead.plus(back).plus(again, -1)
    return StepTime(
        matmul=m * kept.matmul,
        attention=m * kept.attention,
        memory_bound=m * kept.memory_bound,
        launch=m * (kept.launch + sum(2 * work.action for work in of_ranks[longest])),
        head=m * head,
        recompute=m * again.total,
        tensor=m * kept.tensor,
        messages=m * waits * 2 * len(of_ranks[longest]),
        bubble=max(0.0, span - m * busy[longest]),
        reduction=update[0],
        gather=update[1],
        optimizer=update[2],
    )


def least_time(config: Config, layout: Layout, cluster: Cluster) -> float:
    """Seconds that no schedule can beat: the work of the busiest rank, and the update."""
    c, how = constants_of(cluster.device), ours(config, cluster)
    works = stage_works(config, layout, cluster, how, c)
    busy = [0.0] * layout.pipeline
    for work in works:
        busy[work.stage.rank] += work.times.forward + work.times.backward
    precision = config.precision.resolved(cluster.device.is_accelerator)
    micro_batches = layout.accumulation(config.train)
    return max(busy) * micro_batches + sum(_update(config, layout, cluster, how, c, precision, works))


def timeline_of(config: Config, layout: Layout, cluster: Cluster) -> Timeline:
    """What each pipeline rank does in a step, with the times that `step_time` adds up."""
    c, how = constants_of(cluster.device), ours(config, cluster)
    works = stage_works(config, layout, cluster, how, c)
    precision = config.precision.resolved(cluster.device.is_accelerator)
    sent = _message(config, layout, cluster, how, c, precision)
    micro_batches = layout.accumulation(config.train)
    return timeline(config.parallel, micro_batches, [work.times for work in works], sent, config.train.recompute)


def ours(config: Config, cluster: Cluster) -> Program:
    """How this package computes a step there."""
    model = config.known_shapes
    fused = model.attention_dropout_p == 0 or (cluster.device.is_accelerator and config.train.dropout_mode == "fast")
    plain, rotary, gated = _KERNELS if cluster.device.is_accelerator else _OPERATORS
    kernels = plain + (rotary if model.rotary_dim else 0) + (gated if model.gated else 0)
    return Program(fused_attention=fused, kernels=kernels, runs_ahead=cluster.device.is_accelerator)


def stage_works(
    config: Config, layout: Layout, cluster: Cluster, program: Program, constants: Constants
) -> list[StageWork]:
    """What each stage does, in the order of the model."""
    shape, rows = _shape(config, layout, cluster)
    block = block_seconds.block(shape, cluster.device, constants, program)
    first = block_seconds.embedding(shape, rows, cluster.device, constants, program)
    last = block_seconds.head(shape, rows, cluster.device, constants, program)
    action = constants.action if layout.pipeline > 1 else 0.0
    return [
        StageWork(stage, block, (*((first,) if stage.is_first else ()), *((last,) if stage.is_last else ())), action)
        for stage in stage_plan(config, layout)
    ]


def _shape(config: Config, layout: Layout, cluster: Cluster) -> tuple[Shape, int]:
    """The shape of the blocks on one rank, and its rows of the vocabulary."""
    model, train = config.known_shapes, config.train
    local = LocalWidths.of(model, layout.tensor, config.parallel.vocab_multiple)
    precision = config.precision.resolved(cluster.device.is_accelerator)
    shape = block_seconds.shape_of(
        model,
        widths=(local.query, local.key_value),
        batch=train.micro_batch,
        length=train.sequence_length,
        layout=(layout.tensor, layout.sequence_parallel, min(layout.tensor, cluster.per_node)),
        dtypes=(precision.parameter, precision.gradient),
        recompute=train.recompute,
    )
    return shape, local.vocabulary


def _waiting(times: StageTimes, seconds: float) -> StageTimes:
    return StageTimes(times.forward + seconds, times.backward + seconds, times.weight)


def _sums(works: Sequence[StageWork]) -> tuple[Parts, Parts, float, Parts]:
    """Of a rank's blocks forward and backward; of its embedding and head; and what of `backward` is recompute."""
    ahead = back = again = _NO
    rest = 0.0
    for work in works:
        layers = len(work.stage.layers)
        ahead, back = ahead.plus(work.block.forward, layers), back.plus(work.block.backward, layers)
        again = again.plus(work.block.again, layers)
        rest += sum(one.forward.total + one.backward.total for one in work.rest)
    return ahead, back, rest, again


@lru_cache(maxsize=2**12)
def _elements(model: ModelConfig, tensor: int, multiple: int, stages: tuple[Stage, ...]) -> int:
    return local_parameter_count(model, tensor, vocab_multiple=multiple, stages=stages) or 0


def _message(
    config: Config, layout: Layout, cluster: Cluster, program: Program, c: Constants, precision: Precision
) -> float:
    """Seconds of a message between stages: x, [T/s, H]."""
    if layout.pipeline == 1:
        return 0.0
    train, device = config.train, cluster.device
    elements = train.micro_batch * train.sequence_length * config.known_shapes.hidden_size
    size = DTYPE_BYTES[precision.parameter] * elements
    inside = layout.tensor * layout.data * 2 <= cluster.per_node
    if program.splits_messages and not layout.sequence_parallel and layout.tensor > 1:
        of = device_seconds.Group(layout.tensor, min(layout.tensor, cluster.per_node))
        sent = device_seconds.message(device, c, size / layout.tensor, inside=inside)
        return sent + device_seconds.collective(device, c, of, float(size))
    return device_seconds.message(device, c, size / layout.sequence_parts, inside=inside)


def _update(
    config: Config,
    layout: Layout,
    cluster: Cluster,
    program: Program,
    c: Constants,
    precision: Precision,
    works: Sequence[StageWork],
) -> tuple[float, float, float]:
    """Seconds of the reduction that are not hidden, of ZeRO's gather and of the update, on the rank that holds most.

    Buckets are reduced as the last micro-batch's backward pass completes them: all but the last can hide behind it.
    """
    device, of = cluster.device, group(layout.data, layout.tensor, cluster.per_node)
    of_rank = (tuple(work.stage for work in works if work.stage.rank == rank) for rank in {0, layout.pipeline - 1})
    multiple = config.parallel.vocab_multiple
    elements = max(_elements(config.model, layout.tensor, multiple, stages) for stages in of_rank)
    zero = config.optimizer.zero == 1 and layout.data > 1
    gradients = float(DTYPE_BYTES[precision.reduce] * elements)
    whole = not zero or program.reduces_all
    reduced = device_seconds.collective(device, c, of, gradients, reduces_all=whole)
    if program.overlaps and layout.data > 1:
        held = DTYPE_BYTES[precision.gradient] * elements
        bucket = bucket_bytes(held, layout.data, accelerator=device.is_accelerator)
        count = max(1.0, held / bucket)
        latency = (count - 1) * device_seconds.collective(device, c, of, 1.0, reduces_all=whole)
        first = works[0].times.backward * (layout.virtual if layout.pipeline > 1 else 1)
        reduced = max((reduced + latency) / count, reduced + latency - c.overlap * first)
    gathered = (
        device_seconds.collective(device, c, of, float(DTYPE_BYTES[precision.parameter] * elements)) if zero else 0.0
    )
    owned = elements / (layout.data if zero else 1)
    state = DTYPE_BYTES[precision.optimizer]
    rewritten = config.optimizer.spec.kept_tensors(separate_masters=True)  # each is read and written
    touched = owned * (2 * rewritten * state + DTYPE_BYTES[precision.parameter] + DTYPE_BYTES[precision.gradient])
    cleared = elements * 2 * DTYPE_BYTES[precision.gradient]
    seconds = (touched + cleared) / (device.memory_bandwidth * c.update) + c.step
    return reduced, gathered, seconds
