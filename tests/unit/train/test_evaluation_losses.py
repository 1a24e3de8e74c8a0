"""What an evaluation counts. Its losses: tests/dist/test_evaluation.py."""

import numpy as np
import torch

from shardwise.data.samples.batch import IGNORE, Batch
from shardwise.train.mean_loss import MicroBatch


def tokens(batch: Batch) -> int:
    return int(MicroBatch.on(torch.device("cpu"), batch).tokens())


def test_tokens_of_samples_that_only_fill_up_are_not_counted() -> None:
    """Those of sentence pairs: special tokens alone, which a mask does not tell from others."""
    samples, mask_SB = np.arange(3), np.array([[1, 1, 1], [1, 1, 1], [1, 1, 0]])
    inputs = {"ids_SB": mask_SB, "mask_SB": mask_SB, "next_sentence_B": np.array([0, IGNORE, 1])}
    assert tokens(Batch(inputs, np.array([2, 2]), samples)) == 3 + 2
    causal = Batch({"ids_SB": mask_SB, "targets_SB": mask_SB}, np.array([7]), samples)
    assert tokens(causal) == 7
