"""shardwise beside torch DDP, FSDP2 and transformers' tensor parallelism: one Llama, two ranks, the same tokens."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ranks
from measure import PeakMemory, median
from report import Report, Table, target

WORLD = 2
REFERENCE = {"zero1": "ddp", "zero1_mkl": "ddp", "ddp": "ddp", "fsdp2": "ddp"}
REFERENCE |= {"zero1_compiled": "ddp", "zero1_mkl_compiled": "ddp", "ddp_compiled": "ddp", "tp_compiled": "tp_plan"}
MIXED = ("zero1_mixed", "zero1_mixed_compiled", "ddp_autocast", "ddp_autocast_compiled")
REFERENCE |= dict.fromkeys(MIXED, "ddp")
REFERENCE |= {"tp": "tp_plan", "tp_mkl": "tp_plan", "tp_sp": "tp_plan", "tp_plan": "tp_plan"}
WARMUP, STEPS = 2, 4
PEAK_SIZE = 2048


def write_weights(folder: str) -> None:
    """In one process: the model that all start from, as a Hugging Face folder."""
    import torch
    from contestants import MODEL, SEED
    from safetensors.torch import save_file

    from shardwise import canonical_tensors
    from shardwise.checkpoint.companions import model_files
    from shardwise.models.llama import Llama

    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(dict(canonical_tensors(Llama(MODEL, seed=SEED))), Path(folder, "model.safetensors"), {"format": "pt"})
    for name, content in model_files(MODEL, torch.float32, None).items():
        Path(folder, name).write_bytes(content)


def train(name: str, folder: str) -> Iterator[dict[str, Any]]:
    """On one rank: a contestant that takes a step whenever it is its turn, and tells what the step took."""
    import contestants
    import torch.distributed as dist

    contestant = contestants.make(name, folder)
    dist.barrier()
    memory = PeakMemory()
    contestant.prepare()
    yield {}
    for number in itertools.count():
        ids = contestants.batch(number, dist.get_rank(), contestant.whole_batch, WORLD)
        before = contestant.collective_seconds()
        start, start_cpu = time.perf_counter(), time.process_time()
        loss = contestant.step(ids)
        seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
        after = contestant.collective_seconds()
        share = None if after is None or before is None else (after - before) / seconds
        yield {
            "seconds": seconds,
            "cpu_seconds": cpu,
            "collective_share": share,
            "loss": loss,
            "whole_batch": contestant.whole_batch,
            "memory": memory.above(),
        }


def matmul_peak(rounds: int) -> dict[str, float]:
    """On one rank, while the others do the same: best FLOP/s of a large matmul, by each routine."""
    import torch
    import torch.distributed as dist
    from measure import interleaved

    from shardwise.distributed.mesh import join
    from shardwise.layers.matmul import linear

    join()
    a, b = torch.randn(PEAK_SIZE, PEAK_SIZE), torch.randn(PEAK_SIZE, PEAK_SIZE)
    low, lower = a.bfloat16(), b.bfloat16()
    calls = {"mkl": lambda: a @ b.t(), "shardwise": lambda: linear(a, b), "bfloat16": lambda: low @ lower.t()}
    seconds = interleaved(calls, rounds, before=dist.barrier)
    return {name: 2 * PEAK_SIZE**3 / min(times) for name, times in seconds.items()}


def race(names: Sequence[str], folder: str) -> dict[str, list[dict[str, Any]]]:
    """Start contestants, then have them take a step in turn; by name, what each step after the warm-up took."""
    with ExitStack() as stack:
        jobs = {
            name: stack.enter_context(ranks.Job("side_by_side", "train", WORLD, name=name, folder=folder))
            for name in names
        }
        for job in jobs.values():
            job.receive()
        turns = [{name: _turn(job.go_on()) for name, job in jobs.items()} for _ in range(WARMUP + STEPS)]
    return {name: [turn[name] for turn in turns[WARMUP:]] for name in names}


def _turn(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One step: the slower rank's time, the collectives and memory of the rank that has most, the mean loss."""
    parts = results[:1] if results[0]["whole_batch"] else results
    shares = [r["collective_share"] for r in results if r["collective_share"] is not None]
    return {
        "seconds": max(r["seconds"] for r in results),
        "cpu_seconds": max(r["cpu_seconds"] for r in results),
        "memory": max(r["memory"] for r in results),
        "collective_share": max(shares) if shares else None,
        "loss": sum(r["loss"] for r in parts) / len(parts),
    }


def live_memory(name: str, folder: str) -> int:
    """Peak of live tensors over two steps."""
    with ranks.Job("side_by_side", "train", WORLD, variables=ranks.OWN_PAGES, name=name, folder=folder) as job:
        job.receive()
        job.go_on()
        return max(int(r["memory"]) for r in job.go_on())


def run(rounds: int) -> Report:
    import contestants

    from shardwise.models.flops import flops_per_token
    from shardwise.models.parameter_counts import parameter_count

    labels = {name: label for name, (label, _) in contestants.CONTESTANTS.items()}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in labels}
    peaks: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as temporary:
        folder = str(Path(temporary) / "llama")
        ranks.run("side_by_side", "write_weights", 1, folder=folder)
        for number in range(rounds):
            for reference in ("ddp", "tp_plan"):
                names = [name for name in labels if REFERENCE[name] == reference]
                print(f"  round {number + 1}/{rounds}: {', '.join(labels[name] for name in names)}", flush=True)
                for name, steps in race(names, folder).items():
                    found[name] += steps
                peaks += ranks.run("side_by_side", "matmul_peak", WORLD, rounds=5)
        print("  memory of live tensors", flush=True)
        live = {name: live_memory(name, folder) for name in labels}
    tokens = WORLD * contestants.SEQUENCES_PER_RANK * contestants.SEQUENCE_LENGTH
    flops = flops_per_token(contestants.MODEL, contestants.SEQUENCE_LENGTH)
    peak = {routine: max(p[routine] for p in peaks) for routine in peaks[0]}
    figures = {name: _figures(name, found, live, tokens, flops, peak) for name in labels}
    columns = ("", "step", "tokens/s", "speed", "peak memory", "of live tensors", "collectives", "of matmul peak")
    return Report(
        "side_by_side",
        "The same Llama on 2 ranks, side by side",
        [Table(columns, [_row(label, figures[name]) for name, label in labels.items()])],
        {"contestants": figures, "matmul_peak": peak, "tokens_per_step": tokens, "flops_per_token": flops},
        _targets(figures),
        _notes(rounds, tokens, parameter_count(contestants.MODEL), peak, figures),
    )


def _figures(
    name: str,
    found: dict[str, list[dict[str, Any]]],
    live: dict[str, int],
    tokens: int,
    flops: float,
    peak: dict[str, float],
) -> dict[str, Any]:
    """Medians over all steps; a step's speed is compared with the reference's step of the same turn."""
    mine, reference = found[name], found[REFERENCE[name]]
    # The last step of each start has seen the peak.
    memory, other = (median([one["memory"] for one in steps[STEPS - 1 :: STEPS]]) for steps in (mine, reference))
    seconds = median([one["seconds"] for one in mine])
    shares = [one["collective_share"] for one in mine if one["collective_share"] is not None]
    by = (
        "bfloat16"
        if name in MIXED
        else "shardwise"
        if name in ("zero1", "zero1_compiled", "tp", "tp_compiled", "tp_sp")
        else "mkl"
    )
    rate = tokens / seconds * flops / WORLD
    return {
        "step_seconds": seconds,
        "cpu_seconds": median([one["cpu_seconds"] for one in mine]),
        "tokens_per_second": tokens / seconds,
        "speed_ratio": median([b["seconds"] / a["seconds"] for a, b in zip(mine, reference, strict=True)]),
        "memory": memory,
        "memory_ratio": memory / other,
        "live_memory": live[name],
        "live_memory_ratio": live[name] / live[REFERENCE[name]],
        "collective_share": median(shares) if shares else None,
        "flops_per_rank": rate,
        "share_of_own_peak": rate / peak[by],
        "last_loss": mine[-1]["loss"],
        "steps": mine,
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
    zero_compiled, ddp_compiled, tp_compiled = (figures[f"{name}_compiled"] for name in ("zero1", "ddp", "tp"))

    mixed, mixed_compiled, autocast, autocast_compiled = (figures[name] for name in MIXED)

    def speed(mine: dict[str, Any], other: dict[str, Any]) -> float:
        pairs = zip(mine["steps"], other["steps"], strict=True)
        return median([theirs["seconds"] / ours["seconds"] for ours, theirs in pairs])

    return [
        target("ZeRO-1's tokens/s over DDP's", zero["speed_ratio"], 1.1, at_least=True),
        target("ZeRO-1's tokens/s over DDP's (aim)", zero["speed_ratio"], 1.3, at_least=True),
        target("ZeRO-1's peak memory over DDP's", zero["memory_ratio"], 0.9, at_least=False),
        target("the same of live tensors", zero["live_memory_ratio"], 0.9, at_least=False),
        target("TP 2's tokens/s over tp_plan=\"auto\"'s", tp["speed_ratio"], 1.2, at_least=True),
        target("compiled ZeRO-1's tokens/s over DDP's", zero_compiled["speed_ratio"], 1.3, at_least=True),
        target("the same over compiled DDP's", speed(zero_compiled, ddp_compiled), 1.1, at_least=True),
        target(
            "compiled ZeRO-1's tokens/s by MKL matmuls over compiled DDP's",
            speed(figures["zero1_mkl_compiled"], ddp_compiled),
            1.05,
            at_least=True,
        ),
        target("compiled TP 2's tokens/s over its own eager", speed(tp_compiled, tp), 1.0, at_least=True),
        target("compiled and mixed ZeRO-1's tokens/s over float32's", speed(mixed_compiled, zero), 2.5, at_least=True),
        target("mixed ZeRO-1's tokens/s over autocast DDP's", speed(mixed, autocast), 1.3, at_least=True),
        target("the same, both compiled", speed(mixed_compiled, autocast_compiled), 1.3, at_least=True),
    ]


def _notes(rounds: int, tokens: int, parameters: int, peak: dict[str, float], figures: dict[str, Any]) -> list[str]:
    spread, mixed_spread = (
        _spread([f for name, f in figures.items() if (name in MIXED) == low]) for low in (False, True)
    )
    return [
        f"Llama of 4 layers × 256, 8 heads, intermediate 688, vocabulary 4,096: {parameters:,} parameters, float32 "
        "unless said. "
        f"Sequences of 256; {tokens:,} tokens a step over both ranks, cut by sequences under data parallelism and all "
        "on both ranks under tensor parallelism. SDPA and fused AdamW with the same options everywhere, no clipping; "
        "one thread a rank; gloo.",
        f"Each contestant trains in processes of its own, started afresh {rounds} times; those of one reference are "
        f"ready at once and take steps in turn, {WARMUP} to warm up and {STEPS} that count. Times are medians over "
        "these steps, of the slower rank; a speed is the median ratio to the reference's step of the same turn.",
        'The reference is torch DDP for data parallelism, tp_plan="auto" for tensor parallelism: speed and, in '
        "brackets, memory as ratios to it. Memory: peak above what stands after import and model build, of the rank "
        "with most, as the process is; and of live tensors, in a run of its own whose allocator keeps no heap of "
        "freed ones. The compiler, which a process loads, is part of the memory of compiled contestants.",
        "All start from the same weights and see the same tokens: their losses after "
        f"{WARMUP + STEPS} steps differ by at most {spread:.1e} relative, in bfloat16 by {mixed_spread:.1e}.",
        "Collectives: share of the step that a rank spends in them, waiting for the other rank included (ours only, "
        "and of compiled blocks none: the others do not tell). Of matmul peak: model FLOPs, the causal half of "
        "attention counted, over the measured peak of the routine that the contestant's matmuls run by.",
        f"Matmul peak, measured on both ranks at once with matrices of {PEAK_SIZE:,}: MKL {peak['mkl'] / 1e9:.0f}, "
        f"shardwise's choice {peak['shardwise'] / 1e9:.0f}, bfloat16 "
        f"{peak['bfloat16'] / 1e9:.0f} GFLOP/s a rank. On CPUs that are not Intel's shardwise "
        "gives float32 matmuls to oneDNN; the rows with MKL matmuls show what it gains without that.",
    ]


def _spread(figures: Sequence[dict[str, Any]]) -> float:
    final = [f["last_loss"] for f in figures]
    return max(final) / min(final) - 1
