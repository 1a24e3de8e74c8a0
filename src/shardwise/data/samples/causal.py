"""Samples of a causal language model: a row of tokens, and as targets the same row one token further.

Shapes: B = samples, S = sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwise.config import Config
from shardwise.data.samples.batch import IGNORE, Batch, Batches, Tokens
from shardwise.data.samples.sampler import IntArray
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.errors import ConfigError, see


@dataclass(frozen=True)
class DocumentEnds:
    """What the end of a document changes within a sample, as Megatron-LM's options of these names do.

    The token that ends a document belongs to it. The first document of a sample may begin in an earlier sample.

    Attributes:
        token: the id of the token that ends a document.
        mask_loss: the token after it is no target, as nothing before it could predict it.
        reset_position_ids: positions begin with 0 again after it.
        reset_attention_mask: tokens after it attend to none of those before.
    """

    token: int
    mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False

    @staticmethod
    def of(config: Config, tokenizer: Path | None) -> DocumentEnds | None:
        """What the `data` section asks for; None: nothing, a sample is a plain row of tokens.

        Raises:
            ConfigError: nothing says which token ends a document.
        """
        data = config.data
        if not data.document_options:
            return None
        token = data.eod_token
        if token is None and tokenizer is not None:
            token = Tokenizer.load(tokenizer).end_of_document_id
        if token is None:
            raise ConfigError(without_end(config))
        return DocumentEnds(token, data.eod_mask_loss, data.reset_position_ids, data.reset_attention_mask)


def without_end(config: Config) -> list[str]:
    """The problem of a configuration that needs the id of the end of a document, which no tokenizer says."""
    data = config.data
    if not data.document_options or data.eod_token is not None:
        return []
    return [
        f"{data.document_options[0]} (true) needs the id of the token that ends a document: set data.eod_token, or "
        "data.tokenizer to the one that made the data"
    ]


def causal_batch(rows_BS: IntArray, targets_B: IntArray, samples: IntArray, ends: DocumentEnds | None) -> Batch:
    """The batch of rows of S + 1 tokens; in each row the `targets_B` tokens after the first are targets.

    Inputs: `ids_SB` and `targets_SB`, which is `IGNORE` where nothing is counted; as `ends` asks, `positions_SB`, and
    `starts_SB`: the first place that each place attends to.
    """
    length = rows_BS.shape[1] - 1
    targets_SB = rows_BS[:, 1:].T.copy()  # inputs and targets must not share memory
    targets_SB[np.arange(length)[:, None] >= targets_B] = IGNORE
    ids_SB = rows_BS[:, :-1].T.copy()
    inputs = {"ids_SB": ids_SB, "targets_SB": targets_SB}
    if ends is not None:
        ended_SB = ids_SB == ends.token
        if ends.mask_loss:
            targets_SB[ended_SB] = IGNORE
        places_S1 = np.arange(length)[:, None]
        begins_SB = np.zeros_like(ids_SB)
        begins_SB[1:] = np.where(ended_SB[:-1], places_S1[1:], 0)
        starts_SB = np.maximum.accumulate(begins_SB, axis=0)
        if ends.reset_position_ids:
            inputs["positions_SB"] = places_S1 - starts_SB
        if ends.reset_attention_mask:
            inputs["starts_SB"] = starts_SB
    return Batch(inputs, np.array([np.count_nonzero(targets_SB != IGNORE)]), samples, targets_B)


class TokenBatches(Batches):
    """Batches over one long row of tokens: sample `i` is `tokens[i·S : i·S + S + 1]`.

    Inputs: see `causal_batch`. A sample that counts nothing has ids 0 and targets `IGNORE`.

    Args:
        tail: the tokens after the last whole sample are a sample too, padded with ids 0 and targets `IGNORE`: every
            token except the first is then a target, exactly once.
        ends: what the end of a document changes.
    """

    objectives = ("lm",)

    def __init__(
        self, tokens: Tokens, sequence_length: int, seed: int, *, tail: bool = False, ends: DocumentEnds | None = None
    ) -> None:
        least = 2 if tail else sequence_length + 1
        if len(tokens) < least:
            wanted = "2, one to read and one to predict" if tail else f"train.sequence_length + 1 ({least})"
            raise ConfigError(f"the tokens ({len(tokens)}) must be at least {wanted}{see('data#too-few-tokens')}")
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
                tokens = self.tokens.take(np.arange(first, min(first + length + 1, len(self.tokens))))
                rows_BS[row, : len(tokens)] = tokens
                targets_B[row] = len(tokens) - 1
        return causal_batch(rows_BS, targets_B, samples, self.ends)
