"""`shardwise data`: what is refused before a byte is read."""

from pathlib import Path

import pytest

from shardwise.checkpoint.storage.root import Root
from shardwise.cli import main


def test_a_checksum_is_of_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Root.of("memory://two/a.txt").write(b"a")
    Root.of("memory://two/b.txt").write(b"b")
    for given, text in (
        ("12ab", "--sha256 (12ab) must be 64 hexadecimal digits"),
        ("0" * 64, "--sha256 must be left out: memory://two/ is 2 files, and it is of one"),
    ):
        assert main(["data", "fetch", "memory://two/", str(tmp_path / "there"), "--sha256", given]) == 2
        assert text in capsys.readouterr().err
    assert not (tmp_path / "there").exists()


def test_raw_tokens_are_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--format", "megatron", "--token-dtype", "uint16", "--eod-token", "0"]
    assert main(["data", "prepare", str(tmp_path), str(tmp_path / "made"), *given]) == 2
    assert f"INPUT ({tmp_path}) must be a file of raw tokens" in capsys.readouterr().err
