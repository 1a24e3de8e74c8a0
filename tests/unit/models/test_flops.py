"""FLOPs against hand-made counts."""

import pytest

from shardwise.config import BertConfig, LlamaConfig
from shardwise.config.decoders import Qwen2Config
from shardwise.models.flops import flops_per_token, model_flops_utilization, recomputed_flops_per_token
from shardwise.models.parameter_counts import matmul_parameter_count
from tests.unit.estimates.families import OWN

LLAMA2_7B = LlamaConfig(
    family="llama", vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
    num_attention_heads=32,
)  # fmt: skip
BERT_LARGE = BertConfig(
    family="bert", vocab_size=30522, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
    num_attention_heads=16,
)  # fmt: skip


def test_matmuls_and_attention() -> None:
    matmuls = 6 * 6_607_077_376
    # Forward a token takes 2·q·S for the scores and 2·q·S for the sum of values; backward twice that; half is masked.
    attention = 3 * (2 + 2) * 4096 * 4096 * 32 / 2
    assert matmul_parameter_count(LLAMA2_7B) == 6_607_077_376
    assert flops_per_token(LLAMA2_7B, 4096) == matmuls + attention
    assert flops_per_token(LLAMA2_7B, 4096, count_masked=True) == matmuls + 2 * attention
    layers, attention = 24 * 12 * 1024**2, 12 * 24 * 1024 * 128
    masked, once = (30522 + 1024) * 1024, (1024 + 2) * 1024
    assert flops_per_token(BERT_LARGE, 128, 20) == 6 * (layers + masked * 20 / 128 + once / 128) + attention
    assert flops_per_token(BERT_LARGE, 128) == flops_per_token(BERT_LARGE, 128, 20)  # ⌈0.15 · 128⌉


@pytest.mark.parametrize("window", [1024, 8192])
def test_a_window_of_w_tokens_leaves_w_times_s_less_half_w(window: int) -> None:
    """A query sees all that come before it, up to w; in the blocks that have the window."""
    seen = min(window, 4096)
    model = Qwen2Config(
        **LLAMA2_7B.model_dump(include={"vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"}),
        family="qwen2",
        num_hidden_layers=32,
        num_key_value_heads=32,
        sliding_window=window,
        layer_types=4,  # type: ignore[arg-type]
    )
    attention = 12 * 4096 * (24 * seen * (4096 - seen / 2) + 8 * 4096**2 / 2) / 4096
    assert flops_per_token(model, 4096) == pytest.approx(6 * 6_607_077_376 + attention)


def test_recompute_and_utilization() -> None:
    core, blocks = 4 * 32 * 4096 * 2048, 2 * (6_607_077_376 - 32000 * 4096)
    for fused in (False, True):
        assert recomputed_flops_per_token(LLAMA2_7B, 4096, "none", fused_attention=fused) == 0
        assert recomputed_flops_per_token(LLAMA2_7B, 4096, "selective", fused_attention=fused) == (0 if fused else core)
        assert recomputed_flops_per_token(LLAMA2_7B, 4096, "full", fused_attention=fused) == core + blocks
    assert model_flops_utilization(1e9, 4000.0, 8, 1e12) == pytest.approx(0.5)
    assert model_flops_utilization(1e9, 4000.0, 8, None) is None
    assert model_flops_utilization(flops_per_token(OWN.model, 128), 4000.0, 8, 1e12) is None
    assert recomputed_flops_per_token(OWN.model, 128, "full", fused_attention=True) is None
