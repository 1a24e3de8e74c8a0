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
from shardwise.cost.params import (
    DTYPE_BYTES,
    LocalWidths,
    key_value_count,
    local_parameter_count,
    norm_count,
    replicated_bias_count,
)

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]

STEP_SCALARS = 4
"""Float64 numbers that all ranks agree on once a step: loss, squared norms of gradients and parameters, a flag."""

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


def step_transfers(config: Config, layout: Layout, accelerator: bool = False) -> list[Transfer]:
    """Every collective of one optimizer step: forward and backward of all micro-batches, reduction, update, agreement.

    Drift checks (`log.drift_every`) come on top in the steps that make them. `accelerator`: whether the run is on one,
    which settles the dtypes where `precision.mode` leaves them open.
    """
    micro_batches = layout.accumulation(config.train)
    forward_and_backward = _forward(config, layout, accelerator) + _backward(config, layout, accelerator)
    transfers = [replace(one, count=one.count * micro_batches) for one in forward_and_backward]
    transfers += _update(config, layout, accelerator)
    return [one for one in transfers if one.ranks > 1 and one.bytes and one.count]


def evaluation_transfers(config: Config, layout: Layout, accelerator: bool = False) -> list[Transfer]:
    """The collectives of one global batch of evaluation, without the final sum of losses over data parallelism."""
    micro_batches = layout.accumulation(config.train)
    transfers = [replace(one, count=one.count * micro_batches) for one in _forward(config, layout, accelerator)]
    return [one for one in transfers if one.ranks > 1]


def bytes_per_step(config: Config, layout: Layout, accelerator: bool = False) -> dict[tuple[str, str], float]:
    """Wire bytes of one rank in one optimizer step, by (axis, kind)."""
    return _sum(step_transfers(config, layout, accelerator))


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


def _update(config: Config, layout: Layout, accelerator: bool) -> list[Transfer]:
    """Once a step: gradients over data parallelism, parameters back, partial gradients over TP, agreement on scalars.

    With ZeRO partial gradients are summed after the reduce-scatter, so each rank exchanges only what its slice holds of
    them. Which ones those are depends on the slice: the number here is the mean over the d slices.
    """
    precision, tensor, data = config.precision.resolved(accelerator), layout.tensor, layout.data
    reduced = DTYPE_BYTES[precision.reduce]
    elements = local_parameter_count(config.model, tensor)
    slices = data if config.optimizer.zero else 1
    transfers = [
        Transfer("world", "all_reduce", layout.world, _FLOAT64 * STEP_SCALARS, 1, "loss, norms and flags"),
        Transfer("dp", "all_reduce", data, _FLOAT64, 1, "number of counted targets"),
    ]
    if config.optimizer.zero:
        padded = -(-elements // data) * data
        transfers += [
            Transfer("dp", "reduce_scatter", data, reduced * padded, 1, "gradients"),
            Transfer("dp", "all_gather", data, DTYPE_BYTES[precision.parameter] * padded, 1, "parameters"),
        ]
    else:
        transfers.append(Transfer("dp", "all_reduce", data, reduced * elements, 1, "gradients"))
    if layout.sequence:
        biases = config.model.num_hidden_layers * replicated_bias_count(config.model)
        partial = reduced * (norm_count(config.model) + biases) // slices
        transfers.append(Transfer("tp", "all_reduce", tensor, partial, 1, "gradients of norms and row biases"))
    copies = LocalWidths.of(config.model, tensor).key_value_copies
    axis = "tp" if copies == tensor else f"tp/{copies}"
    shared = reduced * key_value_count(config.model, tensor) // slices
    transfers.append(Transfer(axis, "all_reduce", copies, shared, 1, "gradients of shared key/value heads"))
    return transfers
