"""Samples of BERT from the rows of HDF5 shards, which were masked when the shards were made."""

from __future__ import annotations

import numpy as np

from shardwise.data.reading.hdf5 import ShardRows, in_list
from shardwise.data.samples.batch import IGNORE, Batch, Batches
from shardwise.data.samples.pairs import pair_batch
from shardwise.data.samples.sampler import IntArray


class ShardBatches(Batches):
    """Batches of the rows `first` to before `after` of all shards; sample `i` is row `first + i`.

    Each epoch has every row once, in another order (`SampleOrder`); the masks are the same in each.

    Inputs: those of `SentencePairBatches`, with targets at the masked positions alone. A sample that counts nothing is
    the first row, with targets and `next_sentence_B` of `IGNORE`.
    """

    objectives = ("mlm", "nsp")

    def __init__(self, shards: ShardRows, first: int, after: int, seed: int) -> None:
        super().__init__(after - first, seed)
        self.shards, self.first = shards, first

    def collate(self, indices: IntArray, epochs: IntArray, samples: IntArray) -> Batch:
        real_B = indices >= 0
        rows = self.shards.take(np.maximum(indices, 0) + self.first)
        positions_BP = rows["masked_lm_positions"]
        listed_BP = in_list(positions_BP)
        return pair_batch(
            samples,
            ids_SB=rows["input_ids"],
            token_types_SB=rows["segment_ids"],
            mask_SB=rows["input_mask"],
            positions_PB=np.where(listed_BP, positions_BP, 0),
            targets_PB=np.where(listed_BP & real_B[:, None], rows["masked_lm_ids"], IGNORE),
            next_sentence_B=np.where(real_B, rows["next_sentence_labels"], IGNORE),
        )
