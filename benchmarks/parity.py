"""`shardwise verify` on eight CPU ranks: every layout of four families in float32, and of the others every division."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from report import RESULTS, Report, Table

RANKS, STEPS = 8, 4
PIPELINES = (1, 2, 4, 8)
FAMILIES = {"llama": "llama2-7b", "gpt": "gpt3-23b", "gpt_neox": "gpt-neox-20b", "bert": "bert-large"}
"""The recipe of each family whose every layout is verified."""
OTHERS = {name: f"model.family={name} model.num_key_value_heads=8" for name in ("mistral", "qwen2", "olmo2", "smollm3")}
OTHERS["qwen3"] = "model.family=qwen3 model.num_key_value_heads=8 model.head_dim=128"
"""Llama's recipe becomes another family's, which differs from it by facts."""
CONTEXT = ("parallel.context=2,4,8", "parallel.sequence=false,true", "optimizer.zero=1")
"""The layouts of ranks that share samples, with the recipe's schedule and recompute."""
SHARING = {
    "llama, CP": ("llama2-7b", "gather"),
    "llama, CP by a ring": ("llama2-7b", "ring"),
    "gpt, CP": ("gpt3-23b", "gather"),
    "gpt_neox, CP": ("gpt-neox-20b", "gather"),
    "gpt_neox, CP by a ring": ("gpt-neox-20b", "ring"),
}
"""The recipe, and how ranks that share samples get keys and values; gpt's dropout of attention excludes a ring."""
KINDS = {"weights": "weights", "losses": "loss", "gradients": "gradient", "resumed": "resumed"}


def verify(recipe: str, overrides: str, layouts: list[str], steps: int, *, bits: bool = False) -> dict[str, Any]:
    """What the command found."""
    layouts = [*layouts, "--bits"] if bits else layouts
    arguments = [recipe, "precision.mode=float32", *overrides.split(), "--nproc", str(RANKS), "--steps", str(steps)]
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "verify", *arguments, "--devices", "cpu", *layouts, "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if not done.stdout:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run(rounds: int, steps: int | None = None) -> Report:
    """A verification for each pipeline degree: few ranks in a pipeline need few blocks."""
    found = {}
    for family, recipe in FAMILIES.items():
        for pipeline in PIPELINES:
            layouts = ["--layouts", "all", "optimizer.zero=0,1", f"parallel.pipeline={pipeline}"]
            found[family, pipeline] = verify(recipe, "", layouts, steps or STEPS)
            print(f"{family}, pipeline degree {pipeline}: {len(found[family, pipeline]['layouts'])}", flush=True)
    for family, overrides in OTHERS.items():
        found[family, 0] = verify("llama2-7b", overrides, [], steps or STEPS)
    found |= _sharing_samples(steps or STEPS)
    return report(found)


def _sharing_samples(steps: int) -> dict[tuple[str, int], dict[str, Any]]:
    found = {}
    for name, (recipe, keys) in SHARING.items():
        found[name, 0] = verify(recipe, f"parallel.context_keys={keys}", ["--layouts", *CONTEXT], steps)
        print(f"{name}: {len(found[name, 0]['layouts'])}", flush=True)
    return found


def report(found: Mapping[tuple[str, int], dict[str, Any]]) -> Report:
    """The tables, from what was found by family and pipeline degree (0: all of them)."""
    figures = _with_bits({family: _summary(family, found) for family in dict.fromkeys(family for family, _ in found)})
    families = [family for family in figures if family in FAMILIES]
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for (family, _), one in found.items():
        for layout in one["layouts"][:-1] if family in families else ():
            rows.setdefault(_row(layout), {})[family] = _numbers(layout)
    tables = [
        _family_table(figures),
        Table(
            ("TP", "PP", "DP", "schedule", "recompute", *families),
            [[*row, *(numbers.get(family, "") for family in families)] for row, numbers in rows.items()],
            "Each layout: loss, gradient, resumed",
        ),
        _sharing_table(found),
    ]
    missing = sum(len(families) - len(numbers) for numbers in rows.values())
    return Report(
        "parity",
        "Every layout of eight ranks against one process",
        tables,
        figures,
        targets=_contract(figures),
        notes=[
            "`shardwise verify` measured it in float32 on eight CPU ranks (gloo); "
            "[docs/verify.md](../../docs/verify.md) says what the columns compare. SP is sequence parallelism, Z1 is "
            "ZeRO-1. `make bench ARGS=parity` measures it again. [bits.md](bits.md) says when the layouts with "
            "`train.bitwise` were measured.",
            "Llama is the miniature of `llama2-7b`, gpt that of `gpt3-23b` (tied embedding, four kinds of dropout), "
            "gpt_neox that of `gpt-neox-20b`, bert that of `bert-large` (dropout, two losses): all combinations of "
            "degrees, schedule and recompute.",
            *(
                [
                    "The other families have Llama's recipe with key/value heads that four query heads share: all "
                    "combinations of degrees, with the recipe's schedule and recompute."
                ]
                if {*figures} & {*OTHERS}
                else []
            ),
            *([f"{missing} empty fields of the table were not measured."] if missing else []),
        ],
    )


def _contract(figures: Mapping[str, dict[str, Any]]) -> list[str]:
    broken = sum(one["that differ"] for one in figures.values())
    return [f"every measured layout keeps the contract of 1e-5: {f'MISSED by {broken}' if broken else 'reached'}"]


def add_sharing(steps: int) -> None:
    """Measure the layouts of ranks that share samples, and add them to the results, which keep all other figures."""
    stored = json.loads((RESULTS / "parity.json").read_text())
    surroundings = stored.pop("environment")
    found = _sharing_samples(steps)
    figures = stored.pop("figures") | {name: _summary(name, found) for name in SHARING}
    _, layouts, *_ = (Table(**table) for table in stored.pop("tables"))
    tables = [_family_table(figures), layouts, _sharing_table(found)]
    stored["notes"].append(
        "Layouts of ranks that share samples (CP) were measured alone, with the recipe's schedule and recompute, "
        f"on {datetime.now(UTC).date()}."
    )
    stored["targets"] = _contract(figures)
    Report(**stored, tables=tables, figures=figures).save(RESULTS, surroundings)


def _sharing_table(found: Mapping[tuple[str, int], dict[str, Any]]) -> Table:
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in SHARING:
        for layout in found[name, 0]["layouts"][:-1]:
            tensor, pipeline, data, schedule, _ = _row(layout)
            rows.setdefault((tensor, str(layout["context"]), pipeline, data, schedule), []).append(_numbers(layout))
    return Table(
        ("TP", "CP", "PP", "DP", "schedule", *SHARING),
        [[*row, *numbers] for row, numbers in rows.items()],
        "Each layout of ranks that share samples: loss, gradient, resumed",
    )


def add_bits() -> None:
    """Put what `bits` measured into the results, which keep all other figures and where they were measured."""
    stored = json.loads((RESULTS / "parity.json").read_text())
    surroundings = stored.pop("environment")
    figures = _with_bits(stored.pop("figures"))
    _, *others = (Table(**table) for table in stored.pop("tables"))
    Report(**stored, tables=[_family_table(figures), *others], figures=figures).save(RESULTS, surroundings)


def _with_bits(figures: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The figures of each family, with the layouts that were measured with `train.bitwise`."""
    import bits  # here, as it imports this module

    counts = bits.by_family(bits.measured())
    return {family: part | counts.get(family, {}) for family, part in figures.items()}


def _family_table(figures: Mapping[str, dict[str, Any]]) -> Table:
    columns = ("family", "layouts", "that differ", *KINDS.values(), "steps", "with bitwise", "bits differ")
    return Table(
        columns,
        [_padded([family, *map(_text, part.values())], len(columns)) for family, part in figures.items()],
        "The largest differences of each family; layouts with `train.bitwise`, and those of which a bit differs",
    )


def _summary(family: str, found: Mapping[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    of_family = [one for (name, _), one in found.items() if name == family]
    layouts = [layout for one in of_family for layout in one["layouts"]]
    largest = {text: max(layout.get(kind, 0.0) for layout in layouts) for kind, text in KINDS.items()}
    steps = min(one["miniature"]["train"]["steps"] for one in of_family)
    return {**_count(family, found), **largest, "steps": steps}


def _count(family: str, found: Mapping[tuple[str, int], dict[str, Any]]) -> dict[str, int]:
    of_family = [one for (name, _), one in found.items() if name == family]
    return {
        "layouts": sum(len(one["layouts"]) - 1 for one in of_family),  # the last is one process that reads a checkpoint
        "that differ": sum(one["broken"] for one in of_family),
    }


def _padded(row: list[str], length: int) -> list[str]:
    return [*row, *[""] * (length - len(row))]


def _row(layout: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{layout['tensor']}{' SP' if layout['sequence'] else ''}",
        str(layout["pipeline"]),
        f"{layout['data']}{' Z1' if layout['zero'] else ''}",
        layout["schedule"] or "",
        layout["recompute"],
    )


def _numbers(layout: dict[str, Any]) -> str:
    if "losses" not in layout:
        return "failed"
    return " ".join(_text(layout[kind]) for kind in ("losses", "gradients", "resumed"))


def _text(value: float) -> str:
    return f"{value:.0e}" if isinstance(value, float) and value else f"{value:g}"
