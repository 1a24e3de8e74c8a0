"""Parameter counts against published models and hand-counted shards."""

import pytest

from shardwise.config import LlamaConfig
from shardwise.cost import local_parameter_count, matmul_parameter_count, parameter_count


def llama(**changes: object) -> LlamaConfig:
    sizes: dict[str, object] = {
        "family": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
    return LlamaConfig.model_validate(sizes | changes)


LLAMA3_8B = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
LLAMA32_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("changes", "published"),
    [({}, 6_738_415_616), (LLAMA3_8B, 8_030_261_248), (LLAMA32_1B, 1_235_814_400)],
    ids=["Llama-2 7B", "Llama-3 8B", "Llama-3.2 1B"],
)
def test_published_models(changes: dict[str, object], published: int) -> None:
    assert parameter_count(llama(**changes)) == published


def test_one_rank_of_eight_holds_an_eighth_and_the_norms() -> None:
    norms = 65 * 4096
    assert local_parameter_count(llama(), 8) == (6_738_415_616 - norms) // 8 + norms


def test_replicated_heads_and_padded_vocabulary_count_as_stored() -> None:
    model = llama(
        vocab_size=10, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    tables = 2 * 3 * 8  # ceil(10 / 4) = 3 rows
    attention = 8 * (2 + 2 * 2) + 2 * 8  # one query head and one whole key/value head of width 2
    mlp = 3 * 8 * 3
    assert local_parameter_count(model, 4) == tables + attention + mlp + 3 * 8


def test_biases_are_cut_with_columns_and_whole_with_rows() -> None:
    plain = llama(num_hidden_layers=1)
    biased = llama(num_hidden_layers=1, attention_bias=True, mlp_bias=True)
    whole = 3 * 4096 + 4096 + 2 * 11008 + 4096
    assert parameter_count(biased) - parameter_count(plain) == whole
    cut = (3 * 4096 + 2 * 11008) // 4 + 2 * 4096
    assert local_parameter_count(biased, 4) - local_parameter_count(plain, 4) == cut


def test_the_head_is_multiplied_even_when_tied_and_the_embedding_never() -> None:
    for tied in (False, True):
        model = llama(tie_word_embeddings=tied)
        assert matmul_parameter_count(model) == 6_738_415_616 - 65 * 4096 - 32000 * 4096
