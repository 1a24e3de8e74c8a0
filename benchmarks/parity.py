"""`shardwise verify` on eight CPU ranks: every layout of four families in float32, and of the others every division.

The four families are also trained with `train.bitwise`: at every layout in float32, and in other formats at 60 layouts
that together have each pair of choices.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from report import Report, Table

RANKS, STEPS = 8, 4
PIPELINES = (1, 2, 4, 8)
FAMILIES = {"llama": "llama2-7b", "gpt": "gpt3-23b", "gpt_neox": "gpt-neox-20b", "bert": "bert-large"}
"""The recipe of each family whose every layout is verified."""
OTHERS = {name: f"model.family={name} model.num_key_value_heads=8" for name in ("mistral", "qwen2", "olmo2", "smollm3")}
OTHERS["qwen3"] = "model.family=qwen3 model.num_key_value_heads=8 model.head_dim=128"
"""Llama's recipe becomes another family's, which differs from it by facts."""
FORMATS = {
    "mixed, AdamW": "precision.mode=mixed",
    "bfloat16 by stochastic rounding, AdamW": "precision.mode=bfloat16 precision.rounding=stochastic",
    "float32, LAMB": "precision.mode=float32 optimizer.name=lamb",
}
"""Overrides of the trainings of which pairs of choices are compared."""
CELLS_OF_FORMAT = 60
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
    bits = {}
    for family, recipe in FAMILIES.items():
        for pipeline in PIPELINES:
            layouts = ["--layouts", "all", f"parallel.pipeline={pipeline}"]
            found[family, pipeline] = verify(recipe, "", layouts, steps or STEPS)
            bits[family, pipeline] = verify(recipe, "", layouts, steps or STEPS, bits=True)
            print(f"{family}, pipeline degree {pipeline}: {len(found[family, pipeline]['layouts'])}", flush=True)
    for family, overrides in OTHERS.items():
        found[family, 0] = verify("llama2-7b", overrides, [], steps or STEPS)
    pairs = {name: verify_pairs(overrides, steps or STEPS) for name, overrides in FORMATS.items()}
    return report(found, bits, pairs)


def verify_pairs(overrides: str, steps: int) -> dict[str, int]:
    """Return how many layouts of a pairwise set were compared, and how many differ from one process in a bit."""
    from shardwise.config.load import load_config
    from shardwise.verify import miniature, verification
    from shardwise.verify.layouts import Cell, candidates

    chosen = {"parallel.schedule": None, "train.recompute": None}
    by_choice: dict[tuple[Any, ...], tuple[str, Cell]] = {}
    for family, recipe in FAMILIES.items():
        for cell in candidates(load_config(recipe, []), "cpu", RANKS, chosen):
            choices = (family, cell.tensor, cell.sequence, cell.pipeline, cell.schedule, cell.zero, cell.recompute)
            by_choice[choices] = (family, cell)
    cells = [by_choice[choices] for choices in covering(list(by_choice), CELLS_OF_FORMAT)]
    differ = 0
    by_mesh = sorted(cells, key=lambda one: (one[0], one[1].pipeline))
    for (family, _), group in itertools.groupby(by_mesh, key=lambda one: (one[0], one[1].pipeline)):
        recipe = load_config(FAMILIES[family], overrides.split())
        # Grains are those of the largest degrees, whatever degrees the set has here.
        of_family = [cell for _, cell in group]
        largest = replace(of_family[0], tensor=RANKS // of_family[0].pipeline, sequence=False, zero=0)
        config = miniature.miniature(recipe, [*of_family, largest], steps, has_accelerator=False, bitwise=True)
        kept, reasons = miniature.existing(config, of_family)
        if len(kept) < len(of_family):
            raise RuntimeError("\n".join(reasons))
        with tempfile.TemporaryDirectory() as folder:
            result = verification.verify(config, kept, Path(folder))
        differ += len(result.broken)
        print(overrides, family, len(kept), [outcome.problems for outcome in result.broken], flush=True)
    return {"layouts": len(cells), "that differ": differ}


def covering(choices: Sequence[tuple[Any, ...]], count: int) -> list[tuple[Any, ...]]:
    """Return `count` of the combinations that together have each pair of values that any of them has, if it can be."""
    shuffled = list(choices)
    random.Random(0).shuffle(shuffled)

    def pairs(combination: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(combination), 2))

    missing = set().union(*map(pairs, shuffled))
    taken = []
    while len(taken) < count:
        best = max(shuffled, key=lambda combination: len(pairs(combination) & missing))
        shuffled.remove(best)
        missing -= pairs(best)
        taken.append(best)
    if missing:
        raise RuntimeError(f"{count} layouts have not all pairs: {missing}")
    return taken


def report(
    found: Mapping[tuple[str, int], dict[str, Any]],
    bits: Mapping[tuple[str, int], dict[str, Any]],
    pairs: Mapping[str, dict[str, int]],
) -> Report:
    """The tables, from what was found by family and pipeline degree (0: all of them), without and with `--bits`."""
    figures = {family: _summary(family, found) for family in dict.fromkeys(family for family, _ in found)}
    for family in dict.fromkeys(family for family, _ in bits):
        figures[family] |= {f"bits: {key}": value for key, value in _count(family, bits).items()}
    families = [family for family in figures if family in FAMILIES]
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for (family, _), one in found.items():
        for layout in one["layouts"][:-1] if family in families else ():
            rows.setdefault(_row(layout), {})[family] = _numbers(layout)
    tables = [
        Table(
            ("family", "layouts", "that differ", *KINDS.values(), "steps", "with bitwise", "bits differ"),
            [_padded([family, *map(_text, one.values())], 9) for family, one in figures.items()],
            "The largest differences of each family; layouts with `train.bitwise`, and those of which a bit differs",
        ),
        Table(
            ("train.bitwise", "layouts", "bits differ"),
            [[name, *map(_text, numbers.values())] for name, numbers in pairs.items()],
            "Other formats, at layouts of eight ranks and families that have each pair of choices",
        ),
        Table(
            ("TP", "PP", "DP", "schedule", "recompute", *families),
            [[*row, *(numbers.get(family, "") for family in families)] for row, numbers in rows.items()],
            "Each layout: loss, gradient, resumed",
        ),
    ]
    broken = sum(one["that differ"] for one in figures.values())
    bits_broken = sum(one.get("bits: that differ", 0) for one in figures.values())
    bits_broken += sum(numbers["that differ"] for numbers in pairs.values())
    figures |= {name: dict(numbers) for name, numbers in pairs.items()}
    missing = sum(len(families) - len(numbers) for numbers in rows.values())
    return Report(
        "parity",
        "Every layout of eight ranks against one process",
        tables,
        figures,
        targets=[
            f"every measured layout keeps the contract of 1e-5: {f'MISSED by {broken}' if broken else 'reached'}",
            f"with train.bitwise no bit differs: {f'MISSED by {bits_broken}' if bits_broken else 'reached'}",
        ],
        notes=[
            "`shardwise verify` measured it in float32 on eight CPU ranks (gloo); "
            "[docs/verify.md](../../docs/verify.md) says what the columns compare. SP is sequence parallelism, Z1 is "
            "ZeRO-1. `make bench ARGS=parity` measures it again.",
            "Llama is the miniature of `llama2-7b`, gpt that of `gpt3-23b` (tied embedding, four kinds of dropout), "
            "gpt_neox that of `gpt-neox-20b`, bert that of `bert-large` (dropout, two losses): all combinations of "
            "degrees, schedule and recompute.",
            *(
                [
                    "The other families have Llama's recipe with key/value heads that four query heads share: all "
                    "combinations of degrees, with the recipe's schedule and recompute."
                ]
                if len(figures) > len(families)
                else []
            ),
            *([f"{missing} empty fields of the table were not measured."] if missing else []),
        ],
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
