"""Turns the lines of a session into tables and figures, as the other benchmarks' results are."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from report import RESULTS, Report, Table, environment

from first_gpu.questions import QUESTIONS

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
}

_LISTED_KERNELS = 12
_LONGEST_TEXT = 70
"""Characters of a kernel's name in a table."""


def write(folder: Path, results: Path = RESULTS) -> Report:
    """Write the report of a folder of lines to `first_gpu.md` and `.json`."""
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in QUESTIONS}
    for path in sorted(folder.glob("*.jsonl")):
        # The last line of a process that was killed may be cut off.
        for line in (json.loads(text) for text in path.read_text().splitlines() if text.endswith("}")):
            lines[line.pop("question")].append(line)
    found = report(lines)
    machine = next((line["machine"] for line in lines["environment"] if "machine" in line), None)
    found.save(results, machine or environment())
    return found


def report(lines: dict[str, list[dict[str, Any]]]) -> Report:
    tables = []
    notes = []
    for name, records in lines.items():
        if not records:
            continue
        module = importlib.import_module(f"first_gpu.{name}")
        tables.append(_table(module.TITLE, module.COLUMNS.split(), _without_short_kernels(records)))
        notes.append(f"{module.TITLE}: {module.NOTE}")
    versions = next((line for line in lines["environment"] if "torch" in line), {})
    device = versions.get("device", "an unknown device")
    known = ("torch", "cuda", "cudnn", "driver", "python", "memory", "processors")
    notes.append("; ".join(f"{key} {versions[key]}" for key in known if versions.get(key) is not None))
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
    if key in ("mfu", "share", "host_share", "ratio"):
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
