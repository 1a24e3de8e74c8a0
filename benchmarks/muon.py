"""A step of Muon beside one of AdamW, over two ranks: matrices cut by data parallelism, and by tensor parallelism."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import ranks
from measure import median
from report import Report, Table, target

LAYOUTS = {"DP 2": ["parallel.tensor=1", "parallel.sequence=false", "train.micro_batch=4"], "TP 2": []}
BATCHES = {8: 1.35, 32: 1.12}
"""Samples of a step, with the most that the step may take, in times of AdamW's."""


def train(layout: str, batch: int, optimizer: str, steps: int, cache: str) -> Any:
    """On two processes: at each turn the seconds of a step of llama-small."""
    from pathlib import Path

    import torch

    from shardwise.config import load_config
    from shardwise.data.open_data import prepare_data
    from shardwise.distributed import mesh
    from shardwise.train.build import build_trainer

    torch.set_num_threads(1)
    keys = [*LAYOUTS[layout], f"optimizer.name={optimizer}", f"train.global_batch={batch}", f"train.steps={steps + 24}"]
    config = load_config("llama-small", keys)
    mesh.join()
    trainer = build_trainer(
        config, mesh.Mesh(tensor=config.parallel.tensor, device="cpu"), prepare_data(config, Path(cache))
    )
    yield 0.0
    for _ in range(steps):
        start = time.perf_counter()
        trainer.step()
        yield time.perf_counter() - start


def run(rounds: int) -> Report:
    figures: dict[str, Any] = {}
    rows, targets = [], []
    steps = 4 * rounds + 2
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as cache:
        for layout in LAYOUTS:
            for batch, limit in BATCHES.items():
                adamw, muon = _seconds(layout, batch, steps, cache)
                ratio = median([one / other for one, other in zip(muon, adamw, strict=True)])
                figures[f"{layout}, {batch}"] = {"adamw": median(adamw), "muon": median(muon), "ratio": ratio}
                rows.append([layout, str(batch), f"{median(adamw):.3f}", f"{median(muon):.3f}", f"{ratio:.2f}"])
                targets.append(
                    target(f"{layout}, batch {batch}: step time, times AdamW's", ratio, limit, at_least=False)
                )
    return Report(
        "muon",
        "Muon",
        [Table(("layout", "samples a step", "AdamW, s", "Muon, s", "step time, × AdamW"), rows)],
        figures,
        targets,
        ["llama-small's model in float32, steps in turns. The iteration does not depend on the samples of a step."],
    )


def _seconds(layout: str, batch: int, steps: int, cache: str) -> list[list[float]]:
    """Seconds of the steps of AdamW and of Muon, by the slower rank; the first two steps do not count."""
    jobs = {
        optimizer: ranks.Job(
            "muon", "train", 2, layout=layout, batch=batch, optimizer=optimizer, steps=steps, cache=cache
        )
        for optimizer in ("adamw", "muon")
    }
    times: dict[str, list[float]] = {optimizer: [] for optimizer in jobs}
    try:
        for job in jobs.values():
            job.receive()
        for _ in range(steps):
            for optimizer, job in jobs.items():
                times[optimizer].append(max(job.go_on()))
    finally:
        for job in jobs.values():
            job.__exit__()
    return [seconds[2:] for seconds in times.values()]
