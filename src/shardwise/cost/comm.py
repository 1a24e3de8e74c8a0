"""Bytes that one rank puts on the wire in an optimizer step, collective by collective.

Legend: S sequence length, B micro batch, H hidden size, L blocks, t tensor-parallel degree, d data-parallel degree. A
collective over n ranks on a whole tensor of b bytes costs each rank 2·b·(n-1)/n (all-reduce) or b·(n-1)/n (all-gather,
reduce-scatter): the ring algorithm's volume, whatever the backend really does.

Axes are named as the groups in `comm.py`: "tp", "dp", "world", and "tp/c" for the c neighbouring ranks that hold the
same key/value heads.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.config import Config, Layout
from shardwise.cost.buckets import bucket_shapes
from shardwise.cost.params import DTYPE_BYTES, LocalWidths

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]

_FLOAT32, _FLOAT64 = 4, 8


@dataclass(frozen=True)
class Transfer:
    """One collective of a step.

    Attributes:
        axis: the group it runs over. ranks: that group's size.
        bytes: of the whole tensor. count: how often per step; a tensor that goes in chunks counts once.
        what: the tensor, for people.
    """

    axis: str
    kind: Kind
    ranks: int
    bytes: int
    count: int
    what: str

    @property
    def wire_bytes(self) -> float:
        """Bytes that each rank sends per step."""
        rounds = 2 if self.kind == "all_reduce" else 1
        return rounds * self.bytes * self.count * (self.ranks - 1) / self.ranks


def step_transfers(config: Config, layout: Layout, accelerator: bool = False, *, data_rank: int = 0) -> list[Transfer]:
    """Every collective of one optimizer step: forward and backward of all micro-batches, reduction, update, agreement.

    Drift checks (`log.drift_every`) come on top in the steps that make them. `accelerator`: whether the run is on one,
    which settles the dtypes where `precision.mode` leaves them open. `data_rank`: with ZeRO, what a rank owns of the
    gradients that are partial over tensor parallelism depends on its place in data parallelism.
    """
    micro_batches = layout.accumulation(config.train)
    forward_and_backward = _forward(config, layout, accelerator) + _backward(config, layout, accelerator)
    transfers = [replace(one, count=one.count * micro_batches) for one in forward_and_backward]
    transfers += _update(config, layout, accelerator, data_rank)
    return [one for one in transfers if one.ranks > 1 and one.bytes and one.count]


def evaluation_transfers(config: Config, layout: Layout, accelerator: bool = False) -> list[Transfer]:
    """The collectives of one global batch of evaluation, without the final sum of losses over data parallelism."""
    micro_batches = layout.accumulation(config.train)
    transfers = [replace(one, count=one.count * micro_batches) for one in _forward(config, layout, accelerator)]
    return [one for one in transfers if one.ranks > 1]


def bytes_per_step(
    config: Config, layout: Layout, accelerator: bool = False, *, data_rank: int = 0
) -> dict[tuple[str, str], float]:
    """Wire bytes of one rank in one optimizer step, by (axis, kind)."""
    return _sum(step_transfers(config, layout, accelerator, data_rank=data_rank))


def bytes_per_evaluation_batch(
    config: Config, layout: Layout, accelerator: bool = False
) -> dict[tuple[str, str], float]:
    """Wire bytes of one rank in one global batch of evaluation, by (axis, kind)."""
    return _sum(evaluation_transfers(config, layout, accelerator))


def _sum(transfers: list[Transfer]) -> dict[tuple[str, str], float]:
    total: dict[tuple[str, str], float] = defaultdict(float)
    for one in transfers:
        total[one.axis, one.kind] += one.wire_bytes
    return dict(total)


def _hidden_bytes(config: Config, accelerator: bool) -> int:
    """Bytes of a whole x_SBH of one micro-batch."""
    tokens = config.train.sequence_length * config.train.micro_batch
    return tokens * config.model.hidden_size * DTYPE_BYTES[config.precision.resolved(accelerator).parameter]


def _forward(config: Config, layout: Layout, accelerator: bool) -> list[Transfer]:
    """One micro-batch forward.

    A block enters two column-parallel regions (QKV, gate and up) and leaves two row-parallel ones. With sequence
    parallelism entering gathers and leaving reduce-scatters; without, only leaving communicates. The loss exchanges the
    largest logit of a token, then the sum of exponentials and the target's logit, in float32.
    """
    tensor, blocks = layout.tensor, 2 * config.model.num_hidden_layers
    hidden = _hidden_bytes(config, accelerator)
    tokens = config.train.sequence_length * config.train.micro_batch
    loss = [
        Transfer("tp", "all_reduce", tensor, _FLOAT32 * tokens, 1, "largest logit of each token"),
        Transfer("tp", "all_reduce", tensor, 2 * _FLOAT32 * tokens, 1, "sum of exponentials and target logit"),
    ]
    if not layout.sequence:
        return [
            Transfer("tp", "all_reduce", tensor, hidden, 1, "embedding output"),
            Transfer("tp", "all_reduce", tensor, hidden, blocks, "outputs of attention and MLP"),
            *loss,
        ]
    return [
        Transfer("tp", "reduce_scatter", tensor, hidden, 1, "embedding output"),
        Transfer("tp", "all_gather", tensor, hidden, blocks, "inputs of attention and MLP"),
        Transfer("tp", "reduce_scatter", tensor, hidden, blocks, "outputs of attention and MLP"),
        Transfer("tp", "all_gather", tensor, hidden, 1, "input of the head, in chunks"),
        *loss,
    ]


def _backward(config: Config, layout: Layout, accelerator: bool) -> list[Transfer]:
    """One micro-batch backward: the mirror image of the forward pass, and the gradient of the head's input."""
    tensor, blocks = layout.tensor, 2 * config.model.num_hidden_layers
    hidden = _hidden_bytes(config, accelerator)
    if not layout.sequence:
        return [
            Transfer("tp", "all_reduce", tensor, hidden, 1, "gradient of the head's input"),
            Transfer("tp", "all_reduce", tensor, hidden, blocks, "gradients of the inputs of attention and MLP"),
        ]
    return [
        Transfer("tp", "reduce_scatter", tensor, hidden, 1, "gradient of the head's input, in chunks"),
        Transfer("tp", "all_gather", tensor, hidden, blocks, "gradients of the outputs of attention and MLP"),
        Transfer("tp", "reduce_scatter", tensor, hidden, blocks, "gradients of the inputs of attention and MLP"),
        Transfer("tp", "all_gather", tensor, hidden, 1, "gradient of the embedding output"),
    ]


def _update(config: Config, layout: Layout, accelerator: bool, data_rank: int) -> list[Transfer]:
    """Once a step: gradients over data parallelism, partial ones over TP, agreement on scalars, parameters back.

    Partial gradients are summed after the reduction over data parallelism, in the gradient dtype: each rank exchanges
    only what its slice holds of them.
    """
    precision, tensor, data = config.precision.resolved(accelerator), layout.tensor, layout.data
    buckets = bucket_shapes(config, layout, accelerator)
    elements = sum(bucket.elements for bucket in buckets)
    gradients = DTYPE_BYTES[precision.reduce] * elements
    transfers = [
        Transfer("dp", "all_reduce", data, _FLOAT64, 1, "number of counted targets"),
        Transfer("dp", "all_reduce", data, _FLOAT32, 1, "loss"),
        Transfer("world", "all_reduce", layout.world, 2 * _FLOAT32, 1, "squared norms of gradients and parameters"),
    ]
    if config.optimizer.zero:
        parameters = DTYPE_BYTES[precision.parameter] * elements
        transfers += [
            Transfer("dp", "reduce_scatter", data, gradients, 1, "gradients"),
            Transfer("dp", "all_gather", data, parameters, 1, "parameters"),
        ]
    else:
        transfers.append(Transfer("dp", "all_reduce", data, gradients, 1, "gradients"))
    for ranks in sorted({tensor, LocalWidths.of(config.model, tensor).key_value_copies}):
        partial = sum(bucket.partial(ranks, data_rank) for bucket in buckets) if ranks > 1 else 0
        axis = "tp" if ranks == tensor else f"tp/{ranks}"
        size = DTYPE_BYTES[precision.gradient] * partial
        transfers.append(Transfer(axis, "all_reduce", ranks, size, 1, "partial gradients"))
    return transfers
