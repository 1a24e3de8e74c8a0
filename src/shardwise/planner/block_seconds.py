"""Seconds of the parts of a model on one rank: a block, the embedding, the head with its loss.

Legend: see `planner/rank_case.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwise.config import DTYPE_BYTES, DtypeName, FamilyConfig, Recompute
from shardwise.planner import device_seconds
from shardwise.planner.device_seconds import Constants, Group
from shardwise.planner.device_specs import Device

_SHARPNESS = 4  # of the maximum of the host's and the device's time


@dataclass(frozen=True)
class Program:
    """What the program that trains does in its own way; the defaults are ours.

    Attributes:
        fused_attention: one kernel computes attention. Else its probabilities are written and read.
        loss_ahead: the head's gradients are computed in the forward pass.
        overlaps: gradients are reduced behind the backward pass, bucket by bucket.
        waits_for_messages: a rank waits for its messages to other stages.
        splits_messages: the ranks of a tensor-parallel group each send a part of a message, and gather it.
        runs_ahead: the host starts kernels before the device is done with earlier ones.
        casts_gradients: a weight's new gradient is copied to the gradients' dtype before it is added to them.
        reduces_all: gradients are all-reduced even if the optimizer's state is sharded.
        kernels: that a block starts in its forward pass.
    """

    fused_attention: bool = True
    loss_ahead: bool = True
    overlaps: bool = True
    waits_for_messages: bool = False
    splits_messages: bool = False
    runs_ahead: bool = True
    casts_gradients: bool = True
    reduces_all: bool = False
    kernels: int = 24


@dataclass(frozen=True)
class Shape:
    """What the time of a block depends on, for one micro-batch on one rank."""

    hidden: int
    intermediate: int
    gated: bool
    query: int
    key_value: int
    head_dim: int
    causal: bool
    masks: bool
    batch: int
    length: int
    tensor: int
    sequence_parallel: bool
    inside: int
    dtype: DtypeName
    gradient: DtypeName
    recompute: Recompute

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def a(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def accumulated(self, elements: int, program: Program) -> float:
        """Bytes that are read and written to add a weight's new gradient to that of earlier micro-batches."""
        g = DTYPE_BYTES[self.gradient]
        if self.gradient == self.dtype:
            return 3.0 * g * elements
        return elements * (self.a + 2.0 * g + (2 * g if program.casts_gradients else 0))


@dataclass(frozen=True)
class Parts:
    """Seconds by what they are spent on."""

    matmul: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    launch: float = 0.0
    tensor: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.memory_bound + self.launch + self.tensor

    def plus(self, other: Parts, times: float = 1) -> Parts:
        """The sum with `times` another."""
        return Parts(
            self.matmul + times * other.matmul,
            self.attention + times * other.attention,
            self.memory_bound + times * other.memory_bound,
            self.launch + times * other.launch,
            self.tensor + times * other.tensor,
        )


@dataclass(frozen=True)
class Times:
    """Of one block, or of what a stage has beside blocks. `again` is a part of `backward`: what is computed twice."""

    forward: Parts
    backward: Parts
    weight: float
    again: Parts = Parts()


def _launched(parts: Parts, kernels: float, host: float, program: Program) -> Parts:
    """With the time that the device waits for the host, which starts kernel after kernel.

    Where one of the two is much slower, it alone counts; where they are alike, each waits for the other at times. A
    host that does not run ahead waits for each kernel, and the device for the host.
    """
    device, starts = parts.total, kernels * host
    launch = _smooth(device, starts) - device if program.runs_ahead else starts
    return Parts(parts.matmul, parts.attention, parts.memory_bound, launch, parts.tensor)


def _smooth(one: float, other: float) -> float:
    """A smooth maximum."""
    return float((one**_SHARPNESS + other**_SHARPNESS) ** (1 / _SHARPNESS))


@lru_cache(maxsize=2**14)
def block(shape: Shape, device: Device, c: Constants, program: Program) -> Times:
    """A transformer block.

    Its backward pass has two matrix products for each of the forward pass: by the gradient of its output those of its
    input and of its weight; `weight` is the part of the latter.
    """
    s, t, peak = shape, shape.tensor, device.peak(shape.dtype)
    feed = s.intermediate // t * (2 if s.gated else 1)
    products = (
        (s.query + 2 * s.key_value, s.hidden),
        (s.hidden, s.query),
        (feed, s.hidden),
        (s.hidden, s.intermediate // t),
    )
    forward = sum(device_seconds.matmul(device, c, peak, s.tokens, n, k) for n, k in products)
    inputs = sum(device_seconds.matmul(device, c, peak, s.tokens, k, n) for n, k in products)
    weights = sum(device_seconds.matmul(device, c, peak, n, k, s.tokens) for n, k in products)
    core, core_back, kernels = _core(s, device, c, program)
    between = s.tokens * s.hidden // (t if s.sequence_parallel else 1)
    wide = s.tokens * (s.intermediate // t) * (3 if s.gated else 2)
    norms, adds = 4 * s.a * between, 2 * (3 * s.a + s.masks) * between
    around = s.a * (wide + 3 * s.tokens * (s.query + 2 * s.key_value))
    touched = device_seconds.passes(device, c, norms + adds + around)
    added = device_seconds.passes(device, c, s.accumulated(sum(n * k for n, k in products), program))
    touched_back = device_seconds.passes(device, c, 1.5 * norms + 0.7 * adds + 1.5 * around) + added
    sent, sent_again = _tensor(s, device, c)
    count = program.kernels + kernels
    ahead = _launched(Parts(forward, core, touched, 0.0, sent), count, c.host, program)
    back = _launched(Parts(inputs + weights, core_back, touched_back, 0.0, sent), 1.6 * count, c.host, program)
    again = Parts()
    if s.recompute == "full":
        # On a CPU the functions that recompute calls for each saved tensor take about as long as the operators' starts.
        launch = ahead.launch * (1 if device.is_accelerator else 2)
        repeated = Parts(ahead.matmul, ahead.attention, ahead.memory_bound, launch, sent_again)
        again, back = repeated, back.plus(repeated)
    elif s.recompute == "selective":
        again = Parts(attention=core)
        back = back.plus(again)
    return Times(ahead, back, weights + added, again)


def _core(s: Shape, device: Device, c: Constants, program: Program) -> tuple[float, float, int]:
    """Seconds of attention's core, forward and backward, and its kernels beside those of a block.

    Fused it does no work on masked tokens, and its backward pass five products of the size of the two of the forward
    pass. Step by step, softmax reads and writes the probabilities, dropout reads them, writes them and its mask.
    """
    peak, heads = device.peak(s.dtype), s.batch * (s.query // s.head_dim)
    if program.fused_attention:
        work = 4.0 * heads * s.length * s.length * s.head_dim / (2 if s.causal else 1)
        seconds = work / (peak * c.fused_attention)
        return seconds, 2.5 * seconds / 0.85, 0
    scores = device_seconds.matmul(device, c, peak, s.length, s.length, s.head_dim, heads)
    values = device_seconds.matmul(device, c, peak, s.length, s.head_dim, s.length, heads)
    weights = device_seconds.matmul(device, c, peak, s.head_dim, s.length, s.length, heads)
    elements = heads * s.length * s.length
    dropped = 2 * s.a + 1 if s.masks else 0
    ahead = device_seconds.passes(device, c, elements * (2 * s.a + dropped))
    back = device_seconds.passes(device, c, elements * (3 * s.a + dropped))
    return scores + values + ahead, 2 * (scores + values + weights) / 1.5 + back, 6


def _tensor(s: Shape, device: Device, c: Constants) -> tuple[float, float]:
    """Seconds of tensor parallelism's collectives of a block in one direction, and in a repeated forward pass."""
    if s.tensor == 1:
        return 0.0, 0.0
    of, size = Group(s.tensor, s.inside), float(s.a * s.tokens * s.hidden)
    if not s.sequence_parallel:
        both = 2 * device_seconds.collective(device, c, of, size, reduces_all=True)
        return both, both
    one = device_seconds.collective(device, c, of, size)
    return 4 * one, 4 * one


def head(shape: Shape, rows: int, device: Device, c: Constants, program: Program) -> Times:
    """The last norm, the output head over `rows` of the vocabulary, and the loss over its logits in float32."""
    s, peak = shape, device.peak(shape.dtype)
    forward = device_seconds.matmul(device, c, peak, s.tokens, rows, s.hidden)
    inputs = device_seconds.matmul(device, c, peak, s.tokens, s.hidden, rows)
    weights = device_seconds.matmul(device, c, peak, rows, s.hidden, s.tokens)
    logits = s.tokens * rows
    ahead = device_seconds.passes(device, c, logits * (2 * s.a + 12) + 4 * s.a * s.tokens * s.hidden)
    added = device_seconds.passes(device, c, s.accumulated(rows * s.hidden, program))
    back = device_seconds.passes(device, c, logits * (2 * s.a + 8) + 6 * s.a * s.tokens * s.hidden) + added
    of = Group(s.tensor, s.inside)
    sums = 3 * device_seconds.collective(device, c, of, 4.0 * s.tokens, reduces_all=True)
    whole = device_seconds.collective(
        device, c, of, float(s.a * s.tokens * s.hidden), reduces_all=not s.sequence_parallel
    )
    first = _launched(Parts(forward, 0.0, ahead, 0.0, sums), 20, c.host, program)
    second = _launched(Parts(inputs + weights, 0.0, back, 0.0, whole), 20, c.host, program)
    if program.loss_ahead:
        return Times(first.plus(second), Parts(memory_bound=0.0), 0.0)
    return Times(first, second, weights + added)


def embedding(shape: Shape, rows: int, device: Device, c: Constants, program: Program) -> Times:
    """Rows are looked up; in the backward pass the table's gradient is made and added to the earlier one."""
    s = shape
    seconds = device_seconds.passes(device, c, 5.0 * s.a * s.tokens * s.hidden)
    sent = device_seconds.collective(
        device, c, Group(s.tensor, s.inside), float(s.a * s.tokens * s.hidden), reduces_all=not s.sequence_parallel
    )
    ahead = _launched(Parts(memory_bound=seconds, tensor=sent), 8, c.host, program)
    made = device_seconds.passes(device, c, s.accumulated(rows * s.hidden, program) + s.a * rows * s.hidden)
    back = Parts(memory_bound=2 * seconds + made, tensor=sent if s.sequence_parallel else 0.0)
    back = _launched(back, 8, c.host, program)
    return Times(ahead, back, 0.0)


def shape_of(
    model: FamilyConfig,
    *,
    widths: tuple[int, int],
    batch: int,
    length: int,
    layout: tuple[int, bool, int],
    dtypes: tuple[DtypeName, DtypeName],
    recompute: Recompute,
) -> Shape:
    """The shape of the model's blocks.

    Args:
        widths: of the queries and of the keys on one rank.
        layout: tensor-parallel degree, whether the sequence is cut too, and its ranks inside a node.
        dtypes: of the parameters and of the gradients.
    """
    tensor, sequence_parallel, inside = layout
    drops = model.hidden_dropout_p > 0
    return Shape(
        model.hidden_size, model.intermediate_size, model.gated, *widths, model.head_dim, model.causal, drops,
        batch, length, tensor, sequence_parallel, inside, *dtypes, recompute,
    )  # fmt: skip
