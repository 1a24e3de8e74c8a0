"""Rows of tokens in the stores of other libraries: python -m examples.token_stores.write mosaic|litdata|array|tars."""

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

Rows = Sequence[Sequence[int]]


def mosaic(folder: Path, rows: Rows) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"tokens": "ndarray:int32"}, size_limit=1 << 18) as writer:
        for row in rows:
            writer.write({"tokens": np.array(row, np.int32)})


def litdata(folder: Path, rows: Rows, *, joined: bool = False) -> None:
    from litdata import TokensLoader, optimize

    folder.mkdir(parents=True)
    optimize(
        _Tensors(rows),
        [*range(len(rows))],
        str(folder),
        num_workers=1,
        chunk_bytes="256KB",
        item_loader=TokensLoader() if joined else None,
    )


class _Tensors:
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __call__(self, number: int) -> object:
        import torch

        return torch.tensor(self.rows[number])


def array(folder: Path, rows: Rows) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    folder.mkdir(parents=True)
    for number in range(2):
        writer = ArrayRecordWriter(str(folder / f"{number}.array_record"), "group_size:1")
        for row in _half(rows, number):
            writer.write(np.array(row, "<u4").tobytes())
        writer.close()


def tars(folder: Path, rows: Rows) -> None:
    from webdataset import TarWriter

    folder.mkdir(parents=True)
    for number in range(2):
        with TarWriter(str(folder / f"{number:05d}.tar")) as writer:
            for place, row in enumerate(_half(rows, number)):
                writer.write({"__key__": f"{number}-{place:06d}", "tokens.npy": np.array(row, np.uint16)})


def _half(rows: Rows, number: int) -> Rows:
    middle = len(rows) // 2
    return rows[middle:] if number else rows[:middle]


WRITERS = {"mosaic": mosaic, "litdata": litdata, "array": array, "tars": tars}


def main(names: Iterable[str]) -> None:
    """Rows that count upwards, in the folder that TOKENS names."""
    rows = [[(first + place) % 500 for place in range(65)] for first in range(600)]
    for name in names:
        for part, chosen in (("train", rows[:500]), ("eval", rows[500:])):
            WRITERS[name](Path(os.environ.get("TOKENS", "tokens"), part), chosen)


if __name__ == "__main__":
    main(sys.argv[1:])
