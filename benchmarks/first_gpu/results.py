"""Turns the lines of a session into tables and figures, as the other benchmarks' results are."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from report import RESULTS, Report, Table, environment

from first_gpu.questions import QUESTIONS

Lines = dict[str, list[dict[str, Any]]]
"""The lines of each question."""

_HEADINGS = {
    "step_ms": "ms a step",
    "ms_per_1e9": "ms",
    "host_ms": "host, ms",
    "forward_ms": "forward, ms",
    "backward_ms": "backward, ms",
    "tokens_per_second": "tokens/s",
    "gb_per_second": "GB/s",
    "mfu": "MFU",
    "bytes": "bytes / parameter",
    "tflops": "TFLOP/s",
    "forward_tflops": "TFLOP/s",
    "backward_tflops": "TFLOP/s",
    "y_tflops": "Y, TFLOP/s",
    "dx_tflops": "dX, TFLOP/s",
    "dw_tflops": "dW, TFLOP/s",
    "sm_mhz": "SM clock, MHz",
    "watts": "W",
    "tensor": "TP",
    "host_share": "host / whole",
    "ratio": "measured / expected",
    "peak_allocated": "peak memory",
    "first_step_seconds": "first step, s",
    "is_repeatable": "repeatable",
    "predicted_gain": "predicted gain",
    "losses_agree": "losses agree",
}

_LISTED_KERNELS = 12
_LONGEST_TEXT = 70
"""Characters of a kernel's name in a table."""


_STEP_COLUMNS = (
    "",
    "recompute",
    "blocks",
    "micro-batches",
    "ms before",
    "ms after",
    "ratio",
    "expected ms",
    "MFU before",
    "MFU after",
    "loss before",
    "loss after",
    "peak before",
    "peak after",
    "expected memory",
)
_STEP_NOTES = (
    "The code of both commits in processes of their own, one after the other on the same GPU, with the same program "
    "(`benchmarks/first_gpu`, question `training`).",
    "Ratio: ms after / ms before; none where the numbers of blocks differ. Expected: by the later commit's planner.",
    "Initial weights come from one sequence of random numbers for all settings of a process. After a setting whose "
    "numbers of blocks differ, losses before and after are therefore of other weights.",
)


def write(folder: Path, results: Path = RESULTS) -> Report:
    """Write the report of a folder of lines to `first_gpu.md` and `.json`."""
    lines = _read(folder)
    found = report(lines)
    found.save(results, _machine(lines))
    return found


def write_comparison(before: Path, after: Path, results: Path = RESULTS) -> Report:
    """Write the training steps of two folders of lines, of two commits, to `first_gpu_step.md` and `.json`."""
    lines = {"before": _read(before), "after": _read(after)}
    machine = _machine(lines["after"])
    commits = [f"{_machine(of_commit)['commit']} ({name})" for name, of_commit in reversed(lines.items())]
    found = comparison(lines["before"], lines["after"])
    found.save(results, {**machine, "commit": ", ".join(commits)})
    return found


def comparison(before: Lines, after: Lines) -> Report:
    """Each setting of the commit after, beside the same setting before."""
    earlier = {_setting(line): line for line in before["training"] if "step_ms" in line}
    later = [line for line in after["training"] if "step_ms" in line]
    steps = [{"before": earlier.get(_setting(line), {}), "after": line} for line in later]
    rows = [_step_row(**step) for step in steps]
    versions = _versions(after)
    title = f"Training steps of two commits on one {versions.get('device', 'unknown device')}"
    notes = [*_STEP_NOTES, _described_versions(versions)]
    return Report("first_gpu_step", title, [Table(_STEP_COLUMNS, rows)], {"steps": steps}, notes=notes)


def _setting(line: dict[str, Any]) -> tuple[Any, ...]:
    keys = ("program", "recompute", "micro_batch", "micro_batches", "fills_device")
    return tuple(line.get(key) for key in keys)


def _step_row(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    blocks = before.get("blocks", after["blocks"])
    is_same_model = blocks == after["blocks"]
    return [
        after["program"],
        after["recompute"],
        str(blocks) if is_same_model else f"{blocks} → {after['blocks']}",
        f"{after['micro_batches']} of {after['micro_batch']}",
        _text("step_ms", before.get("step_ms")),
        _text("step_ms", after["step_ms"]),
        f"{after['step_ms'] / before['step_ms']:.3f}" if before and is_same_model else "",
        _text("expected_ms", after["expected_ms"]),
        _text("mfu", before.get("mfu")),
        _text("mfu", after["mfu"]),
        f"{before['loss']:.6f}" if before else "",
        f"{after['loss']:.6f}",
        _text("peak_allocated", before.get("peak_allocated")),
        _text("peak_allocated", after.get("peak_allocated")),
        _text("expected_memory", after["expected_memory"]),
    ]


def _read(folder: Path) -> Lines:
    lines: Lines = {name: [] for name in QUESTIONS}
    for path in sorted(folder.glob("*.jsonl")):
        # The last line of a process that was killed may be cut off.
        for line in (json.loads(text) for text in path.read_text().splitlines() if text.endswith("}")):
            lines[line.pop("question")].append(line)
    return lines


def _machine(lines: Lines) -> dict[str, Any]:
    return next((line["machine"] for line in lines["environment"] if "machine" in line), None) or environment()


def _versions(lines: Lines) -> dict[str, Any]:
    return next((line for line in lines["environment"] if "torch" in line), {})


def _described_versions(versions: dict[str, Any]) -> str:
    known = ("torch", "cuda", "cudnn", "driver", "python", "memory", "processors")
    return "; ".join(f"{key} {versions[key]}" for key in known if versions.get(key) is not None)


def report(lines: Lines) -> Report:
    tables = []
    notes = []
    for name, records in lines.items():
        if not records:
            continue
        module = importlib.import_module(f"first_gpu.{name}")
        tables.append(_table(module.TITLE, module.COLUMNS.split(), _without_short_kernels(records)))
        notes.append(f"{module.TITLE}: {module.NOTE}")
    versions = _versions(lines)
    device = versions.get("device", "an unknown device")
    notes.append(_described_versions(versions))
    for name, records in lines.items():
        errors = [line for line in records if "error" in line or "stopped" in line]
        notes += [f"No figure: {name}{_described(line)}" for line in errors]
    return Report("first_gpu", f"One {device} with Llama 2 7B's work", tables, lines, notes=notes)


def _without_short_kernels(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records without the kernels of a profile that are not among the longest; the figures have all."""
    shown = []
    kernels: Counter[str] = Counter()
    for record in records:
        if record.get("kind") == "kernel":
            kernels[record["program"]] += 1
            if kernels[record["program"]] > _LISTED_KERNELS:
                continue
        shown.append(record)
    return shown


def _table(title: str, keys: list[str], records: list[dict[str, Any]]) -> Table:
    shown = [record for record in records if "error" not in record and any(key in record for key in keys[1:])]
    headings = ["", *(_HEADINGS.get(key, key.replace("_", " ")) for key in keys[1:])]
    return Table(headings, [[_text(key, record.get(key)) for key in keys] for record in shown], title)


def _text(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key in ("peak_allocated", "peak_reserved", "expected_memory"):
        return f"{value / 2**30:.2f} GiB"
    if key in ("mfu", "share", "host_share", "ratio", "gain", "predicted_gain"):
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value).replace("|", "/")
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"


def _described(line: dict[str, Any]) -> str:
    """The labels of a line without figures, and the reason."""
    labels = "".join(f", {key} {value}" for key, value in line.items() if key not in ("error", "where", "stopped"))
    return f"{labels}: {line.get('error') or 'stopped ' + line['stopped']}"
