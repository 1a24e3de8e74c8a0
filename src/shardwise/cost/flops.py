"""Floating-point operations that a model needs, and the share of the hardware's peak that they make."""

from __future__ import annotations

from shardwise.config import ModelConfig, OwnConfig, Recompute
from shardwise.plan.parameters import matmul_parameter_count
from shardwise.plan.work import attention_work, block_work, head_work


def flops_per_token(
    model: ModelConfig, sequence_length: int, predictions: int | None = None, *, count_masked: bool = False
) -> float | None:
    """Model FLOPs of one training token: forward and backward, without recompute. None for a model of your own.

    6·N + 12·L·q·S / 2, where N are the parameters in matrix products (`matmul_parameter_count`), q = heads · head_dim
    and S the sequence length: two FLOPs a multiply-add, the backward pass twice the forward. The causal mask halves the
    second term; BERT's tokens attend to all S, so its is not halved. `plan/work.py` says how BERT's heads count.

    Args:
        predictions: positions that BERT predicts (default: ⌈0.15·S⌉); other families predict at every position.
        count_masked: leave the halving out. That is the convention of PaLM (arXiv:2204.02311, appendix B) and of most
            published figures; it reports a higher utilisation for the same speed.
    """
    if isinstance(model, OwnConfig):
        return None
    blocks = model.num_hidden_layers * block_work(model, sequence_length, count_masked=count_masked)
    return 6.0 * (blocks + head_work(model, sequence_length, predictions))


def recomputed_flops_per_token(model: ModelConfig, sequence_length: int, recompute: Recompute) -> float | None:
    """FLOPs a token that recompute adds: the forward pass of the attention cores, or of whole blocks.

    They are work of the hardware, not of the model: no part of its FLOPs or of MFU. None for a model of your own.
    """
    if isinstance(model, OwnConfig):
        return None
    if recompute == "none":
        return 0.0
    core = 2.0 * model.num_hidden_layers * attention_work(model, sequence_length)
    return core if recompute == "selective" else core + 2.0 * matmul_parameter_count(model, "token")


def model_flops_utilization(
    token_flops: float | None, tokens_per_second: float, ranks: int, peak_flops: float | None
) -> float | None:
    """Model FLOPs done per second over the peak of all ranks' devices, in [0, 1]; None where either is unknown."""
    if token_flops is None or peak_flops is None:
        return None
    return token_flops * tokens_per_second / (ranks * peak_flops)
