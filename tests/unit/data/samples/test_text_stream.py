"""Streams: every document once an epoch, the same global batches at any layout and from any stop, little read twice."""

import gzip
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.errors import DataError
from shardwise.config import Config
from shardwise.data.formats.prepared_data import make_batches, make_evaluation_batches
from shardwise.data.open_data import prepare_data
from shardwise.data.reading import jsonl_parquet
from shardwise.data.reading import text_sources as shards_module
from shardwise.data.reading.text_sources import FileShard
from shardwise.data.samples import text_stream as streaming_module
from shardwise.data.samples.batch import Batch
from shardwise.data.samples.text_stream import StreamBatches, StreamPosition
from shardwise.data.tokens.tokenizer import Tokenizer, train_tokenizer
from tests.sweeps import few
from tests.unit.data import small_runs
from tests.unit.data.small_runs import batches_of, saved_rows, stories

TEXTS = stories()[:120]
GLOBAL, LENGTH = 8, 32
KINDS = ("jsonl", "jsonl.gz", "parquet", "text", "datasets")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, 300, "text").save(folder)
    return folder


def write(at: Path, kind: str, texts: list[str], files: int = 3) -> Path:
    """The texts in several files."""
    at.mkdir(exist_ok=True)
    cuts = [texts[number * len(texts) // files : (number + 1) * len(texts) // files] for number in range(files)]
    if kind == "datasets":
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict({"text": ["", *texts]}).save_to_disk(at, num_shards=files)
    for number, cut in enumerate(cuts if kind != "datasets" else []):
        lines = b"".join(json.dumps({"text": text}).encode() + b"\n\n" for text in cut)
        if kind == "jsonl":
            (at / f"{number}.jsonl").write_bytes(lines)
        elif kind == "jsonl.gz":
            (at / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines))
        elif kind == "parquet":
            pq.write_table(pa.table({"text": cut}), at / f"{number}.parquet", row_group_size=7)
        else:
            for place, text in enumerate(cut):
                (at / f"{number}-{place:03}.txt").write_text(text, encoding="utf-8", newline="")
    return at


def config(path: Path | None, tokenizer: Path, buffer: int = 16, seed: int = 1, **data: Any) -> Config:
    keys = {"split": "1,0", "streaming": True, "shuffle_buffer": buffer, "path": path and str(path), **data}
    return small_runs.config(300, LENGTH, tokenizer=str(tokenizer), **keys).with_keys(train={"seed": seed})


@pytest.fixture
def opened(tmp_path: Path, tokenizer: Path) -> Callable[..., StreamBatches]:
    """The batches of a stream of this path, with these keys."""
    return lambda path, **keys: batches_of(config(path, tokenizer, **keys), tmp_path / "cache")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    return write(tmp_path_factory.mktemp("stream") / "data", "jsonl", TEXTS)


def rows(batches: list[Batch]) -> np.ndarray:
    """All samples of micro-batches, each its ids and its last target."""
    return np.concatenate([np.vstack([batch.inputs["ids_SB"], batch.inputs["targets_SB"][-1:]]).T for batch in batches])


def global_batch(batches: StreamBatches, consumed: int, size: int = GLOBAL) -> np.ndarray:
    return rows([batches.global_batch(consumed, size)])


def documents_in(tokens: Any, tokenizer: Path) -> list[str]:
    return Tokenizer.load(tokenizer).decode(tokens).split("<|endoftext|>")[:-1]


def blocks_of(batches: StreamBatches, epoch: int) -> list[np.ndarray]:
    """The tokens of the blocks of an epoch."""
    place, found = StreamPosition(epoch=epoch), []
    while place.epoch == epoch:
        block = batches._stream.block(place)
        found.append(np.array([]) if block.samples is None else block.samples.tokens)
        place = block.stop
    return found


def epoch_documents(batches: StreamBatches, tokenizer: Path, epoch: int) -> list[str]:
    """The documents that the blocks of an epoch have, in their order."""
    return [text for tokens in blocks_of(batches, epoch) for text in documents_in(tokens, tokenizer)]


@pytest.mark.parametrize("kind", few(KINDS, "jsonl", "parquet"))
def test_every_document_once_an_epoch_in_another_order(kind: str, tokenizer: Path, opened: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "data", kind, TEXTS)
    first, second = (epoch_documents(opened(path), tokenizer, epoch) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == sorted(TEXTS)
    assert first != second != TEXTS
    assert epoch_documents(opened(path, seed=2), tokenizer, 0) != first
    # A buffer as large as the data shuffles all of them.
    assert sorted(epoch_documents(opened(path, buffer=999), tokenizer, 0)) == sorted(TEXTS)


@pytest.mark.parametrize("kind", few(KINDS, "jsonl.gz"))
@settings(max_examples=6, deadline=None)
@given(
    runs=st.lists(st.tuples(st.integers(1, 30), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=4),
    buffer=st.sampled_from([1, 5, 16, 50, 1000]),
)
def test_stops_and_layouts_change_nothing(
    kind: str, runs: list[tuple[int, int]], buffer: int, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Runs of so many global batches, each at another DP degree and begun from the state of the one before.

    An epoch has about 30 batches of 8 samples of 32 tokens.
    """
    at = tmp_path_factory.getbasetemp() / f"property-{kind}"
    if not at.exists():
        at.mkdir()
        write(at / "data", kind, TEXTS[:24])
    chosen = config(at / "data", tokenizer, buffer)
    reference, consumed, state = batches_of(chosen, at / "cache"), 0, None
    for batches_of_run, degree in runs:
        run = batches_of(chosen, at / "cache")
        if state is not None:
            run.restore(json.loads(json.dumps(state)))
        for _ in range(batches_of_run):
            expected = global_batch(reference, consumed)
            shares = [run.local_batch(consumed, GLOBAL, rank, degree, 1) for rank in range(degree)]
            # Micro-batch m of rank r has sample m · degree + r.
            found = rows([shares[rank][m] for m in range(GLOBAL // degree) for rank in range(degree)])
            assert np.array_equal(found, expected), f"global batch {consumed // GLOBAL} differs at DP {degree}"
            numbers = [int(batch.samples[0]) for share in shares for batch in share]
            assert sorted(numbers) == list(range(consumed, consumed + GLOBAL))
            consumed += GLOBAL
        state = run.state(consumed)
        assert set(state) == {"samples", "epoch", "block", "shard", "offset"}
        assert state["samples"] <= consumed


def test_readers_may_ask_in_any_order(whole: Path, opened: Any) -> None:
    ordered, asked = opened(whole, buffer=5), opened(whole, buffer=5)
    expected = {consumed: global_batch(ordered, consumed) for consumed in range(0, 320, GLOBAL)}
    wanted = np.random.default_rng(0).permutation(list(expected)).tolist()
    with ThreadPoolExecutor(4) as readers:
        for consumed, found in zip(wanted, readers.map(lambda one: global_batch(asked, one), wanted), strict=True):
            assert np.array_equal(found, expected[consumed]), consumed


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
def test_a_resume_reads_one_block(kind: str, opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a state only the block at hand is read again, wherever it lies, and the next one: nothing is replayed."""
    path = write(tmp_path / "data", kind, TEXTS)
    first, consumed = opened(path, buffer=10), 0
    while first.state(consumed)["epoch"] < 1 or first.state(consumed)["block"] < 7:
        global_batch(first, consumed)
        consumed += GLOBAL
    state, expected = first.state(consumed), global_batch(first, consumed)
    first._reader.shutdown()
    read: list[int] = []
    plain = FileShard.documents

    def watched(shard: FileShard, start: int) -> Iterator[Any]:
        for each in plain(shard, start):
            read.append(each[0])
            yield each

    monkeypatch.setattr(FileShard, "documents", watched)
    second = opened(path, buffer=10)
    assert read == [], "a start looks at nothing"
    second.restore(state)
    assert np.array_equal(global_batch(second, consumed), expected)
    second._reader.shutdown()
    assert 10 <= len(read) <= 20, "documents of a block, and of the one that is read ahead"
    assert second.state(consumed) == state


def test_weights_hold_a_share_of_the_first_block_out(whole: Path, tokenizer: Path, tmp_path: Path) -> None:
    chosen = config(whole, tokenizer, buffer=60, split="80,20")
    data = prepare_data(chosen, tmp_path)
    held = documents_in(data.tokens["eval"], tokenizer)
    assert 5 <= len(held) <= 20
    assert set(held) <= set(TEXTS[:60])
    batches = make_batches(chosen, data, "train")
    for epoch in (0, 1):
        trained = epoch_documents(batches, tokenizer, epoch)
        assert sorted(trained + held) == sorted(TEXTS), "each document is trained on or held out"
    evaluation = make_evaluation_batches(chosen, data, "eval")
    assert sum(int(batch.counts[0]) for batch in evaluation.eval_batches(99, 8, 0, 1, 8)) == data.count("eval") - 1
    assert data.beginning("train", 5) == Tokenizer.load(tokenizer).encode(TEXTS[0])[:5].tolist()
    with pytest.raises(DataError, match=r"data\.streaming \(true\) must be false where the training part of"):
        make_evaluation_batches(chosen, data, "train")


def test_long_documents_end_a_block(whole: Path, tokenizer: Path, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded whatever the documents are, and the same blocks come of it everywhere."""
    monkeypatch.setattr(streaming_module, "BLOCK_CHARACTERS", 2000)
    batches = opened(whole, buffer=1000)
    sizes = [len(tokens) for tokens in blocks_of(batches, 0)]
    assert len(sizes) > 10
    assert max(sizes) < 4000
    assert sorted(epoch_documents(batches, tokenizer, 0)) == sorted(TEXTS)


def test_a_long_text_is_cut_up(tokenizer: Path, opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all of a file, however large, would be in memory at once."""
    monkeypatch.setattr(shards_module, "BLOCK_CHARACTERS", 700)
    monkeypatch.setattr(jsonl_parquet, "BLOCK", 100)
    content = ("\ufeff" + " – ".join(TEXTS)).encode()
    path = tmp_path / "one.txt.gz"
    path.write_bytes(gzip.compress(content))
    shard = shards_module.open_text_shard(str(path), config(path, tokenizer).data)
    found = list(shard.documents(0))
    parts = ["".join(blocks) for _, blocks in found]
    assert "".join(parts) == " – ".join(TEXTS)
    assert len(parts) > 5
    assert max(map(len, parts)) < 900
    for number, (after, _) in enumerate(found):
        rest = ["".join(blocks) for _, blocks in shard.documents(after)]
        assert rest == parts[number + 1 :], f"from byte {after} on"
    assert sorted(epoch_documents(opened(path, buffer=4), tokenizer, 0)) == sorted(parts)


def test_what_cannot_be_streamed(tokenizer: Path, opened: Any, tmp_path: Path) -> None:
    saved_rows(tmp_path / "tokens", text=[[1, 2]] * 100)
    with pytest.raises(DataError, match=r"arrow holds token ids in 'text', not text: set data\.streaming=false, and"):
        opened(tmp_path / "tokens")
    data = config(None, tokenizer, dataset="acme/tiny").data
    said = r"acme/tiny/a\.csv must be a \.parquet, \.jsonl or \.json file for data\.streaming: set it to false, or"
    with pytest.raises(DataError, match=said):
        shards_module.open_text_shard("hf://datasets/acme/tiny/a.csv", data)
    # Files that were emptied are told, and not read over and over.
    path = write(tmp_path / "data", "datasets", TEXTS)
    batches = opened(path)
    shutil.rmtree(path)
    datasets.Dataset.from_dict({"text": [""] * 3}).save_to_disk(path, num_shards=3)
    with pytest.raises(DataError, match=r"must have a document to train on, and a whole epoch has none"):
        global_batch(batches, 0)


def test_another_file_is_other_data(tokenizer: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "data", "jsonl", TEXTS)
    chosen = config(path, tokenizer)
    first = prepare_data(chosen, tmp_path / "cache").fingerprint
    assert prepare_data(chosen, tmp_path / "cache").fingerprint == first
    other = write(tmp_path / "other", "jsonl", TEXTS)
    assert prepare_data(config(other, tokenizer), tmp_path / "cache").fingerprint == first, "the same wherever it lies"
    (path / "3.jsonl").write_bytes(b'{"text": "one more"}\n')
    assert prepare_data(chosen, tmp_path / "cache").fingerprint != first
