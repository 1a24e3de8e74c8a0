"""Whole documents packed into samples: padding, time and memory of packing, and the speed of reading and training."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from data_prepare import _documents, _tokenizer
from measure import median
from report import Report, Table, target

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PACKED_DOCUMENTS = 10_000_000
PACKED_LENGTHS = (2048, 8192, 131072)
PACKING_SECONDS, PACKING_BYTES, PADDING, SPEED = 60.0, 2 << 30, 0.01, 1.0
READ_LENGTH, STEP_LENGTH = 2048, 1024
PACKINGS: dict[str, tuple[str, ...]] = {
    "cut": (),
    "cut, documents kept apart": ("data.reset_position_ids=true", "data.reset_attention_mask=true"),
    "best fit": ("data.packing=best_fit",),
}
TRAINED = {"stories": "short documents", "python": "long documents"}
TRAINING = (
    "model.hidden_size=256",
    "model.intermediate_size=688",
    f"model.max_position_embeddings={STEP_LENGTH}",
    f"train.sequence_length={STEP_LENGTH}",
    "train.global_batch=2",
    "train.micro_batch=2",
    "train.steps=1000",
    "train.eval_every=0",
)


def run(rounds: int) -> Report:
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as temporary:
        os.environ.setdefault("SHARDWISE_CACHE", str(Path(temporary) / "cache"))
        found = {name: _in_its_own_process(name) for name in ("texts", "reading")}
        _in_its_own_process("write", temporary)
        found["many"] = {str(length): _in_its_own_process("many", temporary, str(length)) for length in PACKED_LENGTHS}
        steps: dict[str, dict[str, list[float]]] = {}
        for dataset in TRAINED:
            turns = [turn for _ in range(rounds) for turn in _in_its_own_process("training", dataset)]
            steps[dataset] = {name: [turn[name] for turn in turns] for name in PACKINGS}
    return _report(found, steps)


def _in_its_own_process(name: str, *arguments: str) -> Any:
    print(f"  {name}", flush=True)
    done = subprocess.run([sys.executable, __file__, name, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    return json.loads(done.stdout)


# ---- in a process of its own


def texts() -> dict[str, Any]:
    """The facts of packed texts by their names and sequence lengths, with the documents cut that would have fitted."""
    from dataclasses import asdict

    from shardwise.data.samples.packing import PackedSamples
    from shardwise.data.tokens.tokenizer import Tokenizer
    from shardwise.data.tokens.tokenizer_files import resolve_tokenizer

    tokenizer = Tokenizer.load(resolve_tokenizer(_tokenizer()))
    sources = {}
    if "BENCH_TEXT" in os.environ:
        articles = _documents()
        sources["articles of BENCH_TEXT"] = articles
        sources["paragraphs of BENCH_TEXT"] = [line for text in articles for line in text.splitlines() if line.strip()]
        del os.environ["BENCH_TEXT"]
    sources["Python's library, a file each"] = _documents()
    found: dict[str, Any] = {}
    for name, documents in sources.items():
        lengths = np.asarray(tokenizer.encode_rows(documents)[1]) + 1
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        for length in LENGTHS:
            packed = PackedSamples.from_bounds(bounds, length)
            # A document that fits is read from its first token to its last but one.
            read = dict(packed.pieces.tolist())
            fits = (lengths > 1) & (lengths - 1 <= length)
            pairs = zip(bounds[:-1][fits].tolist(), lengths[fits].tolist(), strict=True)
            split = sum(read[begin] != size - 1 for begin, size in pairs)
            found.setdefault(name, {})[str(length)] = {**asdict(packed.facts), "split_needlessly": split}
    return found


def write(folder: str) -> None:
    """The bounds of ten million documents, as a file."""
    lengths = np.random.default_rng(0).lognormal(np.log(400), 1.2, PACKED_DOCUMENTS).astype(np.int64) + 2
    np.save(Path(folder) / "bounds.npy", np.concatenate([[0], np.cumsum(lengths)]))


def many(folder: str, length: str) -> dict[str, float]:
    """Seconds and bytes of memory to pack these documents into the files of the cache."""
    from shardwise.config import load_config
    from shardwise.data.formats.packing_cache import open_packed_samples, packing_key
    from shardwise.data.request import DataRequest

    bounds = np.load(Path(folder) / "bounds.npy", mmap_mode="r")
    keys = [f"train.sequence_length={length}", f"model.max_position_embeddings={length}"]
    request = DataRequest.of(load_config("llama3-tiny", keys), Path(folder) / length)

    def packed() -> Any:
        return open_packed_samples(request, "many", packing_key("many", request), {"train": lambda: np.asarray(bounds)})

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    facts = packed()["train"].facts
    seconds = time.perf_counter() - start
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    start = time.perf_counter()
    packed()
    return {
        "seconds": seconds,
        "bytes": memory,
        "file_bytes": sum(path.stat().st_size for path in request.root.rglob("train.*.bin")),
        "open_seconds": time.perf_counter() - start,
        "padding": 1 - facts.targets / facts.places,
    }


def reading() -> dict[str, float]:
    """Tokens a second of one thread that makes batches of each packing."""
    from shardwise.data.samples.causal import DocumentEnds, TokenBatches
    from shardwise.data.samples.packing import PackedBatches, PackedSamples, document_bounds

    generator = np.random.default_rng(0)
    row = generator.integers(1, 50_257, 50_000_000).astype(np.uint16)
    row[np.cumsum(generator.lognormal(np.log(400), 1.2, 60_000).astype(np.int64) + 2)] = 0
    ends = DocumentEnds(0, reset_position_ids=True, reset_attention_mask=True)
    packed = PackedSamples.from_bounds(document_bounds(row, 0), READ_LENGTH)
    batches = (
        TokenBatches(row, READ_LENGTH, 1),
        TokenBatches(row, READ_LENGTH, 1, ends=ends),
        PackedBatches(row, packed, 1),
    )
    found = {}
    for name, samples in zip(PACKINGS, batches, strict=True):
        samples.global_batch(0, 8)
        consumed = 0
        start = time.perf_counter()
        while time.perf_counter() - start < 3.0:
            samples.local_batch(consumed, 32, 0, 1, 8)
            consumed += 32
        found[name] = consumed * READ_LENGTH / (time.perf_counter() - start)
    return found


def training(dataset: str) -> list[dict[str, float]]:
    """Processor seconds for each target in steps of each packing, which take turns."""
    from shardwise.config import load_config
    from shardwise.data.open_data import prepare_data
    from shardwise.distributed.mesh import Mesh
    from shardwise.train.build import build_trainer

    mesh = Mesh(device="cpu")
    trainers = {}
    for name, keys in PACKINGS.items():
        config = load_config("llama3-tiny", [f"data.dataset={dataset}", *TRAINING, *keys])
        trainers[name] = build_trainer(config, mesh, prepare_data(config))
        trainers[name].step()
    turns = []
    for _ in range(10):
        turn = {}
        for name, trainer in trainers.items():
            targets = trainer.feed.batches.global_batch(trainer.progress.position, 2).counts[0]
            start = time.process_time()
            trainer.step()
            turn[name] = (time.process_time() - start) / int(targets)
        turns.append(turn)
    return turns


# ---- the report


def _report(found: dict[str, Any], steps: dict[str, dict[str, list[float]]]) -> Report:
    texts_found = found["texts"]
    padded = [
        [
            name,
            f"{int(length):,}",
            f"{facts['documents']:,}",
            f"{facts['samples']:,}",
            f"{facts['samples'] - -(-facts['targets'] // int(length)):,}",
            f"{1 - facts['targets'] / facts['places']:.2%}",
            f"{facts['cut']:,}",
            f"{facts['split_needlessly']:,}",
            f"{facts['with_beginning'] / facts['targets']:.1%}",
            f"{facts['with_beginning_if_cut'] / facts['targets']:.1%}",
        ]
        for name, by_length in texts_found.items()
        for length, facts in by_length.items()
    ]
    packed = [
        [
            f"{int(length):,}",
            f"{facts['seconds']:.1f} s",
            f"{facts['bytes'] / 2**20:,.0f} MiB",
            f"{facts['file_bytes'] / 2**20:,.0f} MiB",
            f"{facts['open_seconds'] * 1e3:.0f} ms",
            f"{facts['padding']:.3%}",
        ]
        for length, facts in found["many"].items()
    ]
    speeds = {
        dataset: {
            name: median([cut / mine for mine, cut in zip(times, of_dataset["cut"], strict=True)])
            for name, times in of_dataset.items()
        }
        for dataset, of_dataset in steps.items()
    }
    trained = [
        [
            name,
            f"{found['reading'][name] / 1e6:.1f} M/s",
            *(f"{1 / median(steps[dataset][name]):,.0f}/s ({speeds[dataset][name]:.2f}×)" for dataset in TRAINED),
        ]
        for name in PACKINGS
    ]
    split = sum(facts["split_needlessly"] for by_length in texts_found.values() for facts in by_length.values())
    slowest = max(facts["seconds"] for facts in found["many"].values())
    most = max(facts["bytes"] for facts in found["many"].values())
    within = [
        f"{name} at {length}"
        for name, by_length in texts_found.items()
        for length, facts in by_length.items()
        if 1 - facts["targets"] / facts["places"] <= PADDING
    ]
    columns = (
        "text", "sequence", "documents", "samples", "above the fewest", "padding", "cut", "cut that fit",
        "whole beginning", "with cut",
    )  # fmt: skip
    return Report(
        "packing",
        "Whole documents packed into samples",
        [
            Table(columns, padded, "Texts with GPT-2's tokens"),
            Table(
                ("sequence", "packing", "memory", "files", "opening again", "padding"),
                packed,
                f"{PACKED_DOCUMENTS:,} documents",
            ),
            Table(
                ("packing", "tokens read", *(f"targets trained on, {text}" for text in TRAINED.values())),
                trained,
                "Speed",
            ),
        ],
        {**found, "seconds_of_a_target": steps, "speeds": speeds, "within": within},
        [
            target("documents cut that fit a sample", split, 0, at_least=False),
            target(f"seconds to pack {PACKED_DOCUMENTS:,} documents", slowest, PACKING_SECONDS, at_least=False),
            target("bytes of memory of that", most, PACKING_BYTES, at_least=False),
            *(
                target(f"speed of best fit over that of cut, {text}", speeds[dataset]["best fit"], SPEED, at_least=True)
                for dataset, text in TRAINED.items()
            ),
        ],
        [
            "Documents are packed in windows of 1,048,576, each of these texts as a whole. Above the fewest: samples "
            "beyond those that the targets would fill without a gap. Cut: documents longer than a sample. Whole "
            "beginning: targets whose sample has all of their document before them, with best fit and with "
            "data.packing=cut.",
            f"{PACKED_DOCUMENTS:,} documents: lengths drawn from a log-normal distribution, median 402 tokens; memory "
            "with their bounds, a file of 80 MB. Tokens read: one thread that makes batches of 8 × 2,048.",
            f"Training: llama3-tiny of width 256, 2 sequences of {STEP_LENGTH:,} tokens a step, one process of one "
            "thread; targets in a second of processor time, in brackets over those of cut; medians over steps taken in "
            "turn, ratios within a turn. Short "
            "documents are the built-in stories, of about 220 tokens each, long ones the built-in Python sources.",
        ],
    )


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
