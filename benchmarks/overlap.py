"""How much of a step's reductions and gathers runs behind computation, on an accelerator in software.

The strict device of the tests (tests/strict) computes on the CPU and runs its collectives on threads of their own, each
after a fixed delay, as a slow link would have it. What the host waits for them is exposed; the rest is hidden.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ranks
from measure import median
from report import Report, Table, target

DELAY = 2000
"""Microseconds of each collective."""
BEHIND, AFTER, PLAIN, DDP = (
    "shardwise train",
    "a loop of your own with accumulate(last=True)",
    "a loop of your own without it",
    "torch DDP and AdamW",
)
WAYS = (BEHIND, AFTER, PLAIN, DDP)
CONFIG = {
    "model": {
        "family": "llama",
        "vocab_size": 512,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
    },
    "train": {"steps": 1, "global_batch": 4, "micro_batch": 2, "sequence_length": 128},
    "optimizer": {"lr": 1e-4},
}
BUCKET_MIB = 7.0
_VARIABLES = {"STRICT_DEVICES": "2"}


def _delayed(microseconds: int) -> dict[str, str]:
    return dict.fromkeys(("STRICT_DELAY", "STRICT_LEAST_DELAY"), str(microseconds))


def steps(way: str) -> Any:
    """On one rank of two: at each turn the seconds of a step, of its waits for reductions and gathers, their number."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch
    import torch.distributed as dist

    from shardwise import Mesh, ZeroRedundancyOptimizer
    from shardwise.config import config_from_sections
    from shardwise.distributed import collectives
    from shardwise.layers.units import parameters_by_unit
    from shardwise.models.build import build_model
    from tests.strict import device

    device.load()
    torch.set_num_threads(1)
    dist.init_process_group("strictccl")
    mesh = Mesh()
    config = config_from_sections(CONFIG)
    model = build_model(config, mesh.tp, sequence_parallel=False, device=mesh.device)
    ids_SB = torch.randint(512, (128, 2), generator=torch.Generator().manual_seed(mesh.dp.rank)).to(mesh.device)
    number, waited = 0, 0.0

    def wait(work: Any, finish: Callable[[Any], Any]) -> Any:
        nonlocal number, waited
        start = time.perf_counter()
        result = finish(work)
        number, waited = number + 1, waited + time.perf_counter() - start
        return result

    if way == DDP:
        wrapped = torch.nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=BUCKET_MIB, gradient_as_bucket_view=True
        )
        plain, under_way = torch.optim.AdamW(model.parameters(), lr=1e-4), []

        def start(_: object, bucket: Any) -> Any:
            """DDP's own all-reduce; the device's library has no futures, so that the step waits for it below."""
            under_way.append(dist.all_reduce(bucket.buffer().div_(2), async_op=True))
            started: Any = torch.futures.Future()
            started.set_result(bucket.buffer())
            return started

        start.__annotations__.clear()  # torch refuses annotations that are texts
        wrapped.register_comm_hook(None, start)

        def step() -> None:
            wrapped(ids_SB, ids_SB).backward()
            while under_way:
                wait(under_way.pop(0), lambda work: work.wait())
            plain.step()
            plain.zero_grad()
    else:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, mesh=mesh, bucket_mib=BUCKET_MIB, lr=1e-4
        )
        finish = collectives.Pending.wait
        collectives.Pending.wait = lambda pending: wait(pending, finish)  # type: ignore[method-assign]
        if way == BEHIND:
            optimizer.gathers.behind_forward(parameters_by_unit(model), optimizer.buckets).__enter__()

        def step() -> None:
            with nullcontext() if way == PLAIN else optimizer.accumulate(last=True):
                model(ids_SB, ids_SB).backward()
            optimizer.step()

    step()
    found = [0.0, 0.0, 0.0]
    while True:
        yield found
        number, waited, start = 0, 0.0, time.perf_counter()
        step()
        found = [time.perf_counter() - start, waited, number]


def run(rounds: int) -> Report:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.strict import build

    build.library()  # before the ranks, which would each build it
    delays = (0, DELAY)
    jobs = {
        (way, delay): ranks.Job("overlap", "steps", 2, variables=_VARIABLES | _delayed(delay), way=way)
        for way in WAYS
        for delay in delays
    }
    turns: dict[tuple[str, int], list[list[float]]] = {key: [] for key in jobs}
    try:
        for job in jobs.values():
            job.receive()
        for _ in range(5 * rounds):
            for key, job in jobs.items():
                turns[key].append([max(values) for values in zip(*job.go_on(), strict=True)])
    finally:
        for job in jobs.values():
            job.__exit__()
    figures, rows = {}, []
    for way in WAYS:
        of_turns = zip(turns[way, 0], turns[way, DELAY], strict=True)
        exposed = median([delayed[1] - without[1] for without, delayed in of_turns])
        seconds, number = (median([turn[column] for turn in turns[way, DELAY]]) for column in (0, 2))
        hidden = 1 - exposed / (number * DELAY / 1e6)
        figures[way] = {"seconds": seconds, "exposed": exposed, "collectives": number, "hidden": hidden}
        rows.append([way, f"{number:.0f}", f"{seconds * 1e3:.0f} ms", f"{exposed * 1e3:.1f} ms", f"{hidden:.0%}"])
    columns = ("two ranks", "reductions, gathers", "a step", "waits that the delays add", "hidden")
    return Report(
        "overlap",
        "Collectives behind computation",
        [Table(columns, rows)],
        figures,
        [target("hidden share of reductions and gathers", figures[BEHIND]["hidden"], 0.8, at_least=True)],
        [
            "Two ranks of a Llama with 8 blocks of width 384 on the strict device, an accelerator in software: the CPU "
            f"computes, and each collective waits {DELAY / 1e3:g} ms on a thread of its own before it begins.",
            "Hidden: 1 less the waits that the delays add, as a part of the delays. The norm that clips, a sum of "
            "two numbers for which a step has to wait, is not counted; DDP's row neither clips nor gathers.",
        ],
    )
