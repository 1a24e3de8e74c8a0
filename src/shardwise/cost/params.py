"""How many numbers a Llama has: whole, and parameter by parameter on one rank.

Legend: V vocabulary, H hidden size, F intermediate size, L blocks, q = heads · head_dim, kv = key/value heads ·
head_dim, t tensor-parallel degree.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.config import ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class LocalWidths:
    """Widths of one rank's part of a model that is cut over t ranks.

    Attributes:
        vocabulary: rows of embedding and head, ceil(V / t): the last rank's are padded.
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
    def of(model: ModelConfig, tensor: int) -> "LocalWidths":
        return LocalWidths(
            vocabulary=-(-model.vocab_size // tensor),
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
        partial_from: the elements from here to the end have a gradient that is still to be summed over `partial_over`
        ranks (1: none has).
    """

    elements: int
    matrix: bool = True
    partial_from: int = 0
    partial_over: int = 1


def local_parameters(model: ModelConfig, tensor: int, sequence: bool = False) -> Iterator[LocalParameter]:
    """What one of t ranks stores, in the order of the model's parameters.

    Partial are, under sequence parallelism, what is replicated between the cut layers (norms and the biases of
    row-parallel layers), and key/value projections of which several ranks hold a copy.
    """
    hidden, local = model.hidden_size, LocalWidths.of(model, tensor)
    replicated = LocalParameter(hidden, matrix=False, partial_over=tensor if sequence else 1)
    qkv = local.query + 2 * local.key_value
    table = LocalParameter(local.vocabulary * hidden)
    yield table
    for _ in range(model.num_hidden_layers):
        yield replicated
        yield LocalParameter(qkv * hidden, True, local.query * hidden, local.key_value_copies)
        if model.attention_bias:
            yield LocalParameter(qkv, False, local.query, local.key_value_copies)
        yield LocalParameter(hidden * local.query)
        if model.attention_bias:
            yield replicated
        yield replicated
        yield LocalParameter(2 * local.intermediate * hidden)
        if model.mlp_bias:
            yield LocalParameter(2 * local.intermediate, matrix=False)
        yield LocalParameter(hidden * local.intermediate)
        if model.mlp_bias:
            yield replicated
    yield replicated
    if not model.tie_word_embeddings:
        yield table


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model; a tied embedding counts once, padding never.

    Embedding V·H, head V·H unless tied, L blocks of H·(q + 2kv) + q·H + 3·H·F + 2H (norms), final norm H; biases where
    the model has them.
    """
    return local_parameter_count(model, 1)


def local_parameter_count(model: ModelConfig, tensor: int) -> int:
    """Elements that one of t ranks holds: its cuts, what is replicated, and the vocabulary's padding."""
    return sum(parameter.elements for parameter in local_parameters(model, tensor))


def matmul_parameter_count(model: ModelConfig) -> int:
    """Parameters that a token is multiplied with: matrices and the head, tied or not; not the embedding's look-up."""
    matrices = sum(parameter.elements for parameter in local_parameters(model, 1) if parameter.matrix)
    look_up = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    return matrices - look_up
