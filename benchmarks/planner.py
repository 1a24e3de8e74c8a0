"""Compare the planner's predicted step times with published ones, and write `results/planner.md`.

    PYTHONPATH=src python benchmarks/planner.py

Constants come from `scripts/fit_planner.py`. Rows that were fitted are told apart; nothing else was adjusted.
"""

from __future__ import annotations

import csv
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations
from pathlib import Path

import published
from published import Row

from shardwise.estimates.memory import memory_by_rank
from shardwise_plan.device_seconds import shipped_constants

RESULT = Path(__file__).parent / "results" / "planner.md"
_LEAST_IN_SET = 8
_NAMES = (
    ("2104.04473 table 1", "arXiv:2104.04473, table 1 (A100, Megatron)"),
    ("2104.04473 table 2", "arXiv:2104.04473, table 2 (A100, Megatron)"),
    ("2205.05198 table 5", "arXiv:2205.05198, table 5 (A100, Megatron; times of a layer of its 22B model are fitted)"),
    ("ground_truth_multi", "vTrain, many nodes (A100, Megatron-DeepSpeed)"),
    ("ground_truth_single", "vTrain, one node (A100, Megatron-DeepSpeed)"),
    ("bigscience", "BigScience 176B (A100, Megatron-DeepSpeed)"),
    ("aws-neuron", "AWS Neuron (Trainium1, NeMo and NxD)"),
    ("README_175b", "NVIDIA, GPT-3 175B (H100, NeMo 25.02)"),
    ("nemotron/", "NVIDIA, Nemotron-4 15B (H100, NeMo 25.02 to 25.05)"),
    ("143b90d", "NVIDIA, Llama 3 8B and 70B (H100, NeMo 25.01)"),
    ("741c886", "NVIDIA, Llama 3.1 8B to 405B (H100, NeMo 25.04)"),
    ("1f6d9f4", "NVIDIA, Llama 3.1 405B (H100 and GB200, NeMo 25.05)"),
    ("performance_summary", "NVIDIA, Llama 2 and 3 (H100, NeMo 24.07)"),
    ("Automodel docs/performance-summary.mdx (2861c414)", "NeMo Automodel, Qwen3 30B-A3B (H100, FSDP)"),
    ("Qwen3 MoE", "Megatron-Bridge 25.11 to 26.08, Qwen3 30B-A3B and 235B-A22B (H100, B200, GB200, GB300)"),
    ("transformer/moe", "Megatron-Core 0.9, Mixtral 8x7B (H100)"),
    ("067f987d, 25.09", "Megatron-Bridge 25.09, Llama 3 and 3.1 (H100, B200, GB200)"),
    ("067f987d", "Megatron-Bridge 25.11 to 26.06, Llama 3 and 3.1 (H100, B200, GB200, GB300)"),
    ("Automodel", "NeMo Automodel, Llama 3 70B (H100, FSDP)"),
    ("training_results_v5", "MLPerf Training 5.0 and 5.1, Llama 3.1 8B and 405B (H100, H200, B200, GB200, NeMo)"),
    ("training_results", "MLPerf Training 3.1 to 4.1, GPT-3 175B (H100, B200, NeMo)"),
    ("llm-foundry", "MosaicML llm-foundry, MPT (A100 and H100, FSDP)"),
)
_SETTING = ("model", "tp", "pp", "vpp", "cp", "sp", "zero", "micro_batch", "recompute", "seq", "precision")
SPLIT = Path(__file__).parent / "data" / "split.csv"


@dataclass(frozen=True)
class Compared:
    """A row with its prediction."""

    row: Row
    predicted: float

    @property
    def error(self) -> float:
        """Relative; above 0 the prediction is too long."""
        return self.predicted / self.row.measured - 1


def compared(*, sparse: bool = False) -> list[Compared]:
    """Every row of a dense model that can be expressed, or of one with experts."""
    return [
        Compared(row, row.predicted().total) for row in published.rows() if not row.reason and row.is_sparse == sparse
    ]


def source_name(row: Row) -> str:
    """A short name of the row's source."""
    name = next((name for part, name in _NAMES if part in row.source), row.source)
    if "one node" in name:
        return f"{name}: {'fitted' if row.is_fitted else 'the other four fifths'}"
    return name


@cache
def _split() -> list[tuple[str, str]]:
    with SPLIT.open(encoding="utf-8", newline="") as file:
        return [(row["source"], row["role"]) for row in csv.DictReader(file)]


def role(row: Row) -> str:
    """What the row's source may be used for: `fit`, `seen` or `test`, as the longest name in the split says."""
    return max((len(source), role) for source, role in _split() if row.source.startswith(source))[1]


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def accuracy(rows: Sequence[Compared]) -> tuple[str, ...]:
    """Number, mean, median, P90, worst and bias of the errors."""
    errors = [one.error for one in rows]
    sizes = [abs(error) for error in errors]
    worst = max(errors, key=abs)
    means = (statistics.mean(sizes), statistics.median(sizes), percentile(sizes, 0.9))
    return (str(len(rows)), *(f"{one:.1%}" for one in means), f"{worst:+.1%}", f"{statistics.mean(errors):+.1%}")


def tau(rows: Sequence[Compared]) -> float:
    """Kendall's τ-a of predicted and measured times."""
    signs = [(a.predicted - b.predicted) * (a.row.measured - b.row.measured) for a, b in combinations(rows, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


def regret(rows: Sequence[Compared]) -> float:
    """How much longer the layout that is predicted fastest takes than the fastest."""
    chosen = min(rows, key=lambda one: one.predicted)
    return chosen.row.measured / min(one.row.measured for one in rows) - 1


def sets() -> dict[tuple[str, ...], list[Compared]]:
    """Layouts of the same model with the same batch on the same number of devices, of each source; a layout counts
    once, with the mean of its measurements."""
    found: dict[tuple[str, ...], dict[tuple[str, ...], list[Compared]]] = defaultdict(lambda: defaultdict(list))
    for one in compared():
        if one.row.is_fitted:
            continue
        values = one.row.values
        name = source_name(one.row).partition(" (")[0]
        key = (name, values["layers"], values["hidden"], values["global_batch"], values["n_gpu"])
        found[key][tuple(values[k] for k in ("tp", "pp", "dp", "micro_batch", "vpp", "zero"))].append(one)
    merged = {}
    for key, layouts in found.items():
        if len(layouts) >= _LEAST_IN_SET:
            merged[key] = [
                Compared(_with_time(same[0].row, statistics.mean(one.row.measured for one in same)), same[0].predicted)
                for same in layouts.values()
            ]
    return merged


def settings(rows: Sequence[Compared]) -> list[Compared]:
    """The rows with those of one setting as one, which has the mean of their times.

    Rows of a setting have the same model, device, number format and layout but for the degree of data parallelism, and
    the same batch for each device.
    """
    of_setting: dict[tuple[object, ...], list[Compared]] = defaultdict(list)
    for compared_row in rows:
        row = compared_row.row
        assert row.cluster is not None
        batch = int(row.values["global_batch"]) / int(row.values["n_gpu"])
        key = (row.cluster.device.key, batch, *(row.values[name] for name in _SETTING))
        of_setting[key].append(compared_row)
    return [
        Compared(
            _with_time(same[0].row, statistics.mean(compared_row.row.measured for compared_row in same)),
            statistics.mean(compared_row.predicted for compared_row in same),
        )
        for same in of_setting.values()
    ]


def _with_time(row: Row, seconds: float) -> Row:
    return Row(**{**{one.name: getattr(row, one.name) for one in fields(row)}, "measured": seconds})


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of Markdown."""
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def report() -> str:
    """The whole page."""
    everything, by_source = compared(), defaultdict(list)
    for one in everything:
        by_source[source_name(one.row)].append(one)
    never = [one for one in everything if role(one.row) != "fit"]
    constants = [
        (one.name.replace("_", " "), f"{getattr(shipped_constants(), one.name):g}")
        for one in fields(shipped_constants())
    ]
    head = ("source", "rows", "mean", "median", "P90", "worst", "bias")
    lines = [
        "# Predicted and published step times",
        "",
        "Written by `benchmarks/planner.py`; [docs/planner.md](../../docs/planner.md) says how to read it. An error is",
        "(predicted − measured) / measured; mean, median and P90 are of its size, bias is its signed mean. In brackets",
        "stands what [the split](../data/split.csv) says of the source.",
        "",
        "## By source",
        "",
        *table(head, [(f"{name} [{role(rows[0].row)}]", *accuracy(rows)) for name, rows in by_source.items()]),
        *_by_date(everything),
        *_summaries(never),
        f"| **all sources that were never fitted** | {' | '.join(accuracy(never))} |",
        "",
        *_worst(by_source),
        "",
        "## By setting",
        "",
        "Many rows repeat a setting: the same model, device, number format and layout but for the degree of data",
        "parallelism, and the same batch for each device. Here each setting counts once, with the mean of its measured",
        "and of its predicted times.",
        "",
        *table(("settings of", "settings", *head[2:]), _by_setting(never)),
        "",
        "## Ranking",
        "",
        f"Sets of at least {_LEAST_IN_SET} layouts of one model with one batch on one number of devices; fitted rows",
        "are left out. Regret: how much longer the layout that is predicted fastest takes than the fastest.",
        "",
        *_ranking(),
        "",
        "## Models with experts",
        "",
        "No constant was fitted to these rows, and nothing was changed after their errors were seen. Loads of experts",
        "are balanced: the programs force it. Rows that are equal but for the release show how far programs differ.",
        "",
        *_sparse(),
        "",
        "## Memory",
        "",
        "BigScience's runs that state the memory of their first or last nodes, against what our formulas say of the",
        "same layout without the messages that only our pipeline keeps. Stated figures are the device's: they count",
        "CUDA's context and kernels (about 2 GB, they write), what the allocator holds free, whole logits, and",
        "DeepSpeed's copies of gradients and its buffers. What each of these takes is not published, so these rows",
        "cannot tell how far off our formulas are; `tests/dist` compares those with runs of our own.",
        "",
        *_memory(),
        "",
        "## Constants",
        "",
        *table(("constant", "value"), constants),
        "",
        "## Rows that cannot be expressed",
        "",
        *_left_out(),
        "",
        "## Every row",
        "",
        "vTrain's 1,124 runs of one node are summed up by number of devices and hidden size; all others stand here.",
        "",
        *_one_node(everything),
        "",
        *_every(everything),
    ]
    return "\n".join(lines) + "\n"


def _summaries(never: Sequence[Compared]) -> list[str]:
    """The errors of groups of sources, without the one that has most rows."""
    others = _without_llm_foundry(never)
    groups = {
        "H100, without llm-foundry": [one for one in others if _is_on(one, "h100")],
        "B200, GB200 and GB300": [one for one in others if _is_on(one, "b200", "gb200", "gb300")],
        "only tested, without llm-foundry": [one for one in others if role(one.row) == "test"],
        "never fitted, without llm-foundry": others,
    }
    return [f"| {name} | {' | '.join(accuracy(rows))} |" for name, rows in groups.items()]


def _by_setting(never: Sequence[Compared]) -> list[tuple[str, ...]]:
    others = _without_llm_foundry(never)
    groups = {
        "sources that were only tested, without llm-foundry": [one for one in others if role(one.row) == "test"],
        "sources that were never fitted, without llm-foundry": others,
        "all sources that were never fitted": never,
    }
    return [(name, *accuracy(settings(rows))) for name, rows in groups.items()]


def _without_llm_foundry(rows: Sequence[Compared]) -> list[Compared]:
    return [one for one in rows if "llm-foundry" not in one.row.source]


def _is_on(one: Compared, *keys: str) -> bool:
    assert one.row.cluster is not None
    return one.row.cluster.device.key in keys


def _by_date(everything: Sequence[Compared]) -> list[str]:
    """BigScience's rows before and after the day on which their machine was repaired."""
    rows = [one for one in everything if "bigscience" in one.row.source]
    parts: dict[bool, list[Compared]] = defaultdict(list)
    for one in rows:
        date = re.search(r"\d\d-\d\d", one.row.values["notes"])
        assert date is not None
        parts[date[0] < "02-25"].append(one)
    names = {True: "BigScience, until 24 February 2022", False: "BigScience, from 25 February 2022 on"}
    return [f"| {names[early]} | {' | '.join(accuracy(part))} |" for early, part in parts.items()]


def _worst(by_source: Mapping[str, Sequence[Compared]]) -> list[str]:
    worst = {name: max(rows, key=lambda one: abs(one.error)) for name, rows in by_source.items()}
    rows = [
        (name, one.row.values["model"], _layout(one.row), f"{one.row.measured:.3f}", f"{one.predicted:.3f}",
         f"{one.error:+.1%}")
        for name, one in worst.items()
    ]  # fmt: skip
    return table(("worst row of", "model", "layout", "measured s", "predicted s", "error"), rows)


def _memory() -> list[str]:
    rows, rests = [], []
    for row in published.rows():
        stated = re.search(r"peak_mem_gb=(\d+)", row.values["notes"])
        if stated is None or row.reason:
            continue
        assert row.config is not None
        assert row.layout is not None
        by_rank = memory_by_rank(row.config, row.layout, accelerator=True) or []
        ours = max(memory.total - memory.pipeline for memory in by_rank) / 2**30
        rests.append(1 - ours / float(stated[1]))
        rows.append((row.values["model"], _layout(row), stated[1], f"{ours:.1f}", f"{rests[-1]:.0%}"))
    middle = f"mean {statistics.mean(rests):.0%}, largest {max(rests):.0%}"
    return table(("model", "layout", "stated GB", "ours GiB", "rest"), [*rows, ("all", "", "", "", middle)])


def _layout(row: Row) -> str:
    values = row.values
    virtual = f" × {values['vpp']}" if values["vpp"] not in ("", "1") else ""
    tensor = f"TP {values['tp']}{' + SP' if values['sp'] == '1' else ''}"
    return f"{tensor} PP {values['pp']}{virtual} DP {values['dp']}, micro-batch {values['micro_batch']}"


def _ranking() -> list[str]:
    found = sets()
    large = {key: rows for key, rows in found.items() if "one node" not in key[0]}
    small = [rows for key, rows in found.items() if "one node" in key[0]]
    rows = [
        (key[0], f"{key[1]} × {key[2]}", key[3], key[4], str(len(one)), f"{regret(one):.1%}", f"{tau(one):.2f}")
        for key, one in large.items()
    ]
    if small:
        middle = (statistics.mean(map(regret, small)), statistics.mean(map(tau, small)))
        layouts = sum(map(len, small))
        rows.append(
            (f"vTrain, one node: mean of {len(small)} sets", "", "", "", str(layouts), f"{middle[0]:.1%}",
             f"{middle[1]:.2f}")
        )  # fmt: skip
    return table(("source", "layers × hidden", "batch", "devices", "layouts", "regret", "Kendall's τ"), rows)


def _sparse() -> list[str]:
    """Errors of models with experts by source, and each row."""
    rows = compared(sparse=True)
    by_source = defaultdict(list)
    for one in rows:
        by_source[source_name(one.row)].append(one)
    head = ("source", "rows", "mean", "median", "P90", "worst", "bias")
    groups = [(f"{name} [{role(same[0].row)}]", *accuracy(same)) for name, same in by_source.items()]
    each = [
        (
            *(one.row.source.rpartition("/")[2], one.row.model, f"{one.row.values['n_gpu']} {one.row.values['gpu']}"),
            *(one.row.values["precision"], f"{_layout(one.row)}, EP {one.row.values['ep']}"),
            *(f"{one.row.measured:.3f}", f"{one.predicted:.3f}", f"{one.error:+.1%}"),
        )
        for one in rows
    ]
    names = ("source", "model", "devices", "precision", "layout", "measured s", "predicted s", "error")
    return [*table(head, [*groups, ("**all of them**", *accuracy(rows))]), "", *table(names, each)]


def _left_out() -> list[str]:
    reasons = Counter((row.source, row.reason) for row in published.rows() if row.reason)
    return table(("source", "rows", "reason"), [(source, str(n), reason) for (source, reason), n in reasons.items()])


def _one_node(everything: Sequence[Compared]) -> list[str]:
    groups = defaultdict(list)
    for one in everything:
        if published.FITTED_SOURCE in one.row.source:
            groups[one.row.values["n_gpu"], one.row.values["hidden"]].append(one)
    rows = [(*key, *accuracy(one)) for key, one in sorted(groups.items())]
    return table(("devices", "hidden", "rows", "mean", "median", "P90", "worst", "bias"), rows)


def _every(everything: Sequence[Compared]) -> list[str]:
    rows = []
    for one in everything:
        if published.FITTED_SOURCE in one.row.source:
            continue
        values = one.row.values
        rows.append(
            (source_name(one.row).partition(" (")[0], values["model"], _layout(one.row), values["global_batch"],
             values["recompute"], f"{one.row.measured:.3f}", f"{one.predicted:.3f}", f"{one.error:+.1%}")
        )  # fmt: skip
    head = ("source", "model", "layout", "batch", "recompute", "measured s", "predicted s", "error")
    return table(head, rows)


def main() -> None:
    """Write the page."""
    RESULT.write_text(report(), encoding="utf-8")
    sys.stdout.write(f"{RESULT}\n")


if __name__ == "__main__":
    main()
