"""A run's checkpoints: which are found, which are intact at a glance, which stay."""

import itertools
import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shardwise.base.errors import ConfigError, StoreError
from shardwise.base.yaml_and_json import dump_yaml
from shardwise.checkpoint.format.manifest import MANIFEST, Manifest
from shardwise.checkpoint.format.verify import verify_checkpoint
from shardwise.checkpoint.storage import checkpoint_folders as folders
from shardwise.checkpoint.storage import root as places
from shardwise.checkpoint.storage.checkpoint_folders import list_checkpoints, partial_name, removable_folders, step_name
from shardwise.checkpoint.storage.root import Root
from shardwise.checkpoint.storage.run_identity import RunOwner, earlier_run, record_owner
from shardwise.runs.folder import RunDirectory
from tests.dist.training import make_config
from tests.stored import bfloat16, write_checkpoint

TENSORS = {"model": {"w": bfloat16(0, 4, 4)}}


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """Six checkpoints, of which the newest was not completed and the third is short of a byte; and strangers."""
    for step in range(100, 700, 100):
        write_checkpoint(tmp_path, step, TENSORS)
    (tmp_path / step_name(600) / MANIFEST).unlink()
    weights = tmp_path / step_name(300) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for name in (partial_name(200), partial_name(700), "step-7", "notes", "step-00000500.abandoned"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    return Root.of(tmp_path)


def no_answer(folder: Root) -> Any:
    raise StoreError(f"{folder} cannot be read: no answer")


def steps(found: Iterable[folders.StepFolder]) -> list[int]:
    return [each.step for each in found]


def remove_all_but(keep: int, root: Root) -> None:
    going, leftovers = removable_folders(root, keep)
    for folder in [*(each.folder for each in going), *leftovers]:
        folders.remove_checkpoint(folder)


def test_newest_first_and_what_is_wrong(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(list_checkpoints(root))
    assert steps(found) == [600, 500, 400, 300, 200, 100]
    problems = {each.step: each.problem for each in found if each.problem}
    assert set(problems) == {600, 300}
    assert "step-00000600 has no manifest.json: it was not completed" in str(problems[600])
    assert "model.safetensors is damaged: its length" in str(problems[300])
    assert not any(each.unreadable for each in found)
    (root / step_name(100)).rename(root / step_name(150))
    problem = str(list(list_checkpoints(root))[-1].problem)
    assert problem.endswith("is of step 100, and its folder of step 150")
    newer = (root / step_name(500) / MANIFEST).read().replace(b'"version":1', b'"version":2')
    (root / step_name(500) / MANIFEST).write(newer)
    assert {each.step for each in list_checkpoints(root) if each.unreadable} == {500}
    monkeypatch.setattr(Manifest, "read", no_answer)
    assert all(each.unreadable for each in list_checkpoints(root))


@pytest.mark.parametrize(
    ("keep", "every", "gone"),
    [(None, None, []), (None, 200, []), (1, 200, [300, 100]), (0, None, [400, 300, 200, 100]), (9, None, [300])],
)
def test_what_is_kept(root: Root, keep: int | None, every: int | None, gone: list[int]) -> None:
    going, _ = removable_folders(root, keep, every)
    assert steps(going) == gone
    assert all(each.bytes > 0 for each in going)
    assert all(each.folder.exists() for each in going), "asking removes nothing"


def test_the_newest_intact_stay_and_what_may_be_intact(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that gives no answer about a checkpoint is no reason to remove it."""
    read = Manifest.read

    def some_answers(folder: Root) -> Manifest:
        return no_answer(folder) if folder.name in (step_name(400), step_name(100)) else read(folder)

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "read", some_answers)
        assert steps(removable_folders(root, 2)[0]) == [300]
    remove_all_but(2, root)
    assert set(root.names()) == {
        step_name(600), step_name(500), step_name(400), partial_name(700), "step-7", "notes", "step-00000500.abandoned"
    }  # fmt: skip


def lengths(root: Root, *steps: int) -> dict[int, dict[str, int]]:
    """Of checkpoints as they were saved."""
    return {step: {each.path: each.bytes for each in Manifest.read(root / step_name(step)).files} for step in steps}


@pytest.mark.parametrize(
    ("mine", "keep", "every", "gone"),
    [
        ((500,), None, 200, []),
        ((500,), 2, None, [300, 200, 100]),
        ((500,), 3, None, [200, 100]),  # the manifest of step 300 is there, and who wrote it is unknown
        ((500, 300), 3, None, [300, 100]),
        ((400,), 1, None, [300, 200, 100]),  # what is newer may be somebody's save
    ],
)
def test_after_a_save_no_manifest_is_read(
    mine: tuple[int, ...], keep: int | None, every: int | None, gone: list[int], root: Root, monkeypatch: Any
) -> None:
    saved = lengths(root, *mine)
    (root / step_name(200) / "note").write(b"what somebody adds does not matter")
    monkeypatch.setattr(Manifest, "read", None)
    assert folders.prune_checkpoints(root, saved, keep, every) == gone
    assert [step for step in range(600, 0, -100) if not (root / step_name(step)).exists()] == gone
    assert not (root / partial_name(200)).exists(), "the leftover of a killed save"
    assert (root / partial_name(700)).exists(), "perhaps a save under way"


def test_after_a_save_incomplete_ones_do_not_count(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = lengths(root, 500)
    (root / step_name(400) / MANIFEST).remove()
    (root / step_name(300) / MANIFEST).write(b"")
    assert folders.prune_checkpoints(root, saved, 2) == [400, 300, 100]
    saved, before = lengths(root, 500), root.names()
    monkeypatch.setattr(Root, "files", no_answer)
    with pytest.raises(StoreError, match="no answer"):
        folders.prune_checkpoints(root, saved, 2)
    assert root.names() == before


def test_setting_aside(root: Root) -> None:
    assert folders.abandon_checkpoint(root, 500).name == "step-00000500.abandoned-2"
    assert folders.abandon_checkpoint(root, 300, damaged=True).name == "step-00000300.damaged"
    assert steps(list_checkpoints(root)) == [600, 400, 200, 100]
    assert [each.name for each in folders.abandoned_checkpoints(root)] == [
        "step-00000300.damaged", "step-00000500.abandoned", "step-00000500.abandoned-2"
    ]  # fmt: skip
    assert steps(removable_folders(root, 2)[0]) == [100], "what is set aside counts for keep"


class Killed(BaseException):
    """The process ends here."""


CHANGES: dict[str, list[tuple[Any, str]]] = {
    "disk": [(os, "unlink"), (os, "rmdir"), (os, "rename")],
    "object store": [(MemoryFileSystem, "cp_file"), (MemoryFileSystem, "rm_file")],
}
"""What changes a place, one name at a time."""


def ended_before(change: int, kind: str, action: Callable[[], None]) -> bool:
    """Whether the action was ended just before its change of that number, and not after its last one."""
    counter = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in CHANGES[kind]:
            unchanged = getattr(owner, name)

            def counted(*args: Any, plain: Any = unchanged, **options: Any) -> Any:
                if next(counter) == change:
                    raise Killed
                return plain(*args, **options)

            patch.setattr(owner, name, counted)
        try:
            action()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("kind", CHANGES)
def test_a_crash_during_a_replacement_loses_neither(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it comes, one of the two is found, complete; what goes on from there gives it its name."""
    monkeypatch.setattr(places, "_OBJECT_STORES", {"memory"})
    seeds = []
    for change in itertools.count():
        root = Root.of(tmp_path / str(change) if kind == "disk" else f"memory://{uuid.uuid4().hex}")
        old = write_checkpoint(root, 100, TENSORS, rng={"seed": 1})
        new = write_checkpoint(root / "new", 100, TENSORS, rng={"seed": 2})
        new.rename(root / partial_name(100))
        ended = ended_before(
            change, kind, lambda root=root, old=old: folders.put_checkpoint_in_place(root / partial_name(100), old)
        )
        (found,) = folders.summarize_checkpoints(root)
        if found.folder.name != old.name:
            folders.put_checkpoint_in_place(found.folder, old)
        report = verify_checkpoint(old)
        assert report.sound, f"ended before change {change}: {report.problems}"
        seeds.append(Manifest.read(old).rng["seed"])
        if not ended:
            break
    assert len(seeds) > 4
    assert seeds == [1] + [2] * (len(seeds) - 1), "the new one counts once the old one is no longer complete"


def test_a_partial_folder_is_a_checkpoint_only_where_it_is_complete(root: Root) -> None:
    assert steps(folders.summarize_checkpoints(root)) == [600, 500, 400, 300, 200, 100], "700 has no manifest"
    assert {each.step for each in folders.summarize_checkpoints(root) if each.incomplete} == {600}
    for step in (500, 600):
        write_checkpoint(root / "new", step, TENSORS).rename(root / partial_name(step))
    partial = steps(each for each in folders.summarize_checkpoints(root) if each.folder.name == partial_name(each.step))
    assert partial == [600], "500 has a complete one of its own name"


def test_a_prune_that_breaks_off_leaves_no_checkpoint(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that lacks files must not have a manifest any more."""
    remove = Root.remove

    def break_off(place: Root) -> None:
        if place.is_folder():
            no_answer(place)
        remove(place)

    monkeypatch.setattr(Root, "remove", break_off)
    with pytest.raises(StoreError, match="no answer"):
        remove_all_but(2, root)
    assert not (root / step_name(300) / MANIFEST).exists()


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
