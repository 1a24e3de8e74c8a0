"""Saving and loading a checkpoint of more than 1 GiB: against plain writes and copies, and torch's own checkpoints."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import ranks
from measure import interleaved, slowest
from report import Report, Table, target

RANKS = 2
SECTIONS: dict[str, dict[str, Any]] = {
    "model": {
        "family": "llama", "vocab_size": 16000, "hidden_size": 1024, "intermediate_size": 2816,
        "num_hidden_layers": 6, "num_attention_heads": 16, "max_position_embeddings": 256,
    },
    "train": {"steps": 1000, "global_batch": 2, "sequence_length": 128},
    "optimizer": {"lr": 1e-4},
    "precision": {"mode": "float32"},
}  # fmt: skip
"""Bytes of state: 12 for each parameter, weights and two moments in float32."""
LAYOUTS = {"TP 2": {"parallel": {"tensor": 2}}, "TP 2 + SP": {"parallel": {"tensor": 2, "sequence": True}}}
STEPS = 6
WARMUP = 3


def trainer_of(overrides: dict[str, Any]) -> Any:
    """On one rank: the trainer of a run, over random tokens, after its first step."""
    import numpy as np
    import torch

    from shardwise.config import config_from_sections
    from shardwise.data.formats.prepared_data import PreparedText
    from shardwise.distributed.mesh import Mesh, join
    from shardwise.train.build import build_trainer

    torch.set_num_threads(1)
    join()
    config = config_from_sections({**SECTIONS, **overrides})
    mesh = Mesh(tensor=config.parallel.tensor)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, 20_000).astype(np.uint16)
    rows = {"train": tokens, "eval": tokens[:2000], "test": tokens[:0]}
    data = PreparedText(Path(), "random", "random", rows, config.model.vocab_size)
    return build_trainer(config, mesh, data)


def saver_of(trainer: Any, folder: str, buffer_bytes: int | None = None) -> Any:
    from shardwise.checkpoint.save import KeptCheckpoints, Saver
    from shardwise.checkpoint.storage.root import Root

    group = trainer.mesh.host_group("checkpoint")
    parts = (trainer.model, trainer.optimizer, trainer.config, trainer.mesh, group)
    described: dict[str, Any] = {"layout": {}, "data": {}, "versions": {}}
    return Saver(
        Root.of(folder), *parts, described=described, buffer_bytes=buffer_bytes, keeping=KeptCheckpoints(last=1)
    )


PLACE: dict[str, Any] = {"samples": 0, "position": 0, "tokens": 0, "schedule": {}, "rng": {}}


def saving(folder: str, rounds: int) -> dict[str, Any]:
    """On one rank: seconds of saves, of what they are held against, and of steps beside them."""
    import os
    import time

    import torch
    import torch.distributed.checkpoint as dcp

    from shardwise.distributed import collectives
    from shardwise.optim.state import state_tensors

    trainer = trainer_of({})
    trainer.step()
    world, rank = trainer.mesh.world, trainer.mesh.world.rank
    saver = saver_of(trainer, f"{folder}/ours")
    blocked: list[float] = []
    complete: list[float] = []
    sizes: list[int] = []
    number = 0

    def save() -> None:
        nonlocal number
        number += 1
        saver.save(number, PLACE)
        saver.wait()
        (saved,) = saver.finished()
        assert saved.problem is None, saved.problem
        blocked.append(saved.blocked)
        complete.append(saved.seconds)
        sizes.append(saved.bytes)

    save()
    mine = sizes[0] // RANKS if rank == 0 else 0
    mine = max(collectives.all_gather_objects(mine, world))
    block = torch.ones(16 * 2**20, dtype=torch.uint8)

    def plain() -> None:
        with Path(f"{folder}/plain-{rank}").open("wb", buffering=0) as file:
            left = mine
            while left:
                left -= file.write(memoryview(block.numpy())[: min(left, len(block))])
            os.fsync(file.fileno())

    held = [flat for flats in state_tensors(trainer.optimizer).values() for flat in flats.values()]
    held += [bucket.master.detach() for bucket in trainer.optimizer.buckets]
    state = {f"{rank}/{i}": tensor for i, tensor in enumerate(held)}

    def torch_save() -> None:
        writer = dcp.FileSystemWriter(f"{folder}/dcp", single_file_per_rank=True, sync_files=True, overwrite=True)
        dcp.save(state, storage_writer=writer, process_group=trainer.mesh.host_group("checkpoint").process_group)

    copies = [torch.empty_like(tensor) for tensor in held]

    def copy() -> None:
        for target_, source in zip(copies, held, strict=True):
            target_.copy_(source)

    for _ in range(WARMUP):  # a virtual machine gets much of its memory at the first touch: that of the page cache too
        for call in (plain, save, torch_save):
            call()
    for measured in (blocked, complete):
        measured.clear()
    calls = {"plain": plain, "save": save, "torch": torch_save, "copy": copy}
    seconds = interleaved(calls, rounds, before=lambda: (os.sync(), collectives.barrier(world)))
    seconds |= {"blocked": blocked[1:], "complete": complete[1:]}

    alone, beside = [], []
    for steps in (alone, beside):
        if steps is beside:
            number += 1
            saver.save(number, PLACE)
        for _ in range(STEPS):
            start = time.perf_counter()
            trainer.step()
            steps.append(time.perf_counter() - start)
    during = saver._thread is not None and saver._thread.is_alive()
    saver.wait()
    seconds |= {"steps alone": alone, "steps beside": beside}
    counts = {"bytes": sizes[-1], "state": sum(t.nbytes for t in held), "whole_beside": during}
    return {"seconds": seconds, "counts": counts, "peak": peak_of(trainer, folder)}


def peak_of(trainer: Any, folder: str) -> int:
    """Host memory that a save takes whose buffer is 64 MiB."""
    from measure import PeakMemory

    saver = saver_of(trainer, f"{folder}/bounded", buffer_bytes=64 * 2**20)
    memory = PeakMemory()
    saver.save(1, PLACE)
    saver.wait()
    return memory.above()


def loading(folder: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """On one rank: seconds and bytes of loading at another layout."""
    import time

    from shardwise.checkpoint.restore import read_manifest, restore_checkpoint
    from shardwise.checkpoint.storage.root import Root
    from shardwise.distributed import collectives

    trainer = trainer_of(overrides)
    where = Root.of(folder)
    collectives.barrier(trainer.mesh.world)
    start = time.perf_counter()
    manifest = read_manifest(where, trainer.mesh.world)
    restored = restore_checkpoint(where, manifest, trainer.model, trainer.optimizer, trainer.mesh)
    return {"seconds": time.perf_counter() - start, "bytes": restored.bytes_read}


def run(rounds: int) -> Report:
    folder = tempfile.mkdtemp(prefix="shardwise-bench-", dir=Path.cwd())
    try:
        measured = ranks.run("checkpoint", "saving", RANKS, folder=folder, rounds=rounds)
        written = str(next(Path(folder, "ours").glob("step-*")))
        loads = {
            name: ranks.run("checkpoint", "loading", RANKS, folder=written, overrides=layout)
            for name, layout in {"DP 2": {}, **LAYOUTS}.items()
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    times = slowest([each["seconds"] for each in measured])
    state = sum(each["counts"]["state"] for each in measured)
    size = measured[0]["counts"]["bytes"]
    rows = [
        ["plain writes + fsync", f"{times['plain']:.2f} s", "1.00×"],
        ["a checkpoint, complete", f"{times['complete']:.2f} s", f"{times['complete'] / times['plain']:.2f}×"],
        ["  and the one before it removed", f"{times['save']:.2f} s", f"{times['save'] / times['plain']:.2f}×"],
        ["torch.distributed.checkpoint", f"{times['torch']:.2f} s", f"{times['torch'] / times['plain']:.2f}×"],
    ]
    waits = [
        ["plain copy of the bytes", f"{times['copy']:.3f} s", "1.00×"],
        ["training waits for a save", f"{times['blocked']:.3f} s", f"{times['blocked'] / times['copy']:.2f}×"],
        ["a step", f"{times['steps alone']:.3f} s", "1.00×"],
        [
            "a step beside a save",
            f"{times['steps beside']:.3f} s",
            f"{times['steps beside'] / times['steps alone']:.2f}×",
        ],
    ]
    reads = [
        [
            name,
            f"{max(each['seconds'] for each in found):.2f} s",
            f"{sum(each['bytes'] for each in found) / state:.3f}×",
        ]
        for name, found in loads.items()
    ]
    peak = max(each["peak"] for each in measured)
    return Report(
        "checkpoint",
        "Checkpoints",
        [
            Table(("written by 2 ranks", "time", "ratio"), rows, title=f"Saving {size / 2**30:.2f} GiB"),
            Table(("training", "time", "ratio"), waits),
            Table(("loaded by 2 ranks", "time", "bytes read / bytes of state"), reads),
        ],
        {"times": times, "state_bytes": state, "written_bytes": size, "loads": loads, "bounded_peak_bytes": peak},
        [
            target("time to save over plain writes + fsync", times["complete"] / times["plain"], 1.3, at_least=False),
            target("training waits, over a plain copy", times["blocked"] / times["copy"], 2.0, at_least=False),
            target("bytes written over bytes of state", size / state, 1.01, at_least=False),
            target(
                "bytes read over bytes of state, worst layout",
                max(sum(each["bytes"] for each in found) for found in loads.values()) / state,
                1.1,
                at_least=False,
            ),
            target("host memory of a save with a buffer of 64 MiB, in MiB", peak / 2**20, 80, at_least=False),
        ],
        [
            f"Llama of {state / 12 / 1e6:.0f} M parameters with AdamW's state in float32, DP 2 with ZeRO-1, on this "
            f"machine's own disk. Medians of {rounds} rounds in turn, of the slower rank, the disk idle before each. "
            "Plain: one file a rank of as many bytes, over the one of the round before. torch.distributed.checkpoint: "
            "FileSystemWriter with fsync, the same tensors as unrelated ones, no checksums.",
            f"Steps beside a save: the {STEPS} after it began; median.",
        ],
    )
