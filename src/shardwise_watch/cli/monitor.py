"""Print the state of a run: one JSON object per line on stdout, now and every few seconds.

It only reads the run's folder, so it works on any machine that can read the folder. docs/watching.md describes the
fields. With --prometheus nothing is printed; the same numbers are served at http://HOST:PORT/metrics, and the folder is
read at each scrape. Ctrl-C and SIGTERM end it, with exit code 0.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

from shardwise.base.errors import ConfigError
from shardwise.cli import output
from shardwise.runs.folder import RUNS
from shardwise_watch.run import open_run
from shardwise_watch.run_snapshot import run_snapshot

_LARGEST_PORT = 65_535
_LONGEST_INTERVAL = 86_400


def configure(parser: argparse.ArgumentParser) -> None:
    latest = RUNS / "latest"
    add = parser.add_argument
    add("run", metavar="RUN", nargs="?", type=Path, help=f"its folder (default: {latest})")
    add("--once", action="store_true", help="print one object and end")
    add("--interval", metavar="S", type=float, default=5.0, help="seconds from one object to the next (default: 5)")
    add("--prometheus", metavar="PORT", type=int, help="serve Prometheus at this port instead")
    add("--host", metavar="H", default="127.0.0.1", help="the address to listen at (default: 127.0.0.1, this machine)")


def run(arguments: argparse.Namespace) -> int:
    interval = arguments.interval
    port = arguments.prometheus
    if not 0 < interval <= _LONGEST_INTERVAL:
        raise ConfigError(f"--interval ({interval:g}) must be seconds above 0 and up to {_LONGEST_INTERVAL:,}, a day")
    if port is not None and not 0 < port <= _LARGEST_PORT:
        raise ConfigError(f"--prometheus ({port}) must be a port from 1 to {_LARGEST_PORT:,}, such as 9400")
    if port is not None and arguments.once:
        raise ConfigError("--once prints one object, and --prometheus prints none: leave one of them out")
    watched = open_run(arguments.run, all_steps=False)
    if arguments.once:
        output.json(run_snapshot(watched), indent=None)
        return 0
    end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: end.set())
    if port is not None:
        # Costly to import, for a server alone.
        from shardwise_watch.prometheus import serve

        serve(watched, port, arguments.host)
        output.progress(f"serving {watched.name} at http://{arguments.host}:{port}/metrics")
        end.wait()
        return 0
    while True:
        output.json(run_snapshot(watched), indent=None)
        sys.stdout.flush()
        # Wakes at once where a signal ends the command, without waiting for the interval.
        if end.wait(interval):
            return 0
        watched.refresh()
