"""What a run says of its saves: that it goes on without a checkpoint, where it does."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from shardwise.checkpoint.save import Saved, Saver
from shardwise.errors import LostPeerError, RunError, see
from shardwise.mesh import Mesh
from shardwise.train.saving import Checkpoints
from tests.unit.train.test_report import config, reporter

LOST = "rank 0 lost the connection to another rank"


class Ended:
    """Saves that have ended."""

    def __init__(self, *saves: Saved) -> None:
        self.saves = list(saves)

    def wait(self) -> None:
        pass

    def finished(self) -> list[Saved]:
        found, self.saves = self.saves, []
        return found


@contextmanager
def checkpoints(path: Path, *saves: Saved) -> Iterator[tuple[Checkpoints, io.StringIO]]:
    made, stream = reporter(path)
    saver: Any = Ended(*saves)
    with made:
        yield Checkpoints(cast(Saver, saver), config(), made, Mesh(device="cpu"), lambda: None, {}), stream


def test_a_run_that_fails_does_not_go_on_without_a_checkpoint(tmp_path: Path) -> None:
    saved = Saved(24, "step-00000024", 0, 0.0, 0.0, LOST, lost_peer=True)
    with checkpoints(tmp_path, saved) as (saving, stream):
        with pytest.raises(RunError, match="a rank is gone"), saving:
            raise RunError("a rank is gone")
        assert stream.getvalue() == f"warning: no checkpoint of step 24: {LOST}{see('checkpoints#save-failed')}\n"


def test_a_last_checkpoint_that_another_rank_prevents_is_a_consequence(tmp_path: Path) -> None:
    """The launcher names the rank that ended; this one only says what it waited for."""
    saved = Saved(24, "step-00000024", 0, 0.0, 0.0, LOST, lost_peer=True)
    said = rf"^{LOST} while the checkpoint of step 24 was saved$"
    with checkpoints(tmp_path, saved) as (saving, _), pytest.raises(LostPeerError, match=said):
        saving.finish()


def test_what_could_not_be_removed_is_a_warning(tmp_path: Path) -> None:
    made, stream = reporter(tmp_path)
    with made:
        made.start()
        made.saved(Saved(40, "step-00000040", 7, 0.5, 2.0, warning="step-00000020: Permission denied"))
    told = "what is left of other checkpoints could not be removed: step-00000020: Permission denied"
    assert told in " ".join(stream.getvalue().split())
