"""The time of an optimizer step on a cluster, and what it is spent on. Deterministic; nothing is measured.

Legend: see `estimates/rank_workload.py`. Ranks are [pipeline, data, tensor], tensor fastest, and nodes take consecutive
ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from shardwise.config import DTYPE_BYTES, Config, FamilyConfig, Layout, OptimizerConfig, Precision
from shardwise.config.layout import LayoutStage
from shardwise.estimates.sharding import owned_elements
from shardwise.models.parameter_counts import LocalWidths, block_matrix_shapes, count_blocks, elements_by_ranks
from shardwise.optim.bucket_layout import bucket_bytes
from shardwise.pipeline.partition import stage_plan
from shardwise.pipeline.timeline import StageTimes, Timeline, timeline
from shardwise_plan import device_seconds, pass_seconds
from shardwise_plan.block_shape import BlockShape
from shardwise_plan.device_seconds import DeviceConstants, LinkedRanks, device_constants, linked_ranks
from shardwise_plan.device_specs import Cluster
from shardwise_plan.makespan import makespan
from shardwise_plan.program_traits import ProgramTraits
from shardwise_plan.update_bytes import update_bytes

# Kernels that a block starts in its forward pass, as torch's dispatcher counts them: of a plain block, and additional
# ones for rotary positions and for a gate. An accelerator starts no kernel for a view of a tensor; the host of a CPU's
# rank spends time on each operator.
_ACCELERATOR_KERNELS = (18, 8, 5)
_CPU_OPERATORS = (37, 8, 7)


_LEAST_SHARE = 0.001  # share of a step from which on a part is shown
_HOST_BANDWIDTH = 100e9
"""Bytes a second of a machine's memory, which its ranks share as they update offloaded state: assumed, not measured."""
HOST_LINK_BANDWIDTH = 25e9
"""Bytes a second between a device and its host, of PCIe 4.0 with 16 lanes: assumed, not measured."""
COMMUNICATION = ("tensor", "context", "experts", "messages", "reduction", "gather")
"""Parts of `StepTime` in which data travel."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of the pipeline rank that works longest, by what they are spent on; they sum to `total`."""

    matmul: float  # matrix products of blocks, forward and backward, without recompute
    attention: float
    memory_bound: float  # norms, activations, dropout and sums, which memory limits
    accumulation: float  # additions of the gradients of blocks' weights to those of earlier micro-batches
    launch: float  # waits of the device for the host
    head: float  # output head and loss, and the embedding
    recompute: float  # all that is computed a second time, the forward pass that only counts rows of experts too
    tensor: float  # collectives of tensor and sequence parallelism, as far as no product hides them
    context: float  # collectives of context parallelism
    experts: float  # all-to-alls of the rows of experts
    messages: float  # waits of the rank while it sends to other stages
    bubble: float  # waits of the rank for other stages
    # Gradients over data parallelism, as far as no backward pass hides it; behind one, the part of the device that its
    # kernels take.
    reduction: float
    gather: float  # all-gathers of ZeRO's parameters, likewise
    optimizer: float  # update with the gradient norm

    @property
    def total(self) -> float:
        return sum(seconds for _, seconds in self.rows())

    @property
    def communication(self) -> float:
        """Seconds that nothing hides."""
        return sum(seconds for part, seconds in self.rows() if part in COMMUNICATION)

    def scaled(self, ratio: float) -> StepTime:
        return StepTime(**{part: ratio * seconds for part, seconds in self.rows()})

    def rows(self) -> list[tuple[str, float]]:
        """(part, seconds) in the order in which they are shown."""
        return [(part.name, getattr(self, part.name)) for part in fields(self)]

    def shares(self) -> str:
        """The parts of at least 0.1%, as shares of the step, the largest first."""
        parts = sorted(((seconds / self.total, part) for part, seconds in self.rows()), reverse=True)
        return ", ".join(f"{part.replace('_', ' ')} {share:.1%}" for share, part in parts if share >= _LEAST_SHARE)


class _StageWork(NamedTuple):
    """The work of a stage on one micro-batch."""

    stage: LayoutStage
    block: pass_seconds.PassSeconds  # seconds of each of its blocks, on average
    ends: tuple[pass_seconds.PassSeconds, ...]  # seconds of the embedding and of the head, if the stage has them
    times: StageTimes  # seconds of its passes
    action: float = 0.0  # seconds that the schedule takes beside each pass


def step_time(
    config: Config,
    layout: Layout,
    cluster: Cluster,
    program: ProgramTraits | None = None,
    constants: DeviceConstants | None = None,
) -> StepTime | None:
    """Predict the time of one step. None for a model of your own.

    Args:
        program: traits of the program that trains; None: this package.
        constants: constants of the device; None: those that were measured on it, else those that were fitted.
    """
    if config.shapes is None:
        return None
    inputs = _StepInputs.of(config, layout, cluster, program, constants)
    wait, busy, makespan_seconds = inputs.passes()
    longest = max(range(layout.pipeline), key=busy.__getitem__)
    m = layout.accumulation(config.train)
    # The parts are those of one rank, and all that it does not work is bubble, so that they sum to the makespan.
    works = [work for work in inputs.works if work.stage.rank == longest]
    forward, backward, recompute = (
        pass_seconds.weighted_seconds((getattr(work.block, name), len(work.stage.layers)) for work in works)
        for name in ("forward", "backward", "recompute")
    )
    model_work = forward.plus(backward).plus(recompute, -1)  # a backward pass contains the recompute
    ends = sum(end.forward.total + end.backward.total for work in works for end in work.ends)
    reduction, gather, optimizer = inputs.update_seconds()
    return StepTime(
        matmul=m * model_work.matmul,
        attention=m * model_work.attention,
        memory_bound=m * model_work.memory_bound,
        accumulation=m * model_work.accumulation,
        launch=m * (model_work.launch + sum(2 * work.action for work in works)),
        head=m * ends,
        recompute=m * recompute.total + _counting_seconds(m, config.optimizer, layout, works),
        tensor=m * model_work.tensor,
        context=m * model_work.context,
        experts=m * model_work.all_to_all,
        messages=m * wait * 2 * len(works),  # each stage sends one message in each direction
        bubble=max(0.0, makespan_seconds - m * busy[longest]),
        reduction=reduction,
        gather=gather,
        optimizer=optimizer,
    )


def _counting_seconds(m: int, settings: OptimizerConfig, layout: Layout, works: Sequence[_StageWork]) -> float:
    """Return the seconds of forward passes that only count rows of experts, with the fill of a pipeline."""
    if not settings.counts_rows_first(m, layout.pipeline):
        return 0.0
    return (m + layout.pipeline - 1) * sum(work.times.forward for work in works)


def least_step_times(
    configs: Sequence[Config], layout: Layout, cluster: Cluster, *, simulated: bool = False
) -> list[float]:
    """Predict seconds that no sharding can beat: those of the passes, and the update.

    The configurations differ only in how data parallelism is sharded. Passes that are not simulated take as long as
    those of the rank that ends last, at least (`_StepInputs.passes`).
    """
    inputs = _StepInputs.of(configs[0], layout, cluster)
    _, _, passes = inputs.passes(simulated=simulated)
    return [passes + sum(replace(inputs, config=config).update_seconds()) for config in configs]


def model_seconds(config: Config, layout: Layout, cluster: Cluster) -> float:
    """Predict the seconds of both passes of a micro-batch through all stages, but for messages."""
    works = stage_works(config, layout, cluster, shardwise_traits(config, cluster), device_constants(cluster.device))
    return sum(work.times.forward + work.times.backward for work in works)


def predicted_timeline(config: Config, layout: Layout, cluster: Cluster) -> Timeline:
    """Return the predicted timeline of a step, with the times that `step_time` adds up."""
    inputs = _StepInputs.of(config, layout, cluster)
    stages = [work.times for work in inputs.works]
    micro_batches = layout.accumulation(config.train)
    return timeline(config.parallel, micro_batches, stages, inputs.message_seconds(), config.recompute)


def shardwise_traits(config: Config, cluster: Cluster) -> ProgramTraits:
    """Return the traits of this package's training on a planned device."""
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
    precision = config.precision.resolved(on_accelerator)
    return ProgramTraits(
        fused_attention=fused,
        kernels=kernels,
        separate_kernels=cluster.device.is_cuda and not config.compile.enabled,
        runs_ahead=on_accelerator,
        travels_once=not config.is_bit_equal,
        tensor_overlap=config.parallel.tensor_overlap if on_accelerator else None,
        adds_products=cluster.device.is_cuda
        and precision.parameter == "bfloat16"
        and precision.gradient == "float32"
        and config.precision.matmul is None
        and not config.is_bit_equal
        # Compiled products of ZeRO-2 and 3 are rounded before they are added.
        and not (config.compile.enabled and config.optimizer.zero >= 2),
    )


def stage_works(
    config: Config, layout: Layout, cluster: Cluster, program: ProgramTraits, constants: DeviceConstants
) -> list[_StageWork]:
    """Predict the work of each stage, in the order of the model."""
    model = config.known_shapes
    shape = BlockShape.of(config, layout, cluster, program)
    inputs = cluster.device, constants, program
    embedding, head = pass_seconds.embedding_seconds(shape, *inputs), pass_seconds.head_seconds(shape, *inputs)
    action = constants.action if layout.pipeline > 1 else 0.0
    works: list[_StageWork] = []
    alike: dict[tuple[object, ...], _StageWork] = {}
    for stage in stage_plan(config, layout):
        kinds = count_blocks(model, stage.layers)
        key = (stage.is_first, stage.is_last, kinds)
        if key not in alike:
            blocks = [(pass_seconds.block_seconds(replace(shape, routing=routing), *inputs), n) for routing, n in kinds]
            block = blocks[0][0] if len(blocks) == 1 else pass_seconds.mean_pass_seconds(blocks)
            ends = (*(embedding,) * stage.is_first, *(head,) * stage.is_last)
            layers = len(stage.layers)
            times = StageTimes(
                layers * block.forward.total + sum(end.forward.total for end in ends) + action,
                layers * block.backward.total + sum(end.backward.total for end in ends) + action,
                layers * block.weight + sum(end.weight for end in ends),
            )
            alike[key] = _StageWork(stage, block, ends, times, action)
        works.append(_StageWork(stage, *alike[key][1:]))
    return works


def _most_elements(
    model: FamilyConfig, local: LocalWidths, layout: Layout, works: Sequence[_StageWork], *, block_matrices: bool
) -> Counter[int]:
    """Return the parameters of the pipeline rank that has most: the embedding or the head makes it an outer one.

    They stand by the number of ranks that divide their tensors among them. With `block_matrices`, only the matrices of
    blocks are counted.
    """
    by_rank = (tuple(work.stage for work in works if work.stage.rank == rank) for rank in {0, layout.pipeline - 1})
    counts = (elements_by_ranks(model, layout.tensor, local, stages, block_matrices) for stages in by_rank)
    return max(counts, key=Counter.total)


@dataclass(frozen=True)
class _StepInputs:
    """The inputs of a step's formulas.

    `parts`: parameters of the pipeline rank that has most, by the number of ranks that divide their tensors.
    """

    config: Config
    layout: Layout
    cluster: Cluster
    program: ProgramTraits
    constants: DeviceConstants
    precision: Precision
    works: list[_StageWork]
    parts: Counter[int]
    matrices: Counter[int]  # likewise those in matrices of blocks

    @staticmethod
    def of(
        config: Config,
        layout: Layout,
        cluster: Cluster,
        program: ProgramTraits | None = None,
        constants: DeviceConstants | None = None,
    ) -> _StepInputs:
        program = program or shardwise_traits(config, cluster)
        constants = constants or device_constants(cluster.device)
        precision = config.precision.resolved(cluster.device.is_accelerator)
        works = stage_works(config, layout, cluster, program, constants)
        model = config.known_shapes
        local = LocalWidths.on(layout, model, config.vocab_multiple(layout.tensor))
        parts, matrices = (_most_elements(model, local, layout, works, block_matrices=only) for only in (False, True))
        return _StepInputs(config, layout, cluster, program, constants, precision, works, parts, matrices)

    def passes(self, *, simulated: bool = True) -> tuple[float, list[float], float]:
        """Return the wait in each pass, the seconds of each rank's passes of a micro-batch, and those of all passes.

        If these are not simulated, they are a bound. A rank begins when the first micro-batch has passed the stages
        before its own. Its last backward pass is one of its first stage, which those of the stages before follow; only
        gradients of weights that are computed apart may be later still.
        """
        message, wait = self.message_seconds(), 0.0
        times = [work.times for work in self.works]
        if self.program.waits_for_messages and self.layout.pipeline > 1:
            # The rank spends the time of a message in the pass that sends it, so nothing is under way between ranks.
            message, wait = 0.0, message + self.constants.wait
            times = [StageTimes(time.forward + wait, time.backward + wait, time.weight) for time in times]
        busy = [0.0] * self.layout.pipeline
        for work, time in zip(self.works, times, strict=True):
            busy[work.stage.rank] += time.forward + time.backward
        m = self.layout.accumulation(self.config.train)
        if simulated:
            return wait, busy, makespan(self.config.parallel, m, tuple(times), message, self.config.recompute)
        returns = not self.config.splits_backward or self.config.recompute == "full"
        # Stages are dealt out in rounds, so that rank r begins with stage r.
        stages_before = (time.forward + message + returns * (time.backward + message) for time in times)
        ends = map(lambda work, before: m * work + before, busy, accumulate(stages_before, initial=0.0))
        return wait, busy, max(ends)

    @property
    def elements(self) -> int:
        """Parameters of the pipeline rank that has most."""
        return self.parts.total()

    def message_seconds(self) -> float:
        """Return the seconds of a message between stages: x, [T/s, H]."""
        layout = self.layout
        if layout.pipeline == 1:
            return 0.0
        model = self.config.known_shapes
        train = self.config.train
        device = self.cluster.device
        tokens = train.micro_batch * train.sequence_length // layout.context
        size = DTYPE_BYTES[self.precision.parameter] * tokens * model.hidden_size
        # Neighbouring stages are on one node if two pipeline ranks, with all ranks of their stages, fit there.
        inside = layout.tensor * layout.replicas * 2 <= self.cluster.per_node
        if self.program.splits_messages and not layout.sequence_parallel and layout.tensor > 1:
            ranks = linked_ranks(layout.tensor, 1, self.cluster.per_node)
            part = device_seconds.message(device, self.constants, size / layout.tensor, inside=inside)
            return part + device_seconds.collective(device, self.constants, ranks, float(size))
        parts = layout.tensor if layout.sequence_parallel else 1
        return device_seconds.message(device, self.constants, size / parts, inside=inside)

    def update_seconds(self) -> tuple[float, float, float]:
        """Return what reduction and gathers add to passes, and the seconds of the update, on the rank with most."""
        device = self.cluster.device
        precision = self.precision
        elements = self.elements
        owned = owned_elements(self.parts, self._shard_ranks)
        spec = self.config.optimizer.spec
        width = DTYPE_BYTES[precision.optimizer]
        if self.program.updates_in_one_pass:
            # Master and states are read and written; the gradient is read, and the parameter written. All gradients are
            # set to zero, and read once for their norm.
            kept = spec.kept_bytes(elements, self.matrices.total(), master=width, state=DTYPE_BYTES[precision.moments])
            touched = owned * (DTYPE_BYTES[precision.parameter] + DTYPE_BYTES[precision.gradient])
            touched += 2 * kept * owned / elements + elements * 2 * DTYPE_BYTES[precision.gradient]
        else:
            touched = update_bytes(
                self.config.optimizer,
                precision,
                elements=elements,
                matrices=self.matrices.total(),
                ranks=round(elements / owned, 9),
                frees_gradients=self.config.optimizer.zero >= 2 and self._shard_ranks > 1,
                values=self.program.update_values,
            )
        update = self.constants.step
        if self.layout.world > 1:
            # Two kernels for each number of each rank.
            update += 2 * self.program.gathered_metrics * self.layout.world * self.constants.host
        if self.config.optimizer.offload and device.is_accelerator:
            by_device = 2 * elements * DTYPE_BYTES[precision.gradient]
            by_host = (touched - by_device) * min(self.layout.world, self.cluster.per_node) / _HOST_BANDWIDTH
            update += max(by_host, 2 * owned * width / HOST_LINK_BANDWIDTH)
            touched = by_device
        update += touched / (device.memory_bandwidth * self.constants.update)
        if spec.orthogonalizes:
            update += self._orthogonalization_seconds()
        exposed, behind_backward = self._gather_seconds()
        return self._reduction_seconds(behind_backward), exposed, update

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
        ranks = self.layout.tensor * self.layout.replicas
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
            device, c, linked_ranks(ranks, 1, self.cluster.per_node), DTYPE_BYTES[width] * elements / ranks
        )
        return max(muon.ns_steps * iterations / ranks, 2 * sent)

    @property
    def _shard_ranks(self) -> int:
        return self.config.shard_ranks(self.layout.replicas)

    def _shard_group(self, divided: int = 1) -> LinkedRanks:
        """Ranks over which ZeRO cuts tensors of a kind that so many neighbours divide among them."""
        ranks = max(1, self._shard_ranks // divided)
        return linked_ranks(ranks, self.layout.tensor * divided, self.cluster.per_node)

    def _copies_group(self, divided: int = 1) -> LinkedRanks:
        """Ranks that own the same part of the gradients."""
        shards = max(1, self._shard_ranks // divided)
        copies = self.layout.replicas // divided // shards
        return linked_ranks(copies, self.layout.tensor * divided * shards, self.cluster.per_node)

    def _collective(self, sizes: Mapping[int, float], *, cut: bool = True, reduces_all: bool = False) -> float:
        """Return the seconds of collectives of so many bytes of each part, over its shards or over its copies."""
        ranks = self._shard_group if cut else self._copies_group
        seconds = partial(device_seconds.collective, self.cluster.device, self.constants, reduces_all=reduces_all)
        return sum(seconds(ranks(divided), size) for divided, size in sizes.items())

    @property
    def _pass_seconds(self) -> StageTimes:
        """The passes of the first rank's stages, behind which its collectives run."""
        times = self.works[0].times
        virtual = self.layout.virtual
        return StageTimes(times.forward * virtual, times.backward * virtual, times.weight * virtual)

    def _hidden(self, seconds: float) -> float:
        """Return the seconds of collectives that a pass of so many seconds hides."""
        return self.constants.overlap * seconds if self.program.overlaps else 0.0

    def _gather_seconds(self) -> tuple[float, float]:
        """Return what gathers of parameters add to passes, and the seconds of those behind one backward pass.

        Up to stage 2, parameters are gathered once, after the update; on accelerators behind the first forward pass, in
        its order. At stage 3, a unit is gathered while the unit before it computes. All but the first unit can hide.
        The last block stays for the backward pass.
        """
        device = self.cluster.device
        optimizer = self.config.optimizer
        width = DTYPE_BYTES[self.precision.parameter]
        if self._shard_ranks == 1:
            return 0.0, 0.0
        seconds = self._collective({divided: float(width * count) for divided, count in self.parts.items()})
        layers = sum(len(work.stage.layers) for work in self.works if work.stage.rank == 0)
        added = partial(device_seconds.overlapped, device, self._shard_group())
        passes = self._pass_seconds
        if optimizer.zero < 3:
            hidden = self._hidden(passes.forward) if device.is_accelerator else 0.0
            return added(seconds, max(seconds / (layers + 1), seconds - hidden)), 0.0
        latency = self._collective(dict.fromkeys(self.parts, 1.0))
        seconds += layers * latency
        count = self.layout.accumulation(self.config.train) if self.config.gather == "micro_batch" else 1
        hidden = self._hidden(passes.forward) if optimizer.prefetch else 0.0
        exposed = count * added(seconds, max(seconds / (layers + 1), seconds - hidden))
        if self.config.gather == "step" or layers == 1:
            return exposed, 0.0
        blocks = {divided: width * count * (layers - 1) / layers for divided, count in self.matrices.items()}
        seconds = self._collective(blocks) + (layers - 2) * latency
        hidden = self._hidden(passes.backward) if optimizer.prefetch else 0.0
        return exposed + count * added(seconds, max(0.0, seconds - hidden)), seconds

    def _reduction_seconds(self, gathers: float) -> float:
        """Return the seconds of the reductions of gradients that no backward pass hides.

        Buckets are reduced as a backward pass completes them, which is the last micro-batch's or each one's: all but
        the last can hide behind it, beside the `gathers` of the same pass. Sums over copies do not hide.
        """
        device = self.cluster.device
        layout = self.layout
        if layout.replicas == 1:
            return 0.0
        optimizer = self.config.optimizer
        count = 1
        if optimizer.zero >= 2 and self.config.reduce == "micro_batch":
            count = layout.accumulation(self.config.train)
        is_cut = self._shard_ranks > 1
        reduces_all = not is_cut or self.program.reduces_all
        ranks = self._shard_group() if is_cut else self._copies_group()
        sizes = {divided: float(DTYPE_BYTES[self.precision.reduce] * count) for divided, count in self.parts.items()}
        seconds = self._collective(sizes, cut=is_cut, reduces_all=reduces_all)
        copies = 0.0
        if is_cut:
            owned = {divided: size / max(1, self._shard_ranks // divided) for divided, size in sizes.items()}
            copies = self._collective(owned, cut=False, reduces_all=True)
        if not self.program.overlaps:
            return count * (seconds + copies)
        gradient_bytes = DTYPE_BYTES[self.precision.gradient] * self.elements
        bucket = bucket_bytes(gradient_bytes, layout.replicas, accelerator=device.is_accelerator)
        buckets = max(1.0, gradient_bytes / bucket)
        # Each bucket beyond the first adds the latency of a collective: the time of one that sends a byte.
        latency = self._collective(dict.fromkeys(self.parts, 1.0), cut=is_cut, reduces_all=reduces_all)
        seconds += (buckets - 1) * latency
        # The first rank's stages, whose gradients are complete last: their reductions end the step.
        hidden = max(0.0, self._hidden(self._pass_seconds.backward) - gathers)
        exposed = max(seconds / buckets, seconds - hidden)
        return count * (device_seconds.overlapped(device, ranks, seconds, exposed) + copies)
