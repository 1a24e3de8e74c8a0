"""Bytes that one rank needs at its peak, and bytes of a checkpoint on disk.

Legend: see `estimates/rank_workload.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

from shardwise.base.hardware import torch_version
from shardwise.config import DTYPE_BYTES, Config, Layout
from shardwise.config.layout import LayoutStage
from shardwise.config.pipeline_schedule_specs import SCHEDULES
from shardwise.estimates.activations import (
    activation_stack,
    block_activations,
    norm_bytes,
    split_backward_bytes,
    split_backward_peak,
)
from shardwise.estimates.rank_workload import RankWorkload
from shardwise.estimates.sharding import InFlightBytes, StageInFlightBytes, bucket_shapes, whole_gradient_bytes
from shardwise.estimates.step_peak import PassBytes, StepPeak, step_peak
from shardwise.layers.chunks import GRADIENTS_AT_ONCE, loss_chunk_elements
from shardwise.models.parameter_counts import (
    EMBEDDING,
    HEAD,
    OUTSIDE,
    OwnShapes,
    block_matrix_shapes,
    local_parameter_count,
    local_parameters,
    parameter_count,
)
from shardwise.optim.bucket_layout import matrix_chunk_elements, rounding_chunk_elements
from shardwise.pipeline.action_order import action_order
from shardwise.pipeline.partition import pipeline_rank_of

_FLOAT32 = 4
_BUCKETS_ON_THEIR_WAY = 3
"""Buckets whose gradients travel to the host, or are there while masters are updated (`optim/master_update.py`)."""
_OPTIONAL = ("pipeline", "in_flight")

RESERVED = 0.06
"""The part of a device's memory that its context, the collectives' buffers and the allocator's gaps take."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank at the peak of a training step, by kind.

    What the process holds before the model is built (interpreter, torch, a device's context) is not counted.
    """

    # This rank's part, with the padding of the vocabulary and of the buckets; at stage 3 of ZeRO 1/n of the buckets
    # with matrices, over n data-parallel ranks.
    parameters: int
    gradients: int  # as many elements, in the gradients' dtype; from stage 2 on 1/n of all
    # The optimizer's states of each element, and a master if its dtype is not that of the parameters; with ZeRO a
    # data-parallel rank has 1/n of them.
    optimizer: int
    activations: int  # what micro-batches keep for their backward pass: one, or in a pipeline as many as are in flight
    loss: int  # the head's live weight gradient, the gradient of its input, and one chunk of logits
    # Rotary tables; the numbers of elements for stochastic rounding; and what recompute, the gradients of activations,
    # the reduction and stochastic rounding need at the peak, beyond the memory that activations and loss have freed by
    # then.
    buffers: int
    pipeline: int = 0  # a message that is under way; with several stages on a rank, what is sent and held until later
    # Whole gradients at stages 2 and 3 until they are reduced, with the copies of a reduction, and whole weights at
    # stage 3 while a unit uses them, as many as there are at the peak.
    in_flight: int = 0

    @property
    def total(self) -> int:
        kept = self.state + self.activations + self.loss
        return kept + self.buffers + self.pipeline + self.in_flight

    @property
    def state(self) -> int:
        """Bytes of parameters, gradients and optimizer, which the rank holds during the whole training."""
        return self.parameters + self.gradients + self.optimizer

    def rows(self) -> list[tuple[str, int]]:
        """(kind, bytes) of each kind, in the order in which they are shown; the last two only if there are any."""
        sizes = ((kind.name, getattr(self, kind.name)) for kind in fields(self))
        return [(kind.replace("_", " "), size) for kind, size in sizes if size or kind not in _OPTIONAL]


def expected_memory(
    config: Config, layout: Layout, accelerator: bool = False, *, pipeline_rank: int | None = None
) -> MemoryEstimate | None:
    """Estimate the peak bytes of training on one pipeline rank, without `torch.compile`. None for a model of your own.

    pipeline_rank: the rank; None: the one that needs most.
    """
    by_rank = memory_by_rank(config, layout, accelerator)
    if by_rank is None:
        return None
    return max(by_rank, key=lambda memory: memory.total) if pipeline_rank is None else by_rank[pipeline_rank]


def config_for_memory_estimate(config: Config, own_shapes: OwnShapes, accelerator: bool) -> Config:
    """Return `config` with a Llama in place of the user's own model, whose memory estimate is that of the model."""
    alone = config.with_keys(parallel={"tensor": 1, "pipeline": 1}, train={"recompute": "none"})
    memory = expected_memory(alone.model_copy(update={"model": own_shapes.like}), Layout(1), accelerator)
    assert memory is not None, "the shapes of a family are known"
    held_bytes = max(0, own_shapes.saved_bytes - memory.activations) // config.train.micro_batch
    like = own_shapes.like.cut_over(config.parallel.tensor).model_copy(update={"held_bytes": held_bytes})
    return config.model_copy(update={"model": like})


def neediest_stage(stages: Sequence[Config], layout: Layout, accelerator: bool = False) -> Config:
    """Return the stage with the largest memory estimate; of a model of your own that with the largest micro-batches."""
    if len(stages) == 1:
        return stages[0]

    def size(stage: Config) -> tuple[int, int]:
        memory = expected_memory(stage, layout, accelerator)
        return 0 if memory is None else memory.total, stage.train.micro_batch * stage.train.sequence_length

    return max(stages, key=size)


def memory_of_machine(config: Config, layout: Layout, ranks: Iterable[int]) -> tuple[int, int] | None:
    """Estimate the bytes of state and at the peak of a step, summed over ranks of one machine that compute on its CPU.

    None for a model of your own. `ranks` are their numbers in the job.
    """
    by_pipeline_rank = memory_by_rank(config, layout)
    if by_pipeline_rank is None:
        return None
    estimates = [by_pipeline_rank[layout.pipeline_rank(rank)] for rank in ranks]
    return sum(estimate.state for estimate in estimates), sum(estimate.total for estimate in estimates)


def neediest_rank(config: Config, layout: Layout, accelerator: bool = False) -> int:
    """Return the pipeline rank that is to need most memory, the first among equals; 0 for a model of your own."""
    by_rank = memory_by_rank(config, layout, accelerator) or []
    return max(range(len(by_rank)), key=lambda rank: by_rank[rank].total, default=0)


def memory_by_rank(config: Config, layout: Layout, accelerator: bool = False) -> list[MemoryEstimate] | None:
    """Estimate the peak bytes of training on each pipeline rank. None for a model of your own."""
    return [estimated_memory(workload) for workload in RankWorkload.of_ranks(config, layout, accelerator)] or None


def estimated_memory(workload: RankWorkload, limit: float | None = None) -> MemoryEstimate:
    """Estimate the peak bytes of training on the workload's pipeline rank.

    limit: if it needs more than so many bytes without what is in flight, this is not computed.
    """
    step = _step_peak(workload)
    numbers, rounding = _rounding(workload)
    update = max(rounding, _matrices(workload), _travelling(workload))
    peak = max(step.whole, update)
    # A `StandIn` knows the parameters of the user's class, and what that keeps beyond a Llama's activations.
    held_bytes, own_parameters = getattr(workload.model, "held_bytes", 0), getattr(workload.model, "parameters", 0)
    share = own_parameters / (local_parameter_count(workload.model, 1) or 1) if own_parameters else 1
    state = 0 if workload.offloads else _state_bytes(workload, master=workload.precision.master_bytes)
    memory = MemoryEstimate(
        parameters=round(share * _parameter_bytes(workload)),
        gradients=round(share * _gradient_bytes(workload)),
        optimizer=round(share * state),
        activations=step.activations + held_bytes * workload.config.train.micro_batch // workload.layout.tensor,
        loss=step.forward - step.activations,
        buffers=_rotary_tables(workload) + numbers + peak - step.forward,
        pipeline=step.sent + (workload.x_bytes if workload.layout.pipeline > 1 else 0),
    )
    if not workload.frees_gradients or (limit is not None and memory.total > limit):
        return memory
    return replace(memory, in_flight=max(_step_peak(workload, InFlightBytes.of(workload)).whole, update) - peak)


def _parameter_bytes(workload: RankWorkload) -> int:
    elements = 0
    for bucket in bucket_shapes(workload):
        is_cut = workload.frees_values and bucket.has_matrices
        elements += bucket.elements // (bucket.slices if is_cut else 1)
    return elements * DTYPE_BYTES[workload.precision.parameter]


def _gradient_bytes(workload: RankWorkload) -> int:
    """Bytes of the gradients that stay: with bit-equal sums also those of ended groups, and those of a tied head."""
    if not workload.frees_gradients:
        return whole_gradient_bytes(workload)
    elements = 0
    for bucket in bucket_shapes(workload):
        # A bucket of one rank is not cut, and frees nothing.
        sources = bucket.divided_over if workload.is_bit_equal and bucket.slices == 1 else 1
        elements += sources * bucket.elements // bucket.slices
    return elements * DTYPE_BYTES[workload.precision.gradient]


def _state_bytes(workload: RankWorkload, *, master: int) -> int:
    """Return the bytes of the states and of masters of so many bytes, on a data-parallel rank."""
    owned = [(bucket.elements // bucket.slices, bucket.is_orthogonalized) for bucket in bucket_shapes(workload)]
    elements = sum(count for count, _ in owned)
    matrices = sum(count for count, is_orthogonalized in owned if is_orthogonalized)
    spec = workload.config.optimizer.spec
    state = DTYPE_BYTES[workload.precision.moments]
    return spec.kept_bytes(elements, matrices, master=master, state=state)


def _step_peak(workload: RankWorkload, in_flight: InFlightBytes | None = None) -> StepPeak:
    """Return the peak of a step, without or with what is in flight at stages 2 and 3 of ZeRO."""
    order = action_order(workload.config.parallel, workload.micro_batches, workload.pipeline_rank, workload.recompute)
    passes = {stage.index: _pass(workload, stage, in_flight) for stage in workload.stages}
    # A single stage counts nothing as sent, and the version of torch takes long to find out.
    frees_onwards = len(workload.stages) > 1 and _frees_onwards()
    peak = step_peak(order, passes, workload.micro_batches, frees_onwards=frees_onwards)
    return peak if in_flight is None else replace(peak, whole=peak.whole + in_flight.constant)


def _pass(workload: RankWorkload, stage: LayoutStage, in_flight: InFlightBytes | None) -> PassBytes:
    """Return the bytes that one micro-batch needs in a stage: embedding, blocks, last norm and loss.

    A stage's input and output are x, [T/s, H]. The input of a later stage is held until the backward pass, also where
    the first block does not keep it. The output is held until the backward pass; if the rank has several stages, it is
    counted as sent. The gradient of the output is received for the backward pass, and is held until its last part. If
    embedding and tied head are in one stage, the head's gradient is held until it is added to the embedding's.
    """
    parallel = workload.config.parallel
    x = workload.x_bytes
    embedding, last = _kept_at_ends(workload, stage)
    levels = activation_stack(workload, stage.layers)
    kept = levels[-1].kept + embedding + last + _shared_tables(workload, stage.layers)
    keeps_input = workload.recompute == "full" or block_activations(workload, stage.layers[0]).saves_input
    received = 0 if keeps_input or stage.is_first else x
    gradient = 0 if stage.is_last else x
    onwards = back = 0
    if SCHEDULES[parallel.schedule].is_single_stage:
        kept += 0 if stage.is_last else x
    elif parallel.pipeline > 1:
        onwards, back = (x * sends for sends in _sends(workload, stage))
    table = DTYPE_BYTES[workload.precision.gradient] * workload.local.vocabulary * workload.model.hidden_size
    # With bit-equal sums the head's gradient has a buffer of its own.
    is_added = workload.model.tie_word_embeddings and not workload.is_bit_equal
    head = table if stage.is_first and stage.is_last and is_added else 0
    loss = _loss(workload) if stage.is_last else 0
    forward = 0
    end = _embedding_gradient(workload, tied=head > 0) + head + gradient if stage.is_first else 0
    extra = StageInFlightBytes.of_reduction(workload, stage) if in_flight is None else in_flight.stages[stage.index]
    at_ends = embedding + head + received + gradient + _gradients_of_parts(workload, stage)
    by_layer = list(zip(stage.layers, levels, strict=True))
    backward = at_ends + max(level.peak for level in levels)
    after = head + gradient + extra.last(OUTSIDE.unit)
    reduction = max(
        end + extra.last(EMBEDDING.unit), after, *(at_ends + extra.at_block(*block, last=True) for block in by_layer)
    )
    if workload.config.splits_backward:
        reduction = max(extra.reduced.values())
    if in_flight is not None:
        backward = at_ends + max(extra.at_block(*block) for block in by_layer)
        end = max(end + extra.backward(EMBEDDING.unit), head + gradient + extra.backward(OUTSIDE.unit))
        loss += extra.forward(HEAD.unit)
        in_blocks = [level.kept + extra.forward(layer) for layer, level in by_layer]
        forward = max(0, embedding + max(extra.forward(EMBEDDING.unit), *in_blocks) - kept - received)
    return PassBytes(
        kept=kept + received,
        loss=loss,
        loss_kept=_loss_gradients(workload) if stage.is_last else 0,
        backward=backward,
        last=end,
        waiting=len(stage.layers) * split_backward_bytes(workload) + gradient,
        split=split_backward_peak(workload, len(stage.layers)) + gradient,
        reduction=reduction,
        onwards=onwards,
        back=back,
        forward=forward,
    )


def _kept_at_ends(workload: RankWorkload, stage: LayoutStage) -> tuple[int, int]:
    """Return what the embedding keeps, and what is kept between the last block and the loss."""
    embedding = 0
    if stage.is_first:
        # The mask of the embedding's dropout has a byte for each element. BERT's embedding ends with a norm.
        mask = workload.x_elements if workload.model.embedding_dropout_p else 0
        embedding = mask + (norm_bytes(workload) if workload.model.embedding_norm else 0)
    last = 0
    if stage.is_last:
        # Between the last block and the loss: the last norm and its output; with BERT, x, gathered.
        normed = norm_bytes(workload) + workload.x_bytes
        last = workload.gathered_bytes if workload.model.head_transform else normed
    return embedding, last


def _sends(workload: RankWorkload, stage: LayoutStage) -> tuple[bool, bool]:
    """Return whether a stage sends x to another rank, and whether it sends the gradient of x to another one."""
    parallel = workload.config.parallel
    to_next, to_previous = (pipeline_rank_of(parallel, stage.index + step) != stage.rank for step in (1, -1))
    return to_next and not stage.is_last, to_previous and not stage.is_first


def messages_of_a_micro_batch(workload: RankWorkload) -> int:
    """Estimate the bytes that messages between stages add to a rank's memory for each micro-batch of a long step."""
    if workload.layout.pipeline == 1 or SCHEDULES[workload.config.parallel.schedule].is_single_stage:
        return 0
    sends = [_sends(workload, stage) for stage in workload.stages]
    return workload.x_bytes * sum(back + (onwards and not _frees_onwards()) for onwards, back in sends)


@cache
def _frees_onwards() -> bool:
    """Return whether a rank with several stages frees what it sends to a next stage before the end of the step.

    torch 2.15 waits for such a send when the micro-batch's backward pass has gone through the stage.
    """
    return tuple(map(int, re.findall(r"\d+", torch_version())[:2])) >= (2, 15)


def checkpoint_bytes(config: Config, accelerator: bool = False) -> int | None:
    """Estimate the bytes on disk of a checkpoint: weights in the dtype of the computation, moments, masters if any.

    Each element counts once, whatever the layout, and padding never. None for a model of your own.
    """
    parameters = parameter_count(config.model)
    if parameters is None:
        return None
    precision = config.precision.resolved(accelerator)
    matrices = local_parameter_count(config.model, 1, block_matrices=True) or 0
    kept = config.optimizer.spec.kept_bytes(
        parameters, matrices, master=precision.master_bytes, state=DTYPE_BYTES[precision.moments]
    )
    return parameters * DTYPE_BYTES[precision.parameter] + kept


def node_memory_of_copies(config: Config, layout: Layout, ranks_per_node: int, accelerator: bool = False) -> int | None:
    """Estimate a node's memory, in bytes, that copies of the state take at most; None for a model of your own.

    A node holds the masters and states that its ranks update, of two steps, and those of another node's ranks too.
    """
    workloads = RankWorkload.of_ranks(config, layout, accelerator)
    if not workloads:
        return None
    master = DTYPE_BYTES[workloads[0].precision.optimizer]
    state = max(_state_bytes(workload, master=master) for workload in workloads)
    return state * ranks_per_node * 2 * (2 if layout.world > ranks_per_node else 1)


def _shared_tables(workload: RankWorkload, layers: range) -> int:
    """Return the bytes that all blocks of a stage share if documents end within a sample, or some keys are hidden.

    Masks that are added to the scores, and the cosines and sines of each token's position, [T·r] for r rotary
    dimensions, or where context parallelism alone makes positions differ from rank to rank [S/c·r]. Attention that goes
    step by step keeps no mask, unless recompute needs it again.
    """
    model, train = workload.model, workload.config.train
    keeps_masks = not workload.attends_step_by_step or workload.recompute != "none"
    masks = workload.dense_mask_elements(layers) if keeps_masks else 0
    turns = 0
    if workload.config.data.reset_position_ids:
        turns = workload.tokens * model.rotary_dim
    elif workload.cuts_samples:
        turns = workload.tokens // train.micro_batch * model.rotary_dim
    return workload.a * (masks + turns)


def _loss(workload: RankWorkload) -> int:
    """The most that head and loss hold: what they keep (`_loss_gradients`), and one chunk of C tokens.

    A chunk has its logits in float32, [C, V/t]; in bfloat16 beside them a bfloat16 tensor of the same shape, the logits
    or their gradient. Then it has the gradient of the logits and the larger of the chunk's part of dW, [V/t, H], and
    the gradient of its input, [C, H]; in bfloat16 an accelerator's product adds dW to the sum by itself. At both
    moments it has a copy of the head's input, [C, H], if the chunk's rows come from several parts of the sequence.
    BERT's masked-token head has P·B rows, and keeps four tensors [P·B, H]: the inputs of its transform, activation and
    norm, and the norm's output.
    """
    a = workload.a
    rows = workload.local.vocabulary
    hidden = workload.model.hidden_size
    parts = 1 if workload.model.head_transform else workload.sequence_parts
    chunk_rows = rows
    if workload.is_bit_equal:
        # A chunk is the same at every layout: rows of each part of the sequence, by the whole vocabulary.
        chunk_rows *= workload.layout.tensor
        is_cut = (workload.predicted // workload.config.train.micro_batch) % workload.config.parallel.grain == 0
        parts = workload.config.parallel.grain if is_cut else 1
    limit = loss_chunk_elements(chunk_rows, workload.accelerator)
    tokens_a_row = workload.config.train.micro_batch * parts
    chunk = min(workload.predicted, max(1, limit // (chunk_rows * tokens_a_row)) * tokens_a_row)
    head = 4 * a * hidden * workload.predicted if workload.model.head_transform else 0
    cut = a * hidden * chunk if parts > 1 else 0
    logits = chunk * rows
    converted = 0 if a == _FLOAT32 else (_FLOAT32 + a) * logits
    adds_products = workload.accelerator and a != _FLOAT32 and not workload.is_bit_equal
    multiplied = a * (logits + hidden * (chunk if adds_products else max(rows, chunk)))
    return _loss_gradients(workload) + max(converted, multiplied) + cut + head


def _loss_gradients(workload: RankWorkload) -> int:
    """Return the bytes of the gradients that the loss's forward pass keeps: [V/t, H] in float32, and of its input."""
    tokens = workload.predicted if workload.model.head_transform else workload.tokens_between
    return (_FLOAT32 * workload.local.vocabulary + workload.a * tokens) * workload.model.hidden_size


def _rotary_tables(workload: RankWorkload) -> int:
    """Cosines and sines, [S, rotary dimensions / 2] each, once for each stage and kind of rotation of its blocks."""
    model = workload.model
    tables = 0
    for stage in workload.stages:
        rotating = [layer for layer in stage.layers if model.rotates(layer)]
        tables += len({model.window_rope_theta is not None and model.window(layer) is not None for layer in rotating})
    return tables * workload.a * workload.config.train.sequence_length * workload.model.rotary_dim


def _gradients_of_parts(workload: RankWorkload, stage: LayoutStage) -> int:
    """Return the bytes of the gradients that the layers behind attention have from parts of a rank's tokens.

    They are added in pairs: beside those of the part at work there is one sum for each level of the tree. Ranks that
    share samples add their sums in a copy; of more than two ranks, each also has what the others sent.
    """
    if not workload.token_parts:
        return 0
    stored = local_parameters(workload.model, workload.layout.tensor, local=workload.local, stages=[stage])
    blocks: Counter[int] = Counter()
    largest = GRADIENTS_AT_ONCE
    for parameter in stored:
        if parameter.place.unit in stage.layers:
            blocks[parameter.place.unit] += parameter.elements
            largest = max(largest, parameter.elements)
    query_key_value = workload.model.hidden_size * (workload.local.query + 2 * workload.local.key_value)
    elements = max(blocks.values()) - query_key_value
    sums = workload.token_parts.bit_length()
    copies = min(workload.layout.context, 3) - 1
    between_ranks = min(sums, 2) * elements + copies * min(elements, largest)
    return DTYPE_BYTES[workload.precision.parameter] * max(sums * elements, between_ranks)


def _embedding_gradient(workload: RankWorkload, *, tied: bool) -> int:
    """The gradients of the embedding's output and of its weight; activations and loss are free by then.

    A tied head's gradient is added to that of the weight, in the gradients' dtype. Their sum is a new tensor.
    """
    elements = workload.local.vocabulary * workload.model.hidden_size
    weight = workload.gradient_bytes(elements)
    if tied:
        weight = max(weight, 2 * DTYPE_BYTES[workload.precision.gradient] * elements)
    return workload.gathered_bytes + weight


def _matrices(workload: RankWorkload) -> int:
    """Return the bytes that Muon holds while it updates: of two chunks, the matrices, what is sent, and what arrives.

    Of the chunk that is iterated also the Gram matrix, a product and the result, and of both the updates.
    """
    optimizer = workload.config.optimizer
    if not optimizer.spec.orthogonalizes:
        return 0
    shapes = block_matrix_shapes(workload.model, split_heads=optimizer.muon.split_heads)
    layers = sum(len(stage.layers) for stage in workload.stages)
    elements = layers * sum(count * rows * columns for (rows, columns), count in shapes.items())
    chunk = matrix_chunk_elements(elements, workload.layout.tensor * workload.layout.replicas)
    largest = max(chunk, *(rows * columns for rows, columns in shapes))
    return 10 * largest * DTYPE_BYTES[optimizer.muon.dtype(workload.accelerator)]


def offloaded_bytes(config: Config, layout: Layout, accelerator: bool) -> int:
    """Estimate the bytes of the host's memory for a rank with `optimizer.offload`: the most of any; 0 without it.

    The states, and in pinned memory, of which torch gives powers of two, the master of each bucket and the gradients of
    three.
    """
    sizes = []
    for workload in RankWorkload.of_ranks(config, layout, accelerator):
        if workload.offloads:
            width = DTYPE_BYTES[workload.precision.optimizer]
            owned = [bucket.elements // bucket.slices for bucket in bucket_shapes(workload)]
            pinned = [1 << (size * width - 1).bit_length() for size in owned]
            states = _state_bytes(workload, master=0)
            sizes.append(states + sum(pinned) + _BUCKETS_ON_THEIR_WAY * max(pinned))
    return max(sizes, default=0)


def _travelling(workload: RankWorkload) -> int:
    """Return the bytes beside the device's buffers as gradients leave for the host, and as a bucket's weights arrive.

    The gradients of three buckets, and the master of one, each if it has another dtype than the buffer.
    """
    if not workload.offloads:
        return 0
    precision = workload.precision
    width = DTYPE_BYTES[precision.optimizer]
    owned = max(bucket.elements // bucket.slices for bucket in bucket_shapes(workload))
    buckets = _BUCKETS_ON_THEIR_WAY * (precision.gradient != precision.optimizer)
    buckets += precision.parameter != precision.optimizer
    return buckets * owned * width


def _rounding(workload: RankWorkload) -> tuple[int, int]:
    """Return the bytes that stochastic rounding holds all the time, and for a moment while it updates a chunk.

    All the time: an int32 number for each element of a chunk. For a moment, of the elements of a bucket that the rank
    updates, a chunk at most: the master, its gradient and its states in float32, and in int32 the random words, the
    bits of one tensor and its signs. A master that is float32 already is updated where it is.
    """
    rounded = workload.precision.rounded(len(workload.config.optimizer.spec.states))
    if not rounded:
        return 0, 0
    chunk = rounding_chunk_elements(workload.accelerator)
    owned = max(bucket.elements // bucket.slices for bucket in bucket_shapes(workload))
    return _FLOAT32 * chunk, (4 + rounded) * _FLOAT32 * min(chunk, owned)


def leaves_to_memory(config: Config, layout: Layout, accelerator: bool) -> bool:
    """Return whether the estimate of a rank's memory decides on a key of the configuration.

    Ranks on CPUs share the memory of their machine, so that null means false, and gather, there.
    """
    return config.train.recompute == "auto" or (accelerator and len(settings_left_to_memory(config, layout)) > 1)


def settings_left_to_memory(config: Config, layout: Layout) -> list[dict[str, object]]:
    """Return the settings of `parallel` among which the memory chooses, without any first."""
    choices: list[dict[str, object]] = [{}]
    parallel = config.parallel
    if config.compile.enabled:
        return choices
    shapes = config.shapes
    has_kernel = shapes is not None and not shapes.attention_dropout_p
    if parallel.context_keys is None and layout.context > 1 and has_kernel and not config.is_bit_equal:
        choices.append({"context_keys": "ring"})
    is_open = parallel.sequence_regather is None and layout.sequence_parallel
    if is_open and not (config.splits_backward or config.precision.matmul):
        choices += [settings | {"sequence_regather": True} for settings in choices]
    return choices
