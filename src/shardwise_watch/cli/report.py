"""Write an HTML report of one run with its branches, or of several runs overlaid.

The page needs no network. It has scores of tasks, curves, lost time, cost, memory, layout, events, configuration and
environment. Curves are drawn by step, by tokens or by time, smoothed, and on logarithmic axes, as the reader chooses on
the page; of several runs also the difference of each from the first. `--json` prints all its numbers instead, and
`--png` also draws the curves as pictures. Branches are searched beside the run.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError
from shardwise.base.files import reason_of, require_replaceable, write_atomic
from shardwise.base.prices import Price
from shardwise.cli import output
from shardwise.runs.folder import RUNS
from shardwise_watch.curve_points import require_distinct_runs
from shardwise_watch.report.numbers import compare_runs, report_numbers
from shardwise_watch.run import branches_of, open_run

_LONGEST_NAME = 150  # characters of the names of runs in the name of a report; a file's name has 255 at most
_MOST_BRANCHES = 7  # branches that are laid over their trunk; the page has colours for as many


def configure(parser: argparse.ArgumentParser) -> None:
    latest = RUNS / "latest"
    add = parser.add_argument
    add("run", metavar="RUN", nargs="?", type=Path, help=f"its folder (default: the newest run, {latest})")
    add("others", metavar="RUN", nargs="*", type=Path, help="further runs, B and so on, overlaid on the first one, A")
    output_help = "where to write it (default: report.html in RUN; of several, report-with-B.html in A)"
    add("--output", metavar="FILE", type=Path, help=output_help)
    add("--png", metavar="DIR", type=Path, help="draw each curve into this folder too")
    price_help = "price of a device, node or chip for an hour (default: log.price, else that of the replaced report)"
    add("--price", metavar="PRICE", help=price_help)
    add("--json", action="store_true", help="print the numbers as JSON, and write no page")


def run(arguments: argparse.Namespace) -> int:
    price = None if arguments.price is None else Price.of(arguments.price, "--price")
    watched = [open_run(path, all_steps=True) for path in (arguments.run, *arguments.others)]
    require_distinct_runs([run.path for run in watched], [run.path.resolve() for run in watched])
    branches = [] if arguments.others else branches_of(watched[0])
    compared = compare_runs(*watched) if arguments.others else None
    shown = branches[:_MOST_BRANCHES]
    other_names = [run.name for run in watched[1:]]
    joined = "-".join(other_names)
    if len(joined) > _LONGEST_NAME:
        joined = f"{other_names[0]}-and-{len(other_names) - 1}-more"
    name = "report.html" if compared is None else f"report-with-{joined}.html"
    file: Path = arguments.output or watched[0].path / name
    if price is None and watched[0].section("log").get("price") is None:
        price = _price_before(file)
    reports = [report_numbers(run, price) for run in [*watched, *shown]]
    if len(shown) < len(branches) and not arguments.json:
        output.line(f"branches: the first {len(shown)} of {len(branches)}; name one as the second RUN to see it")
    require_replaceable(file, "--output")
    if arguments.png is not None:
        # Costly to import, for pictures alone.
        from shardwise_watch.report.page import draw_pictures

        try:
            files = draw_pictures(reports, arguments.png)
        except OSError as error:
            raise ConfigError(f"--png ({error.filename}) cannot be written: {reason_of(error)}") from None
        if not arguments.json:
            output.line(f"pictures: {len(files)} in {arguments.png}")
    if arguments.json:
        output.json(_facts(reports, compared))
        return 0
    # Costly to import, for the page alone.
    from shardwise_watch.report.page import report_page

    try:
        write_atomic(file, report_page(reports, compared))
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {reason_of(error)}; --output chooses another file") from None
    output.line(f"report: {file}")
    return 0


def _price_before(file: Path) -> Price | None:
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    match = re.search(r'<meta name="price" content="([^"]+)">', text)
    return None if match is None else Price.of(match[1], f"give --price: that in {file}")


def _facts(reports: Sequence[Mapping[str, Any]], compared: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if compared is not None and len(reports) == 2:
        return {"a": reports[0], "b": reports[1], "compared": compared}
    if compared is not None:
        return {"runs": reports, "compared": compared}
    return {**reports[0], "branches": reports[1:]} if len(reports) > 1 else reports[0]
