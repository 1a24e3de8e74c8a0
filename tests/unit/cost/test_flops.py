"""FLOPs against hand-made counts."""

import pytest

from shardwise.config import LlamaConfig
from shardwise.cost import flops_per_token, matmul_parameter_count, model_flops_utilization

LLAMA2_7B = LlamaConfig(
    family="llama",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
)


def test_matmuls_and_causal_attention() -> None:
    matmuls = 6 * 6_607_077_376
    # Forward a token takes 2·q·S for the scores and 2·q·S for the sum of values; backward twice that; half is masked.
    attention = 3 * (2 + 2) * 4096 * 4096 * 32 / 2
    assert matmul_parameter_count(LLAMA2_7B) == 6_607_077_376
    assert flops_per_token(LLAMA2_7B, 4096) == matmuls + attention
    assert flops_per_token(LLAMA2_7B, 4096, causal=False) == matmuls + 2 * attention


def test_attention_counts_the_heads_width_not_the_hidden_size() -> None:
    wide = LLAMA2_7B.model_copy(update={"head_dim": 256})
    difference = flops_per_token(wide, 2048) - 6 * matmul_parameter_count(wide)
    assert difference == 12 * 32 * (32 * 256) * 1024


def test_utilization_is_a_share_of_all_ranks_peak_and_never_invented() -> None:
    assert model_flops_utilization(1e9, 4000.0, 8, 1e12) == pytest.approx(0.5)
    assert model_flops_utilization(1e9, 4000.0, 8, None) is None
