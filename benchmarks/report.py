"""What a section found: tables and figures, as JSON and as Markdown, with all that is needed to read them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
PAGE_COLUMNS = 5
"""Columns of docs/performance.md; the results have all."""


@dataclass
class Table:
    """Rows of text under column names; the first column is left-aligned, the others are numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def markdown(self) -> str:
        widths = [max(len(str(row[i])) for row in (self.columns, *self.rows)) for i in range(len(self.columns))]

        def line(cells: Sequence[str]) -> str:
            padded = [
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ]
            return f"| {' | '.join(padded)} |"

        rule = "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths))
        heading = [f"**{self.title}**", ""] if self.title else []
        return "\n".join([*heading, line(self.columns), f"|{rule}|", *(line(row) for row in self.rows)])


@dataclass
class Report:
    """One section's result.

    Attributes:
        figures: the numbers behind the tables, for machines. targets: what was to be reached, and whether it was.
        notes: how to read the tables.
    """

    name: str
    title: str
    tables: list[Table]
    figures: dict[str, Any]
    targets: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self, surroundings: dict[str, Any]) -> str:
        parts = [f"# {self.title}", *(table.markdown() for table in self.tables)]
        parts += ["\n".join(f"- {line}" for line in lines) for lines in (self.targets, self.notes) if lines]
        return "\n\n".join([*parts, describe(surroundings)]) + "\n"

    def save(self, folder: Path, surroundings: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(
            json.dumps({**asdict(self), "environment": surroundings}, indent=1, ensure_ascii=False) + "\n"
        )
        (folder / f"{self.name}.md").write_text(self.markdown(surroundings))


def target(what: str, found: float, limit: float, *, at_least: bool) -> str:
    """One line that says whether a target was reached."""
    reached = found >= limit if at_least else found <= limit
    sign = "≥" if at_least else "≤"
    return f"{'reached' if reached else 'MISSED'}: {what} {sign} {limit:g}: {found:.3g}"


def environment() -> dict[str, Any]:
    """Hardware, versions and load at the start of a run."""
    fields = _cpuinfo()
    cpu = f"{fields.get('model name', platform.processor())} (family {fields.get('cpu family', 'unknown')})"
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("shardwise", "torch", "transformers")},
        "commit": _commit(),
        "omp_num_threads": 1,
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def describe(surroundings: dict[str, Any]) -> str:
    """The surroundings in one sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in surroundings["versions"].items())
    return (
        f"{surroundings['cores']} cores of {surroundings['cpu']}, {surroundings['memory_gib']} GiB, "
        f"{surroundings['system']}; Python {surroundings['python']}, {versions}, commit {surroundings['commit']}; "
        f"OMP_NUM_THREADS={surroundings['omp_num_threads']}; {surroundings['date']}, "
        f"load average {surroundings['load_average_at_start']} at the start."
    )


def write_page(found: Report, surroundings: dict[str, Any]) -> None:
    """Put the first table, the missed targets and the surroundings between the marks of docs/performance.md."""
    missed = "\n".join(f"- {line}" for line in found.targets if line.startswith("MISSED"))
    whole = found.tables[0]
    table = Table(whole.columns[:PAGE_COLUMNS], [row[:PAGE_COLUMNS] for row in whole.rows])
    text = "\n\n".join(filter(None, (table.markdown(), missed, describe(surroundings))))
    path = ROOT / "docs" / "performance.md"
    head, rest = path.read_text().split(BEGIN)
    _, tail = rest.split(END)
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().split("\n\n")[0].splitlines() if path.exists() else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _commit() -> str:
    if shutil.which("git") is None:
        return "unknown"
    # `--exclude` leaves tags out, so that the name is the commit's.
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
