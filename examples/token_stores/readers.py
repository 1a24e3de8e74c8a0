"""Tokens in the stores of other libraries, as `hooks.data` (docs/hooks.md): MDS, litdata, ArrayRecord, webdataset.

A record is a row of token ids. The variable TOKENS names the folder in which `train` and `eval` lie. Any record is read
by its number, so that a run goes on at the exact sample, at any layout.
"""

import io
import os
import tarfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise import Config

Row = npt.NDArray[Any]


class Store:
    """The records of a part; a longer one than a sample is cut."""

    def __init__(self, config: Config, part: str) -> None:
        self.room = config.train.sequence_length + 1
        self.folder = Path(os.environ.get("TOKENS", "tokens"), part)
        self.lock = threading.Lock()  # several threads may read (data.workers), and not every library allows it

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> Row:
        with self.lock:
            return self.row(number)[: self.room]

    records: Any

    def row(self, number: int) -> Row:
        raise NotImplementedError


class Mosaic(Store):
    """MDS of mosaicml-streaming, with a column `tokens`, as LLM Foundry writes it: an array, or the bytes of int64."""

    def __init__(self, config: Config, part: str) -> None:
        from streaming import LocalDataset

        super().__init__(config, part)
        self.records = LocalDataset(str(self.folder))

    def row(self, number: int) -> Row:
        tokens = self.records[number]["tokens"]
        return np.frombuffer(tokens, "<i8") if isinstance(tokens, bytes) else np.asarray(tokens)


class LitData(Store):
    """What `litdata.optimize` wrote of tensors of tokens; with a `TokensLoader`, the tokens are cut into blocks."""

    def __init__(self, config: Config, part: str) -> None:
        from litdata import StreamingDataset, TokensLoader

        super().__init__(config, part)
        loader = TokensLoader(block_size=self.room) if os.environ.get("BLOCKS") else None
        self.records = StreamingDataset(str(self.folder), item_loader=loader, shuffle=False)

    def row(self, number: int) -> Row:
        row: Row = np.asarray(self.records[number])
        return row


class ArrayRecords(Store):
    """Files of ArrayRecord, as Grain reads them, whose records are the bytes of uint32."""

    def __init__(self, config: Config, part: str) -> None:
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        super().__init__(config, part)
        self.records = ArrayRecordDataSource(sorted(map(str, self.folder.glob("*.array_record"))))

    def row(self, number: int) -> Row:
        return np.frombuffer(self.records[number], "<u4")


class Tars(Store):
    """Shards of webdataset with a member `tokens.npy` of each sample: where the members lie is found out once."""

    def __init__(self, config: Config, part: str) -> None:
        super().__init__(config, part)
        self.records = []
        for path in sorted(self.folder.glob("*.tar")):
            with tarfile.open(path) as tar:
                members = [member for member in tar if member.name.endswith(".tokens.npy")]
            self.records += [(path, member.offset_data, member.size) for member in members]

    def row(self, number: int) -> Row:
        path, start, size = self.records[number]
        with path.open("rb") as file:
            file.seek(start)
            row: Row = np.load(io.BytesIO(file.read(size)))
        return row
