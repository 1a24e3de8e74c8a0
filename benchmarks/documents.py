"""Documents kept apart within a sample: time and memory of a training step, by document and by a dense mask."""

from __future__ import annotations

from typing import Any

import ranks
from measure import PeakMemory, median
from report import Report, Table

SEQUENCE, BATCH, DOCUMENTS = 2048, 1, 16
MODEL = {
    "family": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": SEQUENCE,
}
CASES: dict[str, tuple[str, bool]] = {
    # what keeps documents apart, whether the blocks are compiled
    "not kept apart, eager": ("nothing", False),
    "dense mask, eager": ("mask", False),
    "by document, eager": ("documents", False),
    "not kept apart, compiled": ("nothing", True),
    "dense mask, compiled": ("mask", True),
    "by document, compiled": ("documents", True),
}


def steps(apart: str, compiled: bool) -> Any:
    """On one process: build, warm up; the peak's bytes of a step, then at each turn a step's seconds and its loss."""
    import time

    import torch

    from shardwise.config import CompileConfig, LlamaConfig
    from shardwise.layers.execution import Execution, made_with
    from shardwise.models.llama import Llama
    from shardwise.train.compile.compiled_units import Compilation

    class WithMask(Llama):
        def _forms_of(self, masks: Any, x: Any, *_: Any) -> Any:
            return {None: masks[None].dense(SEQUENCE, x.dtype, x.device)}

    torch.set_num_threads(1)
    config = LlamaConfig(**MODEL)  # type: ignore[arg-type]
    compiler = Compilation(CompileConfig(enabled=True), torch.device("cpu"), config) if compiled else None
    with made_with(Execution(compiler=compiler)):
        model = (WithMask if apart == "mask" else Llama)(config, seed=1)
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(MODEL["vocab_size"], (SEQUENCE, BATCH), generator=numbers)
    cuts = torch.randperm(SEQUENCE - 1, generator=numbers)[: DOCUMENTS - 1] + 1
    starts = torch.zeros(SEQUENCE, dtype=torch.int64)
    starts[cuts] = cuts
    inputs = {} if apart == "nothing" else {"starts_SB": starts.cummax(0).values.unsqueeze(1).expand(-1, BATCH)}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> float:
        loss = model(ids, ids, **inputs)
        loss.backward()
        return float(loss.detach())

    step()
    memory = PeakMemory()
    step()
    yield memory.above()
    while True:
        start = time.perf_counter()
        loss = step()
        yield time.perf_counter() - start, loss


def run(rounds: int) -> Report:
    arguments = {name: {"apart": apart, "compiled": compiled} for name, (apart, compiled) in CASES.items()}
    peaks = {
        name: ranks.run("documents", "first", 1, variables=ranks.OWN_PAGES, **values)[0]
        for name, values in arguments.items()
    }
    times: dict[str, list[float]] = {name: [] for name in CASES}
    losses: dict[str, float] = {}
    jobs = {name: ranks.Job("documents", "steps", 1, **values) for name, values in arguments.items()}
    try:
        for job in jobs.values():
            job.receive()
        for _ in range(1 + 3 * rounds):
            for name, job in jobs.items():
                seconds, losses[name] = job.go_on()[0]
                times[name].append(seconds)
    finally:
        for job in jobs.values():
            job.__exit__()
    reference = "dense mask, eager"
    figures: dict[str, Any] = {}
    rows = []
    for name, (apart, _) in CASES.items():
        ratio = median([a / b for a, b in zip(times[name][1:], times[reference][1:], strict=True)])
        difference = abs(losses[name] / losses[reference] - 1) if apart != "nothing" else None
        figures[name] = {
            "seconds": median(times[name][1:]),
            "over_dense": ratio,
            "peak_bytes": peaks[name],
            "loss_difference": difference,
        }
        rows.append(
            [
                name,
                f"{figures[name]['seconds'] * 1e3:,.0f} ms",
                f"{ratio:.2f}×",
                f"{peaks[name] / 2**20:,.0f} MiB",
                f"{peaks[name] / peaks[reference]:.2f}×",
                "" if difference is None else f"{difference:.0e}",
            ]
        )
    columns = ("documents", "forward and backward", "over dense", "peak memory", "over dense", "loss differs by")
    return Report(
        "documents",
        "Documents within a sample",
        [Table(columns, rows)],
        figures,
        [],
        [
            f"Llama of {MODEL['num_hidden_layers']} layers × {MODEL['hidden_size']}, {MODEL['num_attention_heads']} "
            f"heads, {BATCH} sequence of {SEQUENCE:,} tokens with {DOCUMENTS} documents, float32, one process of one "
            "thread. Not kept apart: causal attention over the whole sequence. By document: as shardwise trains on a "
            "CPU.",
            "Times: medians over steps taken in turn, ratios within a turn. Memory: peak of live tensors above weights "
            "and gradients, in a run of its own.",
        ],
    )


def first(apart: str, compiled: bool) -> int:
    """On one process: peak bytes of the second forward and backward."""
    return int(next(steps(apart, compiled)))
