"""`shardwise data prepare` of 100 MB of text beside the bare batch encoder of `tokenizers`, and its memory."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import median
from report import Report, Table, target

BYTES = 100_000_000
MEMORY_BYTES = (BYTES, 4 * BYTES)
LIMIT_SPEED, LIMIT_MEMORY = 0.9, 1 << 30
_BATCH = 8_000_000
_HEADING = re.compile(r"(?m)^(?= = [^=])")
ENCODERS = {"encode_batch": "tokenizers, encode_batch", "encode_batch_fast": "tokenizers, encode_batch_fast"}
PREPARE = "shardwise data prepare"


def write_text(path: Path, size: int) -> int:
    """Documents over and over up to `size` bytes, one a line; returns their number."""
    written = number = 0
    found = _documents()
    with path.open("wb") as file:
        while written < size:
            text = found[number % len(found)]
            file.write(json.dumps({"text": text}).encode() + b"\n")
            written += len(text.encode())
            number += 1
    return number


def _documents() -> list[str]:
    """The articles of $BENCH_TEXT, a file in WikiText's layout; else the modules of the standard library."""
    if named := os.environ.get("BENCH_TEXT"):
        return [text for text in _HEADING.split(Path(named).read_text(encoding="utf-8")) if text.strip()]
    from shardwise.config import DataConfig
    from shardwise.data.reading.text_sources import open_text_source

    texts, parts = [], []
    for piece in open_text_source(DataConfig(dataset="python")).pieces():
        parts.append(piece.text)
        if piece.ends_document:
            texts.append("".join(parts))
            parts = []
    return texts


def _tokenizer() -> str:
    """GPT-2's: $BENCH_TOKENIZER, a folder, or the hub id."""
    return os.environ.get("BENCH_TOKENIZER", "gpt2")


def encode(method: str, path: str) -> None:
    """In a process of its own: the batch encoder alone, on texts that are in memory and on all cores."""
    from shardwise.data.tokens.tokenizer import Tokenizer
    from shardwise.data.tokens.tokenizer_files import resolve_tokenizer

    backend = Tokenizer.load(resolve_tokenizer(_tokenizer()))._backend
    call = getattr(backend, method)
    tokens, seconds, cpu = 0, 0.0, 0.0
    with Path(path).open("rb") as file:
        for texts in _batches(json.loads(line)["text"] for line in file):
            start, start_cpu = time.perf_counter(), time.process_time()
            encoded = call(texts, add_special_tokens=False)
            seconds, cpu = seconds + time.perf_counter() - start, cpu + time.process_time() - start_cpu
            tokens += sum(map(len, encoded))
            del encoded
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "tokens": tokens}))


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    held = 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if held >= _BATCH:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def prepare(path: Path, folder: Path) -> dict[str, Any]:
    """The command from its start to its end, with the most memory that its processes had together."""
    output = folder / "prepared"
    for old in folder.glob("prepared.*"):
        old.unlink()
    program = Path(sys.executable).with_name("shardwise")
    command = [str(program), "data", "prepare", str(path), str(output), "--format", "megatron"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, "--tokenizer", _tokenizer()], **quiet)
    memory = 0
    while process.poll() is None:
        memory = max(memory, _resident(process.pid))
        time.sleep(0.05)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise SystemExit(f"{PREPARE} ended with {process.returncode}: {process.communicate()[1]}")
    made = json.loads(Path(f"{output}.json").read_text())
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "tokens": made["tokens"] - made["documents"],
        "bytes": made["source"]["bytes"],
        "memory": memory,
    }


def _resident(process: int) -> int:
    """Resident bytes of a process and all below it; what they share counts for each."""
    parents, sizes = {}, {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            status = (place / "status").read_text()
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        parents[int(place.name)] = int(fields["PPid"])
        sizes[int(place.name)] = int(fields.get("VmRSS", "0 kB").split()[0]) * 1024
    family = {process}
    for _ in range(3):
        family |= {child for child, parent in parents.items() if parent in family}
    return sum(sizes.get(each, 0) for each in family)


def run(rounds: int) -> Report:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in (*ENCODERS, PREPARE)}
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as temporary:
        folder = Path(temporary)
        os.environ["SHARDWISE_CACHE"] = str(folder / "cache")
        text = folder / "text.jsonl"
        documents = write_text(text, BYTES)
        for number in range(rounds):
            for method in ENCODERS:
                print(f"  round {number + 1}/{rounds}: {method}", flush=True)
                command = [sys.executable, __file__, method, str(text)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found[method].append(json.loads(done.stdout))
            print(f"  round {number + 1}/{rounds}: prepare", flush=True)
            found[PREPARE].append(prepare(text, folder))
        memory = {BYTES: max(each["memory"] for each in found[PREPARE])}
        for size in MEMORY_BYTES[1:]:
            print(f"  memory at {size // 1_000_000} MB", flush=True)
            write_text(text, size)
            memory[size] = prepare(text, folder)["memory"]
    counted = {each["tokens"] for runs in found.values() for each in runs}
    if len(counted) != 1:
        raise SystemExit(f"the contestants' tokens must be as many: {counted}")
    return _report(found, memory, documents, rounds)


def _report(found: dict[str, list[dict[str, Any]]], memory: dict[int, int], documents: int, rounds: int) -> Report:
    size = found[PREPARE][0]["bytes"]

    def middle(name: str, key: str) -> float:
        return median([float(each[key]) for each in found[name]])

    def speed(name: str, key: str) -> float:
        return middle("encode_batch", key) / middle(name, key)

    labels = {**ENCODERS, PREPARE: PREPARE}
    rows = [
        [
            labels[name],
            f"{middle(name, 'seconds'):.1f} s",
            f"{size / 1e6 / middle(name, 'seconds'):.2f}",
            f"{speed(name, 'seconds'):.2f}×",
            f"{middle(name, 'cpu_seconds'):.1f} s",
            f"{speed(name, 'cpu_seconds'):.2f}×",
        ]
        for name in found
    ]
    held = [[f"{text // 1_000_000} MB", f"{bytes_ / 2**20:,.0f} MiB"] for text, bytes_ in memory.items()]
    most = max(memory.values())
    return Report(
        "data_prepare",
        "Preparing text",
        [
            Table(("", "time", "MB/s", "speed", "processor time", "speed by it"), rows),
            Table(("text", "peak memory of all processes"), held),
        ],
        {"runs": found, "memory": {str(text): bytes_ for text, bytes_ in memory.items()}, "bytes": size},
        [
            target("prepare's speed over encode_batch's", speed(PREPARE, "seconds"), LIMIT_SPEED, at_least=True),
            target("the same by processor time", speed(PREPARE, "cpu_seconds"), LIMIT_SPEED, at_least=True),
            target("prepare's memory in MiB", most / 2**20, LIMIT_MEMORY / 2**20, at_least=False),
        ],
        [
            f"{size / 1e6:.0f} MB of text in {documents:,} documents, GPT-2's tokenizer, all cores. The encoders are "
            "timed alone: texts are in memory, the tokenizer is loaded, ids are thrown away. The command is timed from "
            "its start to its end: Python's start, reading, tokenizing, and writing that is on the disk at the end.",
            f"{rounds} rounds by turns. Times are medians, speeds their ratios to encode_batch's. All make as many "
            "tokens. Memory is resident bytes of the command's processes added up: what they share counts twice.",
        ],
    )


if __name__ == "__main__":
    encode(*sys.argv[1:])
