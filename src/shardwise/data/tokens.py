"""Samples of a causal language model: a row of tokens, and as targets the same row one token further."""

from __future__ import annotations

import numpy as np

from shardwise.data.batch import IGNORE, Batch, SampledBatches, TokenArray
from shardwise.data.sampler import IntArray
from shardwise.errors import ConfigError


class TokenBatches(SampledBatches):
    """Batches over one long row of tokens: sample `i` is `tokens[i·S : i·S + S + 1]`.

    Inputs: `ids_SB` and `targets_SB`. A sample that counts nothing has ids 0 and targets `IGNORE`.
    """

    objectives = ("lm",)

    def __init__(self, tokens: TokenArray, sequence_length: int, seed: int) -> None:
        if len(tokens) < sequence_length + 1:
            raise ConfigError(
                f"the tokens ({len(tokens)}) must be at least train.sequence_length + 1 ({sequence_length + 1})"
            )
        super().__init__((len(tokens) - 1) // sequence_length, seed)
        self.tokens = tokens
        self.sequence_length = sequence_length

    def collate(self, indices: IntArray, epochs: IntArray, samples: IntArray) -> Batch:
        length = self.sequence_length
        rows_BS = np.zeros((len(indices), length + 1), dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            if index >= 0:
                rows_BS[row] = self.tokens[index * length : index * length + length + 1]
        targets_SB = rows_BS[:, 1:].T.copy()  # inputs and targets must not share memory
        targets_SB[:, indices < 0] = IGNORE
        counts = np.array([np.count_nonzero(indices >= 0) * length])
        return Batch({"ids_SB": rows_BS[:, :-1].T.copy(), "targets_SB": targets_SB}, counts, samples)
