"""What dropout costs, in both modes, and what recompute gives back: time and memory of forward and backward."""

from __future__ import annotations

from typing import Any

import ranks
from measure import PeakMemory, median
from report import Report, Table

SEQUENCE, BATCH = 256, 8
MODEL = {
    "family": "gpt",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": SEQUENCE,
}
CASES: dict[str, tuple[float, float, str, str]] = {
    # hidden dropout, attention dropout, mode, recompute
    "none": (0.0, 0.0, "fast", "none"),
    "hidden fast": (0.1, 0.0, "fast", "none"),
    "hidden invariant": (0.1, 0.0, "invariant", "none"),
    "all fast": (0.1, 0.1, "fast", "none"),
    "all invariant": (0.1, 0.1, "invariant", "none"),
    "all invariant, selective recompute": (0.1, 0.1, "invariant", "selective"),
    "all invariant, full recompute": (0.1, 0.1, "invariant", "full"),
}


def steps(hidden: float, attention: float, mode: str, recompute: str) -> Any:
    """On one process: build, then at each turn the seconds of one forward and backward; at last the peak's bytes."""
    import time

    import torch

    from shardwise.config import GPTConfig
    from shardwise.layers.dropout import DropoutKey
    from shardwise.models.gpt import GPT

    torch.set_num_threads(1)
    config = GPTConfig(**MODEL, resid_pdrop=hidden, embd_pdrop=hidden, attn_pdrop=attention)  # type: ignore[arg-type]
    model = GPT(config, seed=1, recompute=recompute)  # type: ignore[arg-type]
    ids = torch.randint(config.vocab_size, (SEQUENCE, BATCH), generator=torch.Generator().manual_seed(0))
    key = DropoutKey(1, 1, torch.arange(BATCH), 0, mode)  # type: ignore[arg-type]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    memory = PeakMemory()
    model(ids, ids, key).backward()
    peak = memory.above()
    yield peak
    while True:
        start = time.perf_counter()
        model(ids, ids, key).backward()
        yield time.perf_counter() - start


def run(rounds: int) -> Report:
    arguments = {
        name: dict(zip(("hidden", "attention", "mode", "recompute"), case, strict=True)) for name, case in CASES.items()
    }
    peaks = {
        name: ranks.run("dropout", "first", 1, variables=ranks.OWN_PAGES, **values)[0]
        for name, values in arguments.items()
    }
    jobs = {name: ranks.Job("dropout", "steps", 1, **values) for name, values in arguments.items()}
    times: dict[str, list[float]] = {name: [] for name in jobs}
    try:
        for job in jobs.values():
            job.receive()
        for _ in range(2 + 4 * rounds):
            for name, job in jobs.items():
                times[name].append(job.go_on()[0])
    finally:
        for job in jobs.values():
            job.__exit__()
    figures: dict[str, Any] = {}
    rows = []
    for name in CASES:
        ratio = median([a / b for a, b in zip(times[name][2:], times["none"][2:], strict=True)])
        figures[name] = {"seconds": median(times[name][2:]), "over_none": ratio, "peak_bytes": peaks[name]}
        rows.append(
            [
                name,
                f"{figures[name]['seconds'] * 1e3:,.0f} ms",
                f"{ratio:.2f}×",
                f"{peaks[name] / 2**20:,.0f} MiB",
                f"{peaks[name] / peaks['none']:.2f}×",
            ]
        )
    columns = ("dropout 0.1", "forward and backward", "over none", "peak memory", "over none")
    return Report(
        "dropout",
        "Dropout and recompute",
        [Table(columns, rows)],
        figures,
        [],
        [
            f"GPT of {MODEL['num_hidden_layers']} layers × {MODEL['hidden_size']}, {MODEL['num_attention_heads']} "
            f"heads, {BATCH} sequences of {SEQUENCE}, float32, one process of one thread. Hidden: after the embedding, "
            "attention and MLP. All: attention probabilities too, for which a CPU has no fused kernel: they are held, "
            "in either mode.",
            "Times: medians over steps taken in turn, ratios within a turn. Memory: peak of live tensors above weights "
            "and gradients, in a run of its own.",
        ],
    )


def first(hidden: float, attention: float, mode: str, recompute: str) -> int:
    """On one process: peak bytes of the first forward and backward."""
    return int(next(steps(hidden, attention, mode, recompute)))
