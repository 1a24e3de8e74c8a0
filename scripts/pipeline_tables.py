"""The tables of docs/pipeline.md, as the estimates compute them; `scripts.write_docs` writes them into the page."""

import re
from collections.abc import Callable
from pathlib import Path

from shardwise.base import units
from shardwise.config import Config, ParallelConfig, check_layout, load_config
from shardwise.estimates.communication import step_transfers, wire_bytes
from shardwise.estimates.memory import MemoryEstimate, memory_by_rank
from shardwise.models.parameter_counts import local_parameter_count
from shardwise.pipeline.partition import compute_shares, stage_plan
from shardwise.pipeline.timeline import simulate

PAGE = Path(__file__).resolve().parents[1] / "docs" / "pipeline.md"
WORLD = 128
SHAPES = ((4, 8), (4, 32), (8, 64))


def recipe(*overrides: str) -> Config:
    return load_config("gpt3-23b", list(overrides))


def needed(*overrides: str) -> list[MemoryEstimate]:
    """Memory of each pipeline rank of gpt3-23b on accelerators."""
    chosen = recipe(*overrides)
    found = memory_by_rank(chosen, check_layout(chosen, WORLD), accelerator=True)
    assert found is not None
    return found


def lines(head: str, rows: list[list[str]]) -> str:
    columns = head.split(" | ")
    rule = "|".join(["---", *["---:"] * (len(columns) - 1)])
    body = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"| {head} |\n|{rule}|\n{body}"


def stages() -> str:
    """What each stage of gpt3-23b has."""
    chosen = recipe()
    layout = check_layout(chosen, WORLD)
    shares, memory = compute_shares(chosen, layout), needed()
    rows = []
    for stage in stage_plan(chosen, layout):
        multiple = chosen.parallel.vocab_multiple
        count = local_parameter_count(chosen.model, layout.tensor, vocab_multiple=multiple, stages=[stage])
        assert count is not None
        ends = ", embedding" * stage.is_first + ", head" * stage.is_last
        rows.append(
            [
                str(stage.index),
                f"{stage.layers[0]}-{stage.layers[-1]}{ends}",
                units.count(count),
                f"{shares[stage.index]:.1%}",
                units.size(memory[stage.rank].activations),
            ]
        )
    return lines("stage | blocks | parameters on each of its ranks | compute | activations", rows)


def schedules() -> str:
    """Bubbles at a few shapes, and activations of the rank that has most."""
    rows = []
    for schedule in ("gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev"):
        row = [f"`{schedule}`"]
        for degree, micro_batches in SHAPES:
            parallel = ParallelConfig.model_validate({"pipeline": degree, "schedule": schedule})
            row.append(f"{simulate(parallel, micro_batches).bubble:.1%}")
        virtual = schedule not in ("gpipe", "1f1b")
        overrides = [f"parallel.schedule={schedule}", *(["parallel.stages=[4,3,4,3,4,3,4,3]"] if virtual else [])]
        row.append(units.size(max(one.activations for one in needed(*overrides))))
        rows.append(row)
    shapes = " | ".join(f"p {degree}, m {micro_batches}" for degree, micro_batches in SHAPES)
    return lines(f"`parallel.schedule` | {shapes} | activations of gpt3-23b", rows)


def memory() -> str:
    """With state on every rank, and shared out over DP 4, which changes nothing else."""
    every = [needed(f"optimizer.zero={zero}") for zero in (0, 1)]
    rows = []
    for kind in (*(kind for kind, _ in every[0][0].rows()), "total"):
        for zero in (0, 1) if kind in ("optimizer", "total") else (None,):
            what = kind if zero is None else f"{kind}, `optimizer.zero={zero}`"
            rows.append([what, *(units.size(getattr(estimate, kind)) for estimate in every[zero or 0])])
    return lines("kind | stage 0 | stage 1 | stage 2 | stage 3", rows)


def wire() -> str:
    """Bytes that a rank of each stage sends in a step, by axis."""
    chosen = recipe()
    layout, rows = check_layout(chosen, WORLD), []
    for rank in range(layout.pipeline):
        sent = wire_bytes(step_transfers(chosen, layout, accelerator=True, pipeline_rank=rank))
        assert sent is not None
        by_axis = {
            axis: sum(size for (name, _), size in sent.items() if name == axis)
            for axis in ("tp", "dp", "pp", "pp/ends")
        }
        rows.append([str(rank), *(units.size(size) for size in by_axis.values())])
    return lines("stage | over TP | over DP | to other stages | tied embedding", rows)


TABLES: dict[str, Callable[[], str]] = {"stages": stages, "schedules": schedules, "memory": memory, "wire": wire}


def page() -> str:
    """docs/pipeline.md with the tables of today: each stands behind a comment that names it."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(?=\n(?!\|))"
        assert re.search(pattern, text, re.DOTALL), f"the page has no table {name}"
        text = re.sub(pattern, r"\g<1>" + table(), text, count=1, flags=re.DOTALL)
    return text
