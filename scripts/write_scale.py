"""Write docs/scale.md: two large models from 256 to 16,384 devices, as the planner predicts them."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from shardwise import cost, units
from shardwise.config import load_config
from shardwise.devices import cluster
from shardwise.planner import Plan, search

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
MODELS = {
    "GPT-3 175B": ("gpt3-175b", ["train.global_batch=2048"]),
    "Llama 2 70B": (
        "llama2-7b",
        [
            "model.hidden_size=8192",
            "model.intermediate_size=28672",
            "model.num_hidden_layers=80",
            "model.num_attention_heads=64",
            "model.num_key_value_heads=8",
            "train.global_batch=2048",
        ],
    ),
}
KEPT = ["parallel.schedule=interleaved", "parallel.sequence=true", "train.recompute=selective", "optimizer.zero=1"]
NODES = (32, 64, 128, 256, 512, 1024, 2048)
YEARS = (1.0, 5.0)  # between failures of one device
RESTART = 300.0  # seconds, as the page says
WRITTEN = 2e9  # bytes a second and node
_YEAR = 365 * 86_400


def checkpoint_seconds(plan: Plan) -> float:
    """Of one checkpoint to storage that takes 2 GB a second from each node."""
    return (cost.checkpoint_bytes(plan.config, accelerator=True) or 0) / (WRITTEN * plan.cluster.nodes)


def goodput(plan: Plan, years: float) -> float:
    """The part of the time that trains, where checkpoints are as often as is best (Young, 1974) and do not overlap."""
    between = years * _YEAR / plan.cluster.world
    written = checkpoint_seconds(plan)
    every = math.sqrt(2 * written * between)
    return max(0.0, 1 - written / every - (every / 2 + RESTART) / between)


def row(plan: Plan) -> str:
    """A line of the table."""
    time = plan.time
    messages = plan.memory.pipeline
    cells = (
        f"{plan.cluster.world:,}",
        plan.choice.text().partition(", micro-batch")[0] + f", micro-batch {plan.choice.micro_batch}",
        units.duration(time.total),
        f"{plan.mfu or 0:.1%}",
        f"{units.size(plan.memory.total)} ({units.size(messages)})",
        f"{time.bubble / time.total:.1%}",
        f"{time.communication / time.total:.1%}",
        units.duration(checkpoint_seconds(plan)),
        *(f"{goodput(plan, years):.1%}" for years in YEARS),
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Write the page."""
    years = [f"goodput, {one:g} years" for one in YEARS]
    head = ("devices", "layout", "step", "MFU", "memory (messages)", "bubble", "communication", "checkpoint", *years)
    lines = [
        "# Scale on paper",
        "",
        "Written by `scripts/write_scale.py`: what [the planner](planner.md) predicts on nodes of 8 H100, for the",
        "fastest layout with interleaved stages, sequence parallelism, selective recompute and ZeRO-1. The global",
        "batch is 2,048 sequences at every size. No run of this size has been made.",
        "",
        "Checkpoints are written at 2 GB/s from each node while training waits, as often as is best for the",
        "failure rate; a restart takes 300 seconds and what was not saved. Goodput is what remains of the time,",
        "where a device fails once in so many years. Memory is that of the neediest rank; in brackets the messages",
        "between stages in it.",
        "",
        "What gives way first, by these figures: up to 1,024 devices memory, of which a fifth to a third are",
        "messages that a rank keeps for all micro-batches of a step; from 4,096 on the batch, as ever fewer micro-",
        "batches fill the pipeline and hide the reduction; at 16,384 failures as well. Not told here, as nothing",
        "predicts it: how long ranks take to start and to agree, and the size of a checkpoint's manifest.",
    ]
    for name, (recipe, overrides) in MODELS.items():
        given = [*overrides, *KEPT]
        config, fixed = load_config(recipe, given), {one.partition("=")[0] for one in given}
        lines += ["", f"## {name}", "", "| " + " | ".join(head) + " |", "| " + " | ".join(["---"] * len(head)) + " |"]
        for nodes in NODES:
            plans = search(config, cluster("h100:8", nodes), best=1, fixed=fixed).plans
            lines.append(row(plans[0]) if plans else f"| {nodes * 8:,} | nothing fits |" + " |" * (len(head) - 2))
            sys.stderr.write(f"{lines[-1]}\n")
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
