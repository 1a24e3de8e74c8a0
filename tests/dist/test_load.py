"""A Hugging Face folder at any layout: bit-equal in and out, each rank reads its own part, and all fail or none."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.load_weights import load_hugging_face
from shardwise.checkpoint.storage.root import Root
from shardwise.config import Config, config_from_sections
from shardwise.distributed.mesh import Mesh
from shardwise.distributed.placement import placements
from shardwise.models.build import build_model
from shardwise.optim.state_digest import TensorSums
from shardwise.optim.state_hash import StateSums
from shardwise.train.build import build_trainer
from shardwise.train.model_checks import check_replicas
from shardwise.verify.canonical_values import canonical_weights
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import cases, make_data
from tests.hugging_face import CASES, described, export_hugging_face, open_folder, save
from tests.sweeps import few

# (ranks, TP, sequence parallelism): what is not TP is data parallelism.
LAYOUTS = {"tp2": (2, 2, False), "tp4-sp": (4, 4, True), "tp2-dp2-sp": (4, 2, True), "dp2": (2, 1, False)}
BEGUN = cases("load")


def configured(folder: Path, tensor: int, **parallel: Any) -> Config:
    return config_from_sections(
        {
            "model": described(folder).model_dump(),
            "parallel": {"tensor": tensor, **parallel},
            "train": {"steps": 1, "global_batch": 4, "sequence_length": 8},
            "optimizer": {"lr": 1e-3},
        }
    )


def loaded(folder: Path, tensor: int, sequence: bool, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Mesh]:
    config, mesh = configured(folder, tensor), shared_mesh(tensor)
    model = build_model(config, mesh.tp, sequence_parallel=sequence, dtype=dtype)
    load_hugging_face(model, config.model, mesh, folder)
    return model, mesh


def in_and_out(source: Path, target: Path, tensor: int, sequence: bool) -> list[str]:
    """Load, and export again; returns the parameters whose padding is not 0."""
    model, mesh = loaded(source, tensor, sequence)
    export_hugging_face(model, described(source), mesh, target)
    padded = []
    for name, parameter, placement in placements(model):
        inside = torch.zeros_like(parameter, dtype=torch.bool)
        for piece in placement.pieces:
            inside[piece.local.slices] = True
        if parameter[~inside].any():
            padded.append(name)
    return padded


@pytest.mark.parametrize(
    ("case", "layout"), few(itertools.product(CASES, LAYOUTS), *((case, "tp4-sp") for case in ("llama", "gpt", "bert")))
)
def test_in_and_out_is_bit_equal(case: str, layout: str, ranks: Any, tmp_path: Path) -> None:
    theirs = save(case, tmp_path / "theirs")
    world, tensor, sequence = LAYOUTS[layout]
    padded = ranks(world).run(in_and_out, tmp_path / "theirs", tmp_path / "ours", tensor, sequence)
    assert padded == [[]] * world, "padding must stay 0"
    wanted, found = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert set(found) == set(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    again = open_folder(tmp_path / "ours").state_dict()
    assert [name for name, tensor in theirs.state_dict().items() if not torch.equal(tensor, again[name])] == []
    assert described(tmp_path / "ours") == described(tmp_path / "theirs")


def begin(
    folder: Path, tensor: int, zero: int, replicate: int, mode: str
) -> tuple[dict[str, torch.Tensor], TensorSums, list[float]]:
    """Weights, and their sums, with which a training of the folder begins on this rank; losses and norms of 2 steps."""
    sections = configured(folder, tensor, replicate=replicate).model_dump(exclude_unset=True)
    sections["train"] |= {"dropout_mode": "invariant"}
    sections["optimizer"] |= {"zero": zero, "warmup_steps": 0}
    config = config_from_sections({**sections, "precision": {"mode": mode}})
    trainer = build_trainer(config, shared_mesh(tensor), make_data(config.model.vocab_size), weights=Root.of(folder))
    sums = StateSums(trainer.model, trainer.optimizer, trainer.mesh).measure()
    weights = canonical_weights(trainer.model, optimizer=trainer.optimizer)
    records = [trainer.step() for _ in range(2)]
    check_replicas(trainer.model, trainer.mesh, 2, trainer.optimizer)
    return weights, sums, [number for r in records for number in (r.loss, r.grad_norm, r.param_norm or 0.0)]


@pytest.mark.parametrize(("case", "tensor", "zero", "replicate", "mode"), few(BEGUN, BEGUN[1]))
def test_copies_begin_with_all_of_a_folder(
    case: str, tensor: int, zero: int, replicate: int, mode: str, ranks: Any, tmp_path: Path
) -> None:
    """Where several ranks own the same part: its weights, hashes, losses and norms are those of one process."""
    save(case, tmp_path)
    wanted = load_file(tmp_path / "model.safetensors")
    _, sums, numbers = begin(tmp_path, 1, 0, 1, mode)
    for weights, found_sums, found in ranks(4).run(begin, tmp_path, tensor, zero, replicate, mode):
        assert all(torch.equal(weights[name], weight.to(weights[name])) for name, weight in wanted.items())
        assert found_sums == sums
        assert found == pytest.approx(numbers, rel=1e-5 if mode == "float32" else 1e-2)


def refusal(sound: Path, damaged: Path) -> list[str]:
    """What this rank says where only the last rank's files are damaged."""
    config, mesh = configured(sound, 2), shared_mesh(2)
    model = build_model(config, mesh.tp, sequence_parallel=False, dtype=torch.float32)
    last = mesh.world.rank == mesh.world.size - 1
    try:
        load_hugging_face(model, config.model, mesh, damaged if last else sound)
    except ConfigError as error:
        return [problem.replace(str(damaged), str(sound)) for problem in error.problems]
    return []


@pytest.mark.parametrize("damage", ["truncated", "copy", "not finite"])
def test_all_ranks_fail_where_one_does(damage: str, ranks: Any, tmp_path: Path) -> None:
    """A node whose disk has other files must not leave its peers waiting."""
    sound, damaged = tmp_path / "sound", tmp_path / "damaged"
    save("gpt", sound)
    damaged.mkdir()
    weights = load_file(sound / "model.safetensors")
    if damage == "copy":
        weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
        weights["lm_head.weight"][-1] += 1  # the last rank's row
    if damage == "not finite":
        weights["transformer.wte.weight"][-1, 0] = torch.inf
        weights["transformer.ln_f.bias"][:3] = torch.nan
    save_file(weights, damaged / "model.safetensors")
    if damage == "truncated":
        with (damaged / "model.safetensors").open("r+b") as file:
            file.truncate(1000)
    answers = ranks(4).run(refusal, sound, damaged)
    assert answers == [answers[0]] * 4
    assert len(answers[0]) == 1
    text = {
        "truncated": "is damaged",
        "copy": "must equal",
        "not finite": "NaN or infinite in transformer.wte.weight and transformer.ln_f.bias",
    }
    assert text[damage] in answers[0][0]
