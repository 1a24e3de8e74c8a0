"""The time of an optimizer step on a cluster, and what it is spent on. Deterministic; nothing is measured.

Legend: see `planner/rank_workload.py`. Ranks are [pipeline, data, tensor], tensor fastest, and nodes take consecutive
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from shardwise.config import DTYPE_BYTES, Config, Layout, Precision
from shardwise.config.layout import Stage
from shardwise.models.parameter_counts import LocalWidths, block_matrix_shapes, local_parameter_count
from shardwise.optim.bucket_layout import bucket_bytes
from shardwise.pipeline.makespan import makespan
from shardwise.pipeline.partition import stage_plan
from shardwise.pipeline.timeline import StageTimes, Timeline, timeline
from shardwise.planner import block_seconds, device_seconds
from shardwise.planner.block_seconds import BlockShape, PartSeconds, PassSeconds, ProgramTraits
from shardwise.planner.device_seconds import Constants, RankGroup, constants_of, group
from shardwise.planner.device_specs import Cluster

# Kernels that a block starts in its forward pass, as torch's dispatcher counts them: of a plain block, and additional
# ones for rotary positions and for a gate. An accelerator starts no kernel for a view of a tensor; the host of a CPU's
# rank spends time on each operator.
_ACCELERATOR_KERNELS = (18, 8, 5)
_CPU_OPERATORS = (37, 8, 7)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of the pipeline rank that works longest, by what they are spent on; they sum to `total`.

    Attributes:
        matmul: matrix products of blocks, forward and backward, without recompute.
        attention: attention core.
        memory_bound: norms, activations, dropout and sums, which memory limits.
        launch: waits of the device for the host.
        head: output head and loss, and the embedding.
        recompute: all that is computed a second time.
        tensor: collectives of tensor and sequence parallelism.
        messages: waits of the rank while it sends to other stages.
        bubble: waits of the rank for other stages.
        reduction: gradients over data parallelism, as far as no backward pass hides it.
        gather: all-gather of ZeRO's parameters.
        optimizer: update with the gradient norm.
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
        return [(part.name, getattr(self, part.name)) for part in fields(self)]


@dataclass(frozen=True)
class StageWork:
    """The work of a stage on one micro-batch.

    Attributes:
        stage: the stage.
        block: seconds of each of its blocks.
        ends: seconds of the embedding and of the head, if the stage has them.
        action: seconds that the schedule takes beside each pass.
    """

    stage: Stage
    block: PassSeconds
    ends: tuple[PassSeconds, ...]
    action: float = 0.0

    @cached_property
    def times(self) -> StageTimes:
        layers = len(self.stage.layers)
        return StageTimes(
            layers * self.block.forward.total + sum(end.forward.total for end in self.ends) + self.action,
            layers * self.block.backward.total + sum(end.backward.total for end in self.ends) + self.action,
            layers * self.block.weight + sum(end.weight for end in self.ends),
        )


def step_time(
    config: Config,
    layout: Layout,
    cluster: Cluster,
    program: ProgramTraits | None = None,
    constants: Constants | None = None,
) -> StepTime | None:
    """Return the time of one step. None for a model of your own.

    Args:
        config: the whole configuration.
        layout: degrees of parallelism.
        cluster: devices that it runs on.
        program: traits of the program that trains; None: this package.
        constants: constants of the device; None: those that were measured on it, else those that were fitted.
    """
    if config.shapes is None:
        return None
    inputs = _StepInputs.of(config, layout, cluster, program, constants)
    message = inputs.message_seconds()
    if inputs.program.waits_for_messages and layout.pipeline > 1:
        # The rank spends the time of a message in the pass that sends it, so nothing is under way between ranks.
        wait = message + inputs.constants.wait
        in_flight = 0.0
    else:
        wait = 0.0
        in_flight = message
    times = tuple(
        StageTimes(work.times.forward + wait, work.times.backward + wait, work.times.weight) for work in inputs.works
    )
    busy = _busy_seconds(inputs.works, times, layout.pipeline)
    longest = max(range(layout.pipeline), key=busy.__getitem__)
    m = layout.accumulation(config.train)
    makespan_seconds = makespan(config.parallel, m, times, in_flight, config.train.recompute)
    # The parts are those of one rank, and all that it does not work is bubble, so that they sum to the makespan.
    works = [work for work in inputs.works if work.stage.rank == longest]
    forward, backward, recompute = _block_sums(works)
    # The backward pass contains the recompute, which has a row of its own.
    model_work = forward.plus(backward).plus(recompute, -1)
    ends = sum(end.forward.total + end.backward.total for work in works for end in work.ends)
    update = inputs.update_seconds()
    return StepTime(
        matmul=m * model_work.matmul,
        attention=m * model_work.attention,
        memory_bound=m * model_work.memory_bound,
        launch=m * (model_work.launch + sum(2 * work.action for work in works)),
        head=m * ends,
        recompute=m * recompute.total,
        tensor=m * model_work.tensor,
        messages=m * wait * 2 * len(works),  # each stage sends one message in each direction
        bubble=max(0.0, makespan_seconds - m * busy[longest]),
        reduction=update.reduction,
        gather=update.gather,
        optimizer=update.optimizer,
    )


def least_time(config: Config, layout: Layout, cluster: Cluster) -> float:
    """Return seconds that no schedule can beat: the work of the busiest rank, and the update.

    Waits for other ranks and for messages are left out, which only add to them.
    """
    inputs = _StepInputs.of(config, layout, cluster)
    busy = _busy_seconds(inputs.works, [work.times for work in inputs.works], layout.pipeline)
    micro_batches = layout.accumulation(config.train)
    return max(busy) * micro_batches + inputs.update_seconds().total


def timeline_of(config: Config, layout: Layout, cluster: Cluster) -> Timeline:
    """Return the timeline of a step, with the times that `step_time` adds up."""
    inputs = _StepInputs.of(config, layout, cluster)
    stages = [work.times for work in inputs.works]
    micro_batches = layout.accumulation(config.train)
    return timeline(config.parallel, micro_batches, stages, inputs.message_seconds(), config.train.recompute)


def shardwise_traits(config: Config, cluster: Cluster) -> ProgramTraits:
    """Return the traits of this package's training there."""
    model = config.known_shapes
    on_accelerator = cluster.device.is_accelerator
    # A fused kernel drops probabilities by masks of its own, which only an accelerator's has.
    fused = model.attention_dropout_p == 0 or (on_accelerator and config.train.dropout_mode == "fast")
    plain, rotary, gated = _ACCELERATOR_KERNELS if on_accelerator else _CPU_OPERATORS
    kernels = plain
    if model.rotary_dim:
        kernels += rotary
    if model.gated:
        kernels += gated
    return ProgramTraits(fused_attention=fused, kernels=kernels, runs_ahead=on_accelerator)


def stage_works(
    config: Config, layout: Layout, cluster: Cluster, program: ProgramTraits, constants: Constants
) -> list[StageWork]:
    """Return the work of each stage, in the order of the model."""
    model = config.known_shapes
    local = LocalWidths.of(model, layout.tensor, config.vocab_multiple(layout.tensor))
    precision = config.precision.resolved(cluster.device.is_accelerator)
    shape = BlockShape(
        model=model,
        local=local,
        batch=config.train.micro_batch,
        length=config.train.sequence_length,
        tensor=layout.tensor,
        sequence_parallel=layout.sequence_parallel,
        inside=min(layout.tensor, cluster.per_node),
        dtype=precision.parameter,
        gradient=precision.gradient,
        recompute=config.train.recompute,
    )
    block = block_seconds.block(shape, cluster.device, constants, program)
    embedding = block_seconds.embedding(shape, cluster.device, constants, program)
    head = block_seconds.head(shape, cluster.device, constants, program)
    action = constants.action if layout.pipeline > 1 else 0.0
    works = []
    for stage in stage_plan(config, layout):
        ends: list[PassSeconds] = []
        if stage.is_first:
            ends.append(embedding)
        if stage.is_last:
            ends.append(head)
        works.append(StageWork(stage, block, tuple(ends), action))
    return works


def _busy_seconds(works: Sequence[StageWork], times: Sequence[StageTimes], ranks: int) -> list[float]:
    """Return the seconds that each pipeline rank works on one micro-batch."""
    busy = [0.0] * ranks
    for work, stage_times in zip(works, times, strict=True):
        busy[work.stage.rank] += stage_times.forward + stage_times.backward
    return busy


def _block_sums(works: Sequence[StageWork]) -> tuple[PartSeconds, PartSeconds, PartSeconds]:
    """Return the seconds of all blocks of a rank: forward, backward, and the recompute within backward."""
    forward = PartSeconds()
    backward = PartSeconds()
    recompute = PartSeconds()
    for work in works:
        layers = len(work.stage.layers)
        forward = forward.plus(work.block.forward, layers)
        backward = backward.plus(work.block.backward, layers)
        recompute = recompute.plus(work.block.recompute, layers)
    return forward, backward, recompute


@dataclass(frozen=True)
class _UpdateSeconds:
    """Seconds of what happens once a step.

    Attributes:
        reduction: reduction of gradients, as far as no backward pass hides it.
        gather: all-gather of ZeRO's parameters.
        optimizer: update of the parameters.
    """

    reduction: float
    gather: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum((self.reduction, self.gather, self.optimizer))


@dataclass(frozen=True)
class _StepInputs:
    """The inputs of a step's formulas."""

    config: Config
    layout: Layout
    cluster: Cluster
    program: ProgramTraits
    constants: Constants
    precision: Precision
    works: list[StageWork]

    @staticmethod
    def of(
        config: Config,
        layout: Layout,
        cluster: Cluster,
        program: ProgramTraits | None = None,
        constants: Constants | None = None,
    ) -> _StepInputs:
        program = program or shardwise_traits(config, cluster)
        constants = constants or constants_of(cluster.device)
        precision = config.precision.resolved(cluster.device.is_accelerator)
        works = stage_works(config, layout, cluster, program, constants)
        return _StepInputs(config, layout, cluster, program, constants, precision, works)

    def message_seconds(self) -> float:
        """Return the seconds of a message between stages: x, [T/s, H]."""
        layout = self.layout
        if layout.pipeline == 1:
            return 0.0
        model = self.config.known_shapes
        train = self.config.train
        device = self.cluster.device
        size = DTYPE_BYTES[self.precision.parameter] * train.micro_batch * train.sequence_length * model.hidden_size
        # Neighbouring stages are on one node if two pipeline ranks, with all their tensor and data ranks, fit there.
        inside = layout.tensor * layout.data * 2 <= self.cluster.per_node
        if self.program.splits_messages and not layout.sequence_parallel and layout.tensor > 1:
            tensor_group = RankGroup(layout.tensor, min(layout.tensor, self.cluster.per_node))
            part = device_seconds.message(device, self.constants, size / layout.tensor, inside=inside)
            return part + device_seconds.collective(device, self.constants, tensor_group, float(size))
        return device_seconds.message(device, self.constants, size / layout.sequence_parts, inside=inside)

    def update_seconds(self) -> _UpdateSeconds:
        """Return the seconds of reduction, gather and update on the rank that has most parameters."""
        device = self.cluster.device
        precision = self.precision
        elements = self._most_elements()
        uses_zero = self.config.optimizer.zero > 0 and self.layout.data > 1
        gather = 0.0
        if uses_zero:
            parameter_bytes = float(DTYPE_BYTES[precision.parameter] * elements)
            gather = device_seconds.collective(device, self.constants, self._data_group, parameter_bytes)
        owned = elements / (self.layout.data if uses_zero else 1)
        # Master and states are read and written; the gradient is read, and the parameter written. Then all gradients
        # are set to zero, and read once for their norm.
        spec = self.config.optimizer.spec
        kept = spec.kept_elements(elements, self._most_elements(block_matrices=True), separate_masters=True)
        touched = owned * (DTYPE_BYTES[precision.parameter] + DTYPE_BYTES[precision.gradient])
        touched += 2 * kept * DTYPE_BYTES[precision.optimizer] * owned / elements
        cleared = elements * 2 * DTYPE_BYTES[precision.gradient]
        update = (touched + cleared) / (device.memory_bandwidth * self.constants.update) + self.constants.step
        if spec.orthogonalizes:
            update += self._orthogonalization_seconds()
        return _UpdateSeconds(self._reduction_seconds(elements, uses_zero), gather, update)

    def _orthogonalization_seconds(self) -> float:
        """Return the seconds of Muon's iterations on the rank with most blocks, or of the messages that they hide.

        Each step of an iteration has two products of a matrix and one of its Gram matrix. The ranks of a stage share
        the matrices, and each sends its part there and back.
        """
        device = self.cluster.device
        c = self.constants
        muon = self.config.optimizer.muon
        width = muon.dtype(device.is_accelerator)
        peak = device.bfloat16 if width == "bfloat16" else device.float32
        ranks = self.layout.tensor * self.layout.data
        layers = max(
            sum(len(work.stage.layers) for work in self.works if work.stage.rank == rank)
            for rank in range(self.layout.pipeline)
        )
        shapes = block_matrix_shapes(self.config.known_shapes, split_heads=muon.split_heads)
        iterations = 0.0
        for shape, count in shapes.items():
            short, long = sorted(shape)
            products = (short, short, long), (short, short, short), (short, long, short)
            iterations += layers * count * sum(device_seconds.matmul(device, c, peak, *sizes) for sizes in products)
        elements = layers * sum(math.prod(shape) * count for shape, count in shapes.items())
        sent = device_seconds.collective(
            device, c, group(ranks, 1, self.cluster.per_node), DTYPE_BYTES[width] * elements / ranks
        )
        return max(muon.ns_steps * iterations / ranks, 2 * sent)

    @property
    def _data_group(self) -> RankGroup:
        return group(self.layout.data, self.layout.tensor, self.cluster.per_node)

    def _most_elements(self, *, block_matrices: bool = False) -> int:
        """Return the parameters of the pipeline rank that has most: the embedding or the head makes it an outer one.

        With `block_matrices`, only the matrices of blocks are counted.
        """
        model = self.config.model
        multiple = self.config.vocab_multiple(self.layout.tensor)
        counts = []
        for rank in {0, self.layout.pipeline - 1}:
            stages = tuple(work.stage for work in self.works if work.stage.rank == rank)
            counts.append(
                local_parameter_count(
                    model, self.layout.tensor, vocab_multiple=multiple, stages=stages, block_matrices=block_matrices
                )
                or 0
            )
        return max(counts)

    def _reduction_seconds(self, elements: int, uses_zero: bool) -> float:
        """Return the seconds of the reduction of gradients that no backward pass hides.

        Buckets are reduced as the last micro-batch's backward pass completes them: all but the last can hide behind it.
        """
        device = self.cluster.device
        layout = self.layout
        c = self.constants
        reduces_all = not uses_zero or self.program.reduces_all
        size = float(DTYPE_BYTES[self.precision.reduce] * elements)
        seconds = device_seconds.collective(device, c, self._data_group, size, reduces_all=reduces_all)
        if not self.program.overlaps or layout.data == 1:
            return seconds
        gradient_bytes = DTYPE_BYTES[self.precision.gradient] * elements
        bucket = bucket_bytes(gradient_bytes, layout.data, accelerator=device.is_accelerator)
        buckets = max(1.0, gradient_bytes / bucket)
        # Each bucket beyond the first adds the latency of a collective: the time of one that sends a byte.
        latency = device_seconds.collective(device, c, self._data_group, 1.0, reduces_all=reduces_all)
        seconds += (buckets - 1) * latency
        # The first rank's stages, whose gradients are complete last: their reductions end the step.
        backward = self.works[0].times.backward * layout.virtual
        return max(seconds / buckets, seconds - c.overlap * backward)
