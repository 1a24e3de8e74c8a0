"""Floating-point operations that a model needs, and the share of the hardware's peak that they make."""

from __future__ import annotations

import math

from shardwise.config import BertConfig, FamilyConfig, ModelConfig, OwnConfig, Recompute
from shardwise.config.data import MASKED_FRACTION
from shardwise.cost.params import matmul_parameter_count


def flops_per_token(
    model: ModelConfig, sequence_length: int, predictions: int | None = None, *, count_masked: bool = False
) -> float | None:
    """Model FLOPs of one training token: forward and backward, without recompute. None for a model of your own.

    6·N + 12·L·q·S / 2, where N are the parameters in matrix products (`matmul_parameter_count`), q = heads · head_dim
    and S the sequence length: two FLOPs a multiply-add, the backward pass twice the forward. The halving is the causal
    mask: a token attends to S / 2 others on average, and what is masked out is not work. BERT's tokens attend to all S;
    of its N those of the masked-token head count P / S, as P positions are predicted, and those of pooler and
    next-sentence classifier 1 / S.

    Args:
        predictions: P of BERT (default: ⌈0.15·S⌉); other families predict at every position.
        count_masked: leave the halving out. That is the convention of PaLM (arXiv:2204.02311, appendix B) and of most
        published figures; it reports a higher utilisation for the same speed.
    """
    if isinstance(model, OwnConfig):
        return None
    blocks = 6.0 * matmul_parameter_count(model, "token") + 3.0 * _attention(model, sequence_length, count_masked)
    return blocks + head_flops_per_token(model, sequence_length, predictions)


def head_flops_per_token(model: FamilyConfig, sequence_length: int, predictions: int | None = None) -> float:
    """The part of `flops_per_token` that is not the blocks': output head, and BERT's pooler and classifier."""
    share = 1.0
    if isinstance(model, BertConfig):
        share = (predictions or math.ceil(MASKED_FRACTION * sequence_length)) / sequence_length
    predicted = matmul_parameter_count(model, "prediction") * share
    return 6.0 * (predicted + matmul_parameter_count(model, "sequence") / sequence_length)


def recomputed_flops_per_token(model: ModelConfig, sequence_length: int, recompute: Recompute) -> float | None:
    """FLOPs a token that recompute adds: the forward pass of the attention cores, or of whole blocks.

    They are work of the hardware, not of the model: no part of its FLOPs or of MFU. None for a model of your own.
    """
    if isinstance(model, OwnConfig):
        return None
    if recompute == "none":
        return 0.0
    core = _attention(model, sequence_length, count_masked=False)
    return core if recompute == "selective" else core + 2.0 * matmul_parameter_count(model, "token")


def model_flops_utilization(
    token_flops: float | None, tokens_per_second: float, ranks: int, peak_flops: float | None
) -> float | None:
    """Model FLOPs done per second over the peak of all ranks' devices, in [0, 1]; None where either is unknown."""
    if token_flops is None or peak_flops is None:
        return None
    return token_flops * tokens_per_second / (ranks * peak_flops)


def _attention(model: FamilyConfig, sequence_length: int, count_masked: bool) -> float:
    """Forward FLOPs of a token's attention, over all blocks: 4·q for each token that it attends to."""
    attended = sequence_length / 2 if model.causal and not count_masked else sequence_length
    return 4.0 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * attended
