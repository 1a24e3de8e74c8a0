"""Two faults of the tutorials' own code that are not here.

5: GPT2-XL silently another model under ZeRO-1. 10: saving one rank after the other, each file several times.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.storage.chunks import ChunkedWriter
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config, load_config
from shardwise.models.parameter_counts import parameter_count
from shardwise.verify.canonical_values import canonical_weights
from tests.dist.checkpoints import make_trainer, save, step_folder
from tests.dist.test_checkpoint import config_of
from tests.dist.training import make_config
from tests.e2e.processes import wait_for


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
