"""Multiply-adds of one token's forward pass. Stages are balanced by them, and FLOPs are computed from them.

Legend: H hidden size, L blocks, q = heads · head_dim, S sequence length.
"""

from __future__ import annotations

import math

from shardwise.config import FamilyConfig
from shardwise.config.data import MASKED_FRACTION
from shardwise.plan.parameters import matmul_parameter_count


def attention_work(model: FamilyConfig, sequence_length: int, *, count_masked: bool = False) -> float:
    """Multiply-adds of attention in one block, `q kᵀ` and the sum of values: 2·q for each token attended to.

    The causal mask halves it: a token attends to S / 2 others on average, and what is masked out is not work.
    """
    attended = sequence_length / 2 if model.causal and not count_masked else sequence_length
    return 2.0 * model.num_attention_heads * model.head_dim * attended


def block_work(model: FamilyConfig, sequence_length: int, *, count_masked: bool = False) -> float:
    """Multiply-adds of one block: one for each element of its matrices, and its attention."""
    matrices = matmul_parameter_count(model, "token") / model.num_hidden_layers
    return matrices + attention_work(model, sequence_length, count_masked=count_masked)


def head_work(model: FamilyConfig, sequence_length: int, predictions: int | None = None) -> float:
    """Multiply-adds of what follows the last block: output head, and BERT's pooler and next-sentence classifier.

    Of BERT's tokens only P are predicted: the masked-token head counts P / S of its matrices, pooler and classifier,
    which see one token of each sequence, 1 / S.

    Args:
        predictions: P (default: ⌈0.15·S⌉); other families predict at every position.
    """
    share = 1.0
    if "mlm" in model.objectives:
        share = (predictions or math.ceil(MASKED_FRACTION * sequence_length)) / sequence_length
    predicted = matmul_parameter_count(model, "prediction") * share
    return predicted + matmul_parameter_count(model, "sequence") / sequence_length
