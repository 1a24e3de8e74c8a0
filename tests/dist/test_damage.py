"""Checkpoints that are not what was written: what a resume reads of them, it finds."""

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from tokenizers import Tokenizer, models

from shardwise.base.errors import ShardwiseError
from shardwise.checkpoint.storage.checkpoint_folders import summarize_checkpoints
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config
from shardwise.train.resume import restore_first_intact
from tests.dist.checkpoints import Result, State, canonical_state, make_trainer, run, step_folder
from tests.dist.dense import run as on_ranks
from tests.dist.test_checkpoint import config_of, differences

RANKS = 4
CONFIG = config_of(2, True, mode="mixed")
OPTIMIZER = "optimizer/rank-00002.safetensors"


@dataclass(frozen=True)
class Written:
    """The checkpoints of steps 1 and 2, and the state in each; `root` is never changed."""

    root: Path
    states: dict[int, State]


@pytest.fixture(scope="module")
def written(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """By four ranks, in mixed precision: bfloat16 weights, masters and moments; with a tokenizer's file."""
    root, tokenizer = tmp_path_factory.mktemp("written"), tmp_path_factory.mktemp("tokenizer")
    words = {"</s>": 0, **{f"w{number}": number for number in range(1, 100)}}
    Tokenizer(models.WordLevel(words, unk_token="w1")).save(str(tokenizer / "tokenizer.json"))
    states = {}
    for step, source in ((1, None), (2, step_folder(root, 1))):
        result: Result = on_ranks(ranks, RANKS, write, CONFIG, source, str(root), tokenizer)[0]
        states[step] = result.state
    return Written(root, states)


def write(config: Config, source: str | None, root: str, tokenizer: Path) -> Result:
    return run(config, 1, 0, source, root, tokenizer=tokenizer)


@pytest.fixture
def root(written: Written, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written.root, tmp_path / "checkpoints"))


@dataclass
class Resumed:
    """What one rank did: the step that it went on from, what it told, and why it did not."""

    step: int | None = None
    warnings: list[str] = field(default_factory=list)
    problem: str | None = None
    state: State = field(default_factory=dict)

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def resume(config: Config, root: str) -> Resumed:
    trainer, resumed = make_trainer(config), Resumed()
    try:
        restored = restore_first_intact(summarize_checkpoints(Root.of(root)), trainer, resumed)  # type: ignore[arg-type]
    except ShardwiseError as error:
        resumed.problem = f"{type(error).__name__}: {error}"
        return resumed
    assert trainer.progress.step == restored.manifest.step
    resumed.step = trainer.progress.step
    state = canonical_state(trainer)
    if trainer.mesh.world.rank == 0:
        resumed.state = state
    return resumed


def change(path: str, at: int) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        content = bytearray((folder / path).read_bytes())
        content[at] ^= 1
        (folder / path).write_bytes(content)

    return changed


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a master or moment": (change(OPTIMIZER, -5), f"{OPTIMIZER} is damaged: bytes "),
    "the manifest": (change("manifest.json", 2000), "manifest.json is damaged: "),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "has no manifest.json: it was not completed"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resume_falls_back_on_every_rank_alike(case: str, written: Written, root: Path, ranks: Any) -> None:
    damage, reason = CASES[case]
    damage(root / "step-00000002")
    results = on_ranks(ranks, RANKS, resume, config_of(4, mode="mixed"), str(root))
    assert [each.problem for each in results] == [None] * RANKS
    assert [each.step for each in results] == [1] * RANKS, "ranks go on from different steps"
    told = results[0].warnings
    assert all(each.warnings == told for each in results), "ranks tell different things"
    assert len(told) == 1
    assert told[0].startswith("the checkpoint of step 2 was left out: ")
    assert reason in told[0]
    assert not differences(results[0].state, written.states[1]), "something of the damaged checkpoint is left"


def silenced(config: Config, root: str) -> Resumed:
    """Where the store gives no answer about one file of the optimizer's state and the weights of step 2."""
    plain = LocalFileSystem.cat_file

    def cat_file(self: LocalFileSystem, path: str, *args: Any, **options: Any) -> bytes:
        if path.endswith((f"step-00000002/{OPTIMIZER}", "step-00000002/model.safetensors")):
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
        content: bytes = plain(self, path, *args, **options)
        return content

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFileSystem, "cat_file", cat_file)
        return resume(config, root)


def test_a_resume_does_not_fall_back_from_a_store_without_an_answer(root: Path, ranks: Any) -> None:
    """It holds what it holds: an older checkpoint would take back steps that are not lost."""
    results = on_ranks(ranks, RANKS, silenced, config_of(4, mode="mixed"), str(root))
    (said,) = {each.problem for each in results}
    assert [each.warnings for each in results] == [[]] * RANKS
    assert str(said).startswith(
        "RunError: the checkpoint of step 2 could not be used, and no older one is taken for it"
    )
    assert f"step-00000002/{OPTIMIZER} cannot be read: Connection timed out; start again" in str(said)
    assert sorted(each.name for each in root.iterdir()) == ["step-00000001", "step-00000002"], "it was set aside"
    found = on_ranks(ranks, RANKS, resume, config_of(4, mode="mixed"), str(root))
    assert [each.step for each in found] == [2] * RANKS, "once the store answers"


def test_no_intact_checkpoint_is_one_error(root: Path, ranks: Any) -> None:
    change(OPTIMIZER, -5)(root / "step-00000002")
    (root / "step-00000001" / OPTIMIZER).unlink()
    said = [each.problem for each in on_ranks(ranks, RANKS, resume, CONFIG, str(root))]
    assert len(set(said)) == 1, f"ranks tell different things: {said}"
    text = str(said[0])
    assert text.startswith("RunError: none of the checkpoints is intact (step 2: ")
    assert "; step 1: " in text
    assert text.endswith("or start again in another --run-dir (`shardwise explain none-intact`)")
