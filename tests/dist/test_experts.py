"""Sparse models at every expert-parallel degree: losses and gradients of one process, and transformers' own."""

import copy
import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.checkpoint.canonical_tensors import canonical_tensors
from shardwise.config import Config
from shardwise.config.hugging_face import from_hugging_face, to_hugging_face
from shardwise.config.model import FAMILIES
from shardwise.config.routing import Routing
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Group, Mesh
from shardwise.layers.execution import Execution, made_with
from shardwise.layers.experts import Experts, balance_experts, experts_of
from shardwise.models.llama import Llama
from shardwise.train.build import build_trainer
from shardwise.train.model_checks import check_replicas
from shardwise.train.step_record import StepDetail
from shardwise.verify.canonical_values import canonical_weights, gradient_errors, step_with_gradients
from tests.dist.checkpoints import load, save
from tests.dist.dense import mesh as shared_mesh
from tests.dist.dense import run
from tests.dist.training import SPARSE, Sections, make_config, make_data, named, sizes

S, B, V = 16, 4, 61
SIZES = sizes(V, 32, 48, layers=3, heads=4, positions=64)
SCALE = 5.0  # of the weights, so that routers choose clearly
LR, DECAY = 1e-2, 0.1
STEPS = 3
Found = tuple[list[float], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]


def make(family: str) -> Llama:
    config = FAMILIES[family].model_validate(SIZES | SPARSE[family])
    model = Llama(config, Group(), seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(SCALE)
            elif name.endswith("router.bias"):
                parameter.copy_(torch.linspace(-0.1, 0.1, len(parameter)))
    return model


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(V, (S + 1, B), generator=torch.Generator().manual_seed(0))
    return ids[:-1], ids[1:]


def theirs_of(model: Llama, folder: Path, **options: Any) -> Any:
    """What transformers opens of the model's file."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    weights = {name: tensor.contiguous() for name, tensor in canonical_tensors(model)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(to_hugging_face(model.config)))
    options = {"dtype": torch.float32, "experts_implementation": "eager", **options}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize("family", SPARSE)
def test_transformers_computes_the_same(family: str, tmp_path: Path) -> None:
    model = make(family)
    theirs, found = theirs_of(model, tmp_path, output_loading_info=True)
    assert not any(found.values())
    ids, targets = batch()
    logits = theirs(ids.t()).logits.transpose(0, 1)
    assert (model.logits(ids) - logits).abs().max() < 1e-5
    loss, ours = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), model(ids, targets)
    loss.backward()
    ours.backward()
    assert ours.item() == pytest.approx(loss.item(), rel=1e-6)
    router = experts_of(model)[-1].router.weight.grad
    of_theirs = dict(theirs.named_parameters())["model.layers.2.mlp.gate.weight"].grad
    assert (router - of_theirs).norm() / of_theirs.norm() < 1e-5
    described = json.loads((tmp_path / "config.json").read_text())
    assert from_hugging_face(theirs.config.to_dict(), "it") == from_hugging_face(described, "it")


def biases(expert: int, micro_batches: int, recompute: Any = "none") -> dict[str, Tensor]:
    """The loads of the last of two steps of a batch that ranks and micro-batches divide, and the biases after it."""
    mesh = Mesh(expert=expert, device="cpu")
    config = FAMILIES["glm4_moe"].model_validate(SIZES | SPARSE["glm4_moe"])
    with made_with(Execution(experts=mesh.experts)):
        model = Llama(config, Group(), seed=1, recompute=recompute)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    balance_experts(model, optimizer, mesh.dp, 0.5)
    for _ in range(2):
        for part in range(micro_batches):
            place, parts = mesh.dp.rank * micro_batches + part, mesh.dp.size * micro_batches
            model(*(tensor.chunk(parts, dim=1)[place] for tensor in batch())).backward()
        found = {
            name: collectives.all_reduce_(loads.clone(), mesh.dp)
            for name, loads in model.named_buffers()
            if name.endswith("loads")
        }
        optimizer.step()
    biases = {name: bias.detach() for name, bias in model.named_parameters() if name.endswith("router.bias")}
    return found | biases


def test_biases_depend_on_the_loads_of_the_whole_batch_alone(ranks: Any) -> None:
    wanted = biases(1, 1)
    assert all(values.unique().numel() > 1 for name, values in wanted.items() if name.endswith("loads"))
    found_at = [biases(1, 4), biases(1, 2, "full"), *run(ranks, 2, biases, 2, 1), *run(ranks, 2, biases, 1, 2)]
    for found in found_at:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def configuration(sections: Sections, family: str = "glm4_moe") -> Config:
    train = {"micro_batch": 1, "global_batch": 8, "steps": 4, **sections.get("train", {})}
    model = {**SIZES, **SPARSE[family], "vocab_size": 131, "num_hidden_layers": 4}
    return make_config(**{**sections, "train": train, "model": model})


def go_on(sections: Sections, folder: str | None, steps: int, target: str | None) -> list[tuple[float, StepDetail]]:
    """The losses of some steps, from a checkpoint or from the start, and what the experts did."""
    config = configuration(sections)
    parallel = config.parallel
    mesh = shared_mesh(parallel.tensor, parallel.pipeline, (), parallel.context, parallel.expert)
    trainer = build_trainer(config, mesh, make_data(config.model.vocab_size))
    if folder is not None:
        load(trainer, folder)
    records = [trainer.step() for _ in range(steps)]
    check_replicas(trainer.model, mesh, trainer.progress.step, trainer.optimizer)
    if target is not None:
        save(trainer, target)
    return [(record.loss, *record.details) for record in records]


@functools.cache
def curve() -> list[tuple[float, StepDetail]]:
    return go_on({}, None, 4, None)


def check(found: list[tuple[float, StepDetail]], wanted: list[tuple[float, StepDetail]]) -> None:
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in wanted], rel=1e-5)
    for (_, detail), (_, of_one) in zip(found, wanted, strict=True):
        assert detail.lines == of_one.lines
        entropy = of_one.numbers["expert_entropy"]
        assert detail.numbers["expert_entropy"] == pytest.approx(entropy, rel=1e-6)
        assert replace(detail, numbers={**detail.numbers, "expert_entropy": entropy}) == of_one


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_training_goes_on_at_other_degrees(zero: int, tmp_path: Path, ranks: Any) -> None:
    """At EP 4, then in one process, then at EP 2, with the optimizer's state."""
    folder = None
    found: list[tuple[float, StepDetail]] = []
    for degree, steps in ((4, 1), (1, 1), (2, 2)):
        sections = {"parallel": {"expert": degree}, "optimizer": {"zero": zero}}
        target = str(tmp_path / f"at-{degree}")
        steps_of_ranks = run(ranks, degree, go_on, sections, folder, steps, target)
        assert all(of_rank == steps_of_ranks[0] for of_rank in steps_of_ranks)
        found += steps_of_ranks[0]
        folder = f"{target}/step-{len(found):08}"
    check(found, curve())


@pytest.mark.parametrize(("world", "sections"), named("experts", "EP 2 of DP 4, ZeRO-2 with copies"))
def test_curves_of_expert_layouts_and_resumes(world: int, sections: Sections, tmp_path: Path, ranks: Any) -> None:
    halfway = str(tmp_path / "step-00000002")
    for found in run(ranks, world, go_on, sections, None, 2, str(tmp_path)):
        check(found, curve()[:2])
    check(go_on({}, halfway, 2, None), curve()[2:])
    for found in run(ranks, world, go_on, sections, halfway, 2, None):
        check(found, curve()[2:])


def error_of_many_experts() -> float:
    """Of the outputs at EP 2, in bfloat16 by autocast, relative to those of all experts on one rank."""
    routing, group = Routing(512, 4, normalized=False), shared_mesh(1, expert=2).experts
    with made_with(Execution(experts=group)):
        cut = Experts(16, 8, routing, group=Group(), dtype=torch.bfloat16)
    whole = Experts(16, 8, routing, group=Group(), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter, part in zip(whole.parameters(), cut.parameters(), strict=True):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            is_cut = part.shape != parameter.shape
            part.copy_(parameter.chunk(2)[group.group.rank] if is_cut else parameter)
    x = torch.randn(64, 1, 16, generator=torch.Generator().manual_seed(group.group.rank)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = cut(x), whole(x)
    assert found.dtype == wanted.dtype
    return ((found - wanted).norm() / wanted.norm()).item()


def test_more_experts_than_bfloat16_counts(ranks: Any) -> None:
    """It rounds whole numbers from 257 on; these have the weights' dtype on the way."""
    assert max(run(ranks, 2, error_of_many_experts)) < 0.01


def use_a_copy() -> str:
    """What a copied layer says, whose parameters are new and have no further gradients."""
    sections = {"parallel": {"expert": 2}, "train": {"bitwise": True, "data_grain": 4}}
    config = configuration(sections, "olmoe")
    trainer = build_trainer(config, Mesh(**config.parallel.degrees, grains=config.grains, device="cpu"), make_data())
    layer = copy.deepcopy(experts_of(trainer.model)[0])
    with pytest.raises(RuntimeError) as caught:
        layer(torch.zeros(4, 1, config.model.hidden_size))
    return str(caught.value)


def test_a_copied_layer_is_refused(ranks: Any) -> None:
    for text in ranks(2).run(use_a_copy):
        assert "experts with train.bitwise was copied, without the gradients that it keeps: build another layer" in text


class Sparse(torch.nn.Module):
    """A model of a user's own, with experts of different numbers."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, 16)
        self.experts = torch.nn.ModuleList(
            Experts(16, 8, Routing(experts, 2, scores="sigmoid", has_bias=True)) for experts in (4, 6)
        )
        self.head = torch.nn.Linear(16, vocab_size)

    def forward(self, ids_SB: Tensor, targets_SB: Tensor) -> Tensor:
        x = self.embedding(ids_SB)
        for layer in self.experts:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets_SB.flatten(), reduction="sum")


def test_experts_of_a_users_own_model_are_counted() -> None:
    config = make_config(model={"family": "tests.dist.test_experts:Sparse", "vocab_size": 131})
    trainer = build_trainer(config, Mesh(device="cpu"), make_data(131))
    for _ in range(2):
        [detail] = trainer.step().details
        by_block = detail.lines["experts"]["loads"].values()
        assert [len(loads) for loads in by_block] == [4, 6]
        assert [sum(loads) for loads in by_block] == [8 * 16 * 2] * 2
        assert 0.9 < detail.numbers["expert_entropy"] <= 1
    assert all(layer.router.bias.unique().numel() > 1 for layer in trainer.model.experts)


def test_the_record_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of each block with experts is counted at its experts, and its scores' entropy once."""
    entropies = []

    def entr(p: Tensor) -> Tensor:
        entropies.append(-(p * p.log()).sum(-1))
        return real(p)

    real = torch.special.entr
    monkeypatch.setattr(torch.special, "entr", entr)
    _, detail = go_on({"train": {"recompute": "full"}}, None, 1, None)[0]
    # The first block is dense. Of 8 experts each token has 3.
    loads = detail.lines["experts"]["loads"]
    assert list(loads) == [1, 2, 3]
    every = torch.tensor(list(loads.values()))
    assert every.sum(1).tolist() == [8 * 16 * 3] * 3
    assert detail.numbers["expert_load_max"] == pytest.approx(every.max().item() / (8 * 16 * 3 / 8))
    assert detail.numbers["expert_idle"] == 0
    assert detail.numbers["expert_entropy"] == pytest.approx(torch.cat(entropies).mean().item() / math.log(8), rel=1e-6)
    assert detail.facts == {}


def idle_configuration(family: str, sections: Sections, length: int, per_token: int) -> Config:
    train = {"micro_batch": 1, "global_batch": 4, "steps": STEPS, "sequence_length": length}
    optimizer = {"lr": LR, "min_lr": LR, "warmup_steps": 0, "schedule": "constant", "weight_decay": DECAY}
    return make_config(
        model={**SIZES, **SPARSE[family], "num_hidden_layers": 4, "num_experts_per_tok": per_token},
        **{**sections, "train": train | sections.get("train", {}), "optimizer": optimizer | sections["optimizer"]},
    )


def first(per_token: int, scores: Tensor) -> Tensor:
    return torch.arange(per_token, device=scores.device).expand(len(scores), per_token)


def train(family: str, sections: Sections, length: int, per_token: int) -> Found:
    """Losses, the first step's gradients, and the weights before and after; all tokens have the first experts."""
    config = idle_configuration(family, sections, length, per_token)
    mesh = Mesh(**config.parallel.degrees, device="cpu")
    trainer = build_trainer(config, mesh, make_data(config.model.vocab_size))
    for layer in trainer.model.modules():
        if isinstance(layer, Experts):
            layer.router.choose = functools.partial(first, per_token)
    before = canonical_weights(trainer.model, mesh.pp, optimizer=trainer.optimizer)
    record, gradients = step_with_gradients(trainer)
    losses = [record.loss, *(trainer.step().loss for _ in range(STEPS - 1))]
    after = canonical_weights(trainer.model, mesh.pp, optimizer=trainer.optimizer)
    return losses, gradients, before, after


@functools.cache
def alone(family: str, optimizer: str, length: int, per_token: int) -> Found:
    return train(family, {"optimizer": {"name": optimizer}}, length, per_token)


@pytest.mark.parametrize(
    ("family", "optimizer", "length", "per_token", "sections"),
    named("idle experts", "EP 4, ZeRO-2, all tokens at one expert"),
)
def test_experts_without_a_token_decay_as_in_one_process(
    family: str, optimizer: str, length: int, per_token: int, sections: Sections, ranks: Any
) -> None:
    sections = sections | {"optimizer": sections["optimizer"] | {"name": optimizer}}
    losses, gradients, before, after = alone(family, optimizer, length, per_token)
    idle = [weight for weight in before if any(f".experts.{number}." in weight for number in (3, 7))]
    assert idle
    everyone = run(ranks, 4, train, family, sections, length, per_token)
    found_gradients = functools.reduce(lambda all_, one: all_ | one[1], everyone, dict[str, Tensor]())
    for found, _, _, found_after in everyone:
        assert found == pytest.approx(losses, rel=1e-5)
        assert max(gradient_errors(found_gradients, gradients).values()) < 1e-5
        for weight in idle:
            assert not found_gradients[weight].any()
            decayed = before[weight] * (1 - LR * DECAY) ** STEPS
            torch.testing.assert_close(found_after[weight], decayed, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(after[weight], decayed, rtol=1e-5, atol=1e-7)
        assert all(math.isfinite(float(weight.sum())) for weight in found_after.values())
