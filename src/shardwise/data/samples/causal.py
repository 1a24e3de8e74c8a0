"""Rows of tokens become the batch of a causal language model, with what the end of a document changes in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwise.config import Config
from shardwise.data.samples.batch import IGNORE, Batch
from shardwise.data.samples.sampler import IntArray
from shardwise.data.tokens.tokenizer import Tokenizer
from shardwise.errors import ConfigError


@dataclass(frozen=True)
class DocumentEnds:
    """What the end of a document changes within a sample, as Megatron-LM's options of these names.

    The token that ends a document belongs to it. What a sample begins with is its first document, wherever that began.

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
        """As the `data` section asks; None: a sample is a row of tokens and no more.

        Raises:
            ConfigError: nothing says which token ends a document.
        """
        data = config.data
        if not data.document_options:
            return None
        token = data.eod_token
        if token is None:
            if tokenizer is None:
                raise ConfigError(without_end(config))
            token = Tokenizer.load(tokenizer).end_of_document_id
        return DocumentEnds(token, data.eod_mask_loss, data.reset_position_ids, data.reset_attention_mask)


def without_end(config: Config) -> list[str]:
    """The problem of a configuration that needs the id of the end of a document, and neither names nor implies it."""
    data = config.data
    if not data.document_options or data.eod_token is not None:
        return []
    return [
        f"{data.document_options[0]} (true) needs the id of the token that ends a document: set data.eod_token, or "
        "data.tokenizer to the one that made the data"
    ]


def causal_batch(rows_BS: IntArray, targets_B: IntArray, samples: IntArray, ends: DocumentEnds | None) -> Batch:
    """The batch of rows of S + 1 tokens, of which as many are targets as `targets_B` says: those after the first.

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
