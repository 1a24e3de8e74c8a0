"""`shardwise checkpoint` as a user runs it, on checkpoints that were written without training."""

import json
from pathlib import Path

import pytest

from shardwise.checkpoint.format.manifest import MANIFEST
from shardwise.checkpoint.storage.checkpoint_folders import partial_name, step_name
from shardwise.checkpoint.storage.root import Root
from shardwise.checkpoint.storage.run_identity import RunOwner, record_owner
from shardwise.runs.folder import RunDirectory, RunLock
from tests.e2e.command import CASES, within
from tests.stored import small_tensors, write_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with four checkpoints, the newest not completed; `runs/latest` points to it."""
    run = tmp_path / "runs/mine"
    for step in (100, 200, 300):
        write_checkpoint(run / "checkpoints", step, small_tensors(step), ranks=2)
    (run / "checkpoints" / step_name(400)).mkdir()
    (run / "checkpoints" / partial_name(250)).mkdir()
    (run / "checkpoints" / partial_name(250) / "part").write_bytes(bytes(2048))
    (tmp_path / "runs/latest").symlink_to("mine")
    return run


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / step_name(step)


def test_inspect_lists_a_run_and_shows_a_checkpoint(run: Path) -> None:
    at = run.parents[1]
    out = within("checkpoint", "inspect", at=at).succeeded().out
    lines = out.splitlines()
    assert lines[0] == "runs/latest/checkpoints: 4 checkpoints"
    assert lines[1].split() == ["step", "size", "age", "state"]
    assert lines[2].split()[:3] == ["400", "0", "B"]
    assert lines[2].endswith("has no manifest.json: it was not completed")
    assert [line.split()[0] for line in lines[3:]] == ["300", "200", "100"]
    assert all(line.endswith("complete") for line in lines[3:])
    found = json.loads(within("checkpoint", "inspect", run, "--json", at=at).succeeded().out)
    assert [(each["step"], each["state"]) for each in found] == [
        (400, "incomplete"), (300, "complete"), (200, "complete"), (100, "complete")
    ]  # fmt: skip
    out = within("checkpoint", "inspect", checkpoint(run, 300), "--tensors", at=run).succeeded().out
    for text in (
        "step        300",
        "samples     2,400",
        "parameters  llama, 121",
        "layout      TP 1 × PP 1 × DP 2 = 2 ranks",
        "optimizer   name adamw",
        "dtypes      model BF16, exp_avg F32, exp_avg_sq F32, master F32",
        "shardwise 0.1.0",
        "optimizer/rank-00001.safetensors",
        "fingerprint tiny",
    ):
        assert text in out
    assert len([line for line in out.splitlines() if "embed.weight" in line and "[11, 6]" in line]) == 4
    found = json.loads(within("checkpoint", "inspect", checkpoint(run, 300), "--json", at=run).succeeded().out)
    assert (found["step"], found["parameters"], found["model"]["family"]) == (300, 121, "llama")
    assert len(found["files"]) == 4


def test_verify(run: Path) -> None:
    out = within("checkpoint", "verify", run, at=run).succeeded().out
    assert out.count("intact; 4 files, 16 tensors") == 3
    assert f"{step_name(400)}: skipped, it was not completed" in out
    weights = checkpoint(run, 200) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    result = within("checkpoint", "verify", run, at=run)
    assert result.code == 1
    assert result.err == ""
    assert f"{step_name(200)}: 1 problem; 4 files" in result.out
    assert "model.safetensors is damaged: bytes 0 to" in result.out
    assert within("checkpoint", "verify", checkpoint(run, 300), at=run).succeeded()
    found = json.loads(within("checkpoint", "verify", checkpoint(run, 200), "--json", at=run).out)
    assert found["state"] == "damaged"
    assert len(found["problems"]) == 1


def test_prune(run: Path) -> None:
    folder = run / "checkpoints"
    before = sorted(path.name for path in folder.iterdir())
    out = within("checkpoint", "prune", "--keep", "1", "--dry-run", run, at=run).succeeded().out
    assert out.count("would remove") == 3
    assert sorted(path.name for path in folder.iterdir()) == before
    for kind in ("abandoned", "damaged"):
        (folder / f"{step_name(150)}.{kind}").mkdir()
    out = within("checkpoint", "prune", run, "--keep", "1", "--keep-every", "100", at=run).succeeded().out
    assert out.splitlines() == [f"removed {folder / partial_name(250)} (2.0 KiB)", "1 folder, 2.0 KiB freed"]
    out = within("checkpoint", "prune", run, "--keep", "1", "--abandoned", at=run).succeeded().out
    assert out.count("removed ") == 4
    assert sorted(path.name for path in folder.iterdir()) == [step_name(300), step_name(400)]
    assert within("checkpoint", "prune", run, "--keep", "1", at=run).succeeded().out == "nothing to remove\n"


@pytest.mark.parametrize("owned", [False, True])
def test_a_run_under_way_is_not_pruned(run: Path, owned: bool) -> None:
    """Whether its folder is given, that of its checkpoints, or, where these lie elsewhere, what they are told of it."""
    (run / "config.yaml").write_text("checkpoint: {path: null}\n")
    folder = run / "checkpoints"
    if owned:
        folder = folder.rename(run.parent / "far")
        RunDirectory(run).id()
        record_owner(Root.of(folder), RunOwner.here("mine", run))
    before = sorted(folder.iterdir())
    for given in (folder,) if owned else (folder, run):
        command = ("checkpoint", "prune", given, "--keep", "1")
        with RunLock(run):
            text = within(*command, at=run).failed(2)
            assert within(*command, "--dry-run", at=run).succeeded().out.count("would remove") == 3
        assert text.startswith(f"shardwise: the run in {run} is under way: ")
        assert sorted(folder.iterdir()) == before
    assert within(*command, at=run).succeeded().out.count("removed ") == 3


def test_what_is_left_out_is_said(run: Path) -> None:
    """On standard error: what a program reads is the same."""
    weights = checkpoint(run, 300) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for command in (("export", run, "out"), ("diff", run, checkpoint(run, 200))):
        found = within("checkpoint", *command, at=run)
        assert found.code == 0
        assert found.err.startswith(f"taking {checkpoint(run, 200)}, the newest intact one: ")
        assert f"{step_name(400)} has no {MANIFEST}: it was not completed; " in found.err
        assert f"{step_name(300)}/model.safetensors is damaged: its length (" in found.err


def test_diff(run: Path) -> None:
    other = write_checkpoint(run / "other", 300, small_tensors(300), ranks=3, config={"train": {"steps": 7}}).local()
    out = within("checkpoint", "diff", checkpoint(run, 300), other, at=run).succeeded().out
    assert ["train.steps", "1000", "7"] in [line.split() for line in out.splitlines()]
    assert "model: 4 of 4 tensors equal" in out
    assert out.endswith("equal: the same tensors to the bit\n")
    result = within("checkpoint", "diff", checkpoint(run, 100), checkpoint(run, 200), at=run)
    assert result.code == 1
    assert "exp_avg: 0 of 4 tensors equal" in result.out
    assert result.out.endswith("different\n")
    found = json.loads(within("checkpoint", "diff", checkpoint(run, 100), checkpoint(run, 200), "--json", at=run).out)
    assert found["equal"] is False
    assert len(found["tensors"]) == 16
    command = ("checkpoint", "diff", checkpoint(run, 100), checkpoint(run, 200), "--tolerance")
    assert within(*command, "1e9", at=run).succeeded().out.endswith("within the tolerance (1e+09)\n")
    assert "--tolerance (-1.0) must be a number from 0" in within(*command, "-1", at=run).failed(2)


@pytest.mark.parametrize(("arguments", "text"), CASES["wrong checkpoints"])
def test_wrong_input_is_told(arguments: list[str], text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name in ("empty", "step-00000007"):
        (tmp_path / name).mkdir()
    assert text in within("checkpoint", *arguments, at=tmp_path).failed(2)


def test_a_strangers_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config={"model": {"family": "\x1b[2Jllama"}}).local()
    out = within("checkpoint", "inspect", folder, at=tmp_path).succeeded().out
    assert "\x1b" not in out
    assert "\\x1b[2Jllama" in out
