"""shardwise beside torch DDP, FSDP2 and transformers' tensor parallelism: one Llama, two ranks, the same tokens."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import ranks
from measure import PeakMemory, median
from report import Report, Table, target

WORLD = 2
REFERENCE = {"zero1": "ddp", "zero1_mkl": "ddp", "fsdp2": "ddp"}
REFERENCE |= {"tp": "tp_plan", "tp_mkl": "tp_plan", "tp_sp": "tp_plan"}
PEAK_SIZE = 2048


def write_weights(folder: str) -> None:
    """In one process: the model that all start from, as a Hugging Face folder."""
    from contestants import MODEL, SEED

    from shardwise.checkpoint import export_hugging_face
    from shardwise.mesh import Mesh
    from shardwise.models import Llama

    export_hugging_face(Llama(MODEL, seed=SEED), MODEL, Mesh(), Path(folder))


def train(name: str, folder: str, warmup: int, steps: int) -> dict[str, Any]:
    """On one rank: train a contestant; seconds of each step, and what it held at its peak."""
    import contestants
    import torch.distributed as dist

    contestant = contestants.make(name, folder)
    dist.barrier()
    memory = PeakMemory()
    contestant.prepare()
    seconds, cpu, losses, collective = [], [], [], []
    for number in range(warmup + steps):
        ids = contestants.batch(number, dist.get_rank(), contestant.whole_batch, WORLD)
        before = contestant.collective_seconds()
        start, start_cpu = time.perf_counter(), time.process_time()
        losses.append(contestant.step(ids))
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
        after = contestant.collective_seconds()
        collective.append(None if after is None or before is None else after - before)
    return {
        "seconds": seconds[warmup:],
        "cpu_seconds": cpu[warmup:],
        "collective": collective[warmup:],
        "losses": losses,
        "memory": memory.above(),
        "whole_batch": contestant.whole_batch,
    }


def matmul_peak(rounds: int) -> dict[str, float]:
    """On one rank, while the others do the same: best float32 FLOP/s of a large matmul, by each routine."""
    import torch
    import torch.distributed as dist
    from measure import interleaved

    from shardwise.mesh import join
    from shardwise.parallel.matmul import product

    join()
    a, b = torch.randn(PEAK_SIZE, PEAK_SIZE), torch.randn(PEAK_SIZE, PEAK_SIZE)
    calls = {"mkl": lambda: a @ b.t(), "shardwise": lambda: product(a, b)}
    seconds = interleaved(calls, rounds, before=dist.barrier)
    return {name: 2 * PEAK_SIZE**3 / min(times) for name, times in seconds.items()}


def run(rounds: int) -> Report:
    import contestants

    from shardwise.cost import flops_per_token, parameter_count

    names = list(contestants.CONTESTANTS)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    peaks: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as temporary:
        folder = str(Path(temporary) / "llama")
        ranks.run("side_by_side", "write_weights", 1, folder=folder)
        for number in range(rounds):
            peaks += ranks.run("side_by_side", "matmul_peak", WORLD, rounds=5)
            for name in names if number % 2 == 0 else reversed(names):
                print(f"  round {number + 1}/{rounds}: {contestants.CONTESTANTS[name][0]}", flush=True)
                results = ranks.run("side_by_side", "train", WORLD, name=name, folder=folder, warmup=2, steps=5)
                found[name].append(_round(results))
        for name in names:
            print(f"  memory: {contestants.CONTESTANTS[name][0]}", flush=True)
            options = {"name": name, "folder": folder, "warmup": 1, "steps": 1}
            live = ranks.run("side_by_side", "train", WORLD, variables=ranks.OWN_PAGES, **options)
            for one in found[name]:
                one["live_memory"] = max(r["memory"] for r in live)
    tokens = WORLD * contestants.SEQUENCES_PER_RANK * contestants.SEQUENCE_LENGTH
    flops = flops_per_token(contestants.MODEL, contestants.SEQUENCE_LENGTH)
    peak = {routine: max(p[routine] for p in peaks) for routine in peaks[0]}
    figures = {name: _figures(name, found, tokens, flops, peak) for name in names}
    rows = [_row(contestants.CONTESTANTS[name][0], figures[name]) for name in names]
    columns = ("", "step", "tokens/s", "speed", "peak memory", "of live tensors", "collectives", "of matmul peak")
    return Report(
        "side_by_side",
        "The same Llama on 2 ranks, side by side",
        [Table(columns, rows)],
        {"contestants": figures, "matmul_peak": peak, "tokens_per_step": tokens, "flops_per_token": flops},
        _targets(figures),
        _notes(rounds, tokens, parameter_count(contestants.MODEL), peak, figures),
    )


def _round(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One round: the slowest rank's steps; collectives and memory of the rank that has most."""
    steps = [max(times) for times in zip(*(r["seconds"] for r in results), strict=True)]
    shares = [
        median([c / s for c, s in zip(r["collective"], r["seconds"], strict=True)])
        for r in results
        if r["collective"][0] is not None
    ]
    first = results[:1] if results[0]["whole_batch"] else results
    losses = [sum(values) / len(first) for values in zip(*(r["losses"] for r in first), strict=True)]
    return {
        "step_seconds": median(steps),
        "cpu_seconds": max(median(r["cpu_seconds"]) for r in results),
        "memory": max(r["memory"] for r in results),
        "collective_share": max(shares) if shares else None,
        "losses": losses,
    }


def _figures(
    name: str, found: dict[str, list[dict[str, Any]]], tokens: int, flops: float, peak: dict[str, float]
) -> dict[str, Any]:
    """Medians over rounds; ratios are taken within each round."""
    mine = found[name]
    reference = found[REFERENCE.get(name, name)]
    seconds = median([r["step_seconds"] for r in mine])
    shares = [r["collective_share"] for r in mine if r["collective_share"] is not None]
    by = "shardwise" if name in ("zero1", "tp", "tp_sp") else "mkl"
    rate = tokens / seconds * flops / WORLD
    return {
        "step_seconds": seconds,
        "cpu_seconds": median([r["cpu_seconds"] for r in mine]),
        "tokens_per_second": tokens / seconds,
        "speed_ratio": median([b["step_seconds"] / a["step_seconds"] for a, b in zip(mine, reference, strict=True)]),
        "memory": median([r["memory"] for r in mine]),
        "memory_ratio": median([a["memory"] / b["memory"] for a, b in zip(mine, reference, strict=True)]),
        "live_memory": mine[0]["live_memory"],
        "live_memory_ratio": mine[0]["live_memory"] / reference[0]["live_memory"],
        "collective_share": median(shares) if shares else None,
        "flops_per_rank": rate,
        "share_of_own_peak": rate / peak[by],
        "losses": mine[0]["losses"],
        "rounds": [{key: value for key, value in r.items() if key != "losses"} for r in mine],
    }


def _row(label: str, f: dict[str, Any]) -> list[str]:
    share = f["collective_share"]
    return [
        label,
        f"{f['step_seconds'] * 1000:,.0f} ms",
        f"{f['tokens_per_second']:,.0f}",
        f"{f['speed_ratio']:.2f}×",
        f"{f['memory'] / 2**20:,.0f} MiB ({f['memory_ratio']:.2f})",
        f"{f['live_memory'] / 2**20:,.0f} MiB ({f['live_memory_ratio']:.2f})",
        "" if share is None else f"{share:.0%}",
        f"{f['share_of_own_peak']:.0%}",
    ]


def _targets(figures: dict[str, Any]) -> list[str]:
    zero, tp = figures["zero1"], figures["tp"]
    return [
        target("ZeRO-1's tokens/s over DDP's", zero["speed_ratio"], 1.1, at_least=True),
        target("ZeRO-1's tokens/s over DDP's (aim)", zero["speed_ratio"], 1.3, at_least=True),
        target("ZeRO-1's peak memory over DDP's", zero["memory_ratio"], 0.9, at_least=False),
        target("the same of live tensors", zero["live_memory_ratio"], 0.9, at_least=False),
        target("TP 2's tokens/s over tp_plan=\"auto\"'s", tp["speed_ratio"], 1.2, at_least=True),
    ]


def _notes(rounds: int, tokens: int, parameters: int, peak: dict[str, float], figures: dict[str, Any]) -> list[str]:
    final = {name: f["losses"][-1] for name, f in figures.items()}
    spread = (max(final.values()) - min(final.values())) / min(final.values())
    return [
        f"Llama of 4 layers × 256, 8 heads, intermediate 688, vocabulary 4,096: {parameters:,} parameters, float32. "
        f"Sequences of 256; {tokens:,} tokens a step over both ranks, cut by sequences under data parallelism and all "
        "on both ranks under tensor parallelism. SDPA and fused AdamW with the same options everywhere, no clipping; "
        "one thread a rank; gloo.",
        f"Each contestant trains in fresh processes, in turn with the others, {rounds} rounds of 2 + 5 steps. "
        "Times are medians over steps of the slower rank, then over rounds; ratios are taken within a round.",
        'The reference is torch DDP for data parallelism, tp_plan="auto" for tensor parallelism: speed and, in '
        "brackets, memory as ratios to it. Memory: peak above what stands after import and model build, of the rank "
        "with most, as the process is; and of live tensors, in a run of its own whose allocator keeps no heap of "
        "freed ones.",
        "All start from the same weights and see the same tokens: their losses after 7 steps differ by "
        f"{spread:.1e} relative.",
        "Collectives: share of the step that a rank spends in them, waiting for the other rank included (ours only: "
        "the alternatives do not tell). Of matmul peak: model FLOPs, the causal half of attention counted, over the "
        "measured peak of the routine that the contestant's matmuls run by.",
        f"Matmul peak, measured on both ranks at once with matrices of {PEAK_SIZE:,}: MKL {peak['mkl'] / 1e9:.0f}, "
        f"shardwise's choice {peak['shardwise'] / 1e9:.0f} GFLOP/s a rank. On CPUs that are not Intel's shardwise "
        "gives float32 matmuls to oneDNN; the rows with MKL matmuls show what it gains without that.",
    ]
