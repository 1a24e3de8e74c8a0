"""The examples of `hooks.data`: the records that the makers' own writers wrote, and a run that goes on among them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import shardwise
from examples.token_stores import readers, write
from tests.interop.data_formats_texts import NUMBER
from tests.unit.data.small_runs import sized

CLASSES = {"mosaic": readers.Mosaic, "litdata": readers.LitData, "array": readers.ArrayRecords, "tars": readers.Tars}


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """What torchvision's import needs beside a CPU build of torch; `import streaming` imports torchvision.

    Its wheels of the package index are linked with CUDA (libtorch_cuda.so), so their operators are missing here, and
    the import describes two of them. They are declared, and MDS calls none.
    """
    with torch.library._scoped_library("torchvision", "FRAGMENT") as library:
        if torch.version.cuda is None:
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        yield


def rows() -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 500, size).tolist() for size in generator.integers(2, 66, NUMBER)]


def theirs(name: str, folder: Path) -> list[list[int]]:
    """The records as the maker's own reader gives them, in the order of the files."""
    if name == "mosaic":
        import streaming

        return [record["tokens"].tolist() for record in streaming.StreamingDataset(local=str(folder), batch_size=1)]
    if name == "litdata":
        import litdata

        return [record.tolist() for record in litdata.StreamingDataset(str(folder), shuffle=False)]
    if name == "array":
        from array_record.python.array_record_module import ArrayRecordReader

        found = []
        for file in sorted(folder.iterdir()):
            reader = ArrayRecordReader(str(file))
            found += [np.frombuffer(record, "<u4").tolist() for record in reader.read_all()]
        return found
    import webdataset

    files = sorted(map(str, folder.glob("*.tar")))
    records = webdataset.WebDataset(files, shardshuffle=False).decode()
    return [record["tokens.npy"].tolist() for record in records]


@pytest.mark.parametrize("name", CLASSES)
def test_a_store(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENS", str(tmp_path / "tokens"))
    written = rows()
    write.WRITERS[name](tmp_path / "tokens/train", written)
    write.WRITERS[name](tmp_path / "tokens/eval", written[:50])
    store = CLASSES[name](sized(512, 64, 0), "train")
    read = [store[number].tolist() for number in range(len(store))]
    assert read == theirs(name, tmp_path / "tokens/train") == written
    short = CLASSES[name](sized(512, 16, 0), "eval")
    assert short[3].tolist() == written[3][:17]

    def train(run: str, **keys: int) -> shardwise.Run:
        settings = {"train.steps": 6, "train.sequence_length": 64, "data.dataset": None, **keys}
        config = shardwise.load_recipe("gpt-tiny", **settings)
        return shardwise.train(config, run_dir=run, data=CLASSES[name])

    whole = train("whole")
    assert train("halves", **{"train.stop_after": 3}).metrics("step")[-1]["step"] == 3
    halves = train("halves")
    losses = [[event["loss"] for event in run.metrics("step")] for run in (whole, halves)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


def test_blocks_of_litdata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("litdata")
    monkeypatch.setenv("TOKENS", str(tmp_path))
    monkeypatch.setenv("BLOCKS", "1")
    written = rows()
    write.litdata(tmp_path / "train", written, joined=True)
    store = readers.LitData(sized(512, 32, 0), "train")
    tokens = [token for row in written for token in row]
    assert [token for number in range(20) for token in store[number].tolist()] == tokens[: 20 * 33]
