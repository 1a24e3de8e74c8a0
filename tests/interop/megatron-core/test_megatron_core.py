"""Megatron Core 0.16.1 trains on CPU ranks and saves at step 6; its next ten losses are those of a run here."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise_use.importing.imported_model import ImportedModel
from shardwise_use.importing.megatron import open_megatron
from tests.interop.continued import AFTER, BATCH, BEFORE, LENGTH, VOCABULARY, batches, losses_here, shardwise, torchrun

PADDED = 256
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 48}
DISTRIBUTED = {"use_distributed_optimizer": True}
BUFFERS, BY_NAME = "dp_reshardable", "fully_reshardable"


@dataclass(frozen=True)
class Case:
    """A training of Megatron: `ranks`, its arguments, and the layout with which it goes on here."""

    ranks: int
    args: dict[str, Any]
    keys: tuple[str, ...]
    family: str = "llama"
    shardings: tuple[str, ...] = ("plain",)
    imported_as: str = "llama"
    options: tuple[str, ...] = ()


CASES = {
    "float32 optimizer": Case(1, {}, ("parallel.tensor=2",)),
    "TP 2, padded": Case(
        2, {"tensor_model_parallel_size": 2, "padded_vocab_size": PADDED}, ("parallel.pipeline=2",),
        options=("--vocab-size", str(PADDED)),
    ),
    "PP 2, WSD": Case(
        2,
        {"pipeline_model_parallel_size": 2, "lr_decay_style": "WSD", "lr_wsd_decay_style": "minus_sqrt",
         "lr_wsd_decay_iters": 12, "lr_decay_iters": 20, "lr_warmup_iters": 0},
        ("parallel.tensor=2", "optimizer.zero=1"),
    ),
    "DP 2, buffers": Case(2, DISTRIBUTED, ("parallel.pipeline=2",), shardings=(BUFFERS, BY_NAME)),
    "TP 2, buffers, Qwen3": Case(
        2, {**DISTRIBUTED, "tensor_model_parallel_size": 2, "qk_layernorm": True}, ("parallel.tensor=2",),
        shardings=(BUFFERS, BY_NAME), imported_as="qwen3",
    ),
    "GPT-2, tied, PP 2, buffers": Case(
        2, {**DISTRIBUTED, "pipeline_model_parallel_size": 2}, (), "gpt", (BUFFERS, BY_NAME), "gpt",
    ),
    "Qwen2, linear": Case(
        1, {"add_qkv_bias": True, "lr_decay_style": "linear"}, ("parallel.pipeline=2",), imported_as="qwen2"
    ),
    "Mixtral, buffers, balance": Case(
        1,
        {**DISTRIBUTED, **EXPERTS, "micro_batch_size": BATCH, "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.5},
        ("parallel.tensor=2",), shardings=(BUFFERS, BY_NAME), imported_as="mixtral",
    ),
    "Qwen3-MoE, EP 2": Case(
        2,
        {**EXPERTS, "expert_model_parallel_size": 2, "qk_layernorm": True, "moe_layer_freq": [0, 1, 1, 1],
         "moe_router_pre_softmax": True, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5},
        ("parallel.expert=2", "--nproc", "2"), imported_as="qwen3_moe",
    ),
}  # fmt: skip


@dataclass
class Made:
    """What Megatron wrote: the folders by the form of the optimizer's state, and the losses of all steps."""

    case: Case
    folders: dict[str, Path] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


def make(case: Case, folder: Path) -> Made:
    np.save(folder / "tokens.npy", batches())
    made = Made(case, {name: folder / name for name in case.shardings})
    spec = {
        "family": case.family, "tokens": str(folder / "tokens.npy"), "save_at": BEFORE,
        "losses": str(folder / "losses.json"), "saves": {str(made.folders[name]): name for name in case.shardings},
        "args": {"global_batch_size": BATCH, "seq_length": LENGTH, "vocab_size": VOCABULARY,
                 "padded_vocab_size": VOCABULARY, **case.args},
    }  # fmt: skip
    (folder / "spec.json").write_text(json.dumps(spec))
    torchrun(case.ranks, Path(__file__).with_name("maker.py"), folder / "spec.json")
    made.losses = json.loads((folder / "losses.json").read_text())
    return made


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(CASES[request.param], tmp_path_factory.mktemp("megatron"))


def tensors(opened: ImportedModel) -> dict[tuple[str, str], bytes]:
    return {(each.state, each.name): b"".join(map(bytes, each.read())) for each in opened.tensors}


def test_the_next_ten_losses_are_megatrons(made: Made, tmp_path: Path) -> None:
    source = made.folders[made.case.shardings[0]]
    told = shardwise("checkpoint", "import", source, tmp_path / "run", "--from", "megatron", *made.case.options)
    assert f"after step {BEFORE}, {BEFORE * BATCH} samples and {BEFORE * BATCH * LENGTH} tokens" in told
    assert f"step-{BEFORE:08d}: {made.case.imported_as}, " in told
    # Rates, clipping and the decay of weights are those that the import has written.
    losses = losses_here(tmp_path / "run", made.case.keys)
    assert len(losses) == AFTER
    assert losses == pytest.approx(made.losses[BEFORE:], rel=0, abs=1e-5)


def test_buffers_hold_what_is_saved_by_name(made: Made) -> None:
    if len(made.folders) < 2:
        pytest.skip("one form only")
    buffers, by_name = (open_megatron(made.folders[form]) for form in (BUFFERS, BY_NAME))
    assert tensors(buffers) == tensors(by_name)
    assert buffers.progress is not None
    assert {each.state for each in buffers.progress.states} == {"exp_avg", "exp_avg_sq"}


def test_bfloat16_has_float32_masters(tmp_path: Path) -> None:
    args = {**DISTRIBUTED, "tensor_model_parallel_size": 2, "bf16": True}
    made = make(Case(2, args, (), shardings=(BUFFERS, BY_NAME)), tmp_path)
    buffers, by_name = (open_megatron(made.folders[form]) for form in (BUFFERS, BY_NAME))
    found = tensors(buffers)
    assert found == tensors(by_name)
    assert buffers.progress is not None
    assert buffers.progress.keys["precision.mode"] == "mixed"
    for weight in buffers.weights:
        assert weight.dtype == "BF16"
        master = torch.frombuffer(bytearray(found["master", weight.name]), dtype=torch.float32)
        rounded = torch.frombuffer(bytearray(found["model", weight.name]), dtype=torch.bfloat16)
        assert torch.equal(master.bfloat16(), rounded)
        assert not torch.equal(master, rounded.float()), "the masters have bits that bfloat16 lacks"
    told = shardwise("checkpoint", "import", made.folders[BUFFERS], tmp_path / "run", "--from", "megatron")
    assert "exp_avg, exp_avg_sq and master" in told


def test_buffers_of_divided_experts_are_left_out_and_told(tmp_path: Path) -> None:
    args = {**DISTRIBUTED, **EXPERTS, "expert_model_parallel_size": 2}
    made = make(Case(2, args, (), shardings=(BUFFERS, BY_NAME)), tmp_path)
    buffers, by_name = (open_megatron(made.folders[form]) for form in (BUFFERS, BY_NAME))
    assert buffers.progress is None
    assert "--dist-ckpt-optim-fully-reshardable" in buffers.notes[-1]
    found = tensors(by_name)
    assert {state for state, _ in found} == {"model", "exp_avg", "exp_avg_sq"}
    assert {key: value for key, value in found.items() if key[0] == "model"} == tensors(buffers)
