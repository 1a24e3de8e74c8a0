"""Bit-equal training through the command line: two layouts compared, a replay at a third, and `verify --bits`."""

from pathlib import Path

import pytest

from tests.e2e.command import miniature, shardwise
from tests.e2e.test_pages import assert_shown, blocks

KEYS = (
    "train.bitwise=true",
    "log.state_hash_every=2",
    "checkpoint.every=2",
    "log.tensorboard=false",
    "log.sample_tokens=8",
)


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    recipe = miniature(tmp_path)
    shardwise("train", recipe, "--nproc", "1", *KEYS, "--run-dir", "one", at=tmp_path).succeeded()
    layout = ("parallel.tensor=2", "parallel.sequence=true")
    shardwise("train", recipe, "--nproc", "2", *layout, *KEYS, "--run-dir", "two", at=tmp_path).succeeded()
    compared = shardwise("compare", "one", "two", "--bits", at=tmp_path).succeeded()
    assert "equal to the bit at all 2 steps with hashes in both" in compared.out
    assert_shown(blocks("docs/bitwise.md")[0], compared.out)
    replay = ("--from", "2", "--nproc", "2", "parallel.tensor=1", "parallel.sequence=false", "parallel.pipeline=2")
    assert "equal to the bit: steps 3 to 4" in shardwise("audit", "two", *replay, at=tmp_path).succeeded().out


@pytest.mark.slow
def test_verify_to_the_last_bit(tmp_path: Path) -> None:
    layouts = ("--layouts", "parallel.pipeline=1", "optimizer.zero=1", "--nproc", "2", "--steps", "2")
    verified = shardwise("verify", miniature(tmp_path), "--bits", *layouts, at=tmp_path).succeeded()
    assert "equal to the bit" in verified.out
    assert "trained like one process" in verified.out
