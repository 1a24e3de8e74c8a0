"""Count what one training step runs of the package and the packages beside it: files, rooms and functions.

    .venv/bin/python scripts/step_trace.py train llama2-tiny --nproc 1 train.steps=4 --run-dir DIR

Three rows: before the first step, the third step, and the work between the third step and the fourth. Only this process
is followed: start it under torchrun, or with one rank.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType

import shardwise

SOURCE = f"{Path(shardwise.__file__).parents[1]}/shardwise"
BEFORE = "before the first step"
_calls: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
_phase = BEFORE
_steps = 0


def follow(frame: FrameType, event: str, _: object) -> None:
    """Count a call. A step lasts from the call of `Trainer.step` to its return."""
    global _phase, _steps
    code = frame.f_code
    if event not in ("call", "return") or not code.co_filename.startswith(SOURCE):
        return
    is_step = code.co_qualname == "Trainer.step"
    if event == "return":
        if is_step:
            _phase = f"after step {_steps}"
        return
    if is_step:
        _steps += 1
        _phase = f"step {_steps}"
    _calls[_phase][code.co_filename.removeprefix(SOURCE), code.co_qualname] += 1


def report() -> None:
    for phase in (BEFORE, "step 3", "after step 3"):
        files = {file for file, _ in _calls[phase]}
        rooms = {file.rpartition("/")[0].split("/")[:2][-1] for file in files}
        numbers = (
            f"{len(files)} files of {len(rooms)} rooms, {len(_calls[phase])} functions, {_calls[phase].total()} calls"
        )
        print(f"{phase}: {numbers}", file=sys.stderr)


sys.setprofile(follow)
threading.setprofile(follow)
from shardwise.cli.entry import main  # noqa: E402

_code = main(sys.argv[1:])
sys.setprofile(None)
report()
sys.exit(_code)
