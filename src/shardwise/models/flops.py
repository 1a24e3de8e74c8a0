"""FLOPs of a model: those of a training token, of its parts, and of recompute; utilisation of devices (MFU).

Legend: V vocabulary, H hidden size, L blocks, S sequence length, q = heads · head_dim.
"""

from __future__ import annotations

import math

from shardwise.config import FamilyConfig, ModelConfig, Recompute
from shardwise.config.data import MASKED_FRACTION
from shardwise.models.parameter_counts import matmul_parameter_count


def attended_tokens(model: FamilyConfig, sequence_length: int, *, count_masked: bool = False) -> float:
    """Return the tokens to which a token attends, on average over the blocks.

    With the causal mask these are S / 2, and with a window of w tokens w · (1 - w / 2S). Masked tokens count only with
    `count_masked`.
    """
    attended = 0.0
    for layer in range(model.num_hidden_layers):
        seen = min(model.window(layer) or sequence_length, sequence_length)
        attended += seen * (1 - seen / (2 * sequence_length)) if model.causal and not count_masked else seen
    return attended / model.num_hidden_layers


def _attention_work(model: FamilyConfig, sequence_length: int, *, count_masked: bool = False) -> float:
    """Return the multiply-adds of a token's attention in a block: q for each key, in `q kᵀ` and again in `P v`."""
    attended = attended_tokens(model, sequence_length, count_masked=count_masked)
    return 2.0 * model.num_attention_heads * model.head_dim * attended


def block_multiply_adds(model: FamilyConfig, sequence_length: int, *, count_masked: bool = False) -> float:
    """Return the multiply-adds (half the FLOPs) of a token in a model's mean block: its matrices, and its attention."""
    matrices = matmul_parameter_count(model, "token") / model.num_hidden_layers
    return matrices + _attention_work(model, sequence_length, count_masked=count_masked)


def head_work(model: FamilyConfig, sequence_length: int, predictions: int | None = None) -> float:
    """Return the multiply-adds (half the FLOPs) of a token after a model's last block: output head, pooler, classifier.

    BERT predicts P tokens of a sequence, so its masked-token head counts P / S of its matrices. Pooler and classifier
    see one token of a sequence and count 1 / S.

    Args:
        predictions: P; None: ⌈0.15·S⌉. Other families predict at every position.
    """
    share = 1.0  # part of the tokens that are predicted
    if model.predicts_masked_tokens:
        predictions = predictions or math.ceil(MASKED_FRACTION * sequence_length)
        share = predictions / sequence_length
    predicted = matmul_parameter_count(model, "prediction") * share
    return predicted + matmul_parameter_count(model, "sequence") / sequence_length


def flops_per_token(
    model: ModelConfig, sequence_length: int, predictions: int | None = None, *, count_masked: bool = False
) -> float | None:
    """Model FLOPs of one training token: forward and backward, without recompute. None for a model of your own.

    6·N + 12·L·q·S / 2, where N are the parameters in matrix products (`matmul_parameter_count`), q = heads · head_dim
    and S the sequence length: two FLOPs a multiply-add, the backward pass twice the forward. The causal mask halves the
    second term; BERT's tokens attend to all S, so its is not halved. A window of w tokens makes it w · (S - w / 2) in
    place of S² / 2 (`attended_tokens`). `head_work` says how BERT's heads count.

    Args:
        predictions: positions that BERT predicts (default: ⌈0.15·S⌉); other families predict at every position.
        count_masked: leave the halving out. That is the convention of PaLM (arXiv:2204.02311, appendix B) and of most
            published figures; it reports a higher utilisation for the same speed.
    """
    if model.is_own:
        return None
    blocks = model.num_hidden_layers * block_multiply_adds(model, sequence_length, count_masked=count_masked)
    return 6.0 * (blocks + head_work(model, sequence_length, predictions))


def recomputed_flops_per_token(
    model: ModelConfig, sequence_length: int, recompute: Recompute, *, fused_attention: bool
) -> float | None:
    """FLOPs a token that recompute adds: the forward pass of the attention cores, or of whole blocks.

    They are work of the hardware, not of the model: no part of its FLOPs or of MFU. None for a model of your own.

    Args:
        fused_attention: true if one kernel computes the cores, whose output selective recompute keeps.
    """
    if model.is_own:
        return None
    if recompute == "none":
        return 0.0
    core = 2.0 * model.num_hidden_layers * _attention_work(model, sequence_length)
    if recompute == "selective":
        return 0.0 if fused_attention else core
    return core + 2.0 * matmul_parameter_count(model, "token")


def model_flops_utilization(
    token_flops: float | None, tokens_per_second: float, ranks: int, peak_flops: float | None
) -> float | None:
    """MFU: model FLOPs of the tokens per second over the peak of all devices, 0 to 1; None where either is unknown."""
    if token_flops is None or peak_flops is None:
        return None
    return token_flops * tokens_per_second / (ranks * peak_flops)
