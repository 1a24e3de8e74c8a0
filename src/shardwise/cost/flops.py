"""Floating-point operations that a model needs, and the share of the hardware's peak that they make."""

from shardwise.config import ModelConfig
from shardwise.cost.params import matmul_parameter_count


def flops_per_token(model: ModelConfig, sequence_length: int, *, causal: bool = True) -> float:
    """Model FLOPs of one training token: forward and backward, without recompute.

    6·N + 12·L·q·S / 2, where N are the parameters in matrix products (`matmul_parameter_count`), q = heads · head_dim
    and S the sequence length: two FLOPs a multiply-add, the backward pass twice the forward. The halving is the causal
    mask: a token attends to S / 2 others on average, and what is masked out is not work.

    `causal=False` leaves the halving out. That is the convention of PaLM (arXiv:2204.02311, appendix B) and of most
    published figures; it reports a higher utilisation for the same speed.
    """
    query = model.num_attention_heads * model.head_dim
    attended = sequence_length / 2 if causal else sequence_length
    return 6.0 * matmul_parameter_count(model) + 12.0 * model.num_hidden_layers * query * attended


def model_flops_utilization(
    token_flops: float, tokens_per_second: float, ranks: int, peak_flops: float | None
) -> float | None:
    """Model FLOPs done per second over the peak of all ranks' devices, in [0, 1]; None where the peak is unknown."""
    if peak_flops is None:
        return None
    return token_flops * tokens_per_second / (ranks * peak_flops)
