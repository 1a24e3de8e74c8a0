"""Replay steps of a run from one of its checkpoints, at any layout, and compare them with its record to the bit.

The loss and the gradient norm of each step are compared, and the hashes of the state if the run recorded them
(log.state_hash_every). The layout is that of the run, unless --nproc or keys such as parallel.tensor=2 change it. The
replay uses a temporary folder; the run is not changed.

At another layout, only a run with train.bitwise is equal to the bit. A model of your own that has parameters of
make_parameter, or layers of other libraries, has parallel.grain=1, so that only data parallelism and ZeRO may change.

Exit code 0: all is equal to the bit; 1: something differs, or the replay failed; 2: the input is wrong.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from shardwise.base.errors import ConfigError, listing
from shardwise.cli import output
from shardwise.cli.help import add_json, add_overrides, count
from shardwise.config import BITWISE
from shardwise.launch.environment import joined
from shardwise.runs.folder import RunDirectory
from shardwise.runs.state_records import StateRecords
from shardwise.verify import replay
from shardwise.verify.replay import ReplayComparison, ReplayedStretch


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder, such as runs/latest")
    add_overrides(parser, "parallel.tensor=2", "run")
    from_help = "step of a checkpoint, or 0 (default: the newest checkpoint with a recorded step after it)"
    parser.add_argument("--from", dest="first", metavar="STEP", type=int, help=from_help)
    parser.add_argument("--to", dest="last", metavar="STEP", type=int, help="last step (default: the last recorded)")
    parser.add_argument(
        "--nproc", metavar="N", type=count, help="number of local ranks (default: as many as the run had)"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    if joined() is not None:
        raise ConfigError("audit starts ranks of its own: call it outside of torchrun")
    directory = RunDirectory(arguments.run)
    if not directory.path.is_dir():
        raise ConfigError(f"there is no run {directory.path}: name its folder")
    config, changed = replay.read_replay_config(directory, arguments.overrides)
    stretch = replay.choose_stretch(directory, config.checkpoint, arguments.first, arguments.last)
    recorded = StateRecords.of(directory)
    ranks = recorded.ranks if arguments.nproc is None else arguments.nproc
    folder = Path(tempfile.mkdtemp(prefix="shardwise-audit-"))
    try:
        replayed = replay.replay_stretch(directory, changed, stretch, ranks, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    comparison = replay.compare_replay(recorded, replayed, stretch)
    is_equal = comparison.step is None
    if arguments.json:
        facts = {"run": str(directory.path), "from": stretch.first, "to": stretch.last, "ranks": replayed.ranks}
        output.json({**facts, "equal": is_equal, "bitwise": config.is_bit_equal, **asdict(comparison)})
        return int(not is_equal)
    _show(stretch, comparison)
    if changes := [change for change in recorded.changes if not is_equal and change[0] > stretch.first]:
        output.line(
            f"the run changed keys after step {changes[-1][0]:,}, and the replay has its last ones from the beginning: "
            f"{listing([text for _, text in changes], most=5)}; --from {changes[-1][0]} leaves out the steps before"
        )
    if not config.is_bit_equal:
        output.line(f"the run was trained without {BITWISE}: it is repeated to the bit only at its own layout")
    return int(not is_equal)


def _show(stretch: ReplayedStretch, comparison: ReplayComparison) -> None:
    stretch_text = f"steps {stretch.first + 1:,} to {stretch.last:,}"
    compared = f"losses and gradient norms of {len(comparison.steps):,}, state hashes of {len(comparison.hashes):,}"
    if comparison.step is None:
        output.line(f"equal to the bit: {stretch_text} ({compared})")
        return
    output.line(f"step {comparison.step:,} is the first that differs, of {stretch_text} ({compared})")
    for difference in comparison.differences:
        output.line(f"  {difference}")
