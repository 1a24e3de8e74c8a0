"""LM head and cross-entropy in chunks against whole float32 logits: memory, time, and the same numbers."""

from __future__ import annotations

from typing import Any

import ranks
from measure import PeakMemory
from report import Report, Table, target

VOCABULARY, SEQUENCE, BATCH = 50_304, 256, 16
HIDDEN = (256, 1024)


def measure(path: str, hidden: int, accumulate: bool) -> dict[str, float]:
    """On one process: peak bytes and seconds of loss and gradients.

    `accumulate`: the weight's gradient exists already and is added to, as in a training run; it is part of what stands
    before. Otherwise it is made anew and its size is taken off.
    """
    import time

    import torch

    x, weight, targets = _inputs(hidden)
    warm = torch.randn(8, hidden)
    (warm @ warm.t()).sum()
    if accumulate:
        weight.grad = torch.zeros_like(weight)
    x.grad = torch.zeros_like(x)
    memory = PeakMemory()
    start = time.perf_counter()
    _loss(path, x, weight, targets).backward()
    seconds = time.perf_counter() - start
    return {"peak": memory.above() - (0 if accumulate else weight.numel() * 4), "seconds": seconds}


def compare(hidden: int) -> dict[str, float]:
    """On one process: relative differences of loss and gradients between the two paths."""
    results = {}
    for path in ("naive", "chunked"):
        x, weight, targets = _inputs(hidden)
        loss = _loss(path, x, weight, targets)
        loss.backward()
        results[path] = (loss.detach(), x.grad, weight.grad)
    names = ("loss", "input gradient", "weight gradient")
    return {
        name: float((a - b).abs().max() / b.abs().max())
        for name, a, b in zip(names, results["chunked"], results["naive"], strict=True)
    }


def gathered(hidden: int) -> dict[str, int]:
    """On one rank of two, with sequence parallelism: elements of the largest tensor that a collective returned."""
    from shardwise.distributed import collectives
    from shardwise.distributed.mesh import Mesh, join
    from shardwise.layers.loss import linear_cross_entropy

    join()
    mesh = Mesh(tensor=2)
    x, weight, targets = _inputs(hidden)
    mine = x.detach().chunk(2)[mesh.tp.rank].clone().requires_grad_()
    rows = weight.detach().chunk(2)[mesh.tp.rank].clone().requires_grad_()
    largest = 0
    gather = collectives.all_gather

    def watched(*arguments: Any, **options: Any) -> Any:
        nonlocal largest
        whole = gather(*arguments, **options)
        largest = max(largest, whole.numel())
        return whole

    collectives.all_gather = watched
    linear_cross_entropy(mine, rows, targets, group=mesh.tp, sequence_parallel_enabled=True).backward()
    return {"largest": largest, "whole": x.numel()}


def _inputs(hidden: int) -> tuple[Any, Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SEQUENCE, BATCH, hidden, generator=generator).requires_grad_()
    weight = (0.02 * torch.randn(VOCABULARY, hidden, generator=generator)).requires_grad_()
    return x, weight, torch.randint(VOCABULARY, (SEQUENCE, BATCH), generator=generator)


def _loss(path: str, x: Any, weight: Any, targets: Any) -> Any:
    import torch.nn.functional as F

    from shardwise.layers.loss import linear_cross_entropy
    from shardwise.layers.matmul import linear

    if path == "chunked":
        return linear_cross_entropy(x, weight, targets)
    matmul = linear if path == "naive" else F.linear
    return F.cross_entropy(matmul(x, weight).flatten(0, 1).float(), targets.flatten(), reduction="sum")


def run(rounds: int) -> Report:
    figures: dict[str, Any] = {}
    rows, targets = [], []
    paths = {"chunked": "chunked", "naive": "whole logits", "naive_mkl": "whole logits, torch's matmuls"}
    for hidden in HIDDEN:
        print(f"  hidden {hidden}", flush=True)
        one: dict[str, Any] = {path: _both(path, hidden) for path in paths}
        one["differences"] = ranks.run("head_loss", "compare", 1, hidden=hidden)[0]
        one["gathered"] = ranks.run("head_loss", "gathered", 2, hidden=hidden)[0]
        figures[str(hidden)] = one
        for path, label in paths.items():
            rows.append(
                [
                    f"hidden {hidden:,}: {label}",
                    *(f"{one[path][key] / 2**20:,.0f} MiB" for key in ("fresh", "accumulated")),
                    f"{one[path]['seconds']:.2f} s",
                ]
            )
        for key, when in (("fresh", "weight gradient made anew"), ("accumulated", "added to a gradient that exists")):
            ratio = one["chunked"][key] / one["naive"][key]
            targets.append(
                target(f"peak memory over whole logits, hidden {hidden}, {when},", ratio, 0.25, at_least=False)
            )
    columns = ("loss and gradients of 4,096 tokens, vocabulary 50,304", "gradient made anew", "gradient exists", "time")
    return Report(
        "head_loss",
        "LM head and loss in chunks",
        [Table(columns, rows)],
        figures,
        targets,
        [
            "Peak memory above inputs, weight and weight gradient, in fresh processes of one thread. Where the "
            "gradient exists already it is added to: both paths then need a second one for a moment. Time: the "
            "faster of the two runs.",
            *(_differences(hidden, figures[str(hidden)]) for hidden in HIDDEN),
        ],
    )


def _both(path: str, hidden: int) -> dict[str, float]:
    fresh = ranks.run("head_loss", "measure", 1, path=path, hidden=hidden, accumulate=False)[0]
    again = ranks.run("head_loss", "measure", 1, path=path, hidden=hidden, accumulate=True)[0]
    return {"fresh": fresh["peak"], "accumulated": again["peak"], "seconds": min(fresh["seconds"], again["seconds"])}


def _differences(hidden: int, one: dict[str, Any]) -> str:
    differences = ", ".join(f"{name} {value:.1e}" for name, value in one["differences"].items())
    largest, whole = one["gathered"]["largest"], one["gathered"]["whole"]
    return (
        f"Hidden {hidden:,}: largest difference from whole logits, over the largest element: {differences}. At TP 2 + "
        f"SP the largest tensor that it gathers is {largest * 4 / 2**20:.2f} MiB; the hidden states are "
        f"{whole * 4 / 2**20:.0f} MiB."
    )
