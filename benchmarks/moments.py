"""AdamW's moments in bfloat16 beside float32, on llama-small: the curve of the loss, and the time of a step."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import Report, Table, target

STEPS = 320
EVERY = 80
KEYS = (
    "parallel.tensor=1",
    "precision.mode=float32",
    "optimizer.betas=[0.9,0.999]",
    f"train.steps={STEPS}",
    "train.sequence_length=64",  # what moments do depends on steps, not on tokens
    "train.eval_batches=4",
    f"train.eval_every={EVERY}",
    "log.tensorboard=false",
    "log.sample_tokens=0",
)
WAYS = {
    "float32": [],
    "bfloat16": ["precision.moments=bfloat16"],
    "float32, another seed": ["train.seed=1"],
}


def run(rounds: int) -> Report:
    """One training of one process with each dtype: the loss is the same at every layout."""
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        for way, keys in WAYS.items():
            command = [sys.executable, "-m", "shardwise", "train", "llama-small", *KEYS, *keys, "--nproc", "1"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            run_folder = str(Path(folder) / way)
            subprocess.run([*command, "--run-dir", run_folder], env=environment, check=True, capture_output=True)
        return report(Path(folder))


def report(folder: Path) -> Report:
    """The evaluation losses of all, and how far the training losses are apart."""
    from shardwise import Run

    evaluations: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    for way in WAYS:
        trained = Run(folder / way)
        evaluations[way] = [event["loss"] for event in trained.metrics("eval") if event["step"]]
        steps = trained.metrics("step")
        losses[way] = [event["loss"] for event in steps]
        seconds[way] = statistics.median(event["step_seconds"] for event in steps)
    pairs = zip(losses["float32"], losses["bfloat16"], strict=True)
    apart = [narrow / wide - 1 for wide, narrow in pairs]
    steps_of_rows = range(EVERY, STEPS + 1, EVERY)
    rows = [
        [str(step), f"{wide:.4f}", f"{narrow:.4f}", f"{narrow / wide - 1:+.2%}", f"{other / wide - 1:+.2%}"]
        for step, wide, narrow, other in zip(steps_of_rows, *evaluations.values(), strict=True)
    ]
    off = abs(evaluations["bfloat16"][-1] / evaluations["float32"][-1] - 1)
    largest = max(apart, key=abs)
    ratio = seconds["bfloat16"] / seconds["float32"]
    return Report(
        "moments",
        "AdamW's moments in bfloat16 on llama-small",
        [Table(("step", "float32 moments", "bfloat16 moments", "difference", "another seed"), rows)],
        {"evaluation": evaluations, "losses": losses, "step_seconds": seconds},
        [target("evaluation loss at the end, off that of float32 moments by", off, 0.005, at_least=False)],
        [
            "Evaluation losses of one process in float32, sequences of 64, betas of 0.9 and 0.999. The last column is "
            "how far another seed is off with float32 moments: other weights and another order of the data. The losses "
            f"of training steps with bfloat16 moments differ by {statistics.mean(apart):+.2%} in the mean and "
            f"{largest:+.2%} at most. A step takes "
            f"{ratio:.2f} times as long with bfloat16 moments, in separate trainings."
        ],
    )
