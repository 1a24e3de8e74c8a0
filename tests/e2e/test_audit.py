"""State hashes through the command line: recorded, verified, compared, and replayed by `shardwise audit`."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.format.manifest import MANIFEST, Manifest
from shardwise.checkpoint.storage.root import Root
from shardwise.checkpoint.storage.run_identity import OWNER
from tests.e2e.command import CASES, metrics, miniature, shardwise, within
from tests.e2e.test_pages import assert_shown, blocks

KEYS = ("log.state_hash_every=2", "checkpoint.every=2", "log.tensorboard=false", "log.sample_tokens=0")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four steps, which saved its state after the second and the last."""
    folder = tmp_path_factory.mktemp("audit")
    shardwise("train", miniature(folder), *KEYS, "--run-dir", "run", at=folder).succeeded()
    return folder


def copy_of(place: Path, name: str) -> Path:
    return Path(shutil.copytree(place / "run", place / name))


def change(run: Path, kind: str, step: int, **fields: Any) -> None:
    """Change an event of a run's record."""
    events = metrics(run)
    for event in events:
        if event["event"] == kind and event["step"] == step:
            event.update(fields)
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_the_hash_is_recorded_and_verified(place: Path) -> None:
    hashes = metrics(place / "run", "state_hash")
    assert [event["step"] for event in hashes] == [2, 4]
    assert "names" in hashes[0]
    assert "names" not in hashes[1]
    described = json.loads(within("checkpoint", "verify", "run", "--json", at=place).succeeded().out)
    assert [one["state_hash"] for one in described] == [event["hash"] for event in reversed(hashes)]
    folder = Root.of(copy_of(place, "wrong") / "checkpoints/step-00000002")
    manifest = Manifest.read(folder)
    sums = json.loads(json.dumps(manifest.state_hash["sums"]))
    sums["exp_avg"]["lm_head.weight"] = "0" * 16
    text = dataclasses.replace(manifest, state_hash={"hash": "0" * 16, "sums": sums}).to_json()
    (folder / MANIFEST).write(text.encode())
    found = within("checkpoint", "verify", folder, at=place)
    assert found.code == 1
    assert f"must be that of the training ({'0' * 16}): it differs in exp_avg/lm_head.weight" in found.out


def test_an_audit_repeats_a_stretch_to_the_bit_and_changes_nothing(place: Path) -> None:
    before = contents(place / "run")
    temporary = place / "temporary"
    temporary.mkdir()
    out = shardwise("audit", "run", at=place, TMPDIR=str(temporary)).succeeded().out
    assert out.startswith("equal to the bit: steps 3 to 4 (losses and gradient norms of 2, state hashes of 1)")
    assert contents(place / "run") == before
    assert not list(temporary.iterdir())
    assert (place / "runs/latest").samefile(place / "run")


@pytest.mark.slow
def test_an_audit_names_the_first_difference_and_knows_keys_that_a_resumption_changed(place: Path) -> None:
    run = copy_of(place, "altered")
    change(run, "step", 2, loss=1.5)
    digests = metrics(run, "state_hash")[0]["tensors"]
    digests["exp_avg"] = "0" * 8 + digests["exp_avg"][8:]
    change(run, "state_hash", 2, hash="0" * 16, tensors=digests)
    found = shardwise("audit", "altered", "--from", "0", "--to", "3", "--json", at=place)
    assert found.code == 1
    result = json.loads(found.out)
    assert result["step"] == 2
    loss, state = result["differences"]
    assert loss.startswith("loss 1.5 in the run, ")
    assert state.endswith("(exp_avg/lm_head.weight)")
    # A return that leaves out a batch and has another learning rate is repeated, and explains earlier steps.
    back = ("checkpoint.resume=2", "train.skip_batches=1", "optimizer.lr=0.01")
    (copy_of(place, "back") / "checkpoints" / OWNER).unlink()  # a copy of a run is refused
    shardwise("train", miniature(place), *KEYS, *back, "--run-dir", "back", at=place).succeeded()
    out = shardwise("audit", "back", "--from", "2", at=place).succeeded().out
    assert out.startswith("equal to the bit: steps 3 to 4")
    found = shardwise("audit", "back", "--from", "0", at=place)
    assert found.code == 1
    assert "the run changed keys after step 2, and the replay has its last ones from the beginning: " in found.out
    assert "optimizer.lr 0.001 → 0.01" in found.out


@pytest.mark.parametrize(("arguments", "complaint"), CASES["wrong audits"])
def test_a_wrong_stretch_is_refused(arguments: list[str], complaint: str, place: Path) -> None:
    assert complaint in within("audit", *arguments, at=place).failed(2)


BITWISE_KEYS = (
    *("train.bitwise=true", "log.state_hash_every=2", "checkpoint.every=2"),
    *("log.tensorboard=false", "log.sample_tokens=8"),
)


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    recipe = miniature(tmp_path)
    shardwise("train", recipe, "--nproc", "1", *BITWISE_KEYS, "--run-dir", "one", at=tmp_path).succeeded()
    layout = ("parallel.tensor=2", "parallel.sequence=true")
    shardwise("train", recipe, "--nproc", "2", *layout, *BITWISE_KEYS, "--run-dir", "two", at=tmp_path).succeeded()
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
