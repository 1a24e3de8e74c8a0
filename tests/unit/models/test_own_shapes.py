"""A model of the user's own is counted without data, and what it needs is known before a device is paid."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from examples.own_model import plain
from shardwise import pipelined
from shardwise.base.errors import ConfigError
from shardwise.config import Config, Layout, load_config
from shardwise.distributed.mesh import Group
from shardwise.estimates.memory import expected_memory
from shardwise.models.batch_first import batch_first
from shardwise.models.blocks import ModelPart
from shardwise.models.flops import flops_per_token
from shardwise.models.own_shapes import own_shapes, own_token_flops
from shardwise.models.parameter_counts import parameter_count
from shardwise.models.user_model import build_user_model
from tests.dist.own_blocks import MODULES
from tests.e2e.command import within
from tests.unit.models import own_classes
from tests.unit.models.own_classes import build, config, problem

S, B, V, H = 32, 2, 512, 64
SIZES = {"hidden_size": H, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}


def config_of(family: str, **keys: Any) -> Config:
    train = {"steps": 2, "global_batch": B, "micro_batch": B, "sequence_length": S}
    return own_classes.config(family, {"train": train}, **{"vocab_size": V, **keys})


class Attending(nn.Module):
    """The attention of torch, and a head that keeps the logits of the whole vocabulary."""

    def __init__(self, vocab_size: int, width: int = H, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, ids_SB: Tensor, targets_SB: Tensor) -> Tensor:
        x = self.embedding(ids_SB)
        for block in self.blocks:
            q, k, v = block(x).transpose(0, 1).unsqueeze(1).chunk(3, dim=-1)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1).transpose(0, 1)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets_SB.flatten(), reduction="sum")


class Sparse(Attending):
    """Each token goes to the expert of its number."""

    def __init__(self, vocab_size: int, width: int = H) -> None:
        super().__init__(vocab_size, layers=0)
        self.experts = nn.Parameter(torch.zeros(4, width, width))

    def forward(self, ids_SB: Tensor, targets_SB: Tensor) -> Tensor:
        chosen = ids_SB.flatten() % 4
        ends = F.one_hot(chosen, 4).sum(0).cumsum(0).int()
        x = self.embedding(ids_SB).flatten(0, 1)[chosen.argsort()].bfloat16()
        y = F.grouped_mm(x, self.experts.bfloat16(), offs=ends).to(self.head.weight.dtype)
        return F.cross_entropy(self.head(y), targets_SB.flatten(), reduction="sum")


class Depthwise(Attending):
    """Each channel has a filter of its own, over four tokens or, `transposed`, from one token to four."""

    def __init__(self, vocab_size: int, width: int = H, groups: int = H, transposed: bool = False) -> None:
        super().__init__(vocab_size, layers=0)
        kind = nn.ConvTranspose1d if transposed else nn.Conv1d
        self.mixer = kind(width, width, 4, groups=groups, padding=0 if transposed else 3)

    def forward(self, ids_SB: Tensor, targets_SB: Tensor) -> Tensor:
        x = self.embedding(ids_SB)
        x = self.mixer(x.permute(1, 2, 0))[..., : len(ids_SB)].permute(2, 0, 1)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets_SB.flatten(), reduction="sum")


class ReadsData(Attending):
    def forward(self, ids_SB: Tensor, targets_SB: Tensor) -> Tensor:
        return super().forward(ids_SB, targets_SB) * max(1, int(ids_SB.max()) // V)


ATTENDING = f"{__name__}:Attending"
Plain = batch_first(plain.Decoder)
FAMILIES = {"plain": f"{__name__}:Plain", "sharded": "examples.own_model.sharded:Decoder"}


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_and_bytes_are_those_of_the_formula(family: str) -> None:
    """Of plain layers and of ours: 6 for each element of a matrix, and 12·L·H·S of attention, masked keys too."""
    config = config_of(FAMILIES[family], **SIZES)
    shapes = own_shapes(config)
    matrices = 4 * (4 * H * H + 2 * H * 192) + H * V
    assert shapes.token_flops == 6 * matrices + 12 * 4 * H * S
    assert shapes.token_flops == flops_per_token(shapes.like, S, count_masked=True)
    assert shapes.is_cut == (family == "sharded")
    assert not shapes.recomputes
    # The Llama that is like it has its size.
    assert parameter_count(shapes.like) == pytest.approx(shapes.parameters, rel=0.01)
    memory = expected_memory(config.model_copy(update={"model": shapes.like}), Layout(1), False)
    assert memory.parameters == pytest.approx(4 * shapes.parameters, rel=1e-5), "as a run counts them"
    assert memory.activations + memory.loss == pytest.approx(shapes.saved_bytes, rel=0.3)


def test_grouped_products_convolutions_and_bytes_of_a_real_pass() -> None:
    """torch 2.13 counts none of them (findings/torch-grouped-mm-autocast-and-flops.sh)."""
    assert own_shapes(config_of(f"{__name__}:Sparse")).token_flops == 6 * (H * H + H * V)
    # torch 2.13 does not divide a weight's gradient (findings/torch-flop-counter-grouped-convolutions.sh).
    for groups, accelerator in [(4, False), (H, True)]:
        for transposed, length in (False, S + 3), (True, S):
            keys = {"groups": groups, "transposed": transposed}
            shapes = own_shapes(config_of(f"{__name__}:Depthwise", **keys), accelerator)
            assert shapes.token_flops == 6 * (H * V + length * 4 * H * H // groups / S)
    config = config_of(ATTENDING, width=128, layers=3)
    shapes = own_shapes(config)
    model = build_user_model(config, Group(), sequence_parallel=False)
    assert shapes.parameters == sum(parameter.numel() for parameter in model.parameters())
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros(S, B, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(ids, ids)
    real = sum(tensor.untyped_storage().nbytes() for pointer, tensor in saved.items() if pointer not in own)
    assert shapes.saved_bytes == pytest.approx(real, rel=0.02)
    config = config_of(f"{__name__}:ReadsData")
    told = r"ReadsData\): forward must work on tensors without data"
    with pytest.raises(ConfigError, match=told):
        own_shapes(config)
    with pytest.raises(ConfigError, match=told):
        shardwise.plan(config, "h100:8")
    assert own_token_flops(config) is None


RECIPE = f"""
model: {{family: "{ATTENDING}", vocab_size: 50304, width: 64, layers: 2}}
train: {{steps: 100, global_batch: 512, micro_batch: 64, sequence_length: 512}}
optimizer: {{lr: 1.0e-3}}
data: {{dataset: tiny}}
"""


def test_dry_run_and_plan_know_it(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(RECIPE)
    shapes = own_shapes(load_config(str(tmp_path / "own.yaml"), ["precision.mode=mixed"]), True)
    device = ("--device", "h100:8")
    shown = within("train", "own.yaml", "precision.mode=mixed", "--dry-run", *device, at=tmp_path).succeeded().out
    assert f"({shapes.parameters:,}), built without data" in shown
    assert "not known" not in shown
    # Logits of the whole vocabulary in bfloat16, which no formula of ours has.
    logits = 512 * 64 * 50304 * 2
    assert shapes.saved_bytes > logits
    (activations,) = re.findall(r"activations  ([\d.]+) GiB", shown)
    assert float(activations) == pytest.approx(shapes.saved_bytes / 2**30, rel=0.02)
    planned = within("plan", "own.yaml", "precision.mode=mixed", *device, "--json", at=tmp_path)
    assert planned.code == 0, planned.err
    assert f"was built without data: {shapes.parameters:,} parameters" in planned.err
    plans = json.loads(planned.out)["plans"]
    assert {(plan["layout"]["tensor"], plan["layout"]["pipeline"], plan["data"]) for plan in plans} == {(1, 1, 8)}
    for plan in plans:
        assert plan["memory_bytes"] > logits * plan["layout"]["micro_batch"] / 64
        assert plan["headroom_bytes"] == pytest.approx(80e9 * 0.94 - plan["memory_bytes"])
    assert {plan["layout"]["micro_batch"] for plan in plans} >= {8, 16, 64}
    written = within("plan", "own.yaml", *device, "--write", "planned.yaml", at=tmp_path)
    assert written.code == 0, written.err
    own = load_config(str(tmp_path / "own.yaml"), ["precision.mode=mixed"])
    assert load_config(str(tmp_path / "planned.yaml")).model == own.model
    found = shardwise.plan(own, "h100:8", best=3).plans
    assert [plan.headroom for plan in found] == [plan["headroom_bytes"] for plan in plans[:3]]
    assert [plan.calendar.seconds / 86_400 for plan in found] == [plan["days"] for plan in plans[:3]]
    assert {plan.config.model for plan in found} == {own.model}
    assert found[0].mfu == pytest.approx(plans[0]["mfu"])


FOUR_BLOCKS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
PIPELINE = {"parallel": {"pipeline": 2}}


class Tied(plain.Decoder):
    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        self.head.weight = self.embedding.weight


class Shorter(plain.Decoder):
    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        del self.blocks[3]


TiedStages, ShorterStages = (pipelined(kind, *MODULES) for kind in (Tied, Shorter))
NormlessStages = pipelined(plain.Decoder, "embedding", "blocks", "head")
NamelessStages = pipelined(plain.Decoder, "embeddings", "blocks")
PlainDecoder = plain.Decoder


def test_a_stage_has_its_blocks_and_a_class_without_any_is_told() -> None:
    chosen = config("tests.dist.own_blocks:Plain", PIPELINE, **FOUR_BLOCKS)
    whole = dict(build(chosen).named_parameters())
    first = dict(build(chosen, part=ModelPart(range(2), True, False)).named_parameters())
    last = dict(build(chosen, part=ModelPart(range(2, 4), False, True)).named_parameters())
    assert first.keys() | last.keys() == whole.keys()
    assert not first.keys() & last.keys()
    assert {"embedding.weight", "blocks.1.mlp.up.bias"} <= first.keys()
    assert {"head.weight", "norm.weight", "blocks.2.mlp.up.bias"} <= last.keys()
    family = f"{__name__}:PlainDecoder"
    said = problem(config(family, PIPELINE, **FOUR_BLOCKS))
    assert said.startswith(f"parallel.pipeline (2) must be 1 with {family}, which names no blocks: `Trained = shard")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("TiedStages", "embedding.weight must be in one module .* and is in embedding and head"),
        ("NormlessStages", "norm.weight must be in one module .* and is in none"),
        ("ShorterStages", r"model.num_hidden_layers \(4\) must be the number of blocks \(3\) in the one torch.nn"),
        ("NamelessStages", "shardwise.pipelined must name modules of the class: .*no attribute `embeddings`"),
    ],
)
def test_what_cannot_be_cut_is_named(name: str, said: str) -> None:
    chosen = config(f"{__name__}:{name}", PIPELINE, **FOUR_BLOCKS)
    with pytest.raises(ConfigError, match=rf"model.family \({__name__}:{name}\): {said}"):
        build(chosen, part=ModelPart(range(2), True, False))
