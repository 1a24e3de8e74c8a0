"""LM head and cross-entropy in chunks against whole float32 logits: memory, time, and the same numbers."""

from __future__ import annotations

from typing import Any

import ranks
from measure import PeakMemory
from report import Report, Table, target

VOCABULARY, SEQUENCE, BATCH = 50_304, 256, 16
HIDDEN = (256, 1024)


def measure(path: str, hidden: int, accumulate: bool, dtype: str = "float32") -> dict[str, float]:
    """On one process: peak bytes and seconds of loss and gradients.

    `accumulate`: the weight's gradient exists already and is added to, as in a training run; it is part of what stands
    before. Otherwise it is made anew and its size is taken off.
    """
    import time

    import torch

    x, weight, targets = _inputs(hidden, dtype)
    warm = torch.randn(8, hidden)
    (warm @ warm.t()).sum()
    if accumulate:
        weight.grad = torch.zeros_like(weight)
    x.grad = torch.zeros_like(x)
    memory = PeakMemory()
    start = time.perf_counter()
    _loss(path, x, weight, targets).backward()
    seconds = time.perf_counter() - start
    return {"peak": memory.above() - (0 if accumulate else weight.nbytes), "seconds": seconds}


def compare(hidden: int, path: str = "chunked", dtype: str = "float32") -> dict[str, float]:
    """On one process: relative differences of loss and gradients of a path from those of whole float32 logits."""
    results = []
    for number, way in enumerate((path, "naive")):
        x, weight, targets = (part.detach() for part in _inputs(hidden, dtype))
        x, weight = ((part.float() if number else part).requires_grad_() for part in (x, weight))
        loss = _loss(way, x, weight, targets)
        loss.backward()
        results.append((loss.detach().float(), x.grad.float(), weight.grad.float()))
    names = ("loss", "input gradient", "weight gradient")
    return {name: float((a - b).abs().max() / b.abs().max()) for name, a, b in zip(names, *results, strict=True)}


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


def _inputs(hidden: int, dtype: str = "float32") -> tuple[Any, Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SEQUENCE, BATCH, hidden, generator=generator).to(getattr(torch, dtype)).requires_grad_()
    weight = (0.02 * torch.randn(VOCABULARY, hidden, generator=generator)).to(x.dtype).requires_grad_()
    return x, weight, torch.randint(VOCABULARY, (SEQUENCE, BATCH), generator=generator)


def _loss(path: str, x: Any, weight: Any, targets: Any) -> Any:
    import torch
    import torch.nn.functional as F

    from shardwise.layers.loss import linear_cross_entropy
    from shardwise.layers.matmul import linear

    if path == "chunked":
        return linear_cross_entropy(x, weight, targets)
    if path == "torch":
        chunks = torch.nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), reduction="sum", options=chunks)
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
            rows.append(_row(f"hidden {hidden:,}: {label}", one[path]))
        for key, when in (("fresh", "weight gradient made anew"), ("accumulated", "added to a gradient that exists")):
            ratio = one["chunked"][key] / one["naive"][key]
            targets.append(
                target(f"peak memory over whole logits, hidden {hidden}, {when},", ratio, 0.25, at_least=False)
            )
        one["bfloat16"] = _both("chunked", hidden, "bfloat16")
        rows.append(_row(f"hidden {hidden:,}, bfloat16: chunked", one["bfloat16"]))
        for dtype in ("float32", "bfloat16") if _torch_has_it() else ():
            found = _both("torch", hidden, dtype)
            differences = ranks.run("head_loss", "compare", 1, hidden=hidden, path="torch", dtype=dtype)[0]
            one[f"torch_{dtype}"] = {**found, "differences": differences}
            rows.append(_row(f"hidden {hidden:,}, {dtype}: torch's linear_cross_entropy", found))
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


def _torch_has_it() -> bool:
    """True where torch has a loss of a linear layer in chunks, as 2.13 does."""
    import torch

    return hasattr(torch.nn.functional, "linear_cross_entropy")


def _row(label: str, one: dict[str, float]) -> list[str]:
    peaks = (f"{one[key] / 2**20:,.0f} MiB" for key in ("fresh", "accumulated"))
    return [label, *peaks, f"{one['seconds']:.2f} s"]


def _both(path: str, hidden: int, dtype: str = "float32") -> dict[str, float]:
    fresh = ranks.run("head_loss", "measure", 1, path=path, hidden=hidden, accumulate=False, dtype=dtype)[0]
    again = ranks.run("head_loss", "measure", 1, path=path, hidden=hidden, accumulate=True, dtype=dtype)[0]
    return {"fresh": fresh["peak"], "accumulated": again["peak"], "seconds": min(fresh["seconds"], again["seconds"])}


def _differences(hidden: int, one: dict[str, Any]) -> str:
    def texts(differences: dict[str, float]) -> str:
        return ", ".join(f"{name} {value:.1e}" for name, value in differences.items())

    theirs = "".join(
        f" torch's in {key.removeprefix('torch_')}: {texts(found['differences'])}."
        for key, found in one.items()
        if key.startswith("torch_")
    )
    largest, whole = one["gathered"]["largest"], one["gathered"]["whole"]
    return (
        f"Hidden {hidden:,}: largest difference from whole logits, over the largest element: "
        f"{texts(one['differences'])}.{theirs} At TP 2 + "
        f"SP the largest tensor that it gathers is {largest * 4 / 2**20:.2f} MiB; the hidden states are "
        f"{whole * 4 / 2**20:.0f} MiB."
    )
