"""Make docs/images/layouts.svg, the README's picture: one run at two layouts, and the same training in one process.

The quickstart trains here and now, with `train.bitwise`: half of its steps at TP 2 + SP, the rest at DP 2 from the
checkpoint; then all of them in one process. The losses are kept beside the picture, so that `--draw` draws it again
without a training.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from scripts import tutorial_common as common
from shardwise import load_recipe

TARGET = common.Target("layouts")
STEPS = load_recipe("quickstart").train.steps
CHANGE = STEPS // 2
ONE_PROCESS = ["parallel.tensor=1"]
TWO_REPLICAS = ["parallel.tensor=1", "--nproc", "2"]


def train(folder: Path, name: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "shardwise", "train", "quickstart", "train.bitwise=true", "train.micro_batch=4"]
    subprocess.run([*command, f"--run-dir={name}", *arguments], cwd=folder, check=True)


def losses(run: Path) -> list[float]:
    """The loss of each step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if line["event"] == "step"]


def measure() -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        train(folder, "two-layouts", f"train.stop_after={CHANGE}")
        train(folder, "two-layouts", *TWO_REPLICAS)
        train(folder, "one-process", *ONE_PROCESS)
        return {name: losses(folder / name) for name in ("two-layouts", "one-process")}


def draw(curves: dict[str, Any]) -> None:
    changed = curves["two-layouts"]
    reference = curves["one-process"]
    largest = max(abs(a - b) / b for a, b in zip(changed, reference, strict=True))
    steps = range(1, STEPS + 1)
    with plt.rc_context(common.STYLE):
        figure, axes = plt.subplots(figsize=(8.2, 3.4), layout="constrained")
        axes.plot(steps, reference, color=common.INK, alpha=0.4, linewidth=5, label="one process")
        axes.plot(steps[:CHANGE], changed[:CHANGE], color=common.BLUE, label="a run at TP 2 + SP …")
        axes.plot(steps[CHANGE - 1 :], changed[CHANGE - 1 :], color=common.VERMILION, label="… that continues at DP 2")
        axes.axvline(CHANGE, color=common.INK, linewidth=0.8, linestyle=":")
        axes.set(yscale="log", xlabel="step", ylabel="loss", xlim=(0, STEPS))
        axes.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"], minor=False)
        axes.yaxis.set_minor_formatter("")
        axes.text(CHANGE + 3, max(reference), "checkpoint", va="top", fontsize="small")
        difference = f"differ by at most {largest:.2%}" if largest else "are equal to the last bit"
        axes.set_title(f"losses {difference} (train.bitwise=true)", loc="right", fontsize="small")
        axes.legend(frameon=False)
        TARGET.draw(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw the losses that are there")
    if not parser.parse_args().draw:
        TARGET.save(measure())
    draw(TARGET.load())


if __name__ == "__main__":
    main()
