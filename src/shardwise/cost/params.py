"""How many numbers a Llama has, whole and on one rank.

Legend: V vocabulary, H hidden size, F intermediate size, L blocks, q = heads · head_dim, kv = key/value heads ·
head_dim, t tensor-parallel degree.
"""

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


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model; a tied embedding counts once, padding never.

    Embedding V·H, head V·H unless tied, L blocks of H·(q + 2kv) + q·H + 3·H·F + 2H (norms), final norm H; biases where
    the model has them.
    """
    return local_parameter_count(model, 1)


def local_parameter_count(model: ModelConfig, tensor: int) -> int:
    """Elements that one of t ranks stores: its cuts, what is replicated, and the vocabulary's padding."""
    hidden, local = model.hidden_size, LocalWidths.of(model, tensor)
    tables = 1 if model.tie_word_embeddings else 2
    biases = replicated_bias_count(model)
    if model.attention_bias:
        biases += local.query + 2 * local.key_value
    if model.mlp_bias:
        biases += 2 * local.intermediate
    block = _block_matrices(hidden, local) + biases
    return tables * local.vocabulary * hidden + model.num_hidden_layers * block + norm_count(model)


def matmul_parameter_count(model: ModelConfig) -> int:
    """Parameters that a token is multiplied with: matrices and the head, tied or not; not the embedding's look-up."""
    whole = LocalWidths.of(model, 1)
    return model.num_hidden_layers * _block_matrices(model.hidden_size, whole) + model.vocab_size * model.hidden_size


def norm_count(model: ModelConfig) -> int:
    """Norm weights, which every rank holds whole: two a block and the final one."""
    return (2 * model.num_hidden_layers + 1) * model.hidden_size


def replicated_bias_count(model: ModelConfig) -> int:
    """Biases of one block that every rank holds whole: those of the row-parallel layers."""
    return (int(model.attention_bias) + int(model.mlp_bias)) * model.hidden_size


def key_value_count(model: ModelConfig, tensor: int) -> int:
    """Elements of one rank's key and value projections, over all blocks."""
    width = 2 * LocalWidths.of(model, tensor).key_value
    return model.num_hidden_layers * width * (model.hidden_size + int(model.attention_bias))


def _block_matrices(hidden: int, local: LocalWidths) -> int:
    attention = hidden * (local.query + 2 * local.key_value) + local.query * hidden
    return attention + 3 * hidden * local.intermediate
