"""When a run saves, and what a checkpoint says of its place."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from shardwise.checkpoint.format.manifest import Manifest
from shardwise.data.samples.causal import TokenBatches
from shardwise.distributed.mesh import Mesh
from shardwise.train.checkpoint_saving import CheckpointSaver
from shardwise.train.step_record import Progress
from tests.dist.training import make_config

BATCHES = TokenBatches(np.arange(99), 16, seed=1)


class Saves:
    """In place of a `Saver`."""

    def __init__(self) -> None:
        self.saved: dict[int, Any] = {}

    def save(self, step: int, described: Any) -> None:
        self.saved[step] = described

    def finished(self) -> list[Any]:
        return []


def saved(every: int, stopped_at: int | None = None) -> tuple[dict[int, Any], str | None]:
    """What a run of 5 steps saves, and who stopped it; three batches of 8 were left out before it."""
    config = make_config(checkpoint={"every": every}, train={"steps": 5})
    made: Any = Saves()
    progress, stop = Progress(), None
    feed = SimpleNamespace(batches=BATCHES)
    training: Any = SimpleNamespace(config=config, mesh=Mesh(), progress=progress, feed=feed)
    reporter: Any = None
    checkpoints = CheckpointSaver(training, made, reporter, lambda: "somebody" if progress.step == stopped_at else None)
    for step in range(1, 6):
        progress.step, progress.samples, progress.position = step, 8 * step, 8 * step + 24
        checkpoints.after_step(step == 5)
        stop = checkpoints.stopped_by
        if stop is not None:
            break
    return made.saved, stop


def test_when_a_run_saves_and_what_is_saved_again() -> None:
    """The place in the data is ahead of the samples."""
    found, stop = saved(2)
    assert (list(found), stop) == ([2, 4, 5], None)
    found, _ = saved(0)
    assert list(found) == [5]
    assert (found[5]["samples"], found[5]["position"]) == (40, 64)
    found, stop = saved(0, stopped_at=3)
    assert (list(found), stop) == ([3], "somebody")
    # The losses too, by which a spike is noticed after the next resume.
    made: Any = Saves()
    unused: Any = None
    checkpoints = CheckpointSaver(unused, made, unused, lambda: None)
    progress = {"samples": 40, "position": 64, "tokens": 640, "losses": (2.0, 1.5), "schedule": {}, "rng": {}}
    unknown: dict[str, Any] = {"config": {}, "versions": {}, "created": "", "files": (), "tensors": {}}
    checkpoints.save_again(Manifest(step=5, **progress, layout={}, data={}, optimizer={}, **unknown))  # type: ignore[arg-type]
    assert made.saved == {5: progress}
