"""What `train.bitwise` costs: steps of a training, and memory, beside the same training with sums in any order."""

from __future__ import annotations

import time
from typing import Any

import ranks
from measure import median
from report import Report, Table

FREE, FIXED = "any order", "bitwise"
_GRAIN = "parallel.grain=4"
_WHOLE = ("parallel.tensor=1", "parallel.sequence=false", "parallel.grain=1", "train.data_grain=2")
_SHARED = ("parallel.tensor=1", "parallel.sequence=false", "parallel.grain=1", "parallel.context=2")
LAYOUTS = {
    "TP 2 + SP, grain 4": (_GRAIN,),
    "TP 2, grain 4": (_GRAIN, "parallel.sequence=false"),
    "TP 2 + SP, grain 4, mixed": (_GRAIN, "precision.mode=mixed"),
    "DP 2, grain 1": _WHOLE,
    "CP 2, context grain 2": (*_SHARED, "parallel.context_grain=2"),
    "CP 2, context grain 4": (*_SHARED, "parallel.context_grain=4"),
}
"""Trainings of two ranks."""
STEPS = 4
"""Steps of a turn."""


def steps(layout: str, bitwise: bool) -> Any:
    """On one rank of two: at each turn the seconds of a step."""
    import torch
    import torch.distributed as dist

    from shardwise.config.load import load_config
    from shardwise.data.formats.prepared_data import random_tokens
    from shardwise.distributed import collectives
    from shardwise.distributed.mesh import Mesh
    from shardwise.train.build import build_trainer

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    overrides = ["train.micro_batch=4", "train.steps=1000000", f"train.bitwise={str(bitwise).lower()}"]
    config = load_config("llama-small", [*overrides, *LAYOUTS[layout]])
    mesh = Mesh(**config.parallel.degrees, device="cpu", grains=config.grains)
    text = random_tokens(config.model.vocab_size, 64, config.train.sequence_length)
    trainer = build_trainer(config, mesh, text)
    trainer.step()
    seconds = 0.0
    while True:
        sent = sum(meter.bytes.total() for group in mesh.groups for meter in group.meters.values())
        yield [seconds, sent]
        for group in mesh.groups:
            for meter in group.meters.values():
                meter.reset()
        collectives.barrier(mesh.world)
        start = time.perf_counter()
        for _ in range(STEPS):
            trainer.step()
        seconds = (time.perf_counter() - start) / STEPS


def run(rounds: int) -> Report:
    figures = {}
    rows = []
    for layout in LAYOUTS:
        jobs = {name: ranks.Job("bitwise", "steps", 2, layout=layout, bitwise=name == FIXED) for name in (FREE, FIXED)}
        turns: dict[str, list[float]] = {name: [] for name in jobs}
        sent: dict[str, int] = {}
        try:
            for job in jobs.values():
                job.receive()
                job.go_on()
            for _ in range(5 * rounds):
                for name, job in jobs.items():
                    by_rank = job.go_on()
                    turns[name].append(max(seconds for seconds, _ in by_rank))
                    sent[name] = max(bytes_sent for _, bytes_sent in by_rank)
        finally:
            for job in jobs.values():
                job.__exit__()
        seconds = {name: median(times) for name, times in turns.items()}
        ratios = [fixed / free for free, fixed in zip(turns[FREE], turns[FIXED], strict=True)]
        figures[layout] = {**seconds, "ratio": median(ratios), "bytes_ratio": sent[FIXED] / sent[FREE]}
        times = [f"{seconds[name] * 1e3:.0f} ms" for name in jobs]
        rows.append([layout, *times, f"{median(ratios):.2f}", f"{sent[FIXED] / sent[FREE]:.2f}"])
    return Report(
        "bitwise",
        "Bit-equal training beside sums in any order",
        [Table(("two CPU ranks", FREE, FIXED, "ratio", "bytes sent"), rows)],
        figures,
        notes=[
            "Steps of llama-small's model with micro-batch 4 on random tokens, OMP_NUM_THREADS=1; medians of turns "
            f"of {STEPS} steps that alternate, and the median of the turns' ratios.",
        ],
    )
