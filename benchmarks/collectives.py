"""Collectives on gloo: what each costs by size and ranks, and why sums are scattered by an all-to-all there."""

from __future__ import annotations

from typing import Any

import ranks
from measure import interleaved, slowest
from report import Report, Table

MIB = (0.0625, 1.0, 4.0, 16.0, 64.0)
WORLDS = (2, 4)
NAMES = {
    "all_reduce": "all-reduce",
    "native": "reduce-scatter, gloo's own",
    "ours": "reduce-scatter, all-to-all + sum",
    "all_gather": "all-gather",
}


def measure(mib: float, rounds: int) -> dict[str, list[float]]:
    """On one rank: seconds of each collective on a whole tensor of this size."""
    import torch
    from torch import Tensor

    from shardwise.distributed import collectives
    from shardwise.distributed.mesh import Group, join

    join()
    group = Group.world()
    whole = torch.randn(int(mib * 2**20) // 4)
    part = torch.empty(whole.numel() // group.size)

    def reduce_scatter(by_all_to_all: bool) -> Tensor:
        group.scatter_by_all_to_all = by_all_to_all
        return collectives.reduce_scatter_async(whole, group, out=part, overlap=False).wait()

    calls = {
        "all_reduce": lambda: collectives.all_reduce_(whole, group),
        "native": lambda: reduce_scatter(False),
        "ours": lambda: reduce_scatter(True),
        "all_gather": lambda: collectives.all_gather(part, group, out=whole),
    }

    def before() -> None:
        whole.fill_(1.0)
        collectives.barrier(group)

    return interleaved(calls, rounds, warmup=2, before=before)


def run(rounds: int) -> Report:
    tables = []
    figures: dict[str, Any] = {}
    for world in WORLDS:
        print(f"  {world} ranks", flush=True)
        times = {mib: slowest(ranks.run("collectives", "measure", world, mib=mib, rounds=4 * rounds)) for mib in MIB}
        figures[str(world)] = times
        rows = [[label, *(f"{times[mib][name] * 1000:.2f}" for mib in MIB)] for name, label in NAMES.items()]
        sizes = [f"{mib * 1024:g} KiB" if mib < 1 else f"{mib:g} MiB" for mib in MIB]
        tables.append(Table(("ms", *sizes), rows, title=f"{world} ranks"))
    return Report(
        "collectives",
        "Collectives on gloo",
        tables,
        figures,
        notes=[
            f"Size: of the whole tensor, float32. Medians of {4 * rounds} interleaved rounds, each after a barrier, of "
            "the slowest rank; all ranks on this one machine. The third row is the reduce-scatter that "
            "distributed/collectives.py uses on gloo."
        ],
    )
