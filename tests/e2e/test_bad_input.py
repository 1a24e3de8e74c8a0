"""Bad input: one clear text, exit code 2, and nothing started or overwritten."""

from pathlib import Path

import pytest

from tests.e2e.command import UNDER_TORCHRUN, miniature, shardwise, within


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "empty.txt").touch()
    miniature(tmp_path)
    return tmp_path


def test_a_finished_run_is_not_overwritten(folder: Path) -> None:
    old = folder / "old"
    old.mkdir()
    (old / "metrics.jsonl").write_text("precious\n")
    assert "--run-dir (old)" in within("train", "miniature.yaml", "--run-dir", "old", at=folder).failed(2)
    assert (old / "metrics.jsonl").read_text() == "precious\n"


BY_ALL_RANKS: dict[str, tuple[list[str], str]] = {
    "configuration": (["train.global_batch=9"], "train.global_batch (9) must be a multiple of"),
    "data": (["data.path=empty.txt"], "empty.txt holds no text: "),
}


@pytest.mark.parametrize("mistake", BY_ALL_RANKS)
def test_under_torchrun_the_text_appears_once(mistake: str, folder: Path) -> None:
    arguments, text = BY_ALL_RANKS[mistake]
    said = shardwise("train", "miniature.yaml", *arguments, at=folder, program=UNDER_TORCHRUN)
    assert said.code != 0
    assert said.err.count("shardwise: ") == 1, f"the text must appear once, not once a rank:\n{said.err}"
    assert said.err.count(text) == 1
    # The second: torchrun's own error where the other rank ends just as it is to be killed.
    assert "exitcode  : 2" in said.err or "ProcessLookupError" in said.err, "torchrun must see that the input is wrong"
    assert not (folder / "runs").exists()
