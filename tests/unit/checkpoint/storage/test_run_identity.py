"""What a folder says of the run that it holds, also where one of its files is damaged."""

from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.storage.root import Root
from shardwise.checkpoint.storage.run_identity import EarlierRun, Owner, earlier_run, record_owner
from shardwise.config import Config, dump_yaml
from shardwise.runs.folder import RunDirectory
from tests.dist.training import make_config
from tests.stored import write_checkpoint

CONFIG = make_config()


def with_checkpoints(path: Path, *, at: Path | None = None) -> RunDirectory:
    """An intact run of `CONFIG` that has saved the steps 100 and 200, of which the second is damaged."""
    run = RunDirectory(path).create()
    run.write_config(dump_yaml(CONFIG.model_dump(mode="json")))
    run.metrics.write_text('{"event": "step", "step": 1}\n')
    root = Root.of(at or run.checkpoints)
    for step in (100, 200):
        folder = write_checkpoint(root, step, config=CONFIG.model_dump(mode="json"), data={"run": run.id()})
    manifest = folder.local() / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"llama", b"lama!"))
    record_owner(root, Owner.here(run.id(), run.path))
    return run


def found(run: RunDirectory, config: Config = CONFIG) -> EarlierRun:
    earlier = earlier_run(run, config)
    assert earlier is not None
    return earlier


def test_an_intact_run_needs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_checkpoints(tmp_path)
    monkeypatch.setattr("shardwise.checkpoint.format.manifest.Manifest.read", None)
    assert found(run) == EarlierRun(CONFIG.model_dump(mode="json"), run.id())
    assert earlier_run(RunDirectory(tmp_path / "new"), CONFIG) is None


DAMAGE: dict[str, tuple[bytes, bytes]] = {
    "not UTF-8": (b"vocab_size", b"vocab\xffsize"),
    "not YAML": (b"model:", b"model{"),
    "no configuration": (b"model:", b"motel:"),
    "another configuration": (b"vocab_size: 131", b"vocab_size: 1\x331".replace(b"\x33", b"9")),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_one_bad_byte_in_the_configuration_does_not_block_a_run(kind: str, tmp_path: Path) -> None:
    run = with_checkpoints(tmp_path)
    before = run.config.read_bytes()
    run.config.write_bytes(before.replace(*DAMAGE[kind]))
    assert run.config.read_bytes() != before
    earlier = found(run)
    assert earlier.config == CONFIG.model_dump(mode="json")
    (note,) = earlier.notes
    assert note.startswith(f"{run.config} is damaged, and is kept under a number: ")
    assert note.endswith("taken from the checkpoint of step 100")


def test_a_configuration_that_is_not_the_runs_is_refused_by_its_checkpoints_too(tmp_path: Path) -> None:
    run, another = with_checkpoints(tmp_path), make_config(train={"seed": 8})
    with pytest.raises(ConfigError, match=r"train.seed \(8\) must be 7"):
        earlier_run(run, another)
    run.config.unlink()
    with pytest.raises(ConfigError, match=r"train.seed \(8\) must be 7"):
        earlier_run(run, another)


@pytest.mark.parametrize("text", ["\ufffd", '{"id": "0123"}', '{"id": 5}', '{"it": 5}', ""])
@pytest.mark.parametrize("place", ["inside", "elsewhere"])
def test_one_bad_byte_in_the_identity_does_not_block_a_run(place: str, text: str, tmp_path: Path) -> None:
    at = None if place == "inside" else tmp_path / "place"
    run = with_checkpoints(tmp_path / "run", at=at)
    config = make_config(checkpoint={"path": None if at is None else str(at)})
    before = run.id()
    run.identity.write_text(text, encoding="latin-1", errors="replace")
    earlier = found(run, config)
    assert earlier.id == before
    (note,) = earlier.notes
    assert note == f"{run.identity} is damaged: the run's id was taken from its checkpoints"
    assert run.id(earlier.id) == before
    assert found(run, config).notes == ()


def test_a_new_run_does_not_take_the_id_of_another_ones_checkpoints(tmp_path: Path) -> None:
    """Its folder has the name of an earlier run's, which saved elsewhere and is gone."""
    at = tmp_path / "place"
    run = with_checkpoints(tmp_path / "run", at=at)
    run.identity.unlink()
    assert found(run, make_config(checkpoint={"path": str(at)})).id is None


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"config.yaml": ""}, "it holds no configuration"),
        ({"config.yaml": "- 1"}, "it holds no configuration"),
        ({"metrics.jsonl": ""}, "No such file"),
    ],
)
def test_a_run_without_configuration_and_checkpoints_cannot_go_on(
    tmp_path: Path, files: dict[str, str], reason: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(
        ConfigError, match=rf"holds a run whose config.yaml cannot be read \(.*{reason}.*choose another"
    ):
        earlier_run(RunDirectory(tmp_path), CONFIG)


FAILED: list[dict[str, Any]] = [{}, {"metrics.jsonl": '{"event": "start"}\n{"event": "stop", "reason": "failed: x"}\n'}]


@pytest.mark.parametrize("files", FAILED, ids=["before its events", "with events"])
def test_a_start_that_took_no_step_does_not_bind_its_folder(files: dict[str, str], tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    run.write_config(dump_yaml(CONFIG.model_dump(mode="json")))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    another = make_config(train={"seed": 8})
    assert found(run).config == CONFIG.model_dump(mode="json")
    assert earlier_run(run, another) is None


def test_a_run_that_has_saved_elsewhere_binds_its_folder(tmp_path: Path) -> None:
    """Though the command names another place now, and its events are gone."""
    at = tmp_path / "place"
    run = with_checkpoints(tmp_path / "run", at=at)
    run.metrics.unlink()
    run.write_config(dump_yaml(make_config(checkpoint={"path": str(at)}).model_dump(mode="json")))
    with pytest.raises(ConfigError, match=r"train.seed \(8\) must be 7"):
        earlier_run(run, make_config(train={"seed": 8}))
