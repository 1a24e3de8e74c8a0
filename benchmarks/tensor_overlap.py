"""What `parallel.tensor_overlap=pieces` gains: the blocks of a model in tensor and sequence parallelism over two ranks.

On CPU ranks gloo's threads need the cores that multiply. The strict device of the tests (tests/strict) computes on the
CPU too, but its collectives take the time of a link of a given bandwidth, in which a core is free, as on an
accelerator.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import ranks
from measure import median
from report import Report, Table

SEQUENCE, BATCH, HIDDEN, BLOCKS = 512, 2, 512, 4
MEGABYTES_PER_SECOND = (1000, 250, 100)
PLAIN, PIECES = "in turn", "pieces"
CONFIG = {
    "model": {
        "family": "llama",
        "vocab_size": 512,
        "hidden_size": HIDDEN,
        "intermediate_size": 1408,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": 8,
    },
    "train": {"steps": 1, "global_batch": BATCH, "micro_batch": BATCH, "sequence_length": SEQUENCE},
    "optimizer": {"lr": 1e-4},
}


def passes(how: str, device_type: str) -> Any:
    """On one rank of two: at each turn the seconds of a forward and a backward pass, and those of waits."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch
    import torch.distributed as dist

    from shardwise import Mesh
    from shardwise.config import config_from_sections
    from shardwise.distributed import collectives, devices
    from shardwise.models.build import build_model
    from tests.strict import device

    if device_type == "strict":
        device.load()
    torch.set_num_threads(1)
    dist.init_process_group("strictccl" if device_type == "strict" else "gloo")
    mesh = Mesh(tensor=2, device=None if device_type == "strict" else "cpu")
    parallel = {"tensor": 2, "tensor_overlap": None if how == PLAIN else "pieces"}
    config = config_from_sections(CONFIG | {"parallel": parallel})
    model = build_model(config, mesh.tp, sequence_parallel=True, device=mesh.device)
    ids_SB = torch.randint(512, (SEQUENCE, BATCH), generator=torch.Generator().manual_seed(0)).to(mesh.device)
    found = 0.0
    while True:
        yield found
        collectives.barrier(mesh.world)
        start = time.perf_counter()
        model(ids_SB, ids_SB).backward()
        devices.synchronize(mesh.device)
        found = time.perf_counter() - start


def run(rounds: int) -> Report:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.strict import build

    build.library()  # before the ranks, which would each build it
    links = {"CPU, gloo": ("cpu", 0)} | {
        f"strict device, {speed} MB/s": ("strict", speed) for speed in MEGABYTES_PER_SECOND
    }
    figures, rows = {}, []
    for link, (device_type, speed) in links.items():
        variables = {"STRICT_DEVICES": "2", "STRICT_DELAY": "0", "STRICT_BANDWIDTH": str(speed)}
        jobs = {
            how: ranks.Job("tensor_overlap", "passes", 2, variables=variables, how=how, device_type=device_type)
            for how in (PLAIN, PIECES)
        }
        turns: dict[str, list[float]] = {how: [] for how in jobs}
        try:
            for job in jobs.values():
                job.receive()
                job.go_on()
            for _ in range(3 * rounds):
                for how, job in jobs.items():
                    turns[how].append(max(job.go_on()))
        finally:
            for job in jobs.values():
                job.__exit__()
        seconds = {how: median(times) for how, times in turns.items()}
        figures[link] = seconds | {"ratio": seconds[PIECES] / seconds[PLAIN]}
        rows.append([link, *(f"{seconds[how] * 1e3:.0f} ms" for how in jobs), f"{figures[link]['ratio']:.2f}"])
    return Report(
        "tensor_overlap",
        "Tensor-parallel collectives behind matmuls",
        [Table(("two ranks, TP 2 + SP", PLAIN, PIECES, "ratio"), rows)],
        figures,
        notes=[
            f"A forward and a backward pass of a Llama with {BLOCKS} blocks of width {HIDDEN} on {BATCH} sequences of "
            f"{SEQUENCE} tokens, float32, one thread a rank; medians of turns that alternate. `in turn` is "
            "`parallel.tensor_overlap=null`, `pieces` is `parallel.tensor_overlap=pieces`.",
            "The strict device is an accelerator in software (tests/strict): the CPU computes, and a collective of b "
            "bytes takes b bytes / bandwidth on a thread that sleeps, beside what gloo needs for it.",
        ],
    )
