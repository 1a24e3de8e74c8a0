"""Counts of a model's parameters, whole and one by one on a rank.

Memory is predicted, and stages of a pipeline are balanced, by these numbers.

Legend: V vocabulary, H hidden size, F intermediate size, L blocks, S sequence length, q = heads · head_dim,
kv = key/value heads · head_dim, t tensor-parallel degree. Shapes are those on one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardwise.config import FamilyConfig, ModelConfig
from shardwise.config.layout import Layout, LayoutStage
from shardwise.config.routing import Routing
from shardwise.layers.chunks import vocabulary_rows
from shardwise.optim.bucket_layout import UnitPlace

if TYPE_CHECKING:  # costly to import, for a class of the user's alone
    from shardwise.config.stand_in import StandIn

Per = Literal["token", "prediction", "sequence"]
"""Vectors that a matrix is multiplied with: every token (blocks), every predicted token (head), one of a sequence."""


@dataclass(frozen=True)
class LocalWidths:
    """Widths by which a model's parameters are counted on one rank, where t ranks cut the model."""

    vocabulary: int  # rows of embedding and head: V / t rounded up to a multiple; the last ranks' are padded
    query: int
    # Width of the keys, kv / t, but at least one head: with t > kv heads neighbouring ranks hold the same.
    key_value: int
    intermediate: int
    key_value_copies: int  # number of ranks that hold the same key/value head
    expert_ranks: int = 1  # ranks that divide the experts of a block among them, E

    @staticmethod
    def of(model: FamilyConfig, tensor: int, vocab_multiple: int = 1, expert_ranks: int = 1) -> LocalWidths:
        return LocalWidths(
            vocabulary=vocabulary_rows(model.vocab_size, tensor, vocab_multiple),
            query=model.num_attention_heads * model.head_dim // tensor,
            key_value=max(model.num_key_value_heads // tensor, 1) * model.head_dim,
            intermediate=model.intermediate_size // tensor,
            key_value_copies=max(tensor // model.num_key_value_heads, 1),
            expert_ranks=expert_ranks,
        )

    @staticmethod
    def on(layout: Layout, model: FamilyConfig, vocab_multiple: int = 1) -> LocalWidths:
        """Return the widths of a rank's part at a layout."""
        return LocalWidths.of(model, layout.tensor, vocab_multiple, layout.expert)


OUTSIDE, EMBEDDING, HEAD = (UnitPlace(0, unit) for unit in (-1, -2, -3))
"""Places of parameters that no block has: those of no smaller unit than the stage, of the embedding and of the head."""


class LocalParameter(NamedTuple):  # which is made in a fraction of the time of a dataclass: a model has thousands
    """One of a model's parameters on one rank, as its elements are counted."""

    elements: int  # number of elements on this rank, padding included
    matrix: bool = True  # true if its canonical tensors are matrices, so that weight decay applies
    tensors: int = 1  # number of canonical tensors that it holds a part of
    # Vectors that it is multiplied with; None for a vector, and for a table that is only looked up.
    per: Per | None = None
    partial_from: int = 0  # first element whose gradient is partial; all after it are partial too
    partial_over: int = 1  # number of ranks over which these gradients are still to be summed; 1: none is partial
    # Share of the tokens that it is multiplied with: an expert's is its share of balanced loads; 0: the bias of a
    # router, which has no gradient.
    used_share: float = 1.0
    divided_over: int = 1  # data-parallel ranks that divide the tensors of its kind among them: E of experts
    # True if the other end of the pipeline holds it too, with a part of its gradient: a tied embedding.
    at_both_ends: bool = False
    in_block: bool = False
    # Pipeline stage and unit (`layers/units.py`): the number of its block, or a negative one.
    place: UnitPlace = OUTSIDE

    @property
    def is_trained(self) -> bool:
        """True if a bucket has it."""
        return self.used_share > 0

    @property
    def is_routed(self) -> bool:
        """True if it meets only the tokens that a router sends to it, as the weights of an expert do."""
        return self.used_share < 1

    @property
    def is_block_matrix(self) -> bool:
        """True for what Muon orthogonalizes."""
        return self.matrix and self.in_block


def parameter_count(model: ModelConfig) -> int | None:
    """Return the model's parameters; a tied embedding counts once, padding never. None for a class of the user's."""
    count = local_parameter_count(model, 1)
    return count and int(getattr(model, "parameters", count))  # a `StandIn` knows those of the user's class


def local_parameter_count(
    model: ModelConfig,
    tensor: int,
    *,
    vocab_multiple: int = 1,
    stages: Sequence[LayoutStage] | None = None,
    block_matrices: bool = False,
) -> int | None:
    """Count the parameters of a model that one of t ranks holds, replicated ones and the vocabulary's padding included.

    Args:
        tensor: the tensor-parallel degree t.
        vocab_multiple: number that divides each rank's rows of embedding and head.
        stages: pipeline stages of the rank; None: the whole model.
        block_matrices: true to count only the elements of matrices of blocks.

    Returns:
        The number; None for a class of the user's.
    """
    if model.is_own:
        return None
    local = LocalWidths.of(model, tensor, vocab_multiple)
    chosen = None if stages is None else tuple(stages)
    return sum(elements_by_ranks(model, tensor, local, chosen, block_matrices).values())


# The planner asks for the same stages in thousands of layouts.
@lru_cache(maxsize=2**12)
def elements_by_ranks(
    model: FamilyConfig,
    tensor: int,
    local: LocalWidths,
    stages: tuple[LayoutStage, ...] | None = None,
    block_matrices: bool = False,
) -> Counter[int]:
    """Return the elements of `local_parameter_count`, by the number of ranks that divide their tensors among them."""
    stages = stages or _whole_model(model)
    elements: Counter[int] = Counter()
    if not block_matrices:
        ends = [replace(stage, layers=range(0)) for stage in stages]
        at_ends = local_parameters(model, tensor, local=local, stages=ends)
        elements[1] += sum(parameter.elements for parameter in at_ends)
    # Blocks with the same router, or without one, have the same parameters: those of one are counted for all of them.
    for stage in stages:
        for routing, number in count_blocks(model, stage.layers):
            for divided, count in elements_of_block(model, tensor, local, routing, block_matrices).items():
                elements[divided] += count * number
    return elements


@lru_cache(maxsize=2**10)
def elements_of_block(
    model: FamilyConfig, tensor: int, local: LocalWidths, routing: Routing | None, only_matrices: bool = False
) -> Counter[int]:
    """Count the parameters of one block with this router, as `elements_by_ranks` does."""
    elements: Counter[int] = Counter()
    stage = _StageParameters(model, local, tensor, False, LayoutStage(0, 0, range(0), 1), False)
    for parameter in stage.block(routing):
        if parameter.matrix or not only_matrices:
            elements[parameter.divided_over] += parameter.elements
    return elements


@lru_cache(maxsize=2**12)
def count_blocks(model: FamilyConfig, layers: range) -> tuple[tuple[Routing | None, int], ...]:
    """Count a model's blocks by the router that they have, None for an MLP, in the order of the blocks."""
    return tuple(Counter(map(model.routing, layers)).items())


def _whole_model(model: FamilyConfig) -> tuple[LayoutStage, ...]:
    return (LayoutStage(0, 0, range(model.num_hidden_layers), 1),)


@lru_cache(maxsize=64)
def matmul_parameter_count(model: FamilyConfig, per: Per | None = None) -> int:
    """Return the number of parameters in matrix products with `per`; None: in all matrix products.

    Of the experts of a block, those count that are chosen for a token. A head counts whether or not it is tied; a table
    that is only looked up does not.
    """
    multiplied = [parameter for parameter in local_parameters(model, 1) if parameter.per is not None]
    return round(sum(p.elements * p.used_share for p in multiplied if per in (None, p.per)))


def active_parameter_count(model: ModelConfig) -> int | None:
    """Return the parameters but those of experts that are not chosen for a token. None for a class of the user's.

    An embedding counts whole, as in the names of published models.
    """
    if model.is_own or not model.is_sparse:
        return parameter_count(model)
    return round(sum(parameter.elements * (parameter.used_share or 1.0) for parameter in local_parameters(model, 1)))


def block_matrix_shapes(model: FamilyConfig, *, split_heads: bool = False) -> Counter[tuple[int, int]]:
    """Count the matrices among a block's parameters, by shape `[out, in]`: those that Muon orthogonalizes."""
    hidden = model.hidden_size
    query = model.num_attention_heads * model.head_dim
    shapes = Counter([(hidden, query)])
    routing = model.routing(model.num_hidden_layers - 1)
    widths = {model.intermediate_size: 1}
    if routing is not None:
        widths = {model.expert_width: routing.experts}
        shapes[routing.experts, hidden] += 1
        if model.shared_expert_width:
            widths[model.shared_expert_width] = widths.get(model.shared_expert_width, 0) + 1
    for width, count in widths.items():
        shapes[hidden, width] += count
        shapes[width, hidden] += (2 if model.gated else 1) * count
    if split_heads:
        shapes[model.head_dim, hidden] += model.num_attention_heads + 2 * model.num_key_value_heads
    else:
        shapes[query, hidden] += 1
        shapes[model.num_key_value_heads * model.head_dim, hidden] += 2
    return shapes


def canonical_tensor_count(model: ModelConfig) -> int | None:
    """Return the number of tensors in Hugging Face's files; a tied one counts once. None for a class of the user's."""
    if model.is_own:
        return None
    return sum(parameter.tensors for parameter in local_parameters(model, 1))


def local_parameters(
    model: FamilyConfig,
    tensor: int,
    sequence_parallel: bool = False,
    *,
    local: LocalWidths | None = None,
    stages: Sequence[LayoutStage] | None = None,
) -> Iterator[LocalParameter]:
    """Yield the parameters that one of t ranks stores, of the whole model or of some stages, in the model's order.

    Gradients are partial, under sequence parallelism, of what is replicated between the cut layers: norms, biases of
    row-parallel layers, tables of positions and token types. With tensor parallelism they are always partial of norms
    of each head, and of key/value heads that several ranks hold.
    """
    local = local or LocalWidths.of(model, tensor)
    stages = stages or _whole_model(model)
    has_first = any(stage.is_first for stage in stages)
    has_last = any(stage.is_last for stage in stages)
    at_both_ends = model.tie_word_embeddings and has_first != has_last
    for stage in stages:
        yield from _StageParameters(model, local, tensor, sequence_parallel, stage, at_both_ends).all()


@dataclass(frozen=True)
class _StageParameters:
    """The parameters of one stage on one of t ranks; the other attributes are arguments of `local_parameters`."""

    model: FamilyConfig
    local: LocalWidths
    tensor: int
    sequence_parallel: bool
    stage: LayoutStage
    at_both_ends: bool  # true if the embedding is tied, and its other end is on another pipeline rank

    def all(self) -> Iterator[LocalParameter]:
        """Yield them in the order in which the family's module has them, with their pipeline stage."""
        for parameter in self._of_model():
            yield parameter._replace(place=UnitPlace(self.stage.index, parameter.place.unit))

    def _of_model(self) -> Iterator[LocalParameter]:
        model = self.model
        if self.stage.is_first:
            yield from self.embeddings()
        elif self.stage.is_last and self.at_both_ends and not model.head_transform:
            yield self.embedding()  # the head's weight; a transforming head comes after the blocks with its own
        blocks = {routing: list(self.block(routing)) for routing in map(model.routing, self.stage.layers)}
        for layer in self.stage.layers:
            block = blocks[model.routing(layer)]
            yield from (parameter._replace(in_block=True, place=UnitPlace(0, layer)) for parameter in block)
        if not self.stage.is_last:
            return
        if model.head_transform:
            yield from self.bert_heads()
            return
        yield from self.norm()
        if not model.tie_word_embeddings:
            yield LocalParameter(self.local.vocabulary * model.hidden_size, per="prediction", place=HEAD)

    def embeddings(self) -> Iterator[LocalParameter]:
        """Words, and positions, token types and a norm where the family has them: tables are whole on every rank."""
        model = self.model
        yield self.embedding()
        for rows in (model.max_position_embeddings if model.learned_positions else 0, model.token_types):
            if rows:
                yield self.vector()._replace(elements=rows * model.hidden_size, matrix=True)
        if model.embedding_norm:
            yield from self.norm()

    def block(self, routing: Routing | None) -> Iterator[LocalParameter]:
        """Yield H·(q + 2kv) + q·H of attention and 2·H·F of the MLP (3·H·F if gated) over t, biases and norms.

        In the place of the MLP a block may have a router and experts, of which the rank has N / E.
        """
        model = self.model
        local = self.local
        if model.norms_input:
            yield from self.norm()
        # Queries come first: only shared K/V heads are partial.
        fused = 1 if model.fused_query_key_value else 3
        outputs = local.query + 2 * local.key_value
        copies = local.key_value_copies
        yield from self.columns(outputs, model.attention_bias, fused, partial_from=local.query, partial_over=copies)
        if model.query_key_norm == "head":
            # A rank sees only its own heads, so that its gradient is a part of the sum.
            yield from 2 * [LocalParameter(model.head_dim, matrix=False, partial_over=self.tensor)]
        elif model.query_key_norm == "all_heads":
            yield LocalParameter(local.query, matrix=False)
            yield LocalParameter(local.key_value, matrix=False, partial_over=copies)
        yield from self.rows(local.query, model.attention_bias and model.attention_output_bias)
        yield from self.norm()
        if model.norm_place == "both":
            yield from self.norm()
        matrices = 2 if model.gated else 1
        if routing is None:
            width = matrices * model.intermediate_size // self.tensor
            yield from self.columns(width, model.mlp_bias, tensors=matrices)
            yield from self.rows(local.intermediate, model.mlp_bias)
        else:
            yield from self.experts(routing)
        if model.norm_place != "input":
            yield from self.norm()

    def experts(self, routing: Routing) -> Iterator[LocalParameter]:
        """N·H of the router and its bias, 2·H·F and H·F over t of each of the rank's experts, and the shared expert."""
        model = self.model
        ranks = self.local.expert_ranks
        held = routing.experts // ranks
        share = routing.per_token / routing.experts
        elements = held * model.hidden_size * model.expert_width // self.tensor
        for matrices in (2, 1):
            yield LocalParameter(
                matrices * elements, tensors=matrices * held, per="token", used_share=share, divided_over=ranks
            )
        yield LocalParameter(
            routing.experts * model.hidden_size, per="token", partial_over=self.tensor if self.sequence_parallel else 1
        )
        if routing.has_bias:
            yield LocalParameter(routing.experts, matrix=False, used_share=0.0)
        if model.shared_expert_width:
            yield from self.columns(2 * model.shared_expert_width // self.tensor, bias=False, tensors=2)
            yield from self.rows(model.shared_expert_width // self.tensor, bias=False)

    def bert_heads(self) -> Iterator[LocalParameter]:
        """Pooler, masked-token head and next-sentence classifier: 2·H² + 6·H + V + 2, and the tied decoder.

        The outputs of the two heads' first layers are gathered, so no gradient is partial after these layers.
        """
        hidden = self.model.hidden_size
        yield from self.columns(hidden // self.tensor, bias=True, per="sequence")  # pooler.dense
        yield from self.columns(hidden // self.tensor, bias=True, per="prediction")  # transform.dense
        yield from 2 * [LocalParameter(hidden, matrix=False)]  # transform.LayerNorm
        if self.at_both_ends:
            yield self.embedding()  # the decoder's weight
        yield LocalParameter(self.local.vocabulary, matrix=False, place=HEAD)  # the decoder's bias
        yield LocalParameter(2 * hidden, per="sequence")  # seq_relationship
        yield LocalParameter(2, matrix=False)

    def embedding(self) -> LocalParameter:
        """[V/t, H], looked up; a tied one is multiplied in the head as well."""
        per: Per | None = "prediction" if self.model.tie_word_embeddings else None
        elements = self.local.vocabulary * self.model.hidden_size
        return LocalParameter(elements, per=per, at_both_ends=self.at_both_ends, place=EMBEDDING)

    def vector(self) -> LocalParameter:
        """[H], whole on every rank: a norm's weight or bias, or the bias of a row-parallel layer."""
        partial_over = self.tensor if self.sequence_parallel else 1
        return LocalParameter(self.model.hidden_size, matrix=False, partial_over=partial_over)

    def norm(self) -> Iterator[LocalParameter]:
        """A weight, and a bias in LayerNorm."""
        yield from [self.vector()] * (2 if self.model.norm_kind == "layer_norm" else 1)

    def columns(
        self,
        outputs: int,
        bias: bool,
        tensors: int = 1,
        per: Per = "token",
        partial_from: int = 0,
        partial_over: int = 1,
    ) -> Iterator[LocalParameter]:
        """A column-parallel layer, [outputs, H], and [outputs] with a bias; partial from an output on."""
        hidden = self.model.hidden_size
        weight = LocalParameter(outputs * hidden, True, tensors, per, partial_from * hidden, partial_over)
        yield weight
        if bias:
            yield LocalParameter(outputs, False, tensors, None, partial_from, partial_over)

    def rows(self, inputs: int, bias: bool) -> Iterator[LocalParameter]:
        """A row-parallel layer of which this rank has `inputs` columns: [H, inputs], and [H] with a bias."""
        yield LocalParameter(self.model.hidden_size * inputs, per="token")
        if bias:
            yield self.vector()


LONG = 4096
"""Keys from which a dense mask of attention takes too much memory (`models/masks.py`)."""


@dataclass(frozen=True)
class OwnShapes:
    """The counts of a model of the user's own."""

    parameters: int
    # FLOPs of a training token, forward and backward, as the operators compute them: keys that a mask hides count.
    token_flops: float
    # Bytes that the forward pass of a micro-batch keeps for the backward pass without recompute, in the dtype in which
    # the class is made.
    saved_bytes: int
    like: StandIn
    is_cut: bool  # its class takes the tensor-parallel ranks
    recomputes: bool  # its class takes `recompute`
