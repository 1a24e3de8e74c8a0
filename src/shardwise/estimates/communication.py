"""Bytes that one rank sends in an optimizer step, collective by collective.

Legend: see `estimates/rank_workload.py`. A collective over n ranks on a whole tensor of b bytes makes each rank send

    2·b·(n-1)/n   all-reduce
    b·(n-1)/n     all-gather, reduce-scatter, broadcast

which is the volume of the ring algorithm (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009). The backend may
use another algorithm. A message from one rank to another costs the sender its b bytes.

Tensor and sequence parallelism communicate as in arXiv:1909.08053 and arXiv:2205.05198, ZeRO as in arXiv:1910.02054.

Axes are named as the groups in `distributed/mesh.py`: "tp", "cp", "dp", "pp", "world", "dp_cp" for data and context
parallelism together, if both are above 1, "tp/c" for the c neighbouring ranks that hold the same key/value heads,
"dp/n" for the n ranks that ZeRO cuts over and "dp/copies" for those that own the same part, if `parallel.replicate` is
above 1, and "pp/ends" for the two ranks that hold a tied embedding, if "pp" has more than these two. "dp/E" are the E
ranks that divide tensors among them (`LocalParameter.divided_over`), and `Layout.alike_axis` those that have the same
ones, as "dp" of other parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.config import DTYPE_BYTES, Config, Layout
from shardwise.config.routing import SUMS
from shardwise.estimates.feed_forward import ExpertTraffic
from shardwise.estimates.rank_workload import RankWorkload
from shardwise.estimates.sharding import BucketShape, bucket_shapes, evaluation_bytes, gathered_bytes
from shardwise.models.parameter_counts import local_parameters
from shardwise.optim.bucket_layout import LIMBS
from shardwise.pipeline.partition import pipeline_rank_of

_FLOAT32 = 4
_FLOAT64 = 8
_INT64 = 8

_Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]


@dataclass(frozen=True)
class Transfer:
    """An estimated collective, or a message to another rank."""

    axis: str
    kind: _Kind
    ranks: int
    bytes: int  # size of the whole tensor
    count: int  # number of times per step; a tensor that is sent in chunks counts once
    tensor: str

    @property
    def wire_bytes(self) -> float:
        """Bytes that each rank sends per step."""
        if self.kind == "send":
            return float(self.bytes * self.count)
        rounds = 2 if self.kind == "all_reduce" else 1
        return rounds * self.bytes * self.count * (self.ranks - 1) / self.ranks


def _tensor_transfer(workload: RankWorkload, kind: _Kind, size: int, tensor: str, count: int = 1) -> Transfer:
    return Transfer("tp", kind, workload.layout.tensor, size, count, tensor)


def _gather_transfer(workload: RankWorkload, size: int, tensor: str, count: int = 1) -> Transfer:
    """The estimated all-gather where a region of tensor parallelism begins; without sequence parallelism, nothing."""
    return _tensor_transfer(workload, "all_gather", size if workload.layout.sequence_parallel else 0, tensor, count)


def _sum_transfer(workload: RankWorkload, size: int, tensor: str, count: int = 1) -> Transfer:
    """The estimated sum where a region of tensor parallelism ends; under sequence parallelism each rank gets a part."""
    kind: _Kind = "reduce_scatter" if workload.layout.sequence_parallel else "all_reduce"
    return _tensor_transfer(workload, kind, size, tensor, count)


def step_transfers(
    config: Config,
    layout: Layout,
    accelerator: bool = False,
    *,
    pipeline_rank: int = 0,
    data_rank: int = 0,
    tensor_rank: int = 0,
    imbalance: float = 1.0,
) -> list[Transfer] | None:
    """Estimate every collective and message of one rank in one optimizer step. None for a model of your own.

    The step is the forward and backward passes of all micro-batches, the reduction of gradients and the update. The
    comparison of replicas (`log.drift_every`) is not counted.

    Args:
        accelerator: True if the run is on one; it decides the dtypes where `precision.mode` is null.
        pipeline_rank: place of the rank in its pipeline.
        data_rank: place in data parallelism. With ZeRO, it decides which partial gradients the rank owns.
        tensor_rank: place in tensor parallelism. It decides how many rows of a tied embedding are padding.
        imbalance: rows that routers send to the rank over those of balanced loads.
    """
    workload = RankWorkload.of(config, layout, accelerator, pipeline_rank)
    if workload is None:
        return None
    if imbalance != 1.0:
        workload = replace(workload, imbalance=imbalance)
    micro_batch = _forward(workload) + _backward(workload) + _scales(workload) + _router_losses(workload)
    once = [_weight_scales(workload), *_update(workload, data_rank, tensor_rank)]
    if workload.counts_first:
        samples = _samples(workload)
        micro_batch += [transfer for transfer in _forward(workload) if transfer != samples]
        once += _counted_loads(workload) + _weights_of_units(workload, evaluation_bytes(workload))
    return _transfers(workload, micro_batch, once)


def evaluation_transfers(
    config: Config, layout: Layout, accelerator: bool = False, *, pipeline_rank: int = 0
) -> list[Transfer] | None:
    """Estimate every collective and message of one rank in one global batch of evaluation. None: a model of your own.

    The sum of losses over data parallelism and pipeline, at the end of an evaluation, is not counted.
    """
    workload = RankWorkload.of(config, layout, accelerator, pipeline_rank)
    if workload is None:
        return None
    return _transfers(workload, _forward(workload), _weights_of_units(workload, evaluation_bytes(workload)))


def wire_bytes(transfers: list[Transfer] | None) -> dict[tuple[str, str], float] | None:
    """Return the estimated bytes that one rank sends, by (axis, kind). None for a model of your own."""
    if transfers is None:
        return None
    total: dict[tuple[str, str], float] = defaultdict(float)
    for transfer in transfers:
        total[transfer.axis, transfer.kind] += transfer.wire_bytes
    return dict(total)


def _transfers(workload: RankWorkload, micro_batch: list[Transfer], once: list[Transfer]) -> list[Transfer]:
    repeated = [replace(transfer, count=transfer.count * workload.micro_batches) for transfer in micro_batch]
    return [transfer for transfer in repeated + once if transfer.ranks > 1 and transfer.bytes and transfer.count]


# ---- one micro-batch


def _forward(workload: RankWorkload) -> list[Transfer]:
    transfers = []
    if workload.has_first:
        # Each rank looks up its part of the vocabulary.
        transfers.append(_sum_transfer(workload, workload.gathered_bytes, "embedding output"))
    transfers += [*_regions(workload, _outputs(workload), ""), _query_key_squares(workload, "")]
    transfers.append(_keys_and_values(workload, "all_gather", "keys and values"))
    transfers += _experts_forward(workload)
    if workload.has_last:
        transfers += _head(workload)
    return [*transfers, _message(workload, 1, "outputs of stages"), _samples(workload)]


def _backward(workload: RankWorkload) -> list[Transfer]:
    """The backward pass: the forward pass in reverse, and what full recompute repeats of the forward pass.

    The head's input gets a gradient from each rank's part of the vocabulary; they are summed. BERT also sums the
    gradient of its decoder's input, [P·B, H].
    """
    size = workload.gathered_bytes
    outputs = _outputs(workload)
    head = int(workload.has_last)
    embedding = int(workload.has_first)
    transfers = []
    if workload.recompute == "full":
        # Recompute stops at the last tensor that a block saves. The sum after a block's last matrix product is
        # repeated only if dropout (its mask) or a norm (its input) saves something after it, or if both are in one.
        in_one = workload.config.parallel.tensor_overlap is not None
        ends_with_sum = workload.model.norm_place == "input" and not workload.drops_hidden and not in_one
        transfers = _regions(workload, outputs - ends_with_sum, ", recomputed")
        transfers.append(_query_key_squares(workload, "recomputed "))
        transfers += _experts_forward(workload, ", recomputed")
    if workload.gathers_keys_again:
        times = 2 if workload.config.passes_keys and workload.recompute == "full" else 1
        transfers.append(_keys_and_values(workload, "all_gather", "keys and values, gathered again", times))
    transfers.append(_keys_and_values(workload, "reduce_scatter", "gradients of keys and values"))
    if workload.config.regathers:
        inputs = "inputs of attention and MLP, gathered again"
        # Experts keep their routed rows: only an MLP gathers its input again.
        count = workload.layers + (workload.layers - _sparse_blocks(workload))
        transfers.append(_gather_transfer(workload, size, inputs, count))
    transfers.append(_query_key_squares(workload, "gradients of "))
    transfers += _experts_backward(workload)
    if workload.model.head_transform:
        of_decoder = workload.a * workload.predicted * workload.model.hidden_size
        transfers.append(_tensor_transfer(workload, "all_reduce", of_decoder, "gradient of the decoder's input", head))
    transfers += [
        _sum_transfer(workload, size, "gradient of the head's input", head),
        _gather_transfer(workload, size, "gradients of the outputs of attention and MLP", outputs * workload.layers),
        _sum_transfer(workload, size, "gradients of the inputs of attention and MLP", 2 * workload.layers),
        _gather_transfer(workload, size, "gradient of the embedding output", embedding),
    ]
    if workload.token_parts:
        elements = workload.head_gradient_elements
        elements += sum(parameter.elements for bucket in bucket_shapes(workload) for _, parameter in bucket.parameters)
        of_all = DTYPE_BYTES[workload.precision.parameter] * elements
        ranks = workload.layout.context
        transfers.append(Transfer("cp", "all_reduce", ranks, of_all, 1, "gradients of all parameters"))
    return [*transfers, _message(workload, -1, "gradients of the inputs of stages")]


def _samples(workload: RankWorkload) -> Transfer:
    """One rank reads whole samples for its tensor-parallel group and broadcasts 64-bit integers.

    Token ids and targets, [2·c·T]; one row more for each kind of document table, [c·T], and the number of documents
    and the longest one where they attend by themselves. BERT has ids, token types and mask, [3·T], positions and
    targets of predicted tokens, [2·P·B], and labels, [B]. And the number of targets of each loss.
    """
    model = workload.model
    data = workload.config.data
    if model.predicts_masked_tokens:
        numbers = 3 * workload.tokens + 2 * workload.predicted + workload.config.train.micro_batch
    else:
        tables = 2 + data.reset_position_ids + data.reset_attention_mask
        numbers = tables * workload.layout.context * workload.tokens + 2 * data.reset_attention_mask
    return _tensor_transfer(workload, "broadcast", _INT64 * (numbers + len(model.objectives)), "token ids and targets")


def _message(workload: RankWorkload, step: int, tensor: str) -> Transfer:
    """x or its gradient, [T/s, H], from each stage of this rank to the next stage (step 1) or to the one before (-1).

    Two neighbouring stages of one rank need no message.
    """
    receivers = [stage.index + step for stage in workload.stages]
    existing = [index for index in receivers if 0 <= index < workload.layout.stages]
    count = sum(pipeline_rank_of(workload.config.parallel, index) != workload.pipeline_rank for index in existing)
    return Transfer("pp", "send", workload.layout.pipeline, workload.x_bytes, count, tensor)


def _outputs(workload: RankWorkload) -> int:
    """The outputs of each block that are summed over tensor parallelism: those of attention and MLP.

    A parallel residual adds the two before it sums them, unless each has dropout of its own.
    """
    return 1 if workload.model.parallel_residual and not workload.drops_hidden else 2


def _regions(workload: RankWorkload, outputs: int, suffix: str) -> list[Transfer]:
    """The two inputs of attention and MLP in all blocks, and so many of their outputs in each block."""
    size, layers = workload.gathered_bytes, workload.layers
    return [
        _gather_transfer(workload, size, f"inputs of attention and MLP{suffix}", 2 * layers),
        _sum_transfer(workload, size, f"outputs of attention and MLP{suffix}", outputs * layers),
    ]


def _query_key_squares(workload: RankWorkload, prefix: str) -> Transfer:
    """A norm over all heads sums the squares of queries and keys over ranks: [2, T] in float32 for each block."""
    count = workload.layers if workload.model.query_key_norm == "all_heads" else 0
    tensor = f"{prefix}sums of squares of queries and keys"
    return _tensor_transfer(workload, "all_reduce", 2 * _FLOAT32 * workload.tokens, tensor, count)


def _keys_and_values(workload: RankWorkload, kind: _Kind, tensor: str, times: int = 1) -> Transfer:
    """Keys, and values, of all tokens of a sample in each block: a·c·T·kv/t bytes each, in a collective of each.

    Rank by rank, those of the rank, a·T·kv/t bytes each, go to each other rank in one message.
    """
    context = workload.layout.context
    size = workload.a * workload.tokens * workload.local.key_value
    if workload.config.passes_keys:
        return Transfer("cp", "send", context, 2 * size, times * (context - 1) * workload.layers, tensor)
    return Transfer("cp", kind, context, context * size, times * 2 * workload.layers, tensor)


def _scales(workload: RankWorkload) -> list[Transfer]:
    """The scales of fp8 products in a micro-batch, which ranks agree on by the largest number, in float32.

    Over tensor parallelism they are those of two of the four linear layers of a block each: of the inputs that are cut,
    those of attention's output and of the MLP's second layer, and of the gradients of outputs that are cut, those of
    QKV and of the MLP's first layer. Over context parallelism they are those of all four. Full recompute repeats the
    forward pass, and a split backward pass computes its gradients in both halves.
    """
    if workload.config.precision.matmul is None:
        return []
    forwards = 2 * workload.layers * (2 if workload.recompute == "full" else 1)
    backwards = 2 * workload.layers * (2 if workload.config.splits_backward else 1)
    inputs = "largest inputs of linear layers"
    gradients = "largest gradients of outputs"
    context = workload.layout.context
    return [
        _tensor_transfer(workload, "all_reduce", _FLOAT32, inputs, forwards),
        _tensor_transfer(workload, "all_reduce", _FLOAT32, gradients, backwards),
        Transfer("cp", "all_reduce", context, _FLOAT32, 2 * forwards, inputs),
        Transfer("cp", "all_reduce", context, _FLOAT32, 2 * backwards, gradients),
    ]


def _weight_scales(workload: RankWorkload) -> Transfer:
    """The scales of a block's four weights, once a step."""
    count = 0 if workload.config.precision.matmul is None else workload.layers
    return _tensor_transfer(workload, "all_reduce", 4 * _FLOAT32, "largest weights of linear layers", count)


def _head(workload: RankWorkload) -> list[Transfer]:
    """Head and loss, forward.

    Each rank has the logits of its part of the vocabulary. For every predicted token the ranks agree on the largest
    logit, then on the sum of exponentials and on the target's logit, all in float32. Under sequence parallelism the
    head's input is gathered. BERT gathers what the first layers of its two heads return, [P·B, H] and [B, H].
    """
    tokens = _FLOAT32 * workload.predicted
    transfers = [
        _tensor_transfer(workload, "all_reduce", tokens, "largest logit of each token"),
        _tensor_transfer(workload, "all_reduce", 2 * tokens, "sum of exponentials and target logit"),
        _gather_transfer(workload, workload.gathered_bytes, "input of the head"),
    ]
    if workload.model.head_transform:
        size = workload.a * (workload.predicted + workload.config.train.micro_batch) * workload.model.hidden_size
        transfers.append(_tensor_transfer(workload, "all_gather", size, "inputs of the decoder and of the classifier"))
    return transfers


# ---- one update


def _update(workload: RankWorkload, data_rank: int, tensor_rank: int) -> list[Transfer]:
    """Return the transfers of an update: gradients over data parallelism, partial gradients, scalars, new parameters.

    Gradients are reduced over data parallelism first. Then the partial ones are summed, in the gradients' dtype: each
    rank sends only the partial elements of the slice that it owns. A tied embedding at both ends of a pipeline is
    partial over these two ranks. Trust ratios need two norms of each canonical tensor (LAMB,
    arXiv:1904.00962). With stochastic rounding, norms are sums in float64.
    """
    precision = workload.precision
    optimizer = workload.config.optimizer
    layout = workload.layout
    axis = layout.replicas_axis
    replicas = layout.replicas
    objectives = len(workload.model.objectives)
    data_rank %= workload.shard_ranks
    buckets = bucket_shapes(workload)
    is_ordered = workload.is_bit_equal
    norm = _FLOAT64 if precision.rounding == "stochastic" else _FLOAT32
    losses = _FLOAT32 * objectives
    if is_ordered:
        norm = _FLOAT64 * LIMBS
        losses *= workload.config.train.micro_batches
        loss = [
            Transfer("cp", "all_reduce", layout.context, losses // layout.data, 1, "loss of shared samples"),
            Transfer("dp", "all_gather", layout.data, losses, 1, "loss"),
        ]
    else:
        loss = [Transfer(axis, "all_reduce", replicas, losses, 1, "loss")]
    transfers = [
        Transfer(axis, "all_reduce", replicas, _FLOAT64 * objectives, 1, "number of counted targets"),
        *loss,
        Transfer("pp", "all_reduce", layout.pipeline, losses, 1, "loss of the last stage"),
        Transfer("world", "all_reduce", layout.world, 2 * norm, 1, "squared norms of gradients and parameters"),
    ]
    if optimizer.spec.has_trust_ratios:
        size = 2 * norm * sum(parameter.tensors for parameter in local_parameters(workload.model, 1))
        transfers.append(Transfer("world", "all_reduce", layout.world, size, 1, "squared norms of each tensor"))
    if optimizer.spec.orthogonalizes:
        transfers += _matrices(workload)
    transfers += [*_over_data(workload, buckets), _logged_loads(workload)]
    for ranks in sorted({layout.tensor, workload.local.key_value_copies} - {1}):
        axis = "tp" if ranks == layout.tensor else f"tp/{ranks}"
        if workload.is_bit_equal:
            # Each micro-batch's sum is complete before the next one is added to it.
            partial = sum(bucket.partial(ranks) for bucket in buckets)
            size = DTYPE_BYTES[precision.parameter] * partial
            count = workload.micro_batches
            transfers.append(Transfer(axis, "all_reduce", ranks, size, count, "gradients of shared parameters"))
        else:
            partial = sum(bucket.partial(ranks, data_rank) for bucket in buckets)
            size = DTYPE_BYTES[precision.gradient] * partial
            transfers.append(Transfer(axis, "all_reduce", ranks, size, 1, "partial gradients"))
    rows = workload.local.vocabulary
    unpadded_rows = max(0, min(rows, workload.model.vocab_size - tensor_rank * rows))
    unpadded = unpadded_rows * workload.model.hidden_size
    size = DTYPE_BYTES[precision.gradient] * sum(bucket.at_both_ends(unpadded, data_rank) for bucket in buckets)
    axis = "pp" if layout.pipeline == 2 else "pp/ends"
    return [*transfers, Transfer(axis, "all_reduce", 2, size, 1, "gradient of the tied embedding")]


def _over_data(workload: RankWorkload, buckets: Sequence[BucketShape]) -> list[Transfer]:
    """Return the reductions of gradients, and the gathers of new values of buckets that stay whole.

    Ranks that ZeRO cuts over are `n`; those that own the same part, as copies of each other, sum theirs afterwards.
    """
    transfers = []
    for divided in sorted({bucket.divided_over for bucket in buckets}):
        alike = [bucket for bucket in buckets if bucket.divided_over == divided]
        elements = sum(bucket.elements for bucket in alike)
        elements += workload.head_gradient_elements if divided == 1 else 0
        gradients = DTYPE_BYTES[workload.precision.reduce] * elements
        axis, shard_axis, n = _shards(workload, divided)
        copies = workload.layout.replicas // divided // n
        copies_axis = workload.layout.alike_axis(n) if divided == 1 else f"{axis}/copies"
        # Parts that no other rank has are complete at once, and wait for the end of the step.
        count = workload.reductions if n > 1 else 1
        if n == 1:
            transfers.append(Transfer(axis, "all_reduce", copies, gradients, count, "gradients"))
            continue
        whole_elements = sum(bucket.elements for bucket in alike if not (workload.frees_values and bucket.has_matrices))
        values = DTYPE_BYTES[workload.precision.parameter] * whole_elements
        transfers += [
            Transfer(shard_axis, "reduce_scatter", n, gradients, count, "gradients"),
            Transfer(copies_axis, "all_reduce", copies, gradients // n, count, "owned gradients of copies"),
            Transfer(shard_axis, "all_gather", n, values, 1, "parameters"),
        ]
    return transfers + _weights_of_units(workload, gathered_bytes(workload))


def _weights_of_units(workload: RankWorkload, sizes: Mapping[int, int]) -> list[Transfer]:
    """The gathers of so many bytes of values, by the number of ranks that divide the tensors among them."""
    transfers = []
    for divided, size in sizes.items():
        _, axis, n = _shards(workload, divided)
        transfers.append(Transfer(axis, "all_gather", n, size, 1, "weights of units"))
    return transfers


def _shards(workload: RankWorkload, divided: int) -> tuple[str, str, int]:
    """Return the axis of the ranks that have the same part, that of those that ZeRO cuts it over, and their number.

    divided: data-parallel ranks that divide the tensors of its kind among them.
    """
    replicas = workload.layout.replicas // divided
    axis = workload.layout.alike_axis(divided) if divided > 1 else workload.layout.replicas_axis
    n = max(1, workload.shard_ranks // divided)
    return axis, axis if n == replicas else f"{axis}/{n}", n


def _matrices(workload: RankWorkload) -> list[Transfer]:
    """Return the transfers of Muon's matrices: each rank of a stage sends its part to their owners, and gets it back.

    Owners have equal work and not equal bytes, so that these are means over the ranks.
    """
    layout = workload.layout
    optimizer = workload.config.optimizer
    ranks = layout.tensor * layout.replicas
    width = DTYPE_BYTES[optimizer.muon.dtype(workload.accelerator)]
    matrices = [bucket for bucket in bucket_shapes(workload) if bucket.is_orthogonalized]
    part = width * sum(bucket.elements * bucket.divided_over for bucket in matrices) // layout.replicas
    updates = width * sum(bucket.elements // bucket.slices for bucket in matrices)
    axis = "tp" if layout.replicas == 1 else layout.replicas_axis if layout.tensor == 1 else "world"
    if axis == "world" and layout.pipeline > 1:
        axis = f"world/{ranks}"
    return [
        Transfer(axis, "all_to_all", ranks, part, 1, "matrices to their owners"),
        Transfer(axis, "all_to_all", ranks, updates, 1, "updates of the matrices"),
    ]


# ---- collectives beside those of a block's regions: of E ranks a token travels to D, and U tokens arrive


def _sparse_blocks(workload: RankWorkload) -> int:
    layers = (layer for stage in workload.stages for layer in stage.layers)
    return sum(workload.model.routing(layer) is not None for layer in layers)


def _over_experts(workload: RankWorkload, size: int, tensor: str, count: int) -> Transfer:
    """An all-to-all over the ranks that divide the experts, of which a rank sends so many bytes, its own included."""
    layout = workload.layout
    axis = layout.replicas_axis
    axis = axis if layout.expert == layout.replicas else f"{axis}/{layout.expert}"
    return Transfer(axis, "all_to_all", layout.expert, size, count, tensor)


def _experts_forward(workload: RankWorkload, suffix: str = "") -> list[Transfer]:
    """The estimated transfers of the forward pass of experts in all blocks.

    Ranks that divide the experts send two numbers to each, [2·E] in int64, tokens with their weights and numbers of
    experts, [T·D, H] and [T·D, 2k] in float32, and back what arrived, [U, H]. In bit-equal sums a token travels to each
    expert, with two numbers, and results by parts. Under sequence parallelism, the weights and the numbers of the
    chosen experts are gathered, [T·k] in float32 and in int64. The expert that all tokens use is a region of tensor
    parallelism by itself; results are recomputed before it only.
    """
    routing, count = workload.model.any_routing, _sparse_blocks(workload)
    if routing is None:
        return []
    traffic = ExpertTraffic.of(workload, routing)
    row = workload.a * workload.model.hidden_size
    shared = workload.gathered_bytes if workload.model.shared_expert_width else 0
    results = 0 if suffix and not shared else workload.parts_of_sums * row * traffic.arriving
    chosen = (_FLOAT32 + _INT64) * workload.tokens * routing.per_token
    sent = (row + traffic.choices) * traffic.sent
    return [
        _over_experts(workload, 2 * _INT64 * workload.layout.expert, f"numbers of tokens{suffix}", count),
        _over_experts(workload, sent, f"tokens and choices{suffix}", count),
        _over_experts(workload, results, f"results of tokens{suffix}", count),
        _gather_transfer(workload, chosen, f"weights and numbers of chosen experts{suffix}", count),
        _gather_transfer(workload, shared, f"input of the shared expert{suffix}", count),
        _sum_transfer(workload, shared, f"output of the shared expert{suffix}", count),
    ]


def _experts_backward(workload: RankWorkload) -> list[Transfer]:
    """The backward pass of `_experts_forward`: tensors go the other way; the numbers of tokens are known."""
    routing, count = workload.model.any_routing, _sparse_blocks(workload)
    if routing is None:
        return []
    traffic = ExpertTraffic.of(workload, routing)
    row = workload.a * workload.model.hidden_size
    shared = workload.gathered_bytes if workload.model.shared_expert_width else 0
    arrived = (workload.parts_of_sums * row + traffic.choices) * traffic.arriving
    weights = _FLOAT32 * workload.tokens * routing.per_token
    again = shared * workload.config.regathers
    return [
        _over_experts(workload, row * traffic.sent, "gradients of results of tokens", count),
        _over_experts(workload, arrived, "gradients of tokens and choices", count),
        _sum_transfer(workload, weights, "gradients of weights of chosen experts", count),
        _sum_transfer(workload, shared, "gradient of the shared expert's input", count),
        _gather_transfer(workload, shared, "gradient of the shared expert's output", count),
        _gather_transfer(workload, again, "input of the shared expert, gathered again", count),
    ]


def _router_losses(workload: RankWorkload) -> list[Transfer]:
    """The transfers that the objectives of routers add to a micro-batch (`layers/balance.py`).

    Loads, in int64: [B·N] over context parallelism, [N] over all replicas in each block, again in full recompute. Where
    those of the whole batch must be known before, `_counted_loads` are theirs.
    """
    layout = workload.layout
    losses = workload.config.optimizer.router_losses
    times = _sparse_blocks(workload) * (2 if workload.recompute == "full" else 1)
    samples = workload.config.train.micro_batch * _load_bytes(workload) * ("sequence" in losses)
    batch = _load_bytes(workload) * ("batch" in losses and not workload.counts_first)
    return [
        Transfer("cp", "all_reduce", layout.context, samples, times, "loads of samples"),
        Transfer(layout.replicas_axis, "all_reduce", layout.replicas, batch, times, "loads of the batch"),
    ]


def _counted_loads(workload: RankWorkload) -> list[Transfer]:
    """Loads after the forward passes that only count: of the rank's blocks, and for `pooled` of all of them."""
    layout = workload.layout
    of_blocks = _load_bytes(workload) * _sparse_blocks(workload)
    pooled = _load_bytes(workload) * ("pooled" in workload.config.optimizer.router_losses)
    return [
        Transfer(layout.replicas_axis, "all_reduce", layout.replicas, of_blocks, 1, "loads of the batch"),
        Transfer("pp", "all_reduce", layout.pipeline, pooled, 1, "loads of all blocks"),
    ]


def _load_bytes(workload: RankWorkload) -> int:
    """The bytes of the row counts of each expert of a block, [N] in int64."""
    routing = workload.model.any_routing
    return 0 if routing is None else _INT64 * routing.experts


def _logged_loads(workload: RankWorkload) -> Transfer:
    """The transfers that collect the loads of experts of all blocks for the log, [N + K] in int64 each."""
    size = len(workload.model.routings) * (_load_bytes(workload) + _INT64 * len(SUMS))
    return Transfer("world", "all_reduce", workload.layout.world, size, 1, "loads of experts")
