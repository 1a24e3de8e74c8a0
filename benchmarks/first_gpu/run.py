"""Measures one GPU with Llama 2 7B's work: `python benchmarks/first_gpu/run.py --deadline 540 --out FOLDER`.

One process, without make, torchrun or an index of packages. The questions come in order of value. Each configuration of
a question is a line of JSON in FOLDER/lines.jsonl as soon as it is measured, and a later session in the same folder
measures only what is missing there. `--report FOLDER` turns all lines in FOLDER/*.jsonl into
`benchmarks/results/first_gpu.md` and `.json`, and `--report AFTER --before BEFORE` the training steps of two commits
into `first_gpu_step.md` and `.json`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

LEAST_MEMORY = 70e9
"""Bytes that the trainings need."""


def main() -> int:
    from first_gpu.questions import QUESTIONS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"{', '.join(QUESTIONS)} (default: all)")
    parser.add_argument("--deadline", type=float, default=540.0, help="seconds for all questions (default: 540)")
    parser.add_argument("--out", type=Path, help="folder of the lines")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on any device, in seconds")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="write the report of these lines instead")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="compare with these lines, of an earlier commit")
    parser.add_argument("--results", type=Path, help="folder of the report (default: benchmarks/results)")
    options = parser.parse_args()
    end = time.monotonic() + options.deadline
    if unknown := [name for name in options.questions if name not in QUESTIONS]:
        parser.error(f"unknown question {unknown[0]!r}; there are {', '.join(QUESTIONS)}")
    if options.report is not None:
        from first_gpu import results

        target = options.results or results.RESULTS
        if options.before is None:
            results.write(options.report, target)
        else:
            results.write_comparison(options.before, options.report, target)
        return 0
    if options.before is not None:
        parser.error("--before must come with --report, which names the folder of the later commit's lines")
    if options.out is None:
        parser.error("--out must name a folder for the lines")
    if (problem := _problem(options.tiny)) is not None:
        print(problem, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [name for name in QUESTIONS if name in options.questions or not options.questions]
    _ask(chosen, options.out, end, is_tiny=options.tiny)
    return 0


def _problem(is_tiny: bool) -> str | None:
    """The reason why this machine cannot be measured; None if it can."""
    import torch

    if is_tiny:
        return None
    if not torch.accelerator.is_available():
        return "first_gpu: this machine must have a GPU that torch can use, and there is none (--tiny needs none)"
    memory = torch.accelerator.get_memory_info()[1]
    if memory < LEAST_MEMORY:
        return (
            f"first_gpu: the memory of the GPU ({memory / 1e9:.0f} GB) must be at least {LEAST_MEMORY / 1e9:.0f} GB, "
            "which the trainings need (--tiny needs less)"
        )
    return None


def _ask(chosen: list[str], folder: Path, end: float, *, is_tiny: bool) -> None:
    """Ask questions in turn, each for as long as it needs; the last ones are left out where the time is over."""
    import importlib

    import torch

    from first_gpu.questions import QUESTIONS
    from first_gpu.session import Session
    from shardwise.distributed import devices

    session = Session(devices.local_device(), folder, is_tiny=is_tiny)
    torch.manual_seed(0)
    for number, name in enumerate(chosen):
        remaining = end - time.monotonic()
        needed = sum(QUESTIONS[other] for other in chosen[number:])
        share = min(remaining, max(1.0, remaining / needed) * QUESTIONS[name])
        with session.asking(name, share):
            importlib.import_module(f"first_gpu.{name}").run(session)
        if not session.works():
            # After an error such as an illegal address, only a new process can use the device.
            rest = chosen[number + 1 :]
            if rest:
                arguments = ["--deadline", str(end - time.monotonic()), "--out", str(folder), *rest]
                os.execv(sys.executable, [sys.executable, __file__, *arguments])


if __name__ == "__main__":
    # Modules of this folder, such as `profile`, must not hide those of Python.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler prints each of its starts and stops
    sys.exit(main())
