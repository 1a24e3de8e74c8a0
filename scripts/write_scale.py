"""Write the tables of docs/scale.md: two large models from 256 to 16,384 devices, as the planner predicts them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.base import units
from shardwise.config import load_config
from shardwise.config.sections import CheckpointConfig
from shardwise_plan.device_specs import Reliability, parse_cluster
from shardwise_plan.goodput import Calendar, calendar
from shardwise_plan.plan import Plan
from shardwise_plan.search import search_layouts

ROOT = Path(__file__).parents[1]
PAGE, START_UP = ROOT / "docs" / "scale.md", ROOT / "benchmarks" / "results" / "startup.md"
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
KEPT = ["parallel.schedule=interleaved", "parallel.sequence=true", "optimizer.zero=1"]
NODES = (32, 64, 128, 256, 512, 1024, 2048)
YEARS = (1.0, 5.0)  # between failures of one device
USUAL = ", micro-batch 1, recompute selective"  # not shown in the rows
RESTART = 300.0  # seconds, as the page says
WRITTEN = 2e9  # bytes a second and node


def on_calendar(plan: Plan, years: float) -> Calendar:
    """The time of a training whose devices each fail once in so many years, with checkpoints as often as is best."""
    reliability = Reliability(failures_per_year=1 / years, restart=RESTART, storage=WRITTEN)
    machines = replace(plan.cluster, device=replace(plan.cluster.device, reliability=reliability))
    config = plan.config.model_copy(update={"checkpoint": CheckpointConfig()})
    return calendar(config, machines, plan.time.total)


def fastest(recipe: str, overrides: Sequence[str], nodes: int) -> Plan | None:
    """With selective recompute; with full recompute where nothing fits."""
    for recompute in ("selective", "full"):
        given = [*overrides, *KEPT, f"train.recompute={recompute}"]
        config, fixed = load_config(recipe, given), {one.partition("=")[0] for one in given}
        plans = search_layouts(config, parse_cluster("h100:8", nodes), best=1, fixed=fixed).plans
        if plans:
            return plans[0]
    return None


def cells(line: str) -> list[str]:
    """Of a line of a table in Markdown."""
    return [cell.strip() for cell in line.strip("| ").split("|")]


def own_costs() -> list[str]:
    """Our own start, save and resume as START_UP has them, and at four times as many ranks as were measured."""
    part = START_UP.read_text(encoding="utf-8").split("**gpt3-175b")[1].split("**One group")[0]
    titles, _, *lines = [cells(line) for line in part.splitlines() if line.startswith("|")]
    ranks = [int(found[1].replace(",", "")) for title in titles if (found := re.match(r"s at ([\d,]+)", title))]
    seconds = {of: [0.0] * len(ranks) for of in ("torch", "start", "save", "resume")}
    manifest = [0.0] * len(ranks)
    for name, of, *numbers in lines:
        seconds[of] = [sum(pair) for pair in zip(seconds[of], map(float, numbers[: len(ranks)]), strict=True)]
        if name == "text":
            manifest = [float(one) for one in numbers[len(ranks) :]]
    rows = [[*(seconds[of][i] for of in seconds), manifest[i]] for i in range(len(ranks))]
    names = [f"{n:,}" for n in ranks] + [f"{4 * ranks[-1]:,}, extrapolated"]
    rows.append([4 * value for value in rows[-1]])
    head = ("ranks", "torch's groups and store", "our start", "save", "resume", "manifest")
    return [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(
            f"| {name} | {' | '.join(f'{one:.2f} s' for one in times)} | {size:,.0f} MB |"
            for name, (*times, size) in zip(names, rows, strict=True)
        ),
    ]


def row(plan: Plan) -> str:
    """A line of the table; all have sequence parallelism and interleaved stages."""
    time = plan.time
    messages = plan.memory.pipeline
    values = (
        f"{plan.cluster.world:,}",
        re.sub(r" \+ SP|interleaved with | a rank|, ZeRO.*", "", plan.text()).removesuffix(USUAL),
        units.duration(time.total),
        f"{plan.mfu or 0:.1%}",
        f"{units.size(plan.memory.total)} ({units.size(messages)})",
        f"{time.bubble / time.total:.1%}",
        f"{time.communication / time.total:.1%}",
        units.duration(on_calendar(plan, YEARS[0]).write),
        ", ".join(f"{on_calendar(plan, years).goodput:.1%}" for years in YEARS),
    )
    return "| " + " | ".join(values) + " |"


def with_table(page: str, heading: str, lines: Sequence[str]) -> str:
    """The page with these lines as the table of a section."""
    before, title, section = page.partition(f"\n## {heading}\n")
    rows = "".join(f"{line}\n" for line in lines)
    return before + title + re.sub(r"(?:^\|.*\n)+", lambda _: rows, section, count=1, flags=re.MULTILINE)


def main() -> None:
    """Write the tables of the page."""
    years = f"goodput, {' and '.join(f'{one:g}' for one in YEARS)} years"
    head = ("devices", "layout", "step", "MFU", "memory (messages)", "bubble", "communication", "checkpoint", years)
    page = PAGE.read_text(encoding="utf-8")
    for name, (recipe, overrides) in MODELS.items():
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for nodes in NODES:
            plan = fastest(recipe, overrides, nodes)
            lines.append(row(plan) if plan else f"| {nodes * 8:,} | nothing fits |" + " |" * (len(head) - 2))
            sys.stderr.write(f"{lines[-1]}\n")
        page = with_table(page, name, lines)
    PAGE.write_text(with_table(page, "Our own code", own_costs()), encoding="utf-8")


if __name__ == "__main__":
    main()
