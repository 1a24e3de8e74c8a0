"""Bytes that one rank puts on the wire in an optimizer step, collective by collective.

Legend: see `cost/case.py`. A collective over n ranks on a whole tensor of b bytes costs each rank 2·b·(n-1)/n
(all-reduce) or b·(n-1)/n (all-gather, reduce-scatter, broadcast): the ring algorithm's volume, whatever the backend
really does. A message from one rank to another costs the sender its b bytes.

Axes are named as the groups in `comm.py`: "tp", "dp", "pp", "world", "tp/c" for the c neighbouring ranks that hold the
same key/value heads, and "pp/ends" for the two that hold a tied embedding, where these are not all of "pp".
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.config import DTYPE_BYTES, BertConfig, Config, Layout
from shardwise.cost.buckets import bucket_shapes
from shardwise.cost.case import Case
from shardwise.plan.parameters import local_parameters
from shardwise.plan.stage import rank_of

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"]

_FLOAT32, _FLOAT64, _INT64 = 4, 8, 8


@dataclass(frozen=True)
class Transfer:
    """One collective of a step, or message to another rank.

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
        if self.kind == "send":
            return float(self.bytes * self.count)
        rounds = 2 if self.kind == "all_reduce" else 1
        return rounds * self.bytes * self.count * (self.ranks - 1) / self.ranks


def step_transfers(
    config: Config,
    layout: Layout,
    accelerator: bool = False,
    *,
    pipeline_rank: int = 0,
    data_rank: int = 0,
    tensor_rank: int = 0,
) -> list[Transfer] | None:
    """Every collective and message of one optimizer step of one rank: forward and backward of all micro-batches,
    reduction, update, agreement.

    Drift checks (`log.drift_every`) come on top in the steps that make them. `accelerator`: whether the run is on one,
    which settles the dtypes where `precision.mode` leaves them open. `data_rank`: with ZeRO, what a rank owns of the
    gradients that are partial over other ranks depends on its place in data parallelism. `tensor_rank`: of a tied
    embedding at both ends of a pipeline only what is no padding travels. None for a model of your own.
    """
    case = Case.of(config, layout, accelerator, pipeline_rank)
    if case is None:
        return None
    once = _update(case, data_rank) + _ends(case, data_rank, tensor_rank)
    return _happening(_repeated(case, _forward(case) + _backward(case)) + once)


def evaluation_transfers(
    config: Config, layout: Layout, accelerator: bool = False, *, pipeline_rank: int = 0
) -> list[Transfer] | None:
    """The collectives of one global batch of evaluation, without the final sum of losses over data parallelism and
    the pipeline.

    None for a model of your own.
    """
    case = Case.of(config, layout, accelerator, pipeline_rank)
    if case is None:
        return None
    return _happening(_repeated(case, _forward(case)))


def bytes_per_step(
    config: Config,
    layout: Layout,
    accelerator: bool = False,
    *,
    pipeline_rank: int = 0,
    data_rank: int = 0,
    tensor_rank: int = 0,
) -> dict[tuple[str, str], float] | None:
    """Wire bytes of one rank in one optimizer step, by (axis, kind). None for a model of your own."""
    return _sum(
        step_transfers(
            config,
            layout,
            accelerator,
            pipeline_rank=pipeline_rank,
            data_rank=data_rank,
            tensor_rank=tensor_rank,
        )
    )


def bytes_per_evaluation_batch(
    config: Config, layout: Layout, accelerator: bool = False, *, pipeline_rank: int = 0
) -> dict[tuple[str, str], float] | None:
    """Wire bytes of one rank in one global batch of evaluation, by (axis, kind). None for a model of your own."""
    return _sum(evaluation_transfers(config, layout, accelerator, pipeline_rank=pipeline_rank))


def _sum(transfers: list[Transfer] | None) -> dict[tuple[str, str], float] | None:
    if transfers is None:
        return None
    total: dict[tuple[str, str], float] = defaultdict(float)
    for one in transfers:
        total[one.axis, one.kind] += one.wire_bytes
    return dict(total)


def _repeated(case: Case, transfers: list[Transfer]) -> list[Transfer]:
    """One micro-batch's transfers in all micro-batches of a global batch."""
    return [replace(one, count=one.count * case.micro_batches) for one in transfers]


def _happening(transfers: list[Transfer]) -> list[Transfer]:
    return [one for one in transfers if one.ranks > 1 and one.bytes and one.count]


# ---- one micro-batch


@dataclass(frozen=True)
class _Blocks:
    """Collectives of all blocks, by what they are for.

    Attributes:
        entered, left: column-parallel regions that the blocks enter, and row-parallel ones that they leave, forward.
        entered_again, left_again: those that full recompute repeats.
    """

    entered: int
    left: int
    entered_again: int
    left_again: int

    @staticmethod
    def of(case: Case) -> _Blocks:
        """Attention and MLP are one region each; a parallel residual sums both outputs before it leaves, but not with
        dropout on each of them.

        Recompute ends with the last tensor that a block saves. Where that is the input of its last matrix product, the
        sum behind it is not repeated; it is where dropout's mask or a norm comes after it.
        """
        model, layers = case.model, case.layers
        joined = model.parallel_residual and not case.drops_hidden
        left = 1 if joined else 2
        if case.config.train.recompute != "full":
            return _Blocks(2 * layers, left * layers, 0, 0)
        ends_with_sum = model.norm_place == "input" and not case.drops_hidden
        return _Blocks(2 * layers, left * layers, 2 * layers, (left - ends_with_sum) * layers)


def _hidden_bytes(case: Case) -> int:
    """Bytes of a whole x_SBH of one micro-batch."""
    return case.a * case.tokens * case.model.hidden_size


def _forward(case: Case) -> list[Transfer]:
    """What this rank's stages do, and x from each of them to the next, where another rank has that."""
    embedding = _embedding(case) if case.has_first else []
    head = _head(case) if case.has_last else []
    return [*embedding, *_blocks(case), *head, *_messages(case, 1, "outputs of stages"), _samples(case)]


def _samples(case: Case) -> Transfer:
    """What one rank reads for all of its tensor-parallel group: ids and targets [T], or BERT's ids, types and mask [T]
    with positions and targets [P·B] and labels [B]; two rows for documents within a sample, [T]; counted targets [K].
    """
    model, data = case.model, case.config.data
    if isinstance(model, BertConfig):
        numbers = 3 * case.tokens + 2 * case.predicted + case.config.train.micro_batch
    else:
        numbers = (2 + data.reset_position_ids + data.reset_attention_mask) * case.tokens
    size = _INT64 * (numbers + len(model.objectives))
    return Transfer("tp", "broadcast", case.layout.tensor, size, 1, "token ids and targets")


def _messages(case: Case, step: int, what: str) -> list[Transfer]:
    """x, [T/s, H], or its gradient, from each stage of this rank to the next (step 1) or the one before (-1)."""
    parallel, last = case.config.parallel, case.layout.stages - 1
    to = [stage.index + step for stage in case.stages if 0 <= stage.index + step <= last]
    count = sum(rank_of(parallel, index) != case.pipeline_rank for index in to)
    size = case.a * case.tokens_between * case.model.hidden_size
    return [Transfer("pp", "send", case.layout.pipeline, size, count, what)]


def _embedding(case: Case) -> list[Transfer]:
    kind: Kind = "reduce_scatter" if case.layout.sequence else "all_reduce"
    return [Transfer("tp", kind, case.layout.tensor, _hidden_bytes(case), 1, "embedding output")]


def _blocks(case: Case) -> list[Transfer]:
    """All blocks forward. With sequence parallelism entering gathers and leaving reduce-scatters; without, only leaving
    communicates."""
    blocks = _Blocks.of(case)
    return [*_regions(case, blocks.entered, blocks.left, ""), _query_key_squares(case, "")]


def _regions(case: Case, entered: int, left: int, again: str) -> list[Transfer]:
    tensor, hidden = case.layout.tensor, _hidden_bytes(case)
    if not case.layout.sequence:
        return [Transfer("tp", "all_reduce", tensor, hidden, left, f"outputs of attention and MLP{again}")]
    return [
        Transfer("tp", "all_gather", tensor, hidden, entered, f"inputs of attention and MLP{again}"),
        Transfer("tp", "reduce_scatter", tensor, hidden, left, f"outputs of attention and MLP{again}"),
    ]


def _query_key_squares(case: Case, of: str) -> Transfer:
    """A norm over all heads sums the squares of queries and keys, [2, T] in float32, once a block."""
    count = case.layers if case.model.query_key_norm == "all_heads" else 0
    size = 2 * _FLOAT32 * case.tokens
    return Transfer("tp", "all_reduce", case.layout.tensor, size, count, f"{of}sums of squares of queries and keys")


def _head(case: Case) -> list[Transfer]:
    """Head and loss forward.

    The loss exchanges the largest logit of each token that is predicted, then the sum of exponentials and the target's
    logit, in float32. BERT gathers what its two heads' first layers return, [P·B, H] and [B, H].
    """
    tensor, hidden, predicted = case.layout.tensor, _hidden_bytes(case), case.predicted
    transfers = [
        Transfer("tp", "all_reduce", tensor, _FLOAT32 * predicted, 1, "largest logit of each token"),
        Transfer("tp", "all_reduce", tensor, 2 * _FLOAT32 * predicted, 1, "sum of exponentials and target logit"),
    ]
    if case.layout.sequence:
        transfers.append(Transfer("tp", "all_gather", tensor, hidden, 1, "input of the head"))
    if isinstance(case.model, BertConfig):
        rows = predicted + case.config.train.micro_batch
        size = case.a * rows * case.model.hidden_size
        transfers.append(Transfer("tp", "all_gather", tensor, size, 1, "inputs of the decoder and of the classifier"))
    return transfers


def _backward(case: Case) -> list[Transfer]:
    """Backward: the mirror image of the forward pass, what full recompute repeats, and gradients of the head's input.

    BERT's decoder sums the gradient of its own input, [P·B, H], and its heads that of theirs, as every head's input.
    """
    tensor, hidden, blocks = case.layout.tensor, _hidden_bytes(case), _Blocks.of(case)
    head, embedding = int(case.has_last), int(case.has_first)
    transfers = _regions(case, blocks.entered_again, blocks.left_again, ", recomputed")
    if case.config.train.recompute == "full":
        transfers.append(_query_key_squares(case, "recomputed "))
    transfers.append(_query_key_squares(case, "gradients of "))
    if isinstance(case.model, BertConfig):
        size = case.a * case.predicted * case.model.hidden_size
        transfers.append(Transfer("tp", "all_reduce", tensor, size, head, "gradient of the decoder's input"))
    inputs, outputs = (f"gradients of the {which} of attention and MLP" for which in ("inputs", "outputs"))
    if case.layout.sequence:
        transfers += [
            Transfer("tp", "reduce_scatter", tensor, hidden, head, "gradient of the head's input"),
            Transfer("tp", "all_gather", tensor, hidden, blocks.left, outputs),
            Transfer("tp", "reduce_scatter", tensor, hidden, blocks.entered, inputs),
            Transfer("tp", "all_gather", tensor, hidden, embedding, "gradient of the embedding output"),
        ]
    else:
        transfers += [
            Transfer("tp", "all_reduce", tensor, hidden, head, "gradient of the head's input"),
            Transfer("tp", "all_reduce", tensor, hidden, blocks.entered, inputs),
        ]
    return transfers + _messages(case, -1, "gradients of the inputs of stages")


# ---- one update


def _update(case: Case, data_rank: int) -> list[Transfer]:
    """Once a step: gradients over data parallelism, partial ones over TP, agreement on scalars, parameters back.

    Partial gradients are summed after the reduction over data parallelism, in the gradient dtype: each rank exchanges
    only what its slice holds of them. LAMB agrees on two norms of each canonical tensor.
    """
    precision, config, layout = case.precision, case.config, case.layout
    tensor, data, objectives = layout.tensor, layout.data, len(case.model.objectives)
    buckets = bucket_shapes(case)
    elements = sum(bucket.elements for bucket in buckets)
    gradients = DTYPE_BYTES[precision.reduce] * elements
    transfers = [
        Transfer("dp", "all_reduce", data, _FLOAT64 * objectives, 1, "number of counted targets"),
        Transfer("dp", "all_reduce", data, _FLOAT32 * objectives, 1, "loss"),
        Transfer("pp", "all_reduce", layout.pipeline, _FLOAT32 * objectives, 1, "loss of the last stage"),
        Transfer("world", "all_reduce", layout.world, 2 * _FLOAT32, 1, "squared norms of gradients and parameters"),
    ]
    if config.optimizer.name == "lamb":
        size = 2 * _FLOAT32 * sum(one.tensors for one in local_parameters(case.model, 1))
        transfers.append(Transfer("world", "all_reduce", layout.world, size, 1, "squared norms of each tensor"))
    if config.optimizer.zero:
        parameters = DTYPE_BYTES[precision.parameter] * elements
        transfers += [
            Transfer("dp", "reduce_scatter", data, gradients, 1, "gradients"),
            Transfer("dp", "all_gather", data, parameters, 1, "parameters"),
        ]
    else:
        transfers.append(Transfer("dp", "all_reduce", data, gradients, 1, "gradients"))
    for ranks in sorted({tensor, case.local.key_value_copies}):
        partial = sum(bucket.partial(ranks, data_rank) for bucket in buckets) if ranks > 1 else 0
        axis = "tp" if ranks == tensor else f"tp/{ranks}"
        size = DTYPE_BYTES[precision.gradient] * partial
        transfers.append(Transfer(axis, "all_reduce", ranks, size, 1, "partial gradients"))
    return transfers


def _ends(case: Case, data_rank: int, tensor_rank: int) -> list[Transfer]:
    """Once a step: the gradient of a tied embedding, summed over the two pipeline ranks that hold it.

    As other partial gradients, it is summed after the reduction over data parallelism, what a slice holds of it.
    """
    rows, vocabulary = case.local.vocabulary, case.model.vocab_size
    held = max(0, min(rows, vocabulary - tensor_rank * rows)) * case.model.hidden_size
    owned = sum(bucket.at_both_ends(held, data_rank) for bucket in bucket_shapes(case))
    axis = "pp" if case.layout.pipeline == 2 else "pp/ends"
    size = DTYPE_BYTES[case.precision.gradient] * owned
    return [Transfer(axis, "all_reduce", 2, size, 1, "gradient of the tied embedding")]
