"""Saves one after the other, into memory that is no disk, and of models of the user's own."""

import math
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.base.errors import ConfigError, StoreError
from shardwise.checkpoint.format.verify import verify_checkpoint
from shardwise.checkpoint.save import KeptCheckpoints
from shardwise.checkpoint.storage.checkpoint_folders import list_checkpoints, partial_name, summarize_checkpoints
from shardwise.checkpoint.storage.chunks import ChunkedWriter
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config, load_config
from shardwise.distributed.mesh import Group
from shardwise.models.parameter_counts import parameter_count
from shardwise.verify.canonical_values import canonical_weights
from tests.dist.checkpoints import (
    PLACE,
    Result,
    canonical_state,
    load,
    make_saver,
    make_trainer,
    run,
    save,
    step_folder,
)
from tests.dist.dense import run as on_ranks
from tests.dist.test_checkpoint import config_of, differences
from tests.dist.training import make_config
from tests.e2e.processes import wait_for


@pytest.fixture
def memory() -> str:
    """A folder in fsspec's memory: saves take the same path as to an object store."""
    return f"memory://{uuid.uuid4().hex}/run"


def test_a_save_that_breaks_off_elsewhere_leaves_nothing(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same step can be saved again."""
    trainer = make_trainer(config_of())
    trainer.step()

    def refuse(self: ChunkedWriter, data: Any) -> None:
        raise StoreError("the wire is cut")

    with monkeypatch.context() as patch:
        patch.setattr(ChunkedWriter, "write", refuse)
        (saved,) = save(trainer, memory)
    assert "the wire is cut" in saved.problem
    assert not Root.of(memory).files()
    for _ in range(2):
        (saved,) = save(trainer, memory)
        assert saved.problem is None, saved.problem
    assert not verify_checkpoint(Root.of(memory) / "step-00000001").problems
    assert not differences(run(config_of(), 0, 0, f"{memory}/step-00000001", None).state, canonical_state(trainer))


@pytest.mark.parametrize("place", ["disk", "elsewhere"])
def test_a_failed_save_keeps_the_last(place: str, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it fails while it writes, or where it takes the other one's place."""
    root = str(tmp_path) if place == "disk" else memory
    trainer = make_trainer(config_of())
    save(trainer, root)

    def refuse(*_: Any, **__: Any) -> None:
        raise StoreError("it is nailed down")

    for owner, action in ((ChunkedWriter, "write"), (Root, "rename")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, action, refuse)
            (saved,) = save(trainer, root)
        assert saved.problem == "it is nailed down"
        (found,) = summarize_checkpoints(Root.of(root))
        assert verify_checkpoint(found.folder).sound, f"where {action} fails"
    assert found.folder.name == partial_name(0)


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    """Each has the state of its own step, in little memory, and `keep` 1 lets the first go."""
    trainer = make_trainer(config_of())
    saver = make_saver(trainer, str(tmp_path), buffer_bytes=2**14, keeping=KeptCheckpoints(last=1))
    for step in (1, 2):
        trainer.step()
        saver.save(step, PLACE)
    saver.wait()
    first, second = saver.finished()
    assert (first.problem, second.problem) == (None, None)
    assert (first.removed, second.removed) == ((), (1,))
    assert [each.step for each in list_checkpoints(Root.of(tmp_path))] == [2]
    read = run(config_of(), 0, 0, step_folder(tmp_path, 2), None)
    assert not differences(read.state, canonical_state(trainer))


def test_those_of_every_so_many_steps_stay(tmp_path: Path) -> None:
    saver = make_saver(make_trainer(config_of()), str(tmp_path), keeping=KeptCheckpoints(last=1, every=2))
    for step in (1, 2, 3, 4):
        saver.save(step, PLACE)
        saver.wait()
    assert [each.removed for each in saver.finished()] == [(), (1,), (), (3,)]
    assert [each.step for each in list_checkpoints(Root.of(tmp_path))] == [4, 2]


def test_what_keep_cannot_remove_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise StoreError("it is nailed down")

    monkeypatch.setattr("shardwise.checkpoint.storage.checkpoint_folders.prune_checkpoints", refuse)
    (saved,) = run(config_of(), 1, 0, None, str(tmp_path)).saved
    assert saved.warning == "it is nailed down"
    assert not verify_checkpoint(Root.of(step_folder(tmp_path, 1))).problems


GLOO = "[/pytorch/gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:61234. This is useful. GLHF!"


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_save_while_a_rank_ends_is_told(is_committed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rank 0 has given the checkpoint its name, it is complete; and nobody reads what a library says."""

    def lose(found: Any, group: Group, op: str = "max") -> Any:
        if Path(step_folder(tmp_path, 1)).exists() == is_committed:
            raise RuntimeError(GLOO)
        return found

    trainer = make_trainer(config_of())
    trainer.step()
    saver = make_saver(trainer, str(tmp_path))
    for agreement in ("reduce_numbers", "any_rank"):
        monkeypatch.setattr(f"shardwise.distributed.collectives.{agreement}", lose)
    saver.save(1, PLACE)
    saver.wait()
    (saved,) = saver.finished()
    assert saved.lost_peer
    if is_committed:
        assert saved.problem is None
        assert saved.bytes > 0
        assert not verify_checkpoint(Root.of(step_folder(tmp_path, 1))).problems
    else:
        assert saved.problem == "rank 0 lost the connection to another rank"


def own(name: str, tensor: int = 1, **sections: Any) -> Config:
    model = {"family": f"tests.dist.own_models:{name}", "vocab_size": 131}
    return make_config(model=model, parallel={"tensor": tensor}, **sections)


CASES = {
    "DP 2 in mixed precision, one process": (
        own("Plain", precision={"mode": "mixed"}), 2, own("Plain", precision={"mode": "mixed"}), 1
    ),
    "TP 2, DP 2": (own("Sharded", 2), 2, own("Sharded"), 2),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_own_model_at_another_layout(case: str, ranks: Any, tmp_path: Path) -> None:
    """Frozen and shared weights and such without dims too, which are changed before the save."""
    first, size, second, other = CASES[case]
    written = on_ranks(ranks, size, run_marked, first, str(tmp_path))[0]
    assert written.saved[0].problem is None, written.saved[0].problem
    folder = step_folder(tmp_path, 2)
    report = verify_checkpoint(Root.of(folder))
    assert not report.problems
    read = on_ranks(ranks, other, run, second, 0, 1, folder, None)[0]
    assert not differences(read.state, written.state)
    assert read.losses == pytest.approx(written.losses, rel=1e-5 if first.precision.mode == "float32" else 1e-2)


def run_marked(config: Config, root: str) -> Result:
    """Two steps, a frozen table that no constructor draws, a save, and one more step."""
    trainer = make_trainer(config)
    trainer.step()
    trainer.step()
    with torch.no_grad():
        table: Any = trainer.model.table
        table.copy_(torch.arange(table.numel()).view_as(table))
    state = canonical_state(trainer)
    return Result(saved=save(trainer, root), losses=[trainer.step().loss], state=state)


def test_weights_that_are_no_floating_point_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"order \(int64\) must be float64, float32, float16 or bfloat16"):
        make_trainer(own("WholeNumbers"))


def test_a_weight_may_be_frozen_later_and_not_thawed(tmp_path: Path) -> None:
    """Thawed it would need moments, which nobody has."""
    thawed = make_config(model={"family": "tests.dist.own_models:Plain", "vocab_size": 131, "frozen": False})
    for name, config in (("frozen", own("Plain")), ("thawed", thawed)):
        run(config, 1, 0, None, str(tmp_path / name))
    with pytest.raises(ConfigError, match="lacks the exp_avg of table"):
        load(make_trainer(thawed), step_folder(tmp_path / "frozen", 1))
    trainer = make_trainer(own("Plain"))
    load(trainer, step_folder(tmp_path / "thawed", 1))
    trainer.step()


def odd_config(zero: int) -> Config:
    """GPT2-XL's own heads, vocabulary and positions; fewer layers and narrower heads."""
    narrow = {"hidden_size": 50, "intermediate_size": 200, "num_hidden_layers": 2}
    dropout = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
    return make_config(
        model=load_config("gpt2-xl", []).model.model_dump() | narrow | dropout,
        train={"steps": 4, "global_batch": 4, "micro_batch": 1},
        optimizer={"zero": zero},
    )


def train_odd(zero: int) -> tuple[list[float], dict[str, tuple[int, ...]], dict[str, int]]:
    """Losses, the shapes of the canonical tensors, and the bytes of the optimizer's state on this rank."""
    torch.set_num_threads(1)
    trainer = make_trainer(odd_config(zero))
    losses = [trainer.step().loss for _ in range(2)]
    shapes = {name: tuple(tensor.shape) for name, tensor in canonical_weights(trainer.model).items()}
    return losses, shapes, trainer.optimizer.state_bytes()


def test_odd_heads_and_an_odd_vocabulary_train_under_zero(ranks: Any) -> None:
    """At four ranks, which divide neither; padding is no parameter, and no size is rounded."""
    wanted, _, whole = train_odd(0)
    everyone = ranks(4).run(train_odd, 1)
    losses, shapes, _ = everyone[0]
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert shapes["transformer.wte.weight"] == (50257, 50)
    assert shapes["transformer.h.0.attn.c_attn.weight"] == (50, 150)
    parameters = parameter_count(odd_config(1).model)
    assert parameters == sum(math.prod(shape) for shape in shapes.values())
    held = sum(rank["state"] - rank["padding"] for _, _, rank in everyone)
    assert held == whole["state"] - whole["padding"] == 8 * parameters, "two float32 moments a parameter, over all"


PATIENCE = 60.0


def save_together(root: str, meeting: str) -> list[tuple[str, int]]:
    """Of each file that this rank wrote: name and bytes. Writing waits until every rank has begun as many files."""
    sizes: dict[str, int] = {}
    done: list[tuple[str, int]] = []
    begin, write, close = ChunkedWriter.__init__, ChunkedWriter.write, ChunkedWriter.close
    trainer = make_trainer(config_of(2))
    world = trainer.mesh.world

    def begin_together(self: Any, file: Root, size: int, path: str | None = None) -> None:
        begin(self, file, size, path)
        self.shown = str(file)
        sizes[self.shown] = 0
        if self.shown.endswith(".safetensors"):
            number = sum(name.endswith(".safetensors") for name in sizes)
            Path(meeting, f"{number}-{world.rank}").touch()
            begun = wait_for(lambda: len(list(Path(meeting).glob(f"{number}-*"))) == world.size, PATIENCE)
            assert begun, f"some rank begins its file {number} only when another has ended"

    def counting(self: Any, data: Any) -> None:
        sizes[self.shown] += memoryview(data).nbytes
        write(self, data)

    def closing(self: Any) -> Any:
        entry = close(self)
        done.append((entry.path, sizes[self.shown]))
        return entry

    trainer.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkedWriter, "__init__", begin_together)
        patch.setattr(ChunkedWriter, "write", counting)
        patch.setattr(ChunkedWriter, "close", closing)
        patch.setattr("shardwise.checkpoint.weight_writers._BYTES_WORTH_A_FILE", 1)
        (saved,) = save(trainer, root)
    assert saved.problem is None, saved.problem
    return done


def test_all_ranks_write_at_once_and_each_byte_once(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "meeting").mkdir()
    written = [
        [each for each in files if each[0].endswith(".safetensors")]
        for files in ranks(4).run(save_together, str(tmp_path), str(tmp_path / "meeting"))
    ]
    assert [len(files) for files in written] == [2] * 4, "a shard of weights and the rank's own state"
    paths = [path for files in written for path, _ in files]
    assert len(set(paths)) == len(paths), "a file was written by two ranks, or twice"
    folder = Path(step_folder(tmp_path, 1))
    for path, count in (each for files in written for each in files):
        assert count == (folder / path).stat().st_size, f"{path}: bytes were written more than once"
