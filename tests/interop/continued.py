"""A training that another program began goes on here, by the command line: the same batches, the losses compared."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.data.samples.order import SampleOrder

BEFORE, AFTER, BATCH, LENGTH, VOCABULARY = 6, 10, 4, 32, 128
SAMPLES, SEED = 200, 1234


def rows() -> np.ndarray:
    """All samples, [samples, ids]: texts with a rule, so that something is learned."""
    generator = np.random.default_rng(11)
    start = generator.integers(0, VOCABULARY, (SAMPLES, 1))
    return (start + np.arange(LENGTH + 1) * generator.integers(1, 4, (SAMPLES, 1))) % VOCABULARY


def batches() -> np.ndarray:
    """The batches of a run here, [steps, sequences, ids]."""
    order = SampleOrder(SAMPLES, SEED).indices(0, (BEFORE + AFTER) * BATCH)
    return rows()[order].reshape(BEFORE + AFTER, BATCH, LENGTH + 1)


class Samples:
    """`hooks.data`: the samples by number."""

    def __init__(self, config: Any, part: str) -> None:
        self.rows = rows() if part == "train" else rows()[:4]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> list[int]:
        return self.rows[number].tolist()


def shardwise(*words: object, expect: int = 0) -> str:
    """The output of a command."""
    repository = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{repository / 'src'}:{repository}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardwise", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=repository, check=False)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def torchrun(ranks: int, script: Path, *words: object) -> None:
    """Run a script of another program on gloo ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), *map(str, words)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def made(ranks: int, maker: Path, folder: Path, **spec: Any) -> list[float]:
    """The losses of all steps of a maker's program, which trains in a folder as it is specified."""
    np.save(folder / "batches.npy", batches())
    spec |= {"folder": str(folder), "batches": str(folder / "batches.npy"), "save_at": BEFORE}
    (folder / "spec.json").write_text(json.dumps(spec))
    torchrun(ranks, maker, folder / "spec.json")
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


def go_on(source: Path, run: Path, *words: object, keys: Sequence[str] = (), losses: Sequence[float]) -> str:
    """Import a checkpoint into the folder of a run: its next ten losses are those there; what the import said."""
    told = shardwise("checkpoint", "import", source, run, *words)
    assert f"after step {BEFORE}, {BEFORE * BATCH} samples and {BEFORE * BATCH * LENGTH} tokens" in told
    assert losses_here(run, keys) == pytest.approx(losses[BEFORE:], rel=0, abs=1e-5)
    return told


def losses_here(run: Path, keys: Sequence[str]) -> list[float]:
    """The losses of the ten steps after an import into the folder of a run; `keys`: as the maker had them."""
    shardwise(
        "train", run / "imported.yaml", "--run-dir", run, "hooks.data=tests.interop.continued:Samples",
        f"train.global_batch={BATCH}", f"train.sequence_length={LENGTH}", f"train.seed={SEED}",
        f"train.stop_after={AFTER}", "precision.mode=float32", "log.sample_tokens=0", *keys,
    )  # fmt: skip
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert max(event["grad_norm"] for event in steps) > 0.5, "some steps are clipped"
    losses = {event["step"]: event["loss"] for event in steps}
    assert list(losses) == list(range(BEFORE + 1, BEFORE + AFTER + 1))
    return [*losses.values()]
