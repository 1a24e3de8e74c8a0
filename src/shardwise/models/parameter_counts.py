"""How many parameters a model has: whole, and parameter by parameter on one rank.

Legend: V vocabulary, H hidden size, F intermediate size, L blocks, q = heads · head_dim, kv = key/value heads ·
head_dim, t tensor-parallel degree. Shapes are those on one rank.

Multiply-adds of one token's forward pass. From them stages are balanced and FLOPs are computed.

Legend: H hidden size, L blocks, q = heads · head_dim, S sequence length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.config import FamilyConfig, ModelConfig, shapes_of
from shardwise.config.data import MASKED_FRACTION
from shardwise.config.stages import Stage
from shardwise.layers.chunks import vocabulary_rows

Per = Literal["token", "prediction", "sequence"]
"""What a matrix is multiplied with: every token (blocks), every predicted token (head), or one token of a sequence."""


@dataclass(frozen=True)
class LocalWidths:
    """Widths of one rank's part of a model that is cut over t ranks.

    Attributes:
        vocabulary: rows of embedding and head, ceil(V / t) or the multiple above: the last ranks' are padded.
        query: q / t.
        key_value: kv / t, but at least one head: beyond kv heads = t, neighbouring ranks hold the same head.
        intermediate: F / t.
        key_value_copies: ranks that hold the same key/value head.
    """

    vocabulary: int
    query: int
    key_value: int
    intermediate: int
    key_value_copies: int

    @staticmethod
    def of(model: FamilyConfig, tensor: int, vocab_multiple: int = 1) -> LocalWidths:
        return LocalWidths(
            vocabulary=vocabulary_rows(model.vocab_size, tensor, vocab_multiple),
            query=model.num_attention_heads * model.head_dim // tensor,
            key_value=max(model.num_key_value_heads // tensor, 1) * model.head_dim,
            intermediate=model.intermediate_size // tensor,
            key_value_copies=max(tensor // model.num_key_value_heads, 1),
        )


@dataclass(frozen=True)
class LocalParameter:
    """One parameter as one rank stores it.

    Attributes:
        elements: stored on this rank, with padding.
        matrix: whether its canonical tensors are matrices, so that weight decay applies.
        tensors: canonical tensors that it holds a part of.
        per: what it is multiplied with; None for a vector, and for a table that is only looked up.
        partial_from: the first element whose gradient is partial; all after it are too.
        partial_over: ranks over which these are still to be summed; 1: none is partial.
        at_both_ends: whether the other end of the pipeline holds it too, with a part of its gradient: a tied embedding.
    """

    elements: int
    matrix: bool = True
    tensors: int = 1
    per: Per | None = None
    partial_from: int = 0
    partial_over: int = 1
    at_both_ends: bool = False


def parameter_count(model: ModelConfig) -> int | None:
    """Parameters of the whole model; a tied embedding counts once, padding never. None for a model of your own."""
    return local_parameter_count(model, 1)


def local_parameter_count(
    model: ModelConfig, tensor: int, *, vocab_multiple: int = 1, stages: Sequence[Stage] | None = None
) -> int | None:
    """Elements that one of t ranks holds, replicated parameters and the vocabulary's padding included.

    stages: those of a pipeline that the rank has; None: the whole model. The result is None for a model of your own.
    """
    shapes = shapes_of(model)
    if shapes is None:
        return None
    local = LocalWidths.of(shapes, tensor, vocab_multiple)
    return sum(parameter.elements for parameter in local_parameters(shapes, tensor, local=local, stages=stages))


def matmul_parameter_count(model: FamilyConfig, per: Per | None = None) -> int:
    """Parameters in matrix products with `per`, or in all matrix products.

    A head counts whether or not it is tied; a table that is only looked up does not.
    """
    parameters = local_parameters(model, 1)
    return sum(one.elements for one in parameters if one.per is not None and per in (None, one.per))


def canonical_tensor_count(model: ModelConfig) -> int | None:
    """Tensors of the whole model as Hugging Face names them; a tied one counts once. None for a model of your own."""
    shapes = shapes_of(model)
    return None if shapes is None else sum(parameter.tensors for parameter in local_parameters(shapes, 1))


def local_parameters(
    model: FamilyConfig,
    tensor: int,
    sequence_parallel: bool = False,
    *,
    local: LocalWidths | None = None,
    stages: Sequence[Stage] | None = None,
) -> Iterator[LocalParameter]:
    """What one of t ranks stores of the whole model or of these stages, in the order of the model's parameters.

    Gradients are partial, under sequence parallelism, of what is replicated between the cut layers: norms, biases of
    row-parallel layers, tables of positions and token types. With tensor parallelism they are always partial of norms
    of each head, and of key/value heads that several ranks hold.
    """
    local = local or LocalWidths.of(model, tensor)
    stages = stages or (Stage(0, 0, range(model.num_hidden_layers), 1),)
    has_first, has_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    at_both_ends = model.tie_word_embeddings and has_first != has_last
    for stage in stages:
        yield from _StageParameters(model, local, tensor, sequence_parallel, stage, at_both_ends).all()


@dataclass(frozen=True)
class _StageParameters:
    """The parameters of one stage on one of t ranks.

    at_both_ends: whether the embedding is tied, and its other end is on another pipeline rank.
    """

    model: FamilyConfig
    local: LocalWidths
    tensor: int
    sequence_parallel: bool
    stage: Stage
    at_both_ends: bool

    def all(self) -> Iterator[LocalParameter]:
        """In the order in which the family's model has them."""
        model, is_first = self.model, self.stage.is_first
        if is_first or (self.stage.is_last and self.at_both_ends and not model.head_transform):
            yield self.embedding()
        if is_first and model.learned_positions:
            yield self.table(model.max_position_embeddings)
        if is_first and model.token_types:
            yield self.table(model.token_types)
        if is_first and model.embedding_norm:
            yield from self.norm()
        for _ in self.stage.layers:
            yield from self.block()
        if self.stage.is_last and model.head_transform:
            yield from self.bert_heads()
        elif self.stage.is_last:
            yield from self.norm()
            if not model.tie_word_embeddings:
                yield LocalParameter(self.local.vocabulary * model.hidden_size, per="prediction")

    def block(self) -> Iterator[LocalParameter]:
        """Whole: H·(q + 2kv) + q·H of attention, 2·H·F of the MLP (3·H·F if it is gated), biases and norms."""
        model, local = self.model, self.local
        norms_first = model.norm_place == "input"
        if norms_first:
            yield from self.norm()
        yield from self.query_key_value()
        yield from self.query_key_norm()
        yield from self.rows(local.query, model.attention_bias and model.attention_output_bias)
        yield from self.norm()
        inputs = 2 if model.gated else 1
        yield from self.columns(inputs * model.intermediate_size, model.mlp_bias, tensors=inputs)
        yield from self.rows(local.intermediate, model.mlp_bias)
        if not norms_first:
            yield from self.norm()

    def bert_heads(self) -> Iterator[LocalParameter]:
        """Pooler, masked-token head and next-sentence classifier: 2·H² + 6·H + V + 2, and the tied decoder.

        The outputs of the two heads' first layers are gathered, so no gradient is partial after these layers.
        """
        hidden = self.model.hidden_size
        yield from self.columns(hidden, bias=True, per="sequence")  # pooler.dense
        yield from self.columns(hidden, bias=True, per="prediction")  # transform.dense
        yield LocalParameter(hidden, matrix=False)  # transform.LayerNorm
        yield LocalParameter(hidden, matrix=False)
        if self.at_both_ends:
            yield self.embedding()  # the decoder's weight
        yield LocalParameter(self.local.vocabulary, matrix=False)  # the decoder's bias
        yield LocalParameter(2 * hidden, per="sequence")  # seq_relationship
        yield LocalParameter(2, matrix=False)

    def embedding(self) -> LocalParameter:
        """[V/t, H], looked up; a tied one is multiplied in the head as well."""
        per: Per | None = "prediction" if self.model.tie_word_embeddings else None
        return LocalParameter(self.local.vocabulary * self.model.hidden_size, per=per, at_both_ends=self.at_both_ends)

    def table(self, rows: int) -> LocalParameter:
        """[rows, H] on every rank, looked up."""
        return LocalParameter(rows * self.model.hidden_size, partial_over=self._partial_between)

    def vector(self) -> LocalParameter:
        """[H] on every rank: a norm's weight or bias, or the bias of a row-parallel layer."""
        return LocalParameter(self.model.hidden_size, matrix=False, partial_over=self._partial_between)

    @property
    def _partial_between(self) -> int:
        """Ranks over which the gradient of what is replicated between the cut layers is partial."""
        return self.tensor if self.sequence_parallel else 1

    def norm(self) -> Iterator[LocalParameter]:
        """A weight, and a bias in LayerNorm."""
        yield self.vector()
        if self.model.norm_kind == "layer_norm":
            yield self.vector()

    def query_key_value(self) -> Iterator[LocalParameter]:
        """[(q + 2kv)/t, H], and [(q + 2kv)/t] with a bias. Queries come first: only shared K/V heads are partial."""
        query, copies = self.local.query, self.local.key_value_copies
        outputs, hidden = query + 2 * self.local.key_value, self.model.hidden_size
        tensors = 1 if self.model.fused_query_key_value else 3
        yield LocalParameter(outputs * hidden, True, tensors, "token", query * hidden, copies)
        if self.model.attention_bias:
            yield LocalParameter(outputs, False, tensors, None, query, copies)

    def query_key_norm(self) -> Iterator[LocalParameter]:
        """For norms of each head [head_dim] twice, the same on every rank; for norms of all heads [q/t] and [kv/t]."""
        local = self.local
        if self.model.query_key_norm == "head":
            yield from 2 * (LocalParameter(self.model.head_dim, matrix=False, partial_over=self.tensor),)
        elif self.model.query_key_norm == "all_heads":
            yield LocalParameter(local.query, matrix=False)
            yield LocalParameter(local.key_value, matrix=False, partial_over=local.key_value_copies)

    def columns(self, outputs: int, bias: bool, tensors: int = 1, per: Per = "token") -> Iterator[LocalParameter]:
        """A column-parallel layer: [outputs/t, H], and [outputs/t] with a bias."""
        outputs //= self.tensor
        yield LocalParameter(outputs * self.model.hidden_size, tensors=tensors, per=per)
        if bias:
            yield LocalParameter(outputs, matrix=False, tensors=tensors)

    def rows(self, inputs: int, bias: bool) -> Iterator[LocalParameter]:
        """A row-parallel layer: [H, inputs], of which this rank has `inputs`, and [H] with a bias."""
        yield LocalParameter(self.model.hidden_size * inputs, per="token")
        if bias:
            yield self.vector()


def attention_work(model: FamilyConfig, sequence_length: int, *, count_masked: bool = False) -> float:
    """Multiply-adds of attention in one block: 2·q for each token that is attended to, in `q kᵀ` and in `P v`.

    With the causal mask, a token attends to S / 2 tokens on average. Masked tokens are no work, unless `count_masked`.
    """
    attended = sequence_length / 2 if model.causal and not count_masked else sequence_length
    return 2.0 * model.num_attention_heads * model.head_dim * attended


def block_work(model: FamilyConfig, sequence_length: int, *, count_masked: bool = False) -> float:
    """Multiply-adds of one block: one for each element of its matrices, and its attention."""
    matrices = matmul_parameter_count(model, "token") / model.num_hidden_layers
    return matrices + attention_work(model, sequence_length, count_masked=count_masked)


def head_work(model: FamilyConfig, sequence_length: int, predictions: int | None = None) -> float:
    """Multiply-adds of what follows the last block: output head, and BERT's pooler and next-sentence classifier.

    BERT predicts P tokens of a sequence, so its masked-token head counts P / S of its matrices. Pooler and classifier
    see one token of a sequence and count 1 / S.

    Args:
        predictions: P (default: ⌈0.15·S⌉); other families predict at every position.
    """
    share = 1.0
    if model.predicts_masked_tokens:
        share = (predictions or math.ceil(MASKED_FRACTION * sequence_length)) / sequence_length
    predicted = matmul_parameter_count(model, "prediction") * share
    return predicted + matmul_parameter_count(model, "sequence") / sequence_length
