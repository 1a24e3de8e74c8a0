"""Small shards of sentence pairs, as a preparer of BERT's data writes them, from their definition."""

from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np

Arrays = dict[str, np.ndarray]


def arrays(rows: int, first: int = 0, length: int = 16, predictions: int = 4, vocab_size: int = 300) -> Arrays:
    """Row `r` is sample `first + r`, whose number stands at place 1 above 100; lengths, segments and masks differ."""
    numbers, place = first + np.arange(rows), np.arange(length)
    sizes, masked = length - numbers % 5, numbers % predictions + 1
    mask = (place < sizes[:, None]).astype("i4")
    ids = (5 + (numbers[:, None] * 7 + place * 3) % 90) * mask
    ids[:, 1] = 100 + numbers % (vocab_size - 100)
    listed = np.arange(predictions) < masked[:, None]
    positions = np.where(listed, 2 + np.arange(predictions) * 2, 0)
    return {
        "input_ids": ids.astype("i4"),
        "input_mask": mask,
        "segment_ids": ((place >= length // 2) * mask).astype("i4"),
        "masked_lm_positions": positions.astype("i4"),
        "masked_lm_ids": np.where(listed, 5 + positions * 3, 0).astype("i4"),
        "next_sentence_labels": (numbers % 2).astype("i1"),
    }


def write(path: Path, found: Mapping[str, np.ndarray], *, compression: str | None = None) -> str:
    """A shard of these arrays; its path."""
    with h5py.File(path, "w") as file:
        for key, array in found.items():
            file.create_dataset(key, data=array, compression=compression)
    return str(path)
