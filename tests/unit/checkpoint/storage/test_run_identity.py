"""What a folder says of the run that it holds."""

from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError
from shardwise.base.parsing import dump_yaml
from shardwise.checkpoint.storage.root import Root
from shardwise.checkpoint.storage.run_identity import RunOwner, earlier_run, record_owner
from shardwise.runs.folder import RunDirectory
from tests.dist.training import make_config
from tests.stored import write_checkpoint

CONFIG = make_config()
ANOTHER = make_config(train={"seed": 8})


def with_checkpoint(path: Path, *, at: Path | None = None) -> RunDirectory:
    """An intact run of `CONFIG` that has saved step 100."""
    run = RunDirectory(path).create()
    run.write_config(dump_yaml(CONFIG.model_dump(mode="json")))
    run.metrics.write_text('{"event": "step", "step": 1}\n')
    root = Root.of(at or run.checkpoints)
    write_checkpoint(root, 100, config=CONFIG.model_dump(mode="json"), data={"run": run.id()})
    record_owner(root, RunOwner.here(run.id(), run.path))
    return run


def test_a_run_is_continued_with_its_own_configuration_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_checkpoint(tmp_path)
    monkeypatch.setattr("shardwise.checkpoint.format.manifest.Manifest.read", None)
    assert earlier_run(run, CONFIG) == CONFIG.model_dump(mode="json"), "no manifest is needed"
    assert earlier_run(RunDirectory(tmp_path / "new"), CONFIG) is None
    with pytest.raises(ConfigError, match=r"train.seed \(8\) must be 7"):
        earlier_run(run, ANOTHER)


def test_a_run_whose_configuration_cannot_be_read_is_refused(tmp_path: Path) -> None:
    run = with_checkpoint(tmp_path)
    for content, reason in (
        (None, "No such file"),
        (b"", "it holds no configuration"),
        (b"- 1", "it holds no configuration"),
        (b"model: {", "is not valid YAML"),
        (b"model: \xff", "invalid start byte"),
        (b"a: 1\na: 2\na: 3\n", r"line 2: a is given twice; \S+, line 3: a is given twice"),
    ):
        run.config.unlink(missing_ok=True)
        if content is not None:
            run.config.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"config.yaml cannot be read \(.*{reason}.*put a copy of it back"):
            earlier_run(run, CONFIG)


def test_a_start_that_took_no_step_does_not_bind_its_folder(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    run.write_config(dump_yaml(CONFIG.model_dump(mode="json")))
    for events in ("", '{"event": "start"}\n{"event": "stop", "reason": "failed: x"}\n'):
        if events:
            run.metrics.write_text(events)
        assert earlier_run(run, CONFIG) == CONFIG.model_dump(mode="json")
        assert earlier_run(run, ANOTHER) is None
