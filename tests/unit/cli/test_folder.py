"""What `evaluate` and `generate` take from the folder that they are given, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwise.cli import main

COMMANDS = {
    "evaluate": ("evaluate", "folder", "data.dataset=tiny"),
    "generate": ("generate", "folder", "--prompt", "a"),
}


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose model is a class beside it, in the current directory: importing it leaves a mark."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"family": "strange_code:M", "vocab_size": 300}))
    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
    (tmp_path / "strange_code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("given", [(), ("model.family=other:M",), ("model.family=gpt",)])
def test_a_folder_runs_no_code_that_the_user_does_not_name(
    command: str, given: tuple[str, ...], strange: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMANDS[command], *given]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "if you trust it, give model.family=strange_code:M too" in said.err
    assert not (strange / "ran").exists()
