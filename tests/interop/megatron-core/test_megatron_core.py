"""Megatron Core 0.16.1 trains on CPU ranks and saves at step 6; its next ten losses are those of a run here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from shardwise_use.importing.imported_model import ImportedModel
from shardwise_use.importing.megatron import open_megatron
from tests.interop.continued import BEFORE, go_on, made, shardwise

DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 48, "expert_model_parallel_size": 2}
DISTRIBUTED = {"use_distributed_optimizer": True}
BUFFERS, BY_NAME = "dp_reshardable", "fully_reshardable"


@dataclass(frozen=True)
class Case:
    """A training of Megatron: `ranks`, its arguments, and the layout with which it goes on here."""

    ranks: int
    args: dict[str, Any]
    keys: Sequence[str] = ()
    family: str = "llama"
    shardings: Sequence[str] = ("plain",)
    imported_as: str = "llama"
    options: Sequence[str] = ()


CASES = {name: Case(**keys) for name, keys in DATA["cases"].items()}


@dataclass
class Made:
    """What Megatron wrote: the folders by the form of the optimizer's state, and the losses of all steps."""

    case: Case
    folders: dict[str, Path] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


def make(case: Case, folder: Path) -> Made:
    trained = Made(case, {name: folder / name for name in case.shardings})
    args = DATA["arguments"] | DATA.get(case.family, {}) | case.args
    saves = {str(trained.folders[name]): name for name in case.shardings}
    maker = Path(__file__).with_name("maker.py")
    trained.losses = made(case.ranks, maker, folder, saves=saves, args=args)
    return trained


@pytest.fixture(scope="module", params=CASES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(CASES[request.param], tmp_path_factory.mktemp("megatron"))


def tensors(opened: ImportedModel) -> dict[tuple[str, str], bytes]:
    return {(each.state, each.name): b"".join(map(bytes, each.read())) for each in opened.tensors}


def test_the_next_ten_losses_are_megatrons(trained: Made, tmp_path: Path) -> None:
    """Rates, clipping and the decay of weights are those that the import has written."""
    case, words = trained.case, ("--from", "megatron", *trained.case.options)
    source = trained.folders[case.shardings[0]]
    told = go_on(source, tmp_path / "run", *words, keys=case.keys, losses=trained.losses)
    assert f"step-{BEFORE:08d}: {case.imported_as}, " in told


def test_buffers_hold_what_is_saved_by_name(trained: Made) -> None:
    if len(trained.folders) < 2:
        pytest.skip("one form only")
    buffers, by_name = (open_megatron(trained.folders[form]) for form in (BUFFERS, BY_NAME))
    assert tensors(buffers) == tensors(by_name)
    assert {each.state for each in buffers.progress.states} == {"exp_avg", "exp_avg_sq"}


def test_bfloat16_has_float32_masters(tmp_path: Path) -> None:
    args = {**DISTRIBUTED, "tensor_model_parallel_size": 2, "bf16": True}
    trained = make(Case(2, args, shardings=(BUFFERS, BY_NAME)), tmp_path)
    buffers, by_name = (open_megatron(trained.folders[form]) for form in (BUFFERS, BY_NAME))
    found = tensors(buffers)
    assert found == tensors(by_name)
    assert buffers.progress.keys["precision.mode"] == "mixed"
    for weight in buffers.weights:
        assert weight.dtype == "BF16"
        master = torch.frombuffer(bytearray(found["master", weight.name]), dtype=torch.float32)
        rounded = torch.frombuffer(bytearray(found["model", weight.name]), dtype=torch.bfloat16)
        assert torch.equal(master.bfloat16(), rounded)
        assert not torch.equal(master, rounded.float()), "the masters have bits that bfloat16 lacks"
    told = shardwise("checkpoint", "import", trained.folders[BUFFERS], tmp_path / "run", "--from", "megatron")
    assert "exp_avg, exp_avg_sq and master" in told


def test_buffers_of_divided_experts_are_left_out_and_told(tmp_path: Path) -> None:
    args = {**DISTRIBUTED, **EXPERTS}
    trained = make(Case(2, args, shardings=(BUFFERS, BY_NAME)), tmp_path)
    buffers, by_name = (open_megatron(trained.folders[form]) for form in (BUFFERS, BY_NAME))
    assert buffers.progress is None
    assert "--dist-ckpt-optim-fully-reshardable" in buffers.notes[-1]
    found = tensors(by_name)
    assert {state for state, _ in found} == {"model", "exp_avg", "exp_avg_sq"}
    assert {key: value for key, value in found.items() if key[0] == "model"} == tensors(buffers)
