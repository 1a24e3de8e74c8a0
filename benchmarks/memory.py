"""Memory per rank: the optimizer's state against 8 or 12 bytes a parameter, and the peak against the estimate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ranks
from measure import PeakMemory
from report import Report, Table, target

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.distributed.mesh import Mesh
    from shardwise.train.trainer import Trainer

BYTES_PER_PARAMETER = {"float32": 8, "mixed": 12}
LAYOUTS = (
    ("DP 1", 1, {}),
    ("DP 2", 2, {}),
    ("DP 4", 4, {}),
    ("TP 2", 2, {"parallel.tensor": 2}),
    ("TP 2 + SP", 2, {"parallel.tensor": 2, "parallel.sequence": True}),
    ("TP 2 + SP × DP 2", 4, {"parallel.tensor": 2, "parallel.sequence": True}),
    ("DP 2, ZeRO-2", 2, {"optimizer.zero": 2}),
    ("DP 4, ZeRO-2", 4, {"optimizer.zero": 2}),
    ("DP 4, ZeRO-2, reduced once a step", 4, {"optimizer.zero": 2, "optimizer.reduce": "step"}),
    ("DP 2, ZeRO-3", 2, {"optimizer.zero": 3}),
    ("DP 4, ZeRO-3", 4, {"optimizer.zero": 3}),
    ("DP 4, ZeRO-3, reduced once a step", 4, {"optimizer.zero": 3, "optimizer.reduce": "step"}),
    ("DP 4, ZeRO-3, gathered once a step", 4, {"optimizer.zero": 3, "optimizer.gather": "step"}),
    ("DP 4, ZeRO-3, replicate 2", 4, {"optimizer.zero": 3, "parallel.replicate": 2}),
    ("TP 2 + SP × DP 2, ZeRO-3", 4, {"parallel.tensor": 2, "parallel.sequence": True, "optimizer.zero": 3}),
    ("CP 2", 2, {"parallel.context": 2}),
    ("CP 2 × DP 2", 4, {"parallel.context": 2}),
    ("CP 2 × TP 2 + SP", 4, {"parallel.context": 2, "parallel.tensor": 2, "parallel.sequence": True}),
    ("CP 2 × DP 2, ZeRO-3", 4, {"parallel.context": 2, "optimizer.zero": 3}),
    ("CP 2, recompute full", 2, {"parallel.context": 2, "train.recompute": "full"}),
    ("CP 2, ring", 2, {"parallel.context": 2, "parallel.context_keys": "ring"}),
    ("CP 4, ring", 4, {"parallel.context": 4, "parallel.context_keys": "ring"}),
    ("CP 2 × DP 2, ring, ZeRO-2", 4, {"parallel.context": 2, "parallel.context_keys": "ring", "optimizer.zero": 2}),
)
MIXED = ("DP 1", "DP 2", "DP 4", "DP 2, ZeRO-3")
TINY = ("model.hidden_size=64", "model.intermediate_size=64", "model.vocab_size=512", "model.num_hidden_layers=1")
RUNS = [
    (*layout, mode) for mode in ("float32", "mixed") for layout in LAYOUTS if mode == "float32" or layout[0] in MIXED
]


def measure(overrides: list[str], steps: int) -> dict[str, Any]:
    """On one rank: train a few steps of llama-small's model on random tokens.

    A tiny model takes a step first: pages of the libraries that a step touches belong to Python and torch, not to the
    model. The tensors are those of a further trainer, of which no step is the first.
    """
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from shardwise.config import check_layout, load_config
    from shardwise.distributed.mesh import Mesh, join
    from shardwise.estimates.memory import expected_memory
    from shardwise.models.parameter_counts import local_parameter_count
    from tests.live_tensors import LiveTensors

    join()
    config = load_config("llama-small", overrides)
    parallel = config.parallel
    mesh = Mesh(tensor=parallel.tensor, context=parallel.context)
    layout = check_layout(config, mesh.world.size)
    _train(load_config("llama-small", [*overrides, *TINY]), mesh, 1)
    memory = PeakMemory()
    trainer = _train(config, mesh, steps)
    peak = memory.above()
    state = trainer.optimizer.state_bytes()
    del trainer
    with LiveTensors() as live:
        trainer = _train(config, mesh, 1)
        # ZeRO-2 and 3 resize the storages of buckets.
        live.watch(flat for bucket in trainer.optimizer.buckets for flat in (bucket.values, bucket.gradients))
        live.settled()
        live.peak = 0
        trainer.step()
    return {
        "peak": peak,
        "tensors": live.peak,
        "expected": expected_memory(config, layout).total,
        "parameters": local_parameter_count(config.model, layout.tensor),
        **state,
    }


def _train(config: Config, mesh: Mesh, steps: int) -> Trainer:
    import numpy as np

    from shardwise.data.formats.prepared_data import PreparedText
    from shardwise.train.build import build_trainer

    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, 2**16).astype(np.uint16)
    rows = {"train": tokens, "eval": tokens, "test": tokens[:0]}
    data = PreparedText(None, "random", "random", rows, config.model.vocab_size)
    trainer = build_trainer(config, mesh, data)
    for _ in range(steps):
        trainer.step()
    return trainer


def run(rounds: int) -> Report:
    rows = []
    figures = []
    worst_state = 0.0
    worst_peak = 0.0
    for label, world, keys, mode in RUNS:
        print(f"  {mode}, {label}", flush=True)
        shards = world // int(keys.get("parallel.tensor", 1))
        data = shards // int(keys.get("parallel.context", 1))
        shards //= int(keys.get("parallel.replicate", 1))
        settings = {"parallel.tensor": 1, "parallel.sequence": False, "precision.mode": mode, **keys}
        # bfloat16 matmuls are slow on many CPUs: one sequence shows the same state.
        micro_batch = 4 if mode == "float32" else 1
        settings |= {"train.micro_batch": micro_batch, "train.global_batch": 2 * micro_batch * data}
        overrides = [f"{key}={str(value).lower()}" for key, value in settings.items()]
        steps = 3 if mode == "float32" else 2
        result = ranks.run("memory", "measure", world, variables=ranks.OWN_PAGES, overrides=overrides, steps=steps)
        most = max(result, key=lambda r: r["peak"])
        state = max(r["state"] + r["masters"] for r in result)
        padding = max(r["padding"] for r in result)
        wanted = BYTES_PER_PARAMETER[mode] * most["parameters"] / shards
        state_error = (state - padding) / wanted - 1
        peak_error = most["expected"] / most["tensors"] - 1
        worst_state = max(worst_state, abs(state_error))
        if "ZeRO-" in label or "CP" in label:
            worst_peak = max(worst_peak, abs(peak_error))
        figures.append({"layout": label, "mode": mode, "state": state, "wanted": wanted, "padding": padding, **most})
        rows.append(
            [
                f"{mode}, {label}",
                f"{state:,}",
                f"{wanted:,.0f}",
                f"{padding:,}",
                f"{state_error:+.2%}",
                f"{most['tensors'] / 2**20:,.1f} MiB",
                f"{most['expected'] / 2**20:,.1f} MiB",
                f"{peak_error:+.1%}",
                f"{most['peak'] / 2**20:,.0f} MiB",
            ]
        )
    columns = ("", "state, bytes", "8 or 12 × P / n", "padding", "off", "tensors", "expected", "off", "process")
    return Report(
        "memory",
        "Memory per rank, measured and expected",
        [Table(columns, rows)],
        {"rows": figures},
        [
            target(
                "optimizer state without padding off 8 or 12 bytes a parameter by", worst_state, 0.01, at_least=False
            ),
            target(
                "ZeRO-2, ZeRO-3 and context parallelism: tensors at the peak off by", worst_peak, 0.02, at_least=False
            ),
        ],
        [
            "llama-small's model, 256 tokens a sequence, two micro-batches a step, of 4 sequences in float32 and 1 in "
            "mixed; the rank with most. P: parameters on the rank, n: ranks over which ZeRO cuts. State: AdamW's two "
            "moments, and in mixed the float32 masters.",
            "Tensors: the most bytes of live tensors in a step that is not the first. Expected: "
            "`shardwise.estimates.memory.expected_memory`. Process: the peak of resident memory above Python, torch, "
            "the joined processes and a step of a tiny model. A process holds more where its C library keeps a "
            "fragmented heap of what was freed.",
        ],
    )
