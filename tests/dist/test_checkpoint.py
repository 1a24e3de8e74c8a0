"""A checkpoint belongs to the model: whatever layout wrote it, any other reads the same bits from it."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from shardwise.base.errors import ShardwiseError
from shardwise.checkpoint.collective_reading import CheckpointReader
from shardwise.checkpoint.format.manifest import Manifest, TensorEntry
from shardwise.checkpoint.format.verify import verify_checkpoint
from shardwise.checkpoint.load_weights import load_checkpoint_weights
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config
from shardwise.verify.canonical_values import canonical_weights
from tests.dist.checkpoints import (
    PLACE,
    Result,
    State,
    canonical_state,
    load,
    make_saver,
    make_trainer,
    run,
    step_folder,
)
from tests.dist.dense import run as on_ranks
from tests.dist.training import cases, make_config, named, sizes
from tests.hugging_face import open_folder
from tests.sweeps import few

STEPS_BEFORE, STEPS_AFTER = 2, 2
COLLECTIVES_WAIT = 59.0
"""Seconds for which a collective waits for a rank at least: `RankPool` sets a minute."""
OF_BLOCKS = cases("models of checkpoints")
PIPELINES = cases("checkpoints")
OFTEN = ("TP 2 + SP × DP 2, mixed, past an epoch", "TP 2 × DP 2, ZeRO-0, LAMB, bfloat16")
PAIRS = [("pp4", "one"), ("pp4", "pp2"), ("one", "pp4")]
PAIRS += [(layout, "pp4") for layout in PIPELINES if layout not in ("one", "pp4")]
PAIRS += [("pp2-tp2-zbv", layout) for layout in PIPELINES if layout not in ("pp4", "pp2-tp2-zbv")]
RESHARDED = [(model, *pair) for model in OF_BLOCKS for pair in dict.fromkeys(PAIRS)]


def config_of(tensor: int = 1, sequence: bool = False, zero: int = 1, mode: str = "float32", **sections: Any) -> Config:
    return make_config(
        parallel={"tensor": tensor, "sequence": sequence, **sections.pop("parallel", {})},
        optimizer={"zero": zero, **sections.pop("optimizer", {})},
        precision={"mode": mode},
        **sections,
    )


def differences(found: State, wanted: State) -> list[str]:
    """Tensors that are missing, or differ in a bit."""
    names = {(state, name) for each in (found, wanted) for state, tensors in each.items() for name in tensors}
    return [
        f"{state} of {name}"
        for state, name in sorted(names)
        if state not in found or state not in wanted or not torch.equal(found[state][name], wanted[state][name])
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Result]:
    """A checkpoint that one process wrote, with the state in it and the losses that followed."""
    root = tmp_path_factory.mktemp("one")
    result = run(config_of(), STEPS_BEFORE, STEPS_AFTER, None, str(root))
    return step_folder(root, STEPS_BEFORE), result


LAYOUTS = [
    (ranks, tensor, sequence, zero, replicate)
    for ranks in (1, 2, 4, 8, 16)
    for tensor in (1, 2, 4)
    if ranks % tensor == 0 and ranks // tensor <= 4
    for sequence in ((False, True) if tensor > 1 else (False,))
    for zero in (0, 1, 2, 3)
    for replicate in ((1, 2) if zero and ranks // tensor == 4 else (1,))
]
FEW = {(4, 2, True, 0, 1), (4, 1, False, 3, 2)}


@pytest.mark.parametrize(("size", "tensor", "sequence", "zero", "replicate"), few(LAYOUTS, *FEW))
def test_reshard(
    size: int, tensor: int, sequence: bool, zero: int, replicate: int, written: Any, ranks: Any, tmp_path: Path
) -> None:
    """One process → this layout: bit-equal, and trains on alike; this layout → one process: bit-equal again."""
    source, wanted = written
    config = config_of(tensor, sequence, zero, parallel={"replicate": replicate})
    found, *_ = on_ranks(ranks, size, run, config, 0, STEPS_AFTER, source, str(tmp_path))
    assert not differences(found.state, wanted.state), "after loading"
    assert found.losses == pytest.approx(wanted.losses[STEPS_BEFORE:], rel=1e-5), "losses after loading"
    back = run(config_of(), 0, 0, step_folder(tmp_path, STEPS_BEFORE), None)
    assert not differences(back.state, wanted.state), "written by this layout, read by one process"


@pytest.mark.parametrize(("size", "before", "keys"), named("same layout", *OFTEN))
def test_resuming_a_layout_is_exact(size: int, before: int, keys: dict[str, Any], ranks: Any, tmp_path: Path) -> None:
    """Losses and state after a resume equal those of the run that went on, to the bit."""
    if "model" in keys:
        keys = keys | {"model": sizes(131, 32, 64, heads=4) | keys["model"]}
    config = config_of(**keys)
    whole, *_ = on_ranks(ranks, size, run, config, before, STEPS_AFTER, None, str(tmp_path))
    resumed, *_ = on_ranks(ranks, size, run, config, STEPS_AFTER, 0, step_folder(tmp_path, before), None)
    assert resumed.losses == whole.losses[before:], "losses after the resume"
    assert not differences(resumed.state, whole.at_end), "state at the end"


def cut(model: str, layout: str) -> tuple[int, Config]:
    """The number of ranks, and what they train: the same whatever the layout, with masks that no layout changes."""
    size, parallel = PIPELINES[layout]
    replicas = size // parallel.get("tensor", 1) // parallel.get("pipeline", 1)
    sections: dict[str, Any] = {"precision": {"mode": "float32"}, "optimizer": {}, **OF_BLOCKS[model]}
    sections["model"] = sizes(131, 32, 64, layers=4, heads=4) | sections["model"]
    sections["optimizer"] = sections["optimizer"] | {"zero": parallel.get("zero", 1)}
    sections["parallel"] = {key: value for key, value in parallel.items() if key != "zero"}
    sections["train"] = {"micro_batch": 2 // replicas, "dropout_mode": "invariant"}
    return size, make_config(**sections)


@pytest.mark.parametrize(("model", "first", "second"), few(RESHARDED, ("gpt", "pp4", "pp2-tp2-zbv")))
def test_reshard_over_pipelines(model: str, first: str, second: str, ranks: Any, tmp_path: Path) -> None:
    """Bit-equal from layout to layout, in one process and in transformers, and the training goes on alike."""
    size, config = cut(model, first)
    written, *_ = on_ranks(ranks, size, run, config, 2, STEPS_AFTER, None, str(tmp_path / "first"))
    folder = step_folder(tmp_path / "first", 2)
    assert not verify_checkpoint(Root.of(folder)).problems
    other, config = cut(model, second)
    read, *_ = on_ranks(ranks, other, run, config, 0, STEPS_AFTER, folder, str(tmp_path / "second"))
    assert not differences(read.state, written.state), f"written by {first}, read by {second}"
    # In bfloat16 layouts round apart.
    near = 1e-5 if config.precision.mode == "float32" else 1e-2
    assert read.losses == pytest.approx(written.losses[2:], rel=near), "losses after loading"
    _, config = cut(model, "one")
    for root in ("first", "second"):
        alone = run(config, 0, 0, step_folder(tmp_path / root, 2), None)
        assert not differences(alone.state, written.state), f"written by the {root} layout, read by one process"
    opened = open_folder(Path(folder)).state_dict()
    assert all(torch.equal(opened[name], tensor) for name, tensor in written.state["model"].items()), "by transformers"


def test_other_precision_and_bucket_size(ranks: Any, tmp_path: Path) -> None:
    """Masters are what counts: mixed → float32 → mixed gives the same masters and moments."""
    mixed, *_ = on_ranks(ranks, 2, run, config_of(mode="mixed"), 3, 0, None, str(tmp_path / "mixed"))
    assert "master" in mixed.state, "mixed precision keeps masters"
    source = step_folder(tmp_path / "mixed", 3)
    config = config_of(mode="float32", optimizer={"bucket_mib": 1.0})
    single, *_ = on_ranks(ranks, 2, run, config, 0, 0, source, str(tmp_path / "float32"))
    assert not differences({"model": single.state["model"]}, {"model": mixed.state["master"]})
    again, *_ = on_ranks(ranks, 2, run, config_of(mode="mixed"), 0, 0, step_folder(tmp_path / "float32", 3), None)
    assert not differences(again.state, mixed.state)


def bytes_read(config: Config, folder: str) -> int:
    """By this rank, to restore a checkpoint."""
    return load(make_trainer(config), folder)


def test_each_byte_is_written_once_and_read_once(ranks: Any, tmp_path: Path) -> None:
    """Over all ranks: files hold the state and little more; another layout reads it and little more.

    GPT stores its weights transposed, so that a rank's part is many short runs of bytes.
    """
    model = OF_BLOCKS["gpt"]["model"] | sizes(1024, 256, 768, heads=4)
    writing = config_of(2, True, model=model, optimizer={"bucket_mib": 25.0})
    results = on_ranks(ranks, 4, run, writing, 1, 0, None, str(tmp_path))
    state = sum(t.numel() * 4 for tensors in results[0].state.values() for t in tensors.values())
    assert results[0].saved[0].bytes == pytest.approx(state, rel=0.01), "bytes of files over bytes of state"
    for reading in (config_of(4, model=model), config_of(1, zero=0, model=model)):
        read = sum(on_ranks(ranks, 4, bytes_read, reading, step_folder(tmp_path, 1)))
        assert state * 0.99 <= read <= state * 1.1, f"{read / state:.3f} of the state's bytes are read"


@pytest.mark.slow
def test_a_pipeline_writes_and_reads_each_byte_once(ranks: Any, tmp_path: Path) -> None:
    """A tied weight too, which two stages have: a third of this state."""
    model = sizes(2048, 256, 512, heads=4) | {"family": "llama", "tie_word_embeddings": True}
    writing = config_of(2, parallel={"pipeline": 2}, model=model, optimizer={"bucket_mib": 25.0})
    results = on_ranks(ranks, 4, run, writing, 1, 0, None, str(tmp_path))
    folder = step_folder(tmp_path, 1)
    whole = results[0].state
    state = sum(t.numel() * 4 for tensors in whole.values() for t in tensors.values())
    assert results[0].saved[0].bytes == pytest.approx(state, rel=0.01), "bytes of files over bytes of state"
    for reading in ({"pipeline": 2}, {"pipeline": 2, "tensor": 2}, {"tensor": 4}):
        config = config_of(parallel=reading, model=model)
        read = sum(on_ranks(ranks, 4, bytes_read, config, folder))
        assert state * 0.99 <= read <= state * 1.1, f"{read / state:.3f} of the state's bytes are read at {reading}"
    results = on_ranks(ranks, 4, load_weights, config_of(parallel={"pipeline": 2}, model=model), folder)
    for each in results:
        assert not differences(each.state, {"model": whole["model"]})
    read, weights = sum(each.bytes_read for each in results), sum(4 * t.numel() for t in whole["model"].values())
    assert weights * 0.99 <= read <= weights * 1.1, f"{read / weights:.3f} of the weights' bytes are read"


class Counted(CheckpointReader):
    """`last`: the reader that was made last."""

    last: ClassVar[CheckpointReader]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        Counted.last = self


def load_weights(config: Config, folder: str) -> Result:
    trainer = make_trainer(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.checkpoint.load_weights.CheckpointReader", Counted)
        load_checkpoint_weights(trainer.model, config.model.family, trainer.mesh, Root.of(folder))
    weights = canonical_weights(trainer.model, trainer.mesh.pp, optimizer=trainer.optimizer)
    return Result(state={"model": {name: t.cpu() for name, t in weights.items()}}, bytes_read=Counted.last.bytes_read)


def test_weights_alone_come_from_the_masters(tmp_path: Path) -> None:
    trained = run(config_of(mode="mixed"), 3, 0, None, str(tmp_path))
    trainer = make_trainer(config_of(mode="mixed"))
    load(trainer, step_folder(tmp_path, 3), weights_only=True)
    wanted = {name: trained.state[name] for name in ("model", "master")}
    assert not differences(canonical_state(trainer), wanted), "no moments, same weights"


def refusal(config: Config, folder: str) -> str:
    try:
        load(make_trainer(config), folder)
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def rewritten(folder: str, change: Callable[[dict[str, dict[str, TensorEntry]]], None]) -> None:
    """Change what a checkpoint's manifest says of its tensors; the digest is right again."""
    manifest = Manifest.read(Root.of(folder))
    tensors = {state: dict(named) for state, named in manifest.tensors.items()}
    change(tensors)
    (Path(folder) / "manifest.json").write_text(replace(manifest, tensors=tensors).to_json())


def test_a_gap_between_pieces_is_damage(ranks: Any, tmp_path: Path) -> None:
    """What no piece covers would keep the values that it was drawn with."""

    def leave_out(tensors: dict[str, dict[str, TensorEntry]]) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        tensors["exp_avg"][name] = replace(tensors["exp_avg"][name], pieces=())

    run(config_of(), 1, 0, None, str(tmp_path))
    rewritten(step_folder(tmp_path, 1), leave_out)
    said = on_ranks(ranks, 2, refusal, config_of(2), step_folder(tmp_path, 1))
    assert len(set(said)) == 1, f"ranks tell different things: {said}"
    assert "exp_avg/model.layers.1.mlp.up_proj.weight leave a gap" in said[0], said[0]


def fail_to_copy(config: Config, root: str, buffer_bytes: int | None) -> tuple[str, float]:
    """On rank 1 the copy of the state fails; what this rank met, and seconds until it could leave."""
    trainer = make_trainer(config)
    saver = make_saver(trainer, root, buffer_bytes=buffer_bytes)
    if trainer.mesh.world.rank == 1:
        saver._copy = None  # type: ignore[assignment, method-assign]
    start = time.monotonic()
    try:
        saver.save(0, PLACE)
    except TypeError as error:
        saver.wait()
        return str(error), time.monotonic() - start
    return "", 0.0


@pytest.mark.parametrize("buffer_bytes", [pytest.param(None, marks=pytest.mark.slow), 1 << 20])
def test_a_rank_whose_copy_fails_leaves_at_once(buffer_bytes: int | None, ranks: Any, tmp_path: Path) -> None:
    """Its peers' writing threads wait for it: it must not wait for them."""
    outcomes = ranks(2).run(fail_to_copy, config_of(1), str(tmp_path), buffer_bytes)
    ranks(2).close()  # rank 0's thread still waits
    assert "not callable" in outcomes[1][0]
    assert outcomes[1][1] < COLLECTIVES_WAIT, f"the rank that failed waited for {outcomes[1][1]:.0f} s"
