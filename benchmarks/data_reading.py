"""Reading data: opening and indexing Megatron's files, the loader alone, BERT's shards, and what a step waits for."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import median
from report import Report, Table, target

SPARSE_BYTES = 100_000_000_000
DOCUMENTS = 10_000_000
LENGTHS = (256, 1024, 2048)
LOADER_TOKENS = 200_000_000
SHARD_ROWS, SHARDS = 50_000, 4
OPEN_SECONDS, INDEX_SECONDS, INDEX_BYTES, TOKENS_A_SECOND, WAIT = 1.0, 20.0, 2 << 30, 2e6, 0.01


def run(rounds: int) -> Report:
    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as temporary:
        folder = Path(temporary)
        os.environ["SHARDWISE_CACHE"] = str(folder / "cache")
        _in_its_own_process("write", folder)
        for number in range(rounds):
            for name in ("open_sparse", "index", "loader", "shards", "training"):
                print(f"  round {number + 1}/{rounds}: {name}", flush=True)
                found.setdefault(name, []).append(_in_its_own_process(name, folder))
    return _report(found, rounds)


def _in_its_own_process(name: str, folder: Path) -> Any:
    done = subprocess.run([sys.executable, __file__, name, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    return json.loads(done.stdout)


# ---- in a process of its own


def write(folder: Path) -> None:
    """A sparse .bin of 100 GB, one of 10 million documents, one to read from, and compressed HDF5 shards."""
    import h5py

    from shardwise.data.reading.megatron_files import IndexedWriter

    with IndexedWriter(folder / "sparse", vocab_size=50_257) as writer:
        writer.add([1])
    _stretch(folder / "sparse", np.full(SPARSE_BYTES // 2 // 1_000_000, 1_000_000))
    with IndexedWriter(folder / "many", vocab_size=50_257) as writer:
        writer.add([1])
    _stretch(folder / "many", np.random.default_rng(0).integers(100, 1100, DOCUMENTS))
    generator = np.random.default_rng(0)
    with IndexedWriter(folder / "tokens", vocab_size=50_257) as writer:
        for size in generator.integers(100, 1100, LOADER_TOKENS // 600).tolist():
            writer.add(generator.integers(0, 50_257, size))
    (folder / "shards").mkdir()
    for number in range(SHARDS):
        with h5py.File(folder / "shards" / f"wiki_training_{number}.hdf5", "w") as file:
            ids = generator.integers(5, 30_000, (SHARD_ROWS, 128)).astype("i4")
            arrays = {
                "input_ids": ids,
                "input_mask": np.ones((SHARD_ROWS, 128), "i1"),
                "segment_ids": np.zeros((SHARD_ROWS, 128), "i1"),
                "masked_lm_positions": np.tile(np.arange(1, 21, dtype="i4"), (SHARD_ROWS, 1)),
                "masked_lm_ids": ids[:, 1:21],
                "next_sentence_labels": np.zeros(SHARD_ROWS, "i1"),
            }
            for key, array in arrays.items():
                file.create_dataset(key, data=array, compression="gzip")


def _stretch(prefix: Path, sizes: np.ndarray) -> None:
    """Give a written data set other documents, whose tokens are a hole in the file."""
    magic = prefix.with_suffix(".idx").read_bytes()[:18]
    pointers = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64) * 2])
    with prefix.with_suffix(".idx").open("wb") as idx:
        idx.write(magic + np.array([len(sizes), len(sizes) + 1], dtype="<u8").tobytes())
        for array in (sizes.astype("<i4"), pointers.astype("<i8"), np.arange(len(sizes) + 1, dtype="<i8")):
            idx.write(array.tobytes())
    os.truncate(prefix.with_suffix(".bin"), int(sizes.sum()) * 2)


def open_sparse(folder: Path) -> dict[str, float]:
    from shardwise.data.reading.megatron_files import IndexedFile

    def opened() -> Any:
        file = IndexedFile.open(str(folder / "sparse"))
        assert file.tokens[-1] == 0, "a hole"
        return file.digest

    return {"seconds": _seconds(opened), "bytes": (folder / "sparse.bin").stat().st_size}


def index(folder: Path) -> dict[str, float]:
    """From the files to the first batch of an epoch."""
    from shardwise.data.reading.megatron_files import IndexedFile, MegatronDocuments
    from shardwise.data.samples.causal import DocumentBatches

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def first_batch() -> None:
        file = IndexedFile.open(str(folder / "many"))
        documents = MegatronDocuments(file, 0, file.num_documents, 50_257)
        DocumentBatches(documents, 1024, 1).global_batch(0, 8)

    seconds = _seconds(first_batch)
    return {"seconds": seconds, "memory": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024}


def loader(folder: Path) -> dict[str, float]:
    """Tokens a second of one thread, by length of a sample; from the page cache, in random order."""
    from shardwise.data.reading.megatron_files import IndexedFile, MegatronDocuments
    from shardwise.data.samples.causal import DocumentBatches

    file = IndexedFile.open(str(folder / "tokens"))
    np.asarray(file.tokens).sum()  # into the page cache
    documents = MegatronDocuments(file, 0, file.num_documents, 50_257)
    found = {}
    for length in LENGTHS:
        batches = DocumentBatches(documents, length, 1)
        batches.global_batch(0, 8)
        samples, start = 0, time.perf_counter()
        while time.perf_counter() - start < 2.0:
            batches.local_batch(samples, 32, 0, 1, 8)
            samples += 32
        found[str(length)] = samples * length / (time.perf_counter() - start)
    return found


def shards(folder: Path) -> dict[str, float]:
    """Rows a second of one thread from shards that were compressed, once they are unpacked."""
    from shardwise.config import load_config
    from shardwise.data.formats.prepared_data import make_batches
    from shardwise.data.open_data import prepare_data

    keys = (f"data.path={folder / 'shards'}", "model.vocab_size=30522", "train.sequence_length=128")
    config = load_config("bert-tiny", [*keys, "model.max_position_embeddings=128"])
    unpacking = _seconds(lambda: prepare_data(config))
    batches = make_batches(config, prepare_data(config), "train")
    assert batches is not None
    rows, start = 0, time.perf_counter()
    while time.perf_counter() - start < 3.0:
        batches.local_batch(rows, 64, 0, 1, 16)
        rows += 64
    return {"rows": rows / (time.perf_counter() - start), "unpacking": unpacking}


def training(folder: Path) -> dict[str, float]:
    """The part of the step's time that llama-small waits for data."""
    run_dir = folder / f"run-{os.getpid()}"
    command = [sys.executable, "-m", "shardwise", "train", "llama-small", "train.stop_after=60", "train.eval_every=0"]
    subprocess.run([*command, "--run-dir", str(run_dir)], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run_dir / "ranks" / "rank-0000.jsonl").read_text().splitlines()]
    return {key: sum(line[key] for line in lines) for key in ("input_seconds", "step_seconds")}


def _seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


# ---- the table


def _report(found: dict[str, list[Any]], rounds: int) -> Report:
    def middle(name: str, key: str) -> float:
        return median([each[key] for each in found[name]])

    speeds = {length: middle("loader", length) for length in map(str, LENGTHS)}
    wait = median([each["input_seconds"] / each["step_seconds"] for each in found["training"]])
    opening, indexing = middle("open_sparse", "seconds"), middle("index", "seconds")
    memory, rows = middle("index", "memory"), middle("shards", "rows")
    unpacking = found["shards"][0]["unpacking"]
    table = [
        ["opening a .bin of 100 GB (a hole)", f"{opening:.2f} s"],
        ["10 million documents, from the files to the first batch", f"{indexing:.1f} s, {memory / 2**20:,.0f} MiB"],
        *(
            [f"the loader alone, samples of {length} tokens", f"{speed / 1e6:.1f} M tokens/s"]
            for length, speed in speeds.items()
        ),
        ["BERT's shards, compressed, rows of 128 tokens", f"{rows:,.0f} rows/s"],
        [f"unpacking {SHARDS} of them of {SHARD_ROWS:,} rows, once", f"{unpacking:.1f} s"],
        ["llama-small's wait for data, of its steps' time", f"{wait:.2%}"],
    ]
    return Report(
        "data_reading",
        "Reading data",
        [Table(("", "found"), table)],
        found,
        [
            target("seconds to open 100 GB", opening, OPEN_SECONDS, at_least=False),
            target("seconds to index 10 million documents", indexing, INDEX_SECONDS, at_least=False),
            target("MiB to index them", memory / 2**20, INDEX_BYTES / 2**20, at_least=False),
            target("million tokens/s of the loader", min(speeds.values()) / 1e6, TOKENS_A_SECOND / 1e6, at_least=True),
            target("% of a step waited for data", 100 * wait, 100 * WAIT, at_least=False),
        ],
        [
            f"Medians of {rounds} rounds, each figure in a process of its own, one thread. The loader reads samples in "
            "random order from files that the page cache holds, and makes ids and targets of them."
        ],
    )


if __name__ == "__main__":
    result = globals()[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps(result))
