"""Samples of a causal language model: a row of tokens, and as targets the same row one token further."""

from __future__ import annotations

import numpy as np

from shardwise.data.samples.batch import Batch, SampledBatches, Tokens
from shardwise.data.samples.causal import DocumentEnds, causal_batch
from shardwise.data.samples.sampler import IntArray
from shardwise.errors import ConfigError


class TokenBatches(SampledBatches):
    """Batches over one long row of tokens: sample `i` is `tokens[i·S : i·S + S + 1]`.

    Inputs: see `causal_batch`. A sample that counts nothing has ids 0 and targets `IGNORE`.

    Args:
        tail: what is left after the last whole sample is a sample too, filled up with ids 0 and targets `IGNORE`: every
            token except the first is then a target, exactly once.
        ends: what the end of a document changes.
    """

    objectives = ("lm",)

    def __init__(
        self,
        tokens: Tokens,
        sequence_length: int,
        seed: int,
        *,
        tail: bool = False,
        ends: DocumentEnds | None = None,
    ) -> None:
        least = 2 if tail else sequence_length + 1
        if len(tokens) < least:
            wanted = "2, one to read and one to predict" if tail else f"train.sequence_length + 1 ({least})"
            raise ConfigError(f"the tokens ({len(tokens)}) must be at least {wanted}")
        targets = len(tokens) - 1
        super().__init__(-(-targets // sequence_length) if tail else targets // sequence_length, seed)
        self.tokens = tokens
        self.sequence_length, self.ends = sequence_length, ends

    def collate(self, indices: IntArray, epochs: IntArray, samples: IntArray) -> Batch:
        length = self.sequence_length
        rows_BS = np.zeros((len(indices), length + 1), dtype=np.int64)
        targets_B = np.zeros(len(indices), dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            if index >= 0:
                first = index * length
                found = self.tokens.take(np.arange(first, min(first + length + 1, len(self.tokens))))
                rows_BS[row, : len(found)] = found
                targets_B[row] = len(found) - 1
        return causal_batch(rows_BS, targets_B, samples, self.ends)
