"""Llama 2 7B's blocks on this machine's accelerators: tokens/s, MFU, and how much of the communication is hidden."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import ranks
from measure import median
from report import Report, Table

LAYOUTS = {"one device": (1, 1), "DP 2, ZeRO-1": (1, 2), "TP 2 + SP": (2, 1)}
"""Name -> (tensor, data)."""
WHOLE = 32
"""Blocks of the model."""
ROOM = 0.85
"""Of a device's memory, the part that the estimate may fill."""
WARMUP, STEPS, MICRO_BATCHES = 3, 5, 4
_COLLECTIVES = ("nccl", "rccl", "xccl", "hccl", "gloo:")
"""Parts of the names by which the profiler calls the kernels of collectives, or gloo's work on the host."""
_COPIES = ("memcpy", "memset")

Interval = tuple[float, float]


def train(tensor: int, rounds: int, shapes: Sequence[str] = (), device: str | None = None) -> dict[str, Any]:
    """On one rank: what steps of a training take, and what one more step shows to the profiler.

    Args:
        shapes: keys of another model or batch than Llama 2 7B's, for tests.
        device: `cpu`, for tests; default: this machine's accelerator.
    """
    import torch

    from shardwise.data.formats.prepared_data import random_tokens
    from shardwise.distributed import devices
    from shardwise.distributed.mesh import Mesh, join
    from shardwise.estimates.device_peaks import peak_flops
    from shardwise.models.flops import flops_per_token
    from shardwise.train.build import build_trainer

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler prints each of its starts and stops
    join(torch.device(device) if device else None)
    mesh = Mesh(tensor=tensor, device=device)
    config = fitting(mesh, shapes)
    length, batch = config.train.sequence_length, config.train.global_batch
    trainer = build_trainer(config, mesh, random_tokens(config.model.vocab_size, 8 * batch + 1, length))
    for _ in range(WARMUP):
        trainer.step()
    seconds = []
    for _ in range(rounds):
        devices.synchronize(mesh.device)
        start = time.perf_counter()
        for _ in range(STEPS):
            loss = trainer.step().loss
        devices.synchronize(mesh.device)
        seconds.append((time.perf_counter() - start) / STEPS)
    with torch.profiler.profile() as profiler:
        trainer.step()
        devices.synchronize(mesh.device)
    name, memory = devices.name(mesh.device), devices.peak_memory(mesh.device)
    return {
        "device": name,
        "blocks": config.model.num_hidden_layers,
        "seconds": seconds,
        "tokens": batch * length,
        "flops_per_token": flops_per_token(config.model, length),
        "peak_flops": peak_flops(name, "bfloat16"),
        "memory": memory,
        "loss": loss,
        **hidden(*intervals(profiler.events())),
    }


def fitting(mesh: Any, shapes: Sequence[str] = ()) -> Any:
    """The configuration with as many blocks as fit the device that has least memory; with all where it does not tell.

    Raises:
        ConfigError: not even one block fits.
    """
    from shardwise.base.errors import ConfigError
    from shardwise.config import check_layout, load_config
    from shardwise.distributed import collectives as comm
    from shardwise.distributed import devices
    from shardwise.estimates.memory import expected_memory

    room = ROOM * min(comm.all_gather_objects(devices.total_memory(mesh.device) or math.inf, mesh.world))
    keys = [f"parallel.tensor={mesh.tp.size}", f"parallel.sequence={'true' if mesh.tp.size > 1 else 'false'}"]
    keys += [f"train.global_batch={MICRO_BATCHES * mesh.dp.size}", *shapes]
    for blocks in range(WHOLE, 0, -1):
        config = load_config("llama2-7b", [f"model.num_hidden_layers={blocks}", *keys])
        expected = expected_memory(config, check_layout(config, mesh.world.size), accelerator=True)
        assert expected is not None, "the model is shardwise's own"
        if expected.total <= room:
            return config
    raise ConfigError(f"{devices.name(mesh.device)} must have memory for one block of Llama 2 7B, and has too little")


def intervals(events: Iterable[Any]) -> tuple[list[Interval], list[Interval]]:
    """Collectives, and all other work, in a profile: of the device's queues; of the host, where no queue was seen."""
    import torch

    seen = [event for event in events if event.time_range.end > event.time_range.start]
    # The annotations of the host's code (`record_function`) are shown on the queues too.
    queued = [e for e in seen if e.device_type != torch.autograd.DeviceType.CPU and not e.is_user_annotation]
    collectives, work = [], []
    for event in queued or seen:
        name, span = event.name.lower(), (event.time_range.start, event.time_range.end)
        if any(part in name for part in _COLLECTIVES):
            collectives.append(span)
        elif (queued or name.startswith("aten::")) and not name.startswith(_COPIES):
            work.append(span)
    return collectives, work


def hidden(collectives: Iterable[Interval], work: Iterable[Interval]) -> dict[str, float | None]:
    """Seconds with a collective under way, of intervals in microseconds, and the share with other work beside it."""
    during, busy = _joined(collectives), _joined(work)
    total = sum(end - start for start, end in during)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in during for b in busy)
    return {"collective_seconds": total / 1e6, "hidden_share": both / total if total else None}


def _joined(spans: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that do not overlap."""
    joined: list[Interval] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def run(rounds: int) -> Report:
    from shardwise.base.hardware import accelerators

    count = accelerators()[1]
    found = {}
    for name, (tensor, data) in LAYOUTS.items():
        if tensor * data <= count:
            print(f"  {name}", flush=True)
            found[name] = ranks.run("device", "train", tensor * data, tensor=tensor, rounds=rounds)
    return report(found)


def report(found: dict[str, list[dict[str, Any]]]) -> Report:
    """Of what each rank found at each layout: the slowest rank's time, the fullest device, the least hidden."""
    figures = {name: _figures(everyone) for name, everyone in found.items()}
    columns = ("", "blocks", "step", "tokens/s", "a device", "MFU", "peak memory", "in collectives", "of it hidden")
    device = next(iter(figures.values()))["device"]
    return Report(
        "device",
        f"Llama 2 7B's blocks on {device}",
        [Table(columns, [_row(name, f) for name, f in figures.items()])],
        figures,
        notes=[
            "Blocks of Llama 2 7B at its width, with embedding and head, as many as fit: sequences of 4,096, "
            f"{MICRO_BATCHES} micro-batches of one sequence on each replica, mixed precision, selective recompute.",
            f"Time: the median of rounds of {STEPS} steps after {WARMUP} of warm-up, of the slowest rank; the host "
            "waits for the device before and after a round.",
            "MFU: model FLOPs without recompute, the causal half of attention counted, over the published dense "
            "bfloat16 peak of the devices.",
            "In collectives: the time in which the profiler sees one under way, in one step, waiting for the other "
            "rank included; hidden: the share of this time in which other kernels run.",
        ],
    )


def _figures(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    first = everyone[0]
    seconds = median([max(times) for times in zip(*(one["seconds"] for one in everyone), strict=True)])
    rate = first["tokens"] / seconds
    peak, shares = first["peak_flops"], [one["hidden_share"] for one in everyone if one["hidden_share"] is not None]
    return {
        "device": first["device"],
        "devices": len(everyone),
        "blocks": first["blocks"],
        "step_seconds": seconds,
        "tokens_per_second": rate,
        "mfu": rate * first["flops_per_token"] / (len(everyone) * peak) if peak else None,
        "memory": max(one["memory"] for one in everyone),
        "collective_seconds": max(one["collective_seconds"] for one in everyone),
        "hidden_share": min(shares) if shares else None,
        "loss": first["loss"],
    }


def _row(name: str, f: dict[str, Any]) -> list[str]:
    return [
        name,
        str(f["blocks"]),
        f"{f['step_seconds'] * 1000:,.0f} ms",
        f"{f['tokens_per_second']:,.0f}",
        f"{f['tokens_per_second'] / f['devices']:,.0f}",
        "peak unknown" if f["mfu"] is None else f"{f['mfu']:.1%}",
        f"{f['memory'] / 2**30:.1f} GiB",
        f"{f['collective_seconds'] * 1000:,.0f} ms" if f["collective_seconds"] else "",
        "" if f["hidden_share"] is None else f"{f['hidden_share']:.0%}",
    ]
