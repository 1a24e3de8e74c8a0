"""Where a run's lines go, a terminal or a file, and how its summary and its result read there."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shardwise import units


def open_log(path: Path) -> IO[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a", encoding="utf-8", buffering=1)


def plain(file: IO[str]) -> Console:
    """A console that never draws or colours, even where the environment forces others to (FORCE_COLOR)."""
    return Console(file=file, force_terminal=False, color_system=None, highlight=False)


def print_summary(console: Console, rows: list[tuple[str, str]]) -> None:
    if not console.is_terminal:
        for name, value in rows:
            console.print(Text(f"{name:<8} {value}"), soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    console.print(Panel(table, title="shardwise", title_align="left", border_style="dim", expand=False))


def result_line(results: dict[str, Any], seconds: float) -> str:
    """`seconds`: of this run, without those that took the steps before."""
    before = results["steps_before"]
    steps = f"steps {before + 1:,} to {results['steps']:,}" if before else f"{results['steps']:,} steps"
    parts = [f"{steps} in {units.duration(seconds)}"]
    parts.append(f"loss {results['final_loss']:.4f}")
    if results["final_perplexity"] is not None:
        parts.append(f"evaluation perplexity {results['final_perplexity']:,.2f}")
    parts.append(f"{units.count(results['tokens_per_second']['average'])} tokens/s")
    if results["mfu"] is not None:
        parts.append(f"MFU {results['mfu']:.1%}")
    return ", ".join(parts)
