"""`shardwise data`: what is refused before a byte is read."""

from pathlib import Path

from shardwise.checkpoint.storage.root import Root
from tests.command_line import CommandLine


def test_a_checksum_is_of_one_file(tmp_path: Path, cli: CommandLine) -> None:
    Root.of("memory://two/a.txt").write(b"a")
    Root.of("memory://two/b.txt").write(b"b")
    for given, text in (
        ("12ab", "--sha256 (12ab) must be 64 hexadecimal digits"),
        ("0" * 64, "--sha256 must be left out: memory://two/ is 2 files, and it is of one"),
    ):
        assert text in cli.refused("data", "fetch", "memory://two/", tmp_path / "there", "--sha256", given)
    assert not (tmp_path / "there").exists()


def test_raw_tokens_are_one_file(tmp_path: Path, cli: CommandLine) -> None:
    given = ["--format", "megatron", "--token-dtype", "uint16", "--eod-token", "0"]
    said = cli.refused("data", "prepare", tmp_path, tmp_path / "made", *given)
    assert f"INPUT ({tmp_path}) must be a file of raw tokens" in said
