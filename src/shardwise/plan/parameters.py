"""How many numbers a model has: whole, and parameter by parameter on one rank.

Legend: V vocabulary, H hidden size, F intermediate size, L blocks, q = heads · head_dim, kv = key/value heads ·
head_dim, t tensor-parallel degree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.config import BertConfig, FamilyConfig, ModelConfig, OwnConfig
from shardwise.plan.stage import Stage

Per = Literal["token", "prediction", "sequence"]
"""What is multiplied with a matrix: each token in the blocks, each one predicted in the head, or one of a sequence."""


def vocabulary_rows(vocabulary: int, tensor: int, multiple: int = 1) -> int:
    """Rows of embedding and head on each of t ranks: ceil(V / t), rounded up to a multiple."""
    return -(-vocabulary // (tensor * multiple)) * multiple


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
        elements: stored here, padding included. matrix: its canonical tensors are matrices, so that it decays.
        tensors: canonical tensors that it holds a part of.
        per: what it is multiplied with; None: it is a vector, or a table that is only looked up.
        partial_from: the elements from here to the end have a gradient that is still to be summed over `partial_over`
        ranks (1: none has).
        at_both_ends: the other end of the pipeline holds it too, and has the rest of its gradient: a tied embedding.
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
    """Elements that one of t ranks holds: its cuts, what is replicated, and the vocabulary's padding.

    stages: what it has of a pipeline; None: the whole model. None for a model of your own.
    """
    if isinstance(model, OwnConfig):
        return None
    local = LocalWidths.of(model, tensor, vocab_multiple)
    return sum(parameter.elements for parameter in local_parameters(model, tensor, local=local, stages=stages))


def matmul_parameter_count(model: FamilyConfig, per: Per | None = None) -> int:
    """Parameters in matrix products: those with tokens, with predicted ones, with one of a sequence, or all.

    A head counts whether or not it is tied, a table that is only looked up does not.
    """
    wanted = ("token", "prediction", "sequence") if per is None else (per,)
    return sum(parameter.elements for parameter in local_parameters(model, 1) if parameter.per in wanted)


def canonical_tensor_count(model: ModelConfig) -> int | None:
    """Tensors of the whole model as Hugging Face names them; a tied one counts once. None for a model of your own."""
    if isinstance(model, OwnConfig):
        return None
    return sum(parameter.tensors for parameter in local_parameters(model, 1))


def local_parameters(
    model: FamilyConfig,
    tensor: int,
    sequence: bool = False,
    *,
    local: LocalWidths | None = None,
    stages: Sequence[Stage] | None = None,
) -> Iterator[LocalParameter]:
    """What one of t ranks stores, in the order of the model's parameters; of a pipeline's stages, one after the other.

    Partial are, under sequence parallelism, what is replicated between the cut layers (norms, biases of row-parallel
    layers, tables of positions and token types), norms of each head, and what belongs to key/value heads of which
    several ranks hold a copy.
    """
    local = local or LocalWidths.of(model, tensor)
    if stages is None:
        yield from _parameters(_Part(model, local, tensor, sequence, model.num_hidden_layers))
        return
    has_first, has_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    for stage in stages:
        yield from _parameters(
            _Part(
                model,
                local,
                tensor,
                sequence,
                layers=len(stage.layers),
                is_first=stage.is_first,
                is_last=stage.is_last,
                ties_elsewhere=model.tie_word_embeddings and has_first != has_last,
            )
        )


def _parameters(part: _Part) -> Iterator[LocalParameter]:
    """In the order in which the families' models have them."""
    model, is_bert = part.model, isinstance(part.model, BertConfig)
    if part.is_first or not is_bert:
        yield from part.embedding()
    if part.is_first and model.learned_positions:
        yield part.table(model.max_position_embeddings)
    if part.is_first and isinstance(model, BertConfig):
        yield part.table(model.type_vocab_size)
        yield from part.norm()
    for _ in range(part.layers):
        yield from _block(part)
    if part.is_last:
        yield from _bert_heads(part) if is_bert else _head(part)


def _block(part: _Part) -> Iterator[LocalParameter]:
    """H·(q + 2kv) + q·H of attention, 2·H·F of the MLP (3·H·F where it is gated), biases, norms."""
    model, first = part.model, part.model.norm_place == "input"
    if first:
        yield from part.norm()
    yield from part.query_key_value(model.attention_bias, tensors=1 if model.fused_query_key_value else 3)
    yield from part.query_key_norm()
    yield from part.attention_output(model.attention_bias and model.attention_output_bias)
    yield from part.norm()
    ups = 2 if model.gated else 1
    yield from part.columns(ups * model.intermediate_size, model.mlp_bias, tensors=ups)
    yield from part.mlp_output(model.mlp_bias)
    if not first:
        yield from part.norm()


def _head(part: _Part) -> Iterator[LocalParameter]:
    """The last norm, and V·H unless it is tied."""
    yield from part.norm()
    yield from part.untied_head()


def _bert_heads(part: _Part) -> Iterator[LocalParameter]:
    """Pooler, masked-token head and next-sentence classifier: 2·H² + 6·H + V + 2, and the tied decoder.

    What follows the heads' first layers lies behind a gather of their outputs: no gradient is partial there.
    """
    hidden = part.model.hidden_size
    yield from part.columns(hidden, bias=True, per="sequence")  # pooler.dense
    yield from part.columns(hidden, bias=True, per="prediction")  # transform.dense
    yield LocalParameter(hidden, matrix=False)  # transform.LayerNorm
    yield LocalParameter(hidden, matrix=False)
    if not part.is_first:
        yield from part.embedding()  # the decoder's weight
    yield LocalParameter(part.local.vocabulary, matrix=False)  # the decoder's bias
    yield LocalParameter(2 * hidden, per="sequence")  # seq_relationship
    yield LocalParameter(2, matrix=False)


@dataclass(frozen=True)
class _Part:
    """Makes the parameters of one of t ranks, of a model or one of its stages.

    layers: how many blocks. ties_elsewhere: another pipeline rank has the other end of the tied embedding.
    """

    model: FamilyConfig
    local: LocalWidths
    tensor: int
    sequence: bool
    layers: int
    is_first: bool = True
    is_last: bool = True
    ties_elsewhere: bool = False

    @property
    def _between(self) -> int:
        """Ranks over which a gradient is partial where the parameter is replicated between the cut layers."""
        return self.tensor if self.sequence else 1

    def embedding(self) -> Iterator[LocalParameter]:
        """[V/t, H], looked up; a tied one is the head as well, and is there once on a rank that has both ends."""
        if self.is_first or (self.is_last and self.ties_elsewhere):
            per: Per | None = "prediction" if self.model.tie_word_embeddings else None
            elements = self.local.vocabulary * self.model.hidden_size
            yield LocalParameter(elements, per=per, at_both_ends=self.ties_elsewhere)

    def untied_head(self) -> Iterator[LocalParameter]:
        """[V/t, H], where the model does not tie it."""
        if self.is_last and not self.model.tie_word_embeddings:
            yield LocalParameter(self.local.vocabulary * self.model.hidden_size, per="prediction")

    def table(self, rows: int) -> LocalParameter:
        """[rows, H] on every rank, looked up."""
        return LocalParameter(rows * self.model.hidden_size, partial_over=self._between)

    def vector(self) -> LocalParameter:
        """[H] on every rank: a norm's weight or bias, the bias of a row-parallel layer."""
        return LocalParameter(self.model.hidden_size, matrix=False, partial_over=self._between)

    def norm(self) -> Iterator[LocalParameter]:
        """A weight, and a bias in LayerNorm."""
        yield self.vector()
        if self.model.norm_kind == "layer_norm":
            yield self.vector()

    def query_key_value(self, bias: bool, tensors: int = 3) -> Iterator[LocalParameter]:
        """[(q + 2kv)/t, H], and [(q + 2kv)/t] with a bias. Where K/V heads are shared, queries come first."""
        query, copies = self.local.query, self.local.key_value_copies
        outputs, hidden = query + 2 * self.local.key_value, self.model.hidden_size
        yield LocalParameter(outputs * hidden, True, tensors, "token", query * hidden, copies)
        if bias:
            yield LocalParameter(outputs, False, tensors, None, query, copies)

    def query_key_norm(self) -> Iterator[LocalParameter]:
        """[head_dim] twice, of whose heads a rank has some; or [q/t] and [kv/t], with copies where K/V heads have."""
        local = self.local
        if self.model.query_key_norm == "head":
            yield from 2 * (LocalParameter(self.model.head_dim, matrix=False, partial_over=self.tensor),)
        elif self.model.query_key_norm == "all_heads":
            yield LocalParameter(local.query, matrix=False)
            yield LocalParameter(local.key_value, matrix=False, partial_over=local.key_value_copies)

    def columns(self, outputs: int, bias: bool, tensors: int = 1, per: Per = "token") -> Iterator[LocalParameter]:
        """[outputs/t, H], and [outputs/t] with a bias."""
        outputs //= self.tensor
        yield LocalParameter(outputs * self.model.hidden_size, tensors=tensors, per=per)
        if bias:
            yield LocalParameter(outputs, matrix=False, tensors=tensors)

    def attention_output(self, bias: bool) -> Iterator[LocalParameter]:
        """[H, q/t], and [H] with a bias."""
        return self._rows(self.local.query, bias)

    def mlp_output(self, bias: bool) -> Iterator[LocalParameter]:
        """[H, F/t], and [H] with a bias."""
        return self._rows(self.local.intermediate, bias)

    def _rows(self, inputs: int, bias: bool) -> Iterator[LocalParameter]:
        yield LocalParameter(self.model.hidden_size * inputs, per="token")
        if bias:
            yield self.vector()
