"""The memory of a layout as a search asks for it: at least so much, or that of a step that is shortened."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache, partial

from shardwise.config import DTYPE_BYTES, Config, Layout, ParallelConfig, Schedule
from shardwise.config.pipeline_schedule_specs import SCHEDULES
from shardwise.estimates.activations import activation_bytes
from shardwise.estimates.memory import MemoryEstimate, estimated_memory, messages_of_a_micro_batch
from shardwise.estimates.memory_choice import memory_candidates
from shardwise.estimates.rank_workload import RankWorkload
from shardwise.estimates.sharding import owned_elements
from shardwise.estimates.step_peak import PassBytes, step_peak
from shardwise.models.parameter_counts import LocalWidths, count_blocks, elements_of_block
from shardwise.pipeline.action_order import action_order
from shardwise.pipeline.partition import stage_plan
from shardwise_plan.device_specs import Cluster
from shardwise_plan.layout_choices import LayoutChoice, with_compiled_blocks


class LeastMemory:
    """Bytes that a rank of a layout needs at least. It computes once what layouts have in common."""

    def __init__(self, config: Config, cluster: Cluster) -> None:
        self._config = config
        self._device = cluster.device
        self._precision = config.precision.resolved(cluster.device.is_accelerator)
        self._offloads = config.optimizer.offload and cluster.device.is_accelerator
        self._first_stages: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._kept: dict[tuple[object, ...], int] = {}
        self._states: dict[tuple[object, ...], float] = {}

    def __call__(self, choice: LayoutChoice, layout: Layout) -> float:
        """Return the bytes that the first pipeline rank needs at least: its blocks' state, and what they keep.

        Embedding and head, gradients of activations and messages are left out, which only add to it.
        """
        stages = self._blocks_of_first_rank(choice, layout)
        micro_batches = _shorter_step(
            layout, self._config.train.global_batch // (choice.micro_batch * layout.data), choice.schedule
        )
        blocks = _blocks_in_flight(choice.schedule, layout.pipeline, stages, micro_batches)
        return self.state(choice, layout, sum(stages)) + blocks * self._kept_by_a_block(choice, layout)

    def state(self, choice: LayoutChoice, layout: Layout, blocks: int | None = None) -> float:
        """Return the bytes of the state of so many blocks, by default of those of an average pipeline rank.

        Some rank has at least the average, and embedding and head, which are left out, only add to it.
        """
        layers = max(1, self._config.known_shapes.num_hidden_layers // layout.pipeline) if blocks is None else blocks
        shards = layout.replicas // choice.replicate if choice.zero else 1
        key = (layout.inside_a_stage, layers, shards, choice.zero, choice.reduce, choice.splits_backward)
        if key in self._states:
            return self._states[key]
        precision = self._precision
        model = self._config.known_shapes
        block = partial(elements_of_block, model, layout.tensor, LocalWidths.on(layout, model))
        kinds = [kind for kind, _ in count_blocks(model, range(model.num_hidden_layers))]
        smallest = min(kinds, key=lambda kind: block(kind).total())
        counted = block(smallest), block(smallest, True)
        owned, owned_matrices = (int(layers * owned_elements(counts, shards)) for counts in counted)
        elements = layers * counted[0].total()
        kept = self._config.optimizer.spec.kept_bytes(
            owned, owned_matrices, master=precision.master_bytes, state=DTYPE_BYTES[precision.moments]
        )
        parameters = (owned if choice.zero == 3 else elements) * DTYPE_BYTES[precision.parameter]
        # Gradients that are reduced once a step are whole until then.
        reduces_once = choice.reduce == "step" or (choice.reduce is None and self._config.is_bit_equal)
        is_cut = choice.zero >= 2 and not reduces_once and not choice.splits_backward
        gradients = (owned if is_cut else elements) * DTYPE_BYTES[precision.gradient]
        self._states[key] = parameters + gradients + (0 if self._offloads else kept)
        return self._states[key]

    def _blocks_of_first_rank(self, choice: LayoutChoice, layout: Layout) -> tuple[int, ...]:
        key = (choice.pipeline, choice.schedule, choice.virtual)
        if key not in self._first_stages:
            plan = stage_plan(choice.applied(self._config), layout)
            self._first_stages[key] = tuple(len(stage.layers) for stage in plan if stage.rank == 0)
        return self._first_stages[key]

    def _kept_by_a_block(self, choice: LayoutChoice, layout: Layout) -> int:
        """Return what a block keeps for a micro-batch's backward pass, with the choices that keep least."""
        key = (layout.inside_a_stage, choice.micro_batch, choice.recompute, choice.splits_backward)
        if key not in self._kept:
            config = with_compiled_blocks(choice.applied(self._config), self._device)
            sizes = []
            for candidate in memory_candidates(config, layout):
                accelerator = self._device.is_accelerator
                (workload,) = RankWorkload.of_ranks(candidate, layout, accelerator, only={0})
                sizes += [activation_bytes(workload, layer)[0] for layer in set(workload.first_alike.values())]
            self._kept[key] = min(sizes)
        return self._kept[key]


def _shorter_step(layout: Layout, micro_batches: int, schedule: Schedule) -> int:
    """Return a number of micro-batches that have the activations in flight of a longer step.

    These do not depend on the number of micro-batches beyond a few rounds of the schedule, unless all forward passes
    come first.
    """
    p = layout.pipeline
    if p == 1:
        return min(micro_batches, 2)
    if SCHEDULES[schedule].holds_all_micro_batches or micro_batches < 5 * p:
        return micro_batches
    return 3 * p + micro_batches % p  # as many more than whole rounds


def short_step_memory(config: Config, layout: Layout, cluster: Cluster, limit: float) -> MemoryEstimate:
    """Return, for a search, the memory of the rank that needs most, or of the first that needs more than `limit` bytes.

    It is computed for a shorter step if the step is long; messages, which are held for all micro-batches, are added.

    Ranks with equally many blocks that both receive and send differ by what is in flight, which is most on the first
    of them, and where backward passes are split on the last of them. So beside the first and the last rank, the first
    of each number of blocks and the last but one are looked at, those with most blocks first.
    """
    accelerator = cluster.device.is_accelerator
    micro_batches = layout.accumulation(config.train)
    p = layout.pipeline
    shorter = _shorter_step(layout, micro_batches, config.parallel.schedule)
    short_config = config.with_batch(config.train.global_batch // micro_batches * shorter)
    blocks = Counter[int]()
    for stage in stage_plan(short_config, layout):
        blocks[stage.rank] += len(stage.layers)
    first_with = {blocks[rank]: rank for rank in range(p - 2, 0, -1)}
    ranks = {0, max(0, p - 2), p - 1, *first_with.values()}
    workloads = RankWorkload.of_ranks(short_config, layout, accelerator, only=ranks)
    estimates: list[MemoryEstimate] = []
    for workload in sorted(workloads, key=lambda workload: -workload.layers):
        memory = estimated_memory(workload, limit)
        messages = (micro_batches - shorter) * messages_of_a_micro_batch(workload)
        estimates.append(replace(memory, pipeline=memory.pipeline + messages))
        if estimates[-1].total > limit:
            break
    return max(estimates, key=lambda memory: memory.total)


@cache
def _blocks_in_flight(schedule: Schedule, pipeline: int, stages: tuple[int, ...], micro_batches: int) -> int:
    """Return the most blocks of the first pipeline rank that keep a micro-batch at a time; `stages`: blocks of each."""
    parallel = ParallelConfig.model_construct(pipeline=pipeline, schedule=schedule, virtual_stages=len(stages))
    # Halves of backward passes keep blocks for longer, so that whole ones are a bound for both.
    order = action_order(parallel, micro_batches, 0, "full")
    numbers = sorted({action.stage for action in order})
    passes = {
        number: PassBytes(kept=blocks, loss=0, loss_kept=0, backward=0, last=0, waiting=0, reduction=0)
        for number, blocks in zip(numbers, stages, strict=True)
    }
    return step_peak(order, passes, micro_batches).activations
