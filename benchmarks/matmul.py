"""float32 matmuls on one CPU thread: MKL, which torch calls, against oneDNN, which shardwise calls where it is faster.

Legend: T tokens, K input features, N output features.
"""

from __future__ import annotations

from typing import Any

import ranks
from measure import interleaved, median
from report import Report, Table

SHAPES = {
    "QKV": (4096, 256, 768),
    "output projection": (4096, 256, 256),
    "gate and up": (4096, 256, 1376),
    "down": (4096, 688, 256),
    "head, one chunk": (512, 256, 4096),
    "head, vocabulary 50,304": (41, 1024, 50_304),
    "hidden 1,024, gate and up": (1024, 1024, 5504),
    "2,048 cubed": (2048, 2048, 2048),
}


def measure(rounds: int) -> dict[str, Any]:
    """In one process: FLOP/s by shape, product and library."""
    import torch

    from shardwise.distributed import devices
    from shardwise.distributed.torch_private import onednn_linear
    from shardwise.layers.matmul import weight_gradient

    chosen = devices.cpu_prefers_onednn()
    found: dict[str, Any] = {"prefers_onednn": chosen, "rates": {}}
    for label, (t, k, n) in SHAPES.items():
        x, w, dy = torch.randn(t, k), torch.randn(n, k), torch.randn(t, n)
        calls = {
            "forward MKL": lambda x=x, w=w: x @ w.t(),
            "dx MKL": lambda dy=dy, w=w: dy @ w,
            "dw MKL": lambda dy=dy, x=x: dy.t() @ x,
            "forward oneDNN": lambda x=x, w=w: onednn_linear(x, w),
            "dx oneDNN": lambda dy=dy, w=w: onednn_linear(dy, w.t()),
            "dw oneDNN": lambda dy=dy, x=x: weight_gradient(dy, x),
        }
        seconds = interleaved(calls, rounds, warmup=2)
        found["rates"][label] = {name: 2 * t * k * n / median(times) for name, times in seconds.items()}
    return found


def run(rounds: int) -> Report:
    found = ranks.run("matmul", "measure", 1, rounds=5 * rounds)[0]
    kinds = ("forward", "dx", "dw")
    rows = [
        [
            f"{label} (T {t:,}, K {k:,}, N {n:,})",
            *(f"{found['rates'][label][f'{kind} {library}'] / 1e9:.0f}" for kind in kinds for library in LIBRARIES),
        ]
        for label, (t, k, n) in SHAPES.items()
    ]
    columns = ("GFLOP/s on one thread", *(f"{kind} {library}" for kind in kinds for library in LIBRARIES))
    choice = "oneDNN" if found["prefers_onednn"] else "torch's own matmuls"
    return Report(
        "matmul",
        "float32 matmuls: MKL and oneDNN",
        [Table(columns, rows)],
        found,
        notes=[f"Medians of {5 * rounds} interleaved rounds. On this CPU shardwise uses {choice}."],
    )


LIBRARIES = ("MKL", "oneDNN")
