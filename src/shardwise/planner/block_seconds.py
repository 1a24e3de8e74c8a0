"""Seconds of the parts of a model on one rank: a block, the embedding, the head with its loss.

Legend: see `planner/rank_workload.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.config import DTYPE_BYTES, DtypeName, FamilyConfig, Matmul, Recompute
from shardwise.models.parameter_counts import LocalWidths, attended_tokens
from shardwise.planner import device_seconds
from shardwise.planner.device_seconds import Constants, RankGroup
from shardwise.planner.device_specs import Device

_SHARPNESS = 4
"""Exponent of the smooth maximum of the host's and the device's time; an assumption. The larger, the sharper."""

# Memory traffic of a backward pass over that of its forward pass. A norm and an activation read their input and write
# their output; backward they read input and gradient, and write a gradient: 3 passes in place of 2. Dropout with the
# addition to x reads two tensors and a mask, and writes one; backward it reads a gradient and the mask, and writes one:
# in 2 bytes an element, 5 bytes in place of 7.
_NORM_BACKWARD = 1.5
_ADD_BACKWARD = 0.7
_ACTIVATION_BACKWARD = 1.5

# Fused attention has two products forward; backward it computes the first again, and four gradients (arXiv:2205.14135).
_FUSED_BACKWARD_PRODUCTS = 5 / 2
# The rate of the fused backward pass over that of the forward pass: an assumption, as no fitted row has fused
# attention. arXiv:2307.08691 reports up to 63% of the peak backward and 73% forward.
_FUSED_BACKWARD_RATE = 0.85

# Kernels that the host starts; estimates, but for those of a block, which `ProgramTraits.kernels` has.
_BACKWARD_KERNELS = 1.6  # for each kernel of the forward pass: matrix products have two, others one
_STEPWISE_ATTENTION_KERNELS = 6  # two products, scale, mask, softmax and dropout in place of one fused kernel
_ROUNDING_KERNELS = 17  # of a linear layer with fp8 products in each pass, on average: scales, roundings and copies
_HEAD_KERNELS = 20
_EMBEDDING_KERNELS = 8

# Passes over the float32 copy of the logits, of 4 bytes an element: forward it is written, and read for the maximum and
# for the sum of exponentials; backward it is read, and its gradient is written.
_LOGITS_FORWARD_BYTES = 12
_LOGITS_BACKWARD_BYTES = 8


@dataclass(frozen=True)
class ProgramTraits:
    """The ways in which the program that trains differs from others; the defaults are this package's.

    Attributes:
        fused_attention: True if one kernel computes attention; otherwise its probabilities are written and read.
        loss_ahead: True if the head's gradients are computed in the forward pass.
        overlaps: True if gradients are reduced behind the backward pass, bucket by bucket.
        waits_for_messages: True if a rank waits for its messages to other stages.
        splits_messages: True if the ranks of a tensor-parallel group each send a part of a message, and gather it.
        runs_ahead: True if the host starts kernels before the device is done with earlier ones.
        casts_gradients: True if a weight's new gradient is copied to the gradients' dtype before it is added to them.
        adds_products: True if the products of blocks add to gradients of float32 by themselves.
        updates_in_one_pass: True if each value of the optimizer's step is read and written once, also to scale the
            gradients and to round the weights, and the norm reads the gradients of all ranks.
        reduces_all: True if gradients are all-reduced even if the optimizer's state is sharded.
        recomputes_core: True if selective recompute repeats attention, fused or not, and nothing else.
        separate_kernels: True if each element-wise function of a block is a kernel; otherwise functions one after the
            other are one.
        kernels: number of kernels that a block starts in its forward pass.
    """

    fused_attention: bool = True
    loss_ahead: bool = True
    overlaps: bool = True
    waits_for_messages: bool = False
    splits_messages: bool = False
    runs_ahead: bool = True
    casts_gradients: bool = False
    adds_products: bool = False
    updates_in_one_pass: bool = False
    reduces_all: bool = False
    recomputes_core: bool = False
    separate_kernels: bool = False
    kernels: int = 24


_ALONE = RankGroup(1, 1)


@dataclass(frozen=True)
class BlockShape:
    """All that the time of a block depends on, for one micro-batch on one rank.

    Attributes:
        model: configuration of the model.
        local: widths of one rank's part.
        batch: B.
        length: S.
        tensor: t.
        sequence_parallel: True if activations are cut along the sequence too.
        inside: ranks of the tensor-parallel group in one node.
        dtype: dtype of parameters and activations.
        gradient: dtype of gradients.
        recompute: kind of recompute.
        regathers: True if inputs that sequence parallelism gathered are gathered again in the backward pass.
        matmul: format of the products of weights, if it is not `dtype`.
        context_group: the c ranks that share each sample.
        gathers_keys_again: True if keys and values of other ranks are gathered again in the backward pass.
        passes_keys: True if keys and values of other ranks come one rank after the other while attention computes.
    """

    model: FamilyConfig
    local: LocalWidths
    batch: int
    length: int
    tensor: int
    sequence_parallel: bool
    inside: int
    dtype: DtypeName
    gradient: DtypeName
    recompute: Recompute
    regathers: bool = False
    matmul: Matmul | None = None
    context_group: RankGroup = _ALONE
    gathers_keys_again: bool = True
    passes_keys: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * self.queries

    @property
    def queries(self) -> int:
        """S/c: tokens of a sample that the rank has."""
        return self.length // self.context_group.ranks

    @property
    def weights(self) -> tuple[tuple[int, int], ...]:
        """(output, input) of QKV, of the output projection, and of the MLP's first and last layers."""
        hidden = self.model.hidden_size
        feed_width = self.local.intermediate
        return (
            (self.local.query + 2 * self.local.key_value, hidden),
            (hidden, self.local.query),
            (feed_width * (2 if self.model.gated else 1), hidden),
            (hidden, feed_width),
        )

    @property
    def has_dropout(self) -> bool:
        """True if what attention and MLP add to x is dropped in part."""
        return self.model.hidden_dropout_p > 0

    @property
    def a(self) -> int:
        """Bytes of an element of an activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def x_elements(self) -> int:
        """T/s·H: elements of x between the cut layers."""
        return self.tokens * self.model.hidden_size // (self.tensor if self.sequence_parallel else 1)

    @property
    def tensor_group(self) -> RankGroup:
        return RankGroup(self.tensor, self.inside)

    @property
    def gathered_bytes(self) -> int:
        """a·T·H: bytes of x after it is gathered over sequence parallelism."""
        return self.a * self.tokens * self.model.hidden_size

    def accumulation_bytes(
        self, elements: int, device: Device, program: ProgramTraits, in_products: bool = False
    ) -> float:
        """Return the bytes that are read and written to add a weight's new gradient to that of earlier micro-batches.

        The new gradient and the sum are read, and the sum is written. With another dtype, a program that casts also
        writes and reads a copy of the new gradient, as a CPU's addition does. `in_products`: the new gradient stays in
        the product's kernel.
        """
        g = DTYPE_BYTES[self.gradient]
        if in_products:
            return 2.0 * g * elements
        if self.gradient == self.dtype:
            return 3.0 * g * elements
        cast = 2 * g if program.casts_gradients or not device.is_accelerator else 0
        return elements * (self.a + 2.0 * g + cast)


@dataclass(frozen=True)
class PartSeconds:
    """Seconds of a pass, by what they are spent on.

    Attributes:
        matmul: matrix products, without those of the attention core.
        attention: the attention core.
        memory_bound: operations that memory limits, without accumulation.
        launch: waits of the device for the host.
        tensor: collectives of tensor and sequence parallelism.
        accumulation: additions of the gradients of weights to those of earlier micro-batches.
        context: collectives of context parallelism.
    """

    matmul: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    launch: float = 0.0
    tensor: float = 0.0
    accumulation: float = 0.0
    context: float = 0.0

    @property
    def total(self) -> float:
        computation = self.matmul + self.attention + self.memory_bound + self.launch + self.accumulation
        return computation + self.tensor + self.context

    def plus(self, term: PartSeconds, times: float = 1) -> PartSeconds:
        """Return the sum of these seconds and `times` those of `term`."""
        return PartSeconds(
            self.matmul + times * term.matmul,
            self.attention + times * term.attention,
            self.memory_bound + times * term.memory_bound,
            self.launch + times * term.launch,
            self.tensor + times * term.tensor,
            self.accumulation + times * term.accumulation,
            self.context + times * term.context,
        )


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one micro-batch in a block, in the embedding or in the head.

    Attributes:
        forward: seconds of the forward pass.
        backward: seconds of the backward pass, recompute included.
        weight: seconds of the gradients of weights, a part of `backward`.
        recompute: seconds of what is computed a second time, a part of `backward`.
    """

    forward: PartSeconds
    backward: PartSeconds
    weight: float
    recompute: PartSeconds = PartSeconds()


def _with_launch(parts: PartSeconds, kernels: float, host: float, program: ProgramTraits) -> PartSeconds:
    """Return these seconds with the time that the device waits for the host, which starts kernel after kernel.

    If one of the two is much slower, it alone counts; if they are alike, each waits for the other at times. A host that
    does not run ahead waits for each kernel, and the device for the host.
    """
    device = parts.total
    host_time = kernels * host
    launch = _smooth_maximum(device, host_time) - device if program.runs_ahead else host_time
    return replace(parts, launch=launch)


def _smooth_maximum(a: float, b: float) -> float:
    return float((a**_SHARPNESS + b**_SHARPNESS) ** (1 / _SHARPNESS))


@lru_cache(maxsize=2**14)
def block(s: BlockShape, device: Device, c: Constants, program: ProgramTraits) -> PassSeconds:
    """Return the seconds of a transformer block.

    Its backward pass has two matrix products for each of the forward pass: the gradient of the input and that of the
    weight. The latter are `weight`, with the time to add them to earlier gradients.
    """
    peak = device.peak(s.dtype) if s.matmul is None else device.require_fp8()
    weights = s.weights
    outputs = sum(device_seconds.matmul(device, c, peak, s.tokens, n, k) for n, k in weights)
    input_gradients = sum(device_seconds.matmul(device, c, peak, s.tokens, k, n) for n, k in weights)
    weight_gradients = sum(device_seconds.matmul(device, c, peak, n, k, s.tokens) for n, k in weights)
    accumulated = s.accumulation_bytes(sum(n * k for n, k in weights), device, program, program.adds_products)
    accumulation = device_seconds.passes(device, c, accumulated)
    core = _attention_core(s, device, c, program)
    if s.passes_keys and device.is_accelerator:
        core = replace(core, backward=core.forward + core.backward)  # computed again, for the keys of each rank

    passes = _memory_passes(s, device, c, program)
    collectives = _tensor_collectives(s, device, c)
    keys_forward, keys_backward = _key_value_seconds(s, core, device, c)
    kernels = program.kernels + core.kernels
    rounding = _ROUNDING_KERNELS * len(weights) if s.matmul is not None and program.separate_kernels else 0
    forward = _with_launch(
        PartSeconds(outputs, core.forward, passes.forward, 0.0, collectives, context=keys_forward),
        kernels + rounding,
        c.host,
        program,
    )
    backward = _with_launch(
        PartSeconds(
            input_gradients + weight_gradients,
            core.backward,
            passes.backward,
            0.0,
            collectives,
            accumulation,
            keys_backward,
        ),
        _BACKWARD_KERNELS * kernels + rounding,
        c.host,
        program,
    )
    if s.regathers and s.sequence_parallel and s.tensor > 1:
        # The inputs of attention and MLP arrive while the gradients of these inputs are computed.
        gather = device_seconds.collective(device, c, s.tensor_group, float(s.gathered_bytes))
        for n, k in (weights[0], weights[2]):
            exposed = max(0.0, gather - device_seconds.matmul(device, c, peak, s.tokens, k, n))
            backward = backward.plus(PartSeconds(tensor=exposed))
    recompute = _recomputed(s, device, program, forward, passes.cheap)
    return PassSeconds(forward, backward.plus(recompute), weight_gradients + accumulation, recompute)


@dataclass(frozen=True)
class _MemoryPasses:
    """Seconds of a block's passes over activations, without those of the attention core.

    Attributes:
        forward: seconds of the forward pass.
        backward: seconds of the backward pass.
        cheap: seconds of what selective recompute repeats: norms, activation, and rotated q and k.
    """

    forward: float
    backward: float
    cheap: float


def _memory_passes(s: BlockShape, device: Device, c: Constants, program: ProgramTraits) -> _MemoryPasses:
    passes = _separate_passes(s, device, c) if program.separate_kernels else _fused_passes(s, device, c)
    if s.matmul is None:
        return passes
    forward, backward = _rounding_bytes(s, separate=program.separate_kernels)
    return replace(
        passes,
        forward=passes.forward + device_seconds.passes(device, c, forward),
        backward=passes.backward + device_seconds.passes(device, c, backward),
    )


def _fused_passes(s: BlockShape, device: Device, c: Constants) -> _MemoryPasses:
    """Return the seconds of passes where functions one after the other are one kernel."""
    feed_width = s.local.intermediate
    query_key_value = s.local.query + 2 * s.local.key_value
    # Two norms read and write x. Attention and MLP are each added to x: two tensors are read, one is written, and with
    # dropout a mask of one byte.
    norm_bytes = 4 * s.a * s.x_elements
    add_bytes = 2 * (3 * s.a + s.has_dropout) * s.x_elements
    # The activation reads its input and writes its output, gated with one tensor more. QKV is split into heads, rotated
    # and made contiguous: three passes.
    feed_elements = s.tokens * feed_width * (3 if s.model.gated else 2)
    activation_bytes = s.a * (feed_elements + 3 * s.tokens * query_key_value)
    backward_bytes = _NORM_BACKWARD * norm_bytes + _ADD_BACKWARD * add_bytes + _ACTIVATION_BACKWARD * activation_bytes
    cheap_bytes = norm_bytes + s.a * feed_elements
    if s.model.rotary_dim:
        cheap_bytes += 2 * s.a * s.tokens * (s.local.query + s.local.key_value)
    return _MemoryPasses(
        device_seconds.passes(device, c, norm_bytes + add_bytes + activation_bytes),
        device_seconds.passes(device, c, backward_bytes),
        device_seconds.passes(device, c, cheap_bytes),
    )


def _separate_passes(s: BlockShape, device: Device, c: Constants) -> _MemoryPasses:
    """Return the seconds of passes where each function is a kernel that reads its inputs and writes its output.

    | function                | forward                  | backward                                              |
    |-------------------------|--------------------------|-------------------------------------------------------|
    | norm                    | x → y                    | dy, x → dx; dy, x → gradient of the weight            |
    | addition to x           | two → one                | two gradients of x → their sum                        |
    | dropout                 | x → y, mask              | dy, mask → dx                                         |
    | QKV                     | views                    | dq, dk, dv → one tensor                               |
    | rotation of q, k (rows) | x → y; x, y → y          | as forward; elements that are not rotated are copied  |
    | silu(gate)·up (rows)    | gate → y; y, up → y      | gate → du; du, dy → du; dy, up → dg; dg, gate → dg    |
    | other activation        | x → y                    | dy, x → dx                                            |

    (rows): inputs or outputs are parts of a tensor's rows.
    """
    norm_bytes = s.a * s.x_elements
    dropout_bytes = (2 * s.a + 1) * s.x_elements if s.has_dropout else 0
    add_bytes = 2 * (3 * s.a * s.x_elements + dropout_bytes)
    query_key = s.tokens * (s.local.query + s.local.key_value)
    query_key_value = query_key + s.tokens * s.local.key_value
    feed_elements = s.tokens * s.local.intermediate
    rotation = 0.0
    if s.model.rotary_dim:
        rotated = query_key * s.model.rotary_dim / s.model.head_dim
        written = query_key + rotated
        rotation = device_seconds.strided_passes(device, c, written, s.a * (2 * query_key + 3 * rotated))
    if s.model.gated:
        activation = device_seconds.strided_passes(device, c, 2 * feed_elements, 5 * s.a * feed_elements)
        activation_backward = device_seconds.strided_passes(device, c, 4 * feed_elements, 11 * s.a * feed_elements)
    else:
        activation = device_seconds.passes(device, c, 2 * s.a * feed_elements)
        activation_backward = device_seconds.passes(device, c, 3 * s.a * feed_elements)
    backward_bytes = 2 * 5 * norm_bytes + add_bytes + 2 * s.a * query_key_value
    cheap = device_seconds.passes(device, c, 2 * 2 * norm_bytes) + rotation + activation
    return _MemoryPasses(
        cheap + device_seconds.passes(device, c, add_bytes),
        device_seconds.passes(device, c, backward_bytes) + rotation + activation_backward,
        cheap,
    )


def _rounding_bytes(s: BlockShape, *, separate: bool) -> tuple[int, int]:
    """Return the bytes by which fp8 products round their operands, forward and backward.

    A tensor is read for its largest number, then read and written in one byte; with separate kernels it is written and
    read once more between. Weights have their scales, which are computed once a step. Backward, weights, inputs and
    gradients are copied so that kernels read them along the dimension of the sum.
    """
    elements = sum(n * k for n, k in s.weights)
    inputs = s.tokens * sum(k for _, k in s.weights)
    gradients = s.tokens * sum(n for n, _ in s.weights)
    written = s.a + 1 + (2 * s.a if separate else 0)
    copies = 2 * (elements + inputs + gradients)
    rounded_weights = written * elements
    return rounded_weights + (s.a + written) * inputs, rounded_weights + (s.a + written) * gradients + copies


def _recomputed(
    s: BlockShape, device: Device, program: ProgramTraits, forward: PartSeconds, cheap: float
) -> PartSeconds:
    """Return the seconds of what is computed again.

    Args:
        forward: seconds of the forward pass.
        cheap: seconds of norms, activation and rotated q and k, without the host's time.
    """
    if s.recompute == "full":
        # On a CPU the functions that recompute calls for each saved tensor take about as long as the operators' starts.
        return replace(forward, launch=forward.launch * (1 if device.is_accelerator else 2))
    if s.recompute == "none":
        return PartSeconds()
    if program.recomputes_core:
        return PartSeconds(attention=forward.attention)
    attention = 0.0 if program.fused_attention else forward.attention
    launch = forward.launch * cheap / forward.memory_bound
    return PartSeconds(attention=attention, memory_bound=cheap, launch=launch)


@dataclass(frozen=True)
class _CoreSeconds:
    """Seconds of the attention core.

    Attributes:
        forward: seconds of the forward pass.
        backward: seconds of the backward pass.
        kernels: kernels of the forward pass, more than those that `ProgramTraits.kernels` counts.
    """

    forward: float
    backward: float
    kernels: int


def _attention_core(s: BlockShape, device: Device, c: Constants, program: ProgramTraits) -> _CoreSeconds:
    """Return the seconds of softmax(q kᵀ) v.

    The fused core does no work on masked tokens. Step by step, softmax reads and writes the probabilities, and dropout
    reads them, and writes them and its mask.
    """
    peak = device.peak(s.dtype)
    head_dim = s.model.head_dim
    heads = s.batch * (s.local.query // head_dim)
    if program.fused_attention:
        # Two products of 2·head_dim operations for each token and each that it attends to, the mean of all blocks.
        operations = 4.0 * heads * s.queries * attended_tokens(s.model, s.length) * head_dim
        seconds = operations / (peak * c.fused_attention)
        return _CoreSeconds(seconds, _FUSED_BACKWARD_PRODUCTS * seconds / _FUSED_BACKWARD_RATE, 0)
    scores = device_seconds.matmul(device, c, peak, s.queries, s.length, head_dim, heads)
    values = device_seconds.matmul(device, c, peak, s.queries, head_dim, s.length, heads)
    transposed = device_seconds.matmul(device, c, peak, head_dim, s.length, s.queries, heads)
    probabilities = heads * s.queries * s.length
    dropout_bytes = 2 * s.a + 1 if s.has_dropout else 0
    softmax_forward = device_seconds.passes(device, c, probabilities * (2 * s.a + dropout_bytes))
    softmax_backward = device_seconds.passes(device, c, probabilities * (3 * s.a + dropout_bytes))
    # Four products, the gradients of q, k, v and the probabilities, each as long as the mean of the three shapes.
    products_backward = 4 * (scores + values + transposed) / 3
    return _CoreSeconds(
        scores + values + softmax_forward, products_backward + softmax_backward, _STEPWISE_ATTENTION_KERNELS
    )


def _tensor_collectives(s: BlockShape, device: Device, c: Constants) -> float:
    """Return the seconds of tensor parallelism's collectives of a block in one direction.

    Attention and MLP each all-reduce their output, or each gather their input and scatter their output.
    """
    if s.tensor == 1:
        return 0.0
    size = float(s.gathered_bytes)
    if s.sequence_parallel:
        return 4 * device_seconds.collective(device, c, s.tensor_group, size)
    return 2 * device_seconds.collective(device, c, s.tensor_group, size, reduces_all=True)


def _key_value_seconds(s: BlockShape, core: _CoreSeconds, device: Device, c: Constants) -> tuple[float, float]:
    """Return the seconds in which keys and values of all tokens of a block are gathered, forward and backward.

    Backward they are gathered again, and their gradients scattered. Passed from rank to rank, they take as long, but
    travel while attention to those of another rank is computed, and so do gradients.
    """
    ranks = s.context_group.ranks
    if ranks == 1:
        return 0.0, 0.0
    size = float(s.a * s.batch * s.length * s.local.key_value)
    seconds = 2 * device_seconds.collective(device, c, s.context_group, size)
    if s.passes_keys:
        hidden = (ranks - 1) / ranks
        return max(0.0, seconds - hidden * core.forward), max(0.0, 2 * seconds - hidden * core.backward)
    # What full recompute gathers again is counted with its forward pass.
    return seconds, (2 if s.gathers_keys_again and s.recompute != "full" else 1) * seconds


def head(s: BlockShape, device: Device, c: Constants, program: ProgramTraits) -> PassSeconds:
    """Return the seconds of the last norm, the output head, and the loss over its logits in float32."""
    rows = s.local.vocabulary
    hidden = s.model.hidden_size
    peak = device.peak(s.dtype)
    outputs = device_seconds.matmul(device, c, peak, s.tokens, rows, hidden)
    input_gradient = device_seconds.matmul(device, c, peak, s.tokens, hidden, rows)
    weight_gradient = device_seconds.matmul(device, c, peak, rows, hidden, s.tokens)
    logits = s.tokens * rows
    # The logits are written and read in their own dtype too. The norm reads and writes x, and so does the head's input;
    # backward there are three tensors in place of two.
    forward_bytes = logits * (2 * s.a + _LOGITS_FORWARD_BYTES) + 4 * s.gathered_bytes
    backward_bytes = logits * (2 * s.a + _LOGITS_BACKWARD_BYTES) + 6 * s.gathered_bytes
    memory_forward = device_seconds.passes(device, c, forward_bytes)
    accumulation = device_seconds.passes(device, c, s.accumulation_bytes(rows * hidden, device, program))
    memory_backward = device_seconds.passes(device, c, backward_bytes) + accumulation
    # The ranks agree on the largest logit, the sum of exponentials and the target's logit of each token, in float32.
    loss_sums = 3 * device_seconds.collective(device, c, s.tensor_group, 4.0 * s.tokens, reduces_all=True)
    x_gradient = device_seconds.collective(
        device, c, s.tensor_group, float(s.gathered_bytes), reduces_all=not s.sequence_parallel
    )
    forward = _with_launch(PartSeconds(outputs, 0.0, memory_forward, 0.0, loss_sums), _HEAD_KERNELS, c.host, program)
    backward = _with_launch(
        PartSeconds(input_gradient + weight_gradient, 0.0, memory_backward, 0.0, x_gradient),
        _HEAD_KERNELS,
        c.host,
        program,
    )
    if program.loss_ahead:
        # The loss and its gradients come chunk by chunk, so that a schedule cannot put off the gradient of the weight.
        return PassSeconds(forward.plus(backward), PartSeconds(), 0.0)
    return PassSeconds(forward, backward, weight_gradient + accumulation)


def embedding(s: BlockShape, device: Device, c: Constants, program: ProgramTraits) -> PassSeconds:
    """Return the seconds of the embedding.

    Rows are looked up; in the backward pass the table's gradient is made and added to the earlier one.
    """
    # A row is read and written, and a sum or a mask reads two tensors and writes one.
    lookup = device_seconds.passes(device, c, 5.0 * s.gathered_bytes)
    output_sum = device_seconds.collective(
        device, c, s.tensor_group, float(s.gathered_bytes), reduces_all=not s.sequence_parallel
    )
    table = s.local.vocabulary * s.model.hidden_size
    table_gradient = device_seconds.passes(device, c, s.accumulation_bytes(table, device, program) + s.a * table)
    forward = PartSeconds(memory_bound=lookup, tensor=output_sum)
    backward = PartSeconds(
        memory_bound=2 * lookup + table_gradient,
        tensor=output_sum if s.sequence_parallel else 0.0,  # otherwise each rank has the whole gradient already
    )
    return PassSeconds(
        _with_launch(forward, _EMBEDDING_KERNELS, c.host, program),
        _with_launch(backward, _EMBEDDING_KERNELS, c.host, program),
        0.0,
    )
