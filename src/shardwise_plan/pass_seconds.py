"""Seconds of the parts of a model on one rank: a block, the embedding, the head with its loss.

Legend: see `estimates/rank_workload.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

from shardwise.models.flops import attended_tokens
from shardwise_plan import device_seconds
from shardwise_plan.block_shape import BlockShape
from shardwise_plan.device_seconds import DeviceConstants
from shardwise_plan.device_specs import Device
from shardwise_plan.overlap import Product, TensorCollectives, ring_seconds
from shardwise_plan.program_traits import ProgramTraits

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

# Tokens of the longer side of a tile of fused attention, which leaves out masked scores by whole tiles, and computes
# those on the diagonal in whole: BLOCK in `flash_attn_triton.py` of FlashAttention's first generation; in the second,
# `flash_fwd_launch_template.h` and `flash_bwd_launch_template.h` have it for heads of 64 and 128 on an A100.
_ATTENTION_TILE = 128

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
class _PartSeconds:
    """Seconds of a pass, by what they are spent on."""

    matmul: float = 0.0  # matrix products, without those of the attention core
    attention: float = 0.0
    memory_bound: float = 0.0  # operations that memory limits, without accumulation
    launch: float = 0.0  # waits of the device for the host
    tensor: float = 0.0  # collectives of tensor and sequence parallelism
    accumulation: float = 0.0  # additions of the gradients of weights to those of earlier micro-batches
    context: float = 0.0  # collectives of context parallelism
    all_to_all: float = 0.0  # all-to-alls of the rows of experts

    @property
    def total(self) -> float:
        computation = self.matmul + self.attention + self.memory_bound + self.launch + self.accumulation
        return computation + self.tensor + self.context + self.all_to_all

    def plus(self, term: _PartSeconds, times: float = 1) -> _PartSeconds:
        """Return the sum of these seconds and `times` those of `term`."""
        return _PartSeconds(*(getattr(self, name) + times * getattr(term, name) for name in _PARTS))


_PARTS = tuple(part.name for part in fields(_PartSeconds))


@dataclass(frozen=True)
class PassSeconds:
    """Predicted seconds of one micro-batch in a block, in the embedding or in the head."""

    forward: _PartSeconds  # seconds of the forward pass
    backward: _PartSeconds  # seconds of the backward pass, recompute included
    weight: float  # seconds of the gradients of weights, a part of `backward`
    recompute: _PartSeconds = _PartSeconds()  # seconds of what is computed a second time, a part of `backward`


def weighted_seconds(terms: Iterable[tuple[_PartSeconds, float]]) -> _PartSeconds:
    """Return the sum of predicted seconds of passes, each so many times."""
    total = _PartSeconds()
    for seconds, times in terms:
        total = total.plus(seconds, times)
    return total


def mean_pass_seconds(blocks: Sequence[tuple[PassSeconds, int]]) -> PassSeconds:
    """Return the mean predicted seconds of blocks of several kinds, so many of each."""
    shares = [(block, number / sum(number for _, number in blocks)) for block, number in blocks]
    forward, backward, recompute = (
        weighted_seconds((getattr(block, name), share) for block, share in shares)
        for name in ("forward", "backward", "recompute")
    )
    return PassSeconds(forward, backward, sum(share * block.weight for block, share in shares), recompute)


def _with_launch(parts: _PartSeconds, kernels: float, c: DeviceConstants, program: ProgramTraits) -> _PartSeconds:
    """Return these seconds with the time that the device waits for the host, which starts kernel after kernel.

    If one of the two is much slower, it alone counts; if they are alike, each waits for the other at times. A host that
    does not run ahead waits for each kernel, and the device for the host.
    """
    if program.graphs:
        return parts
    device = parts.total
    host = kernels * c.host
    larger = float((device**_SHARPNESS + host**_SHARPNESS) ** (1 / _SHARPNESS))
    return replace(parts, launch=larger - device if program.runs_ahead else host)


@lru_cache(maxsize=2**14)
def block_seconds(s: BlockShape, device: Device, c: DeviceConstants, program: ProgramTraits) -> PassSeconds:
    """Return the predicted seconds of both passes of a transformer block.

    Its backward pass has two matrix products for each of the forward pass: the gradient of the input and that of the
    weight. The latter are `weight`, with the time to add them to earlier gradients.
    """
    peak = device.matmul_peak(s.dtype, s.matmul, block_scales=program.block_scales)
    backward_peak = peak if s.matmul is None else peak * device.fp8_backward_share
    weights = s.weights
    outputs = [_product(device, c, peak, m, n, k, count) for n, k, m, count in weights]
    input_gradients = [_product(device, c, backward_peak, m, k, n, count) for n, k, m, count in weights]
    weight_gradients = [_product(device, c, backward_peak, n, k, m, count) for n, k, m, count in weights]
    weight_seconds = sum(product(1) for product in weight_gradients)
    elements = sum(n * k * count for n, k, _, count in weights)
    accumulated = s.accumulation_bytes(elements, device, program, program.adds_products)
    accumulation = device_seconds.memory_passes(device, c, accumulated)
    core = _attention_core(s, device, c, program)
    if s.passes_keys and device.is_accelerator and program.recomputes_ring:
        core = core._replace(backward=core.forward + core.backward)  # computed again, for the keys of each rank

    passes = _memory_passes(s, device, c, program)
    tensor = _tensor_seconds(s, device, c, program, outputs, input_gradients, weight_gradients)
    context = _context_seconds(s, device, c, program, core)
    exchange = s.exchange(program)
    scored, hidden, rows, _ = exchange.scores
    scores = device_seconds.matmul(device, c, device.float32, rows, scored, hidden)
    # Rows travel to their weights, and the results back; nothing hides them.
    all_to_all = 2 * device_seconds.all_to_all(device, c, exchange.group, exchange.sent_bytes)
    kernels = program.kernels + core.kernels + exchange.kernels
    rounding = _ROUNDING_KERNELS * len(weights) if s.matmul is not None and program.separate_kernels else 0
    forward = _with_launch(
        _PartSeconds(
            matmul=sum(product(1) for product in outputs) + scores,
            attention=core.forward,
            memory_bound=passes.forward,
            tensor=tensor[0],
            context=context[0],
            all_to_all=all_to_all,
        ),
        kernels + rounding,
        c,
        program,
    )
    backward = _with_launch(
        _PartSeconds(
            matmul=sum(product(1) for product in input_gradients) + weight_seconds + 2 * scores,
            attention=core.backward,
            memory_bound=passes.backward,
            tensor=tensor[1],
            accumulation=accumulation,
            context=context[1],
            all_to_all=all_to_all,
        ),
        _BACKWARD_KERNELS * kernels + rounding,
        c,
        program,
    )
    recompute = _recomputed(s, device, program, forward, passes.cheap, outputs[3](1))
    return PassSeconds(forward, backward.plus(recompute), weight_seconds + accumulation, recompute)


class _Work(NamedTuple):
    """Seconds of a part of a block."""

    forward: float  # seconds of the forward pass
    backward: float  # seconds of the backward pass
    cheap: float = 0.0  # seconds of what selective recompute repeats of it: norms, activation, and rotated q and k
    kernels: int = 0  # kernels of the forward pass, more than those that `ProgramTraits.kernels` counts


def _memory_passes(s: BlockShape, device: Device, c: DeviceConstants, program: ProgramTraits) -> _Work:
    """Return the seconds of a block's passes over activations, without those of the attention core."""
    passes = _separate_passes(s, device, c, program) if program.separate_kernels else _fused_passes(s, device, c)
    forward, backward = (0, 0) if s.matmul is None else _rounding_bytes(s, program)
    moved = device_seconds.memory_passes(device, c, s.exchange(program).moved_bytes)
    return passes._replace(
        forward=passes.forward + moved + device_seconds.memory_passes(device, c, forward),
        backward=passes.backward + moved + device_seconds.memory_passes(device, c, backward),
    )


def _fused_passes(s: BlockShape, device: Device, c: DeviceConstants) -> _Work:
    """Return the seconds of passes where functions one after the other are one kernel."""
    query_key_value = s.local.query + 2 * s.local.key_value
    # Two norms read and write x. Attention and MLP are each added to x: two tensors are read, one is written, and with
    # dropout a mask of one byte.
    norm_bytes = 4 * s.a * s.x_elements
    add_bytes = 2 * (3 * s.a + s.has_dropout) * s.x_elements
    # The activation reads its input and writes its output, gated with one tensor more. QKV is split into heads, rotated
    # and made contiguous: three passes.
    feed_elements = s.feed_elements * (3 if s.model.gated else 2)
    activation_bytes = s.a * (feed_elements + 3 * s.tokens * query_key_value)
    backward_bytes = _NORM_BACKWARD * norm_bytes + _ADD_BACKWARD * add_bytes + _ACTIVATION_BACKWARD * activation_bytes
    cheap_bytes = norm_bytes + s.a * feed_elements
    if s.model.rotary_dim:
        cheap_bytes += 2 * s.a * s.tokens * (s.local.query + s.local.key_value)
    return _Work(
        device_seconds.memory_passes(device, c, norm_bytes + add_bytes + activation_bytes),
        device_seconds.memory_passes(device, c, backward_bytes),
        device_seconds.memory_passes(device, c, cheap_bytes),
    )


def _separate_passes(s: BlockShape, device: Device, c: DeviceConstants, program: ProgramTraits) -> _Work:
    """Return the seconds of passes where each function is a kernel that reads its inputs and writes its output.

    | function                | forward                  | backward                                              |
    |-------------------------|--------------------------|-------------------------------------------------------|
    | norm                    | x → y                    | dy, x → dx; dy, x → gradient of the weight            |
    | addition to x           | two → one                | two gradients of x → their sum                        |
    | dropout                 | x → y, mask              | dy, mask → dx                                         |
    | bias                    | in the product's kernel  | dy → gradient of the bias                             |
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
    feed_elements = s.feed_elements
    rotation = 0.0
    if s.model.rotary_dim:
        rotated = query_key * s.model.rotary_dim / s.model.head_dim
        written = query_key + rotated
        rotation = device_seconds.strided_passes(device, c, written, s.a * (2 * query_key + 3 * rotated))
    if s.model.gated:
        activation = device_seconds.strided_passes(device, c, 2 * feed_elements, 5 * s.a * feed_elements)
        activation_backward = device_seconds.strided_passes(device, c, 4 * feed_elements, 11 * s.a * feed_elements)
    else:
        activation = device_seconds.memory_passes(device, c, 2 * s.a * feed_elements)
        activation_backward = device_seconds.memory_passes(device, c, 3 * s.a * feed_elements)
    backward_bytes = 2 * 5 * norm_bytes + add_bytes + s.a * (2 * query_key_value + s.bias_elements)
    forward_bytes = add_bytes
    if program.unpads_attention:
        # A copy is two passes, and one into a tensor of zeros three.
        attended = s.tokens * s.local.query
        forward_bytes += s.a * (2 * query_key_value + 3 * attended)
        backward_bytes += s.a * (3 * query_key_value + 2 * attended)
    cheap = device_seconds.memory_passes(device, c, 2 * 2 * norm_bytes) + rotation + activation
    return _Work(
        cheap + device_seconds.memory_passes(device, c, forward_bytes),
        device_seconds.memory_passes(device, c, backward_bytes) + rotation + activation_backward,
        cheap,
    )


def _rounding_bytes(s: BlockShape, program: ProgramTraits) -> tuple[int, int]:
    """Return the bytes by which fp8 products round their operands, forward and backward.

    A tensor is read for its largest number, then read and written in one byte; with separate kernels it is written and
    read once more between. Weights have their scales, which are computed once a step. Backward, weights, inputs and
    gradients are copied so that kernels read them along the dimension of the sum.

    A program with `rounding_bytes` rounds its weights when they are updated.
    """
    elements = sum(n * k * count for n, k, _, count in s.weights)
    inputs = sum(k * m * count for _, k, m, count in s.weights)
    gradients = sum(n * m * count for n, _, m, count in s.weights)
    if program.rounding_bytes is not None:
        return program.rounding_bytes * inputs, program.rounding_bytes * gradients
    written = s.a + 1 + (2 * s.a if program.separate_kernels else 0)
    copies = 2 * (elements + inputs + gradients)
    rounded_weights = written * elements
    return rounded_weights + (s.a + written) * inputs, rounded_weights + (s.a + written) * gradients + copies


def _recomputed(
    s: BlockShape, device: Device, program: ProgramTraits, forward: _PartSeconds, cheap: float, last_product: float
) -> _PartSeconds:
    """Return the seconds of what is computed again of a forward pass.

    `cheap`: seconds of norms, activation and rotated q and k, without the host's; `last_product`: of its last product.
    """
    if s.recompute == "full":
        # On a CPU the functions that recompute calls for each saved tensor take about as long as the operators' starts.
        launch = forward.launch * (1 if device.is_accelerator else 2)
        return replace(forward, matmul=forward.matmul - last_product * program.stops_recompute, launch=launch)
    if s.recompute == "none":
        return _PartSeconds()
    if program.recomputes_core:
        return _PartSeconds(attention=forward.attention)
    attention = 0.0 if program.fused_attention else forward.attention
    launch = forward.launch * cheap / forward.memory_bound
    return _PartSeconds(attention=attention, memory_bound=cheap, launch=launch)


def _attention_core(s: BlockShape, device: Device, c: DeviceConstants, program: ProgramTraits) -> _Work:
    """Return the seconds of softmax(q kᵀ) v.

    The fused core does no work on masked tokens. Step by step, softmax reads and writes the probabilities, and dropout
    reads them, and writes them and its mask.
    """
    peak = device.peak(s.dtype)
    head_dim = s.model.head_dim
    heads = s.batch * (s.local.query // head_dim)
    if program.fused_attention:
        # Two products of 2·head_dim operations for each token and each that it attends to, the mean of all blocks.
        attended = attended_tokens(s.model, s.length)
        if s.model.causal and device.is_accelerator:
            attended += min(_ATTENTION_TILE, s.length) / 2
        operations = 4.0 * heads * s.queries * attended * head_dim
        shares = program.fused_shares or (c.fused_attention, _FUSED_BACKWARD_RATE * c.fused_attention)
        seconds = operations / peak
        return _Work(seconds / shares[0], _FUSED_BACKWARD_PRODUCTS * seconds / shares[1])
    scores = device_seconds.matmul(device, c, peak, s.queries, s.length, head_dim, heads)
    values = device_seconds.matmul(device, c, peak, s.queries, head_dim, s.length, heads)
    transposed = device_seconds.matmul(device, c, peak, head_dim, s.length, s.queries, heads)
    probabilities = heads * s.queries * s.length
    dropout_bytes = 2 * s.a + 1 if s.has_dropout else 0
    softmax_forward = device_seconds.memory_passes(device, c, probabilities * (2 * s.a + dropout_bytes))
    softmax_backward = device_seconds.memory_passes(device, c, probabilities * (3 * s.a + dropout_bytes))
    # Four products, the gradients of q, k, v and the probabilities, each as long as the mean of the three shapes.
    products_backward = 4 * (scores + values + transposed) / 3
    backward = products_backward + softmax_backward
    return _Work(scores + values + softmax_forward, backward, kernels=_STEPWISE_ATTENTION_KERNELS)


def _product(device: Device, c: DeviceConstants, peak: float, m: int, n: int, k: int, count: int) -> Product:
    return lambda pieces: device_seconds.matmul(device, c, peak, -(-m // pieces), n, k, count)


def _tensor_seconds(
    s: BlockShape,
    device: Device,
    c: DeviceConstants,
    program: ProgramTraits,
    outputs: Sequence[Product],
    input_gradients: Sequence[Product],
    weight_gradients: Sequence[Product],
) -> tuple[float, float]:
    """Return what collectives of tensor parallelism add, forward and backward, to the products of the four layers.

    Attention and MLP each gather their input before their first product, and sum their output after their second one.
    """
    size = float(s.gathered_bytes)
    has_buffers = program.tensor_overlap == "user_buffers"
    # User buffers gather operands as they are multiplied.
    gathered = size / s.a if has_buffers and s.matmul is not None else size
    collectives = TensorCollectives(
        device, c, s.tensor_group, gathered, size, s.sequence_parallel, program.tensor_overlap
    )
    forward = 0.0
    backward = 0.0
    for first, second in ((0, 1), (2, 3), (4, 5))[: len(outputs) // 2]:
        forward += collectives.gather_before(outputs[first]) + collectives.sum_after(outputs[second])
        backward += collectives.gather_before(input_gradients[second])
        backward += collectives.sum_behind(weight_gradients[first])
        if s.regathers or has_buffers:
            # The layer's input arrives while its gradient is computed.
            backward += collectives.gather_behind(input_gradients[first])
    return forward, backward


def _context_seconds(
    s: BlockShape, device: Device, c: DeviceConstants, program: ProgramTraits, core: _Work
) -> tuple[float, float]:
    """Return what it adds, forward and backward, to get keys and values of all tokens, and to send their gradients.

    Passed from rank to rank, they travel while attention to those of another rank is computed.
    """
    ranks = s.context_group.ranks
    if ranks == 1:
        return 0.0, 0.0
    size = float(s.a * s.batch * s.length * s.local.key_value)
    gather = 2 * device_seconds.collective(device, c, s.context_group, size)
    if s.passes_keys:
        # Keys and values go round again in the backward pass, with their gradients.
        return ring_seconds(core.forward, gather, ranks), ring_seconds(core.backward, 2 * gather, ranks)
    gathers_again = program.fused_attention and s.recompute != "full"
    return gather, gather * (2 if gathers_again else 1)


@lru_cache(maxsize=2**12)
def head_seconds(s: BlockShape, device: Device, c: DeviceConstants, program: ProgramTraits) -> PassSeconds:
    """Return the predicted seconds of the last norm, the output head, and the loss over its logits in float32."""
    rows = s.local.vocabulary
    hidden = s.model.hidden_size
    peak = device.peak(s.dtype)
    outputs = device_seconds.matmul(device, c, peak, s.tokens, rows, hidden)
    input_gradient = device_seconds.matmul(device, c, peak, s.tokens, hidden, rows)
    weight_gradient = device_seconds.matmul(device, c, peak, rows, hidden, s.tokens)
    logits = s.tokens * rows
    # The logits are written and read in their own dtype too. The norm reads and writes x, and so does the head's input;
    # backward there are three tensors in place of two.
    logits_bytes = program.logits_bytes or (2 * s.a + _LOGITS_FORWARD_BYTES, 2 * s.a + _LOGITS_BACKWARD_BYTES)
    forward_bytes = logits * logits_bytes[0] + 4 * s.gathered_bytes
    backward_bytes = logits * logits_bytes[1] + 6 * s.gathered_bytes
    memory_forward = device_seconds.memory_passes(device, c, forward_bytes)
    accumulation = device_seconds.memory_passes(device, c, s.accumulation_bytes(rows * hidden, device, program))
    memory_backward = device_seconds.memory_passes(device, c, backward_bytes) + accumulation
    # The ranks agree on the largest logit, the sum of exponentials and the target's logit of each token, in float32.
    loss_sums = 3 * device_seconds.collective(device, c, s.tensor_group, 4.0 * s.tokens, reduces_all=True)
    x_gradient = device_seconds.collective(
        device, c, s.tensor_group, float(s.gathered_bytes), reduces_all=not s.sequence_parallel
    )
    forward = _with_launch(_PartSeconds(outputs, 0.0, memory_forward, 0.0, loss_sums), _HEAD_KERNELS, c, program)
    backward = _with_launch(
        _PartSeconds(input_gradient + weight_gradient, 0.0, memory_backward, 0.0, x_gradient), _HEAD_KERNELS, c, program
    )
    if program.loss_ahead:
        # The loss and its gradients come chunk by chunk, so that a schedule cannot put off the gradient of the weight.
        return PassSeconds(forward.plus(backward), _PartSeconds(), 0.0)
    return PassSeconds(forward, backward, weight_gradient + accumulation)


@lru_cache(maxsize=2**12)
def embedding_seconds(s: BlockShape, device: Device, c: DeviceConstants, program: ProgramTraits) -> PassSeconds:
    """Return the predicted seconds of the embedding.

    Rows are looked up; in the backward pass the table's gradient is made and added to the earlier one.
    """
    # A row is read and written, and a sum or a mask reads two tensors and writes one.
    lookup = device_seconds.memory_passes(device, c, 5.0 * s.gathered_bytes)
    output_sum = device_seconds.collective(
        device, c, s.tensor_group, float(s.gathered_bytes), reduces_all=not s.sequence_parallel
    )
    table = s.local.vocabulary * s.model.hidden_size
    table_gradient = device_seconds.memory_passes(device, c, s.accumulation_bytes(table, device, program) + s.a * table)
    forward = _PartSeconds(memory_bound=lookup, tensor=output_sum)
    backward = _PartSeconds(
        memory_bound=2 * lookup + table_gradient,
        tensor=output_sum if s.sequence_parallel else 0.0,  # otherwise each rank has the whole gradient already
    )
    return PassSeconds(
        _with_launch(forward, _EMBEDDING_KERNELS, c, program),
        _with_launch(backward, _EMBEDDING_KERNELS, c, program),
        0.0,
    )
