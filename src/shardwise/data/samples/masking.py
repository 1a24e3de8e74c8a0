"""Masked-language-model targets (Devlin et al. 2018, arXiv:1810.04805, section 3.1).

Shapes: B = samples, S = sequence length, P = predictions of a sample, at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.data.samples.batch import IGNORE
from shardwise.data.samples.hashing import Draws, below
from shardwise.data.samples.sampler import IntArray

# The `site` of each draw (`Draws`); those of pairs.py are below 16.
_PLACE, _KIND, _TOKEN = 16, 17, 18
_POSITION_BITS = 16
MAX_SEQUENCE_LENGTH = 1 << _POSITION_BITS


@dataclass(frozen=True)
class Masking:
    """Which tokens of a sample are predicted, and what the model sees in their place.

    Of `n` candidates `max(1, ⌊fraction · n + ½⌋)` are predicted, at most `predictions` (P): those with the smallest
    hashes. Four in five become `mask_id`, one in ten a random one of `ordinary_ids`, one in ten stays.

    With `continuations` (whole-word masking, as in the paper's later code) a word, which is a candidate and all tokens
    that continue it, is predicted as a whole or not at all: words are taken in the order of the hashes of their first
    tokens, except those that would exceed the number. What each token is replaced by is drawn for it alone.

    Attributes:
        continuations: which ids continue the word before them, [vocabulary]; None: each token is a word.
    """

    fraction: float
    predictions: int
    mask_id: int
    ordinary_ids: IntArray
    continuations: npt.NDArray[np.bool_] | None = None

    def apply(
        self, ids_BS: IntArray, candidates_BS: npt.NDArray[np.bool_], draws: Draws
    ) -> tuple[IntArray, IntArray, IntArray]:
        """`(ids_BS, positions_BP, targets_BP)`: positions ascend; unused places have position 0 and target `IGNORE`."""
        length = ids_BS.shape[1]
        # A hash whose last bits are its position: no two are equal, and the smallest name their own positions.
        low = np.uint64(MAX_SEQUENCE_LENGTH - 1)
        hashes_BS = (draws.table(_PLACE, length) & ~low) | np.arange(length, dtype=np.uint64)
        hashes_BS[~candidates_BS] = ~np.uint64(0)
        candidates_B = candidates_BS.sum(axis=1)
        wanted_B = np.maximum(np.floor(self.fraction * candidates_B + 0.5).astype(np.int64), 1)
        wanted_B = np.minimum(wanted_B, np.minimum(candidates_B, self.predictions))
        if self.continuations is not None:
            hashes_BS, wanted_B = self._of_words(hashes_BS, self.continuations[ids_BS] & candidates_BS, wanted_B)
        smallest_BP = np.sort(np.partition(hashes_BS, self.predictions - 1, axis=1)[:, : self.predictions], axis=1)
        chosen_BP = np.arange(self.predictions) < wanted_B[:, None]
        positions_BP = np.where(chosen_BP, (smallest_BP & low).astype(np.int64), length)
        positions_BP.sort(axis=1)
        positions_BP[~chosen_BP] = 0
        originals_BP = np.take_along_axis(ids_BS, positions_BP, axis=1)
        kinds_BP = below(draws.table(_KIND, self.predictions), 10)
        random_BP = self.ordinary_ids[below(draws.table(_TOKEN, self.predictions), len(self.ordinary_ids))]
        shown_BP = np.where(kinds_BP < 8, self.mask_id, np.where(kinds_BP < 9, random_BP, originals_BP))
        masked_BS = ids_BS.copy()
        rows = np.nonzero(chosen_BP)[0]
        masked_BS[rows, positions_BP[chosen_BP]] = shown_BP[chosen_BP]
        return masked_BS, positions_BP, np.where(chosen_BP, originals_BP, IGNORE)

    def _of_words(
        self, hashes_BS: npt.NDArray[np.uint64], continued_BS: npt.NDArray[np.bool_], wanted_B: IntArray
    ) -> tuple[npt.NDArray[np.uint64], IntArray]:
        """Hashes in which those of the predicted words' tokens are the smallest, and how many tokens these are.

        A continuation that follows no candidate, such as the first token of B after [SEP], begins a word.
        """
        length = hashes_BS.shape[1]
        none = ~np.uint64(0)
        continued_BS[:, 1:] &= hashes_BS[:, :-1] != none
        continued_BS[:, 0] = False
        # W = words of a sample; word 0 of each sample begins at its first token.
        words_BS = np.cumsum(~continued_BS, axis=1) - 1
        order_BW = np.argsort(np.where(continued_BS, none, hashes_BS), axis=1)
        sizes_BW = np.zeros_like(words_BS)
        np.add.at(sizes_BW, (np.arange(len(words_BS))[:, None], words_BS), hashes_BS != none)
        taken_BW = np.zeros(words_BS.shape, dtype=np.bool_)
        total_B, rows = np.zeros_like(wanted_B), np.arange(len(words_BS))
        for place in range(length):
            word_B = words_BS[rows, order_BW[:, place]]
            size_B = sizes_BW[rows, word_B]
            fits_B = ~taken_BW[rows, word_B] & (size_B > 0) & (total_B + size_B <= wanted_B)
            taken_BW[rows, word_B] |= fits_B
            total_B += size_B * fits_B
            if (total_B == wanted_B).all():
                break
        chosen_BS = np.take_along_axis(taken_BW, words_BS, axis=1) & (hashes_BS != none)
        return np.where(chosen_BS, hashes_BS, none), total_B
