"""Multiply-adds of one token's forward pass. From them stages are balanced and FLOPs are computed.

Legend: H hidden size, L blocks, q = heads · head_dim, S sequence length.
"""

from __future__ import annotations

import math

from shardwise.config import FamilyConfig
from shardwise.config.data import MASKED_FRACTION
from shardwise.plan.parameters import matmul_parameter_count


def attention_work(model: FamilyConfig, sequence_length: int, *, count_masked: bool = False) -> float:
    """Multiply-adds of attention in one block: 2·q for each token that is attended to, in `q kᵀ` and in `P v`.

    With the causal mask, a token attends to S / 2 tokens on average. Masked tokens are no work, unless `count_masked`.
    """
    attended = sequence_length / 2 if model.causal and not count_masked else sequence_length
    return 2.0 * model.num_attention_heads * model.head_dim * attended


def block_work(model: FamilyConfig, sequence_length: int, *, count_masked: bool = False) -> float:
    """Multiply-adds of one block: one for each element of its matrices, and its attention."""
    matrices = matmul_parameter_count(model, "token") / model.num_hidden_layers
    return matrices + attention_work(model, sequence_length, count_masked=count_masked)


def head_work(model: FamilyConfig, sequence_length: int, predictions: int | None = None) -> float:
    """Multiply-adds of what follows the last block: output head, and BERT's pooler and next-sentence classifier.

    BERT predicts P tokens of a sequence, so its masked-token head counts P / S of its matrices. Pooler and classifier
    see one token of a sequence and count 1 / S.

    Args:
        predictions: P (default: ⌈0.15·S⌉); other families predict at every position.
    """
    share = 1.0
    if "mlm" in model.objectives:
        share = (predictions or math.ceil(MASKED_FRACTION * sequence_length)) / sequence_length
    predicted = matmul_parameter_count(model, "prediction") * share
    return predicted + matmul_parameter_count(model, "sequence") / sequence_length
