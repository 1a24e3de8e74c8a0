"""The stages of ZeRO beside each other and beside torch FSDP2, around one model: step time and peak memory.

FSDP2 has the same units: the embedding, each block, and the rest with the head.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import ranks
from measure import median
from report import Report, Table, target

WORLD = 4
MODELS: dict[str, dict[str, int]] = {
    "state dominates: 8 blocks of 512, 64 tokens a rank": {
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "vocab_size": 4096,
        "samples": 1,
        "length": 64,
    },
    "4 blocks of 256, 4,096 tokens a rank": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "vocab_size": 4096,
        "samples": 16,
        "length": 256,
    },
}
KINDS = ("ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2")
_STEPS_TO_PEAK = 3
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


def train(kind: str, model: dict[str, int], steps: int) -> Iterator[float]:
    """On one rank: the seconds of each step, and at last the peak of memory above what libraries take."""
    import torch
    from measure import PeakMemory

    from shardwise.config import LlamaConfig
    from shardwise.distributed.mesh import Mesh, join
    from shardwise.models.llama import Llama
    from shardwise.optim.zero import ZeroRedundancyOptimizer

    torch.set_num_threads(1)
    join()
    mesh = Mesh()
    sizes = {key: value for key, value in model.items() if key not in ("samples", "length")}
    config = LlamaConfig(family="llama", num_attention_heads=8, max_position_embeddings=256, **sizes)
    memory = PeakMemory()
    is_ours = kind != "FSDP2"
    built = Llama(config, mesh.tp, seed=1, dtype=torch.float32, deferred=is_ours)
    optimizer: Any
    if is_ours:
        stage = int(kind[-1])
        optimizer = ZeroRedundancyOptimizer(
            built.parameters(), torch.optim.AdamW, mesh=mesh, stage=stage, model=built, grad_clipping=False, **ADAMW
        )
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        device_mesh = init_device_mesh("cpu", (mesh.world.size,))
        for unit in (built.embed_tokens, *built.layers):
            fully_shard(unit, mesh=device_mesh)
        fully_shard(built, mesh=device_mesh)
        optimizer = torch.optim.AdamW(built.parameters(), **ADAMW)
    generator = torch.Generator().manual_seed(mesh.world.rank)
    shape = (model["length"], model["samples"])
    yield 0.0
    for _ in range(steps):
        ids = torch.randint(model["vocab_size"], shape, generator=generator)
        start = time.perf_counter()
        loss = built(ids, ids) / ids.numel()
        if is_ours:
            with optimizer.accumulate(last=True):
                loss.backward()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        yield time.perf_counter() - start
    yield memory.above()


def run(rounds: int) -> Report:
    figures: dict[str, Any] = {}
    tables = []
    targets = []
    steps = 3 * rounds + 2
    for name, model in MODELS.items():
        seconds, peaks = _measure(model, steps)
        rows = []
        for kind in KINDS:
            ratio = median([one / other for one, other in zip(seconds[kind], seconds["ZeRO-1"], strict=True)])
            figures[f"{name}, {kind}"] = {"seconds": median(seconds[kind]), "peak": peaks[kind], "ratio": ratio}
            rows.append([kind, f"{median(seconds[kind]):.3f}", f"{ratio:.2f}", f"{peaks[kind] / 2**20:.0f}"])
        tables.append(Table((name, "s a step", "× ZeRO-1", "peak, MiB"), rows))
        for kind, limit in {"ZeRO-2": 1.05, "ZeRO-3": 1.25}.items():
            reached = figures[f"{name}, {kind}"]["ratio"]
            targets.append(target(f"{name}: {kind}, times ZeRO-1's step", reached, limit, at_least=False))
        speed = median([other / one for one, other in zip(seconds["ZeRO-3"], seconds["FSDP2"], strict=True)])
        targets.append(target(f"{name}: ZeRO-3, speed in times of FSDP2's", speed, 1.0, at_least=True))
        peak = peaks["ZeRO-3"] / peaks["FSDP2"]
        targets.append(target(f"{name}: ZeRO-3, peak in times of FSDP2's", peak, 1.0, at_least=False))
    return Report(
        "sharding",
        "Stages of ZeRO and FSDP2",
        tables,
        figures,
        targets,
        [f"Llama in float32 on {WORLD} CPU ranks over gloo, AdamW, steps in turns."],
    )


def _measure(model: dict[str, int], steps: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of the steps by the slowest rank, without the first two, and the largest peak, of each kind.

    The peaks are those of other runs, whose tensors have pages of their own: these take time.
    """
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        jobs = {
            kind: stack.enter_context(ranks.Job("sharding", "train", WORLD, kind=kind, model=model, steps=steps))
            for kind in KINDS
        }
        for job in jobs.values():
            job.receive()
        for _ in range(steps):
            for kind, job in jobs.items():
                seconds[kind].append(max(job.go_on()))
    peaks = {}
    for kind in KINDS:
        with ranks.Job(
            "sharding", "train", WORLD, variables=ranks.OWN_PAGES, kind=kind, model=model, steps=_STEPS_TO_PEAK
        ) as job:
            job.receive()
            peaks[kind] = [max(job.go_on()) for _ in range(_STEPS_TO_PEAK + 1)][-1]
    return {kind: values[2:] for kind, values in seconds.items()}, peaks
