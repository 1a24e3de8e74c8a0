"""`shardwise --completion SHELL` prints a script by which the shell completes commands, options, recipes and keys."""

import os
import pty
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli import main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_knows_commands_options_recipes_and_keys(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["--completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("checkpoint", "diff", "run-dir", "llama2-tiny", "train.global_batch="):
        assert word in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True, capture_output=True).stderr == ""


SETUP = {
    "zsh": 'autoload -Uz compinit; compinit -u -d dump; eval "$(<script)"; '
    "show() { print -r -- $BUFFER >> lines; BUFFER=; }; zle -N show; bindkey '^Xs' show\n",
    "bash": '. ./script; show() { echo "$READLINE_LINE" >> lines; READLINE_LINE=; }; bind -x \'"\\C-xs": show\'\n',
}
"""What a shell reads first: Ctrl-X s writes the line that is being typed into a file, and empties it."""
TYPED = {
    "tr": "train ",
    "train llama2-t": "train llama2-tiny ",
    "train mi": "train mine.yaml ",
    "train gpt-tiny train.ste": "train gpt-tiny train.steps=",
    "train gpt-tiny train.steps=3 optimizer.warm": "train gpt-tiny train.steps=3 optimizer.warmup_steps=",
    "train gpt-tiny train.steps=3 --run-d": "train gpt-tiny train.steps=3 --run-dir ",
}


@pytest.mark.parametrize("shell", SETUP)
def test_a_shell_completes_what_is_typed(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["--completion", shell]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "mine.yaml").touch()
    lines = tmp_path / "lines"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "dumb")
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [shell, "-f" if shell == "zsh" else "--norc", "-i"], stdin=end, stdout=end, stderr=end, cwd=tmp_path,
        start_new_session=True,
    )  # fmt: skip
    os.close(end)
    try:
        os.write(terminal, SETUP[shell].encode())
        shown = b""
        for number, line in enumerate(TYPED, 1):
            os.write(terminal, f"shardwise {line}\t\x18s".encode())
            while not lines.exists() or lines.read_text().count("\n") < number:
                assert select.select([terminal], [], [], 60)[0], shown
                shown += os.read(terminal, 4096)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert lines.read_text().splitlines() == [f"shardwise {line}" for line in TYPED.values()]


@pytest.mark.parametrize("arguments", [["--completion"], ["--completion", "csh"], ["--completion=csh"]])
def test_another_shell_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "must be bash, zsh or fish" in capsys.readouterr().err


def test_the_library_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--completion", "bash"]) == 2
    assert "pip install 'shardwise[completion]'" in capsys.readouterr().err
