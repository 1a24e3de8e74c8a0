"""LAMB over real ranks: its trust ratios are those of whole canonical tensors, however these are cut."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import LAMB, ColumnParallelLinear, Mesh, RowParallelLinear, ZeroRedundancyOptimizer
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import Init, Piece, make_parameter, placements
from shardwise.models.build import build_model
from shardwise.train.build import _decay_groups
from tests.dist.dense import mesh as shared_mesh
from tests.dist.dense import random
from tests.dist.training import make_config, sizes

DECAY, STEPS = 0.1, 4
SIZES = sizes(61, 32, 48, heads=4, positions=24)
LLAMA = SIZES | {"family": "llama", "num_key_value_heads": 2}  # fewer than 4 ranks: copied K/V heads
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama tied, biases": LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "gpt": SIZES | {"family": "gpt"},  # Q, K and V are one canonical tensor, held in three pieces
    "gpt_neox": SIZES | {"family": "gpt_neox"},
    "bert": SIZES | {"family": "bert"},
}


def scaled(name: str) -> float:
    """Tensors of very different size, so that each has a trust ratio of its own."""
    return 10.0 ** (sum(name.encode()) % 5 - 2)


def ramp(shape: tuple[int, ...]) -> Tensor:
    """Factors that grow along each dimension, so that the parts of a tensor differ: their ratios would, too."""
    factor = torch.ones(shape)
    for dim, size in enumerate(shape):
        factor *= torch.linspace(0.2, 1.8, size).view(-1, *[1] * (len(shape) - dim - 1))
    return factor


def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    return random(sum(name.encode()), *shape) * ramp(shape) * scaled(name)


def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    return random(1000 * (step + 1) + sum(name.encode()), *shape)


def part(group: Group) -> float:
    """This rank's share of a sum over the group: all differ, and they add up to 1."""
    return 1.0 / group.size + 0.5 * (group.rank - (group.size - 1) / 2)


def reference(
    shapes: dict[str, tuple[int, ...]], lr: float, most: float, steps: int = STEPS
) -> dict[str, list[Tensor]]:
    """Every canonical tensor's updates by algorithm 2 of the paper, in float64, with ratios of at most `most`."""
    updates: dict[str, list[Tensor]] = {}
    for name, shape in shapes.items():
        decay = DECAY if len(shape) > 1 else 0.0
        w, m, v = weight(name, shape).double(), torch.zeros(shape).double(), torch.zeros(shape).double()
        updates[name] = []
        for t in range(1, steps + 1):
            g = gradient(name, shape, t - 1).double()
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            u = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + decay * w
            updates[name].append(lr * (min(float(w.norm() / u.norm()), most) if decay else 1.0) * u)
            w = w - updates[name][-1]
    return updates


def errors_of_updates(module: nn.Module, mesh: Mesh, lr: float = 1e-2, **options: Any) -> dict[str, float]:
    """Given weights and gradients, by canonical name: the worst error of this rank's part of a step's update.

    In float64, where an update is not lost in a weight's rounding; norms are float32 all the same. Relative to the
    update's root mean square. Gradients are split over the ranks that must add them up.
    """
    module.double()
    shapes: dict[str, tuple[int, ...]] = {}
    with torch.no_grad():
        for _, p, record in placements(module):
            for piece in record.pieces:
                shapes[piece.name] = piece.shape
                piece.of(p).copy_(weight(piece.name, piece.shape)[piece.box.slices])
    optimizer = ZeroRedundancyOptimizer(
        _decay_groups(module.parameters(), DECAY), LAMB, mesh=mesh, lr=lr, average=False, grad_clipping=False, **options
    )
    most = 1.0 if options.get("trust_clip") else math.inf
    wanted, errors = reference(shapes, lr, most), dict.fromkeys(shapes, 0.0)
    for step in range(STEPS):
        before = [p.detach().clone() for p in module.parameters()]
        for _, p, record in placements(module):
            assert p.grad is not None
            for piece in record.pieces:
                share = part(mesh.dp) * (part(piece.copies) if piece.partial else 1.0)
                piece.of(p.grad).copy_(gradient(piece.name, piece.shape, step)[piece.box.slices] * share)
        optimizer.step()
        for (_, p, record), old in zip(placements(module), before, strict=True):
            update = old - p.detach()
            for piece in record.pieces:
                whole = wanted[piece.name][step]
                off = (piece.of(update) - whole[piece.box.slices]).norm() / whole.square().mean().sqrt()
                errors[piece.name] = max(errors[piece.name], float(off) / max(piece.box.numel, 1) ** 0.5)
    return errors


def family_errors(name: str, tensor: int, sequence: bool, stage: int, trust_clip: bool = False) -> dict[str, float]:
    mesh = shared_mesh(tensor)
    model = build_model(make_config(model=MODELS[name]), mesh.tp, sequence_parallel=sequence)
    return errors_of_updates(model, mesh, stage=stage, bucket_mib=0.02, trust_clip=trust_clip)


LAYOUTS = {
    "tp2-dp2-sp-zero1": (2, True, 1),
    "tp2-dp2-zero0": (2, False, 0),
    "tp4-sp": (4, True, 1),
    "dp4-zero1": (1, False, 1),
}


def cells(layouts: Iterable[str], others: Sequence[str]) -> list[Any]:
    """Every layout with every other; `make test` runs all layouts, each with another model."""
    slow = pytest.mark.slow
    return [
        pytest.param(layout, other, marks=() if number % len(others) == others.index(other) else slow)
        for number, layout in enumerate(layouts)
        for other in others
    ]


@pytest.mark.parametrize(("layout", "name"), cells(LAYOUTS, list(MODELS)))
def test_ratios_are_those_of_whole_tensors(name: str, layout: str, ranks: Any) -> None:
    """Fused, transposed, copied, padded, tied, replicated and vectors, each updated as in one process."""
    for rank, errors in enumerate(ranks(4).run(family_errors, name, *LAYOUTS[layout])):
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] <= 2e-6, f"rank {rank}: the update of {worst} is off by {errors[worst]:.1e}"


def test_clipped_ratios_are_those_of_whole_tensors(ranks: Any) -> None:
    for errors in ranks(4).run(family_errors, "gpt", *LAYOUTS["tp2-dp2-sp-zero1"], True):
        assert max(errors.values()) <= 2e-6, errors


# ---- ranks that hold different tensors


class Stage(nn.Module):
    """A pipeline stage: a layer of its own, one without a name, a plain norm, and a weight tied to another stage's."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.own = ColumnParallelLinear(
            8, 12, group=mesh.tp, seed=1, name=f"layers.{mesh.pp.rank}", init=Init.normal(1.0 + mesh.pp.rank)
        )
        self.nameless = RowParallelLinear(12, 8, group=mesh.tp, init=Init.normal(1.0 + 2.0 * mesh.pp.rank))
        self.plain = nn.Linear(5, 3)
        piece = replace(Piece.rows("tied.weight", (6, 4), mesh.tp, Init.normal(0.1)), copies=mesh.pp, partial=True)
        self.tied = make_parameter(piece.local.size, (piece,), mesh.tp, seed=1)


def stage_errors(tensor: int, pipeline: int) -> dict[str, float]:
    mesh = Mesh(tensor=tensor, pipeline=pipeline, device="cpu")
    return errors_of_updates(Stage(mesh), mesh)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (2, 2), (1, 4)])
def test_stages_of_a_pipeline(tensor: int, pipeline: int, ranks: Any) -> None:
    """A tensor on two stages counts once; layers without a name are apart; what no record cuts counts once."""
    for errors in ranks(4).run(stage_errors, tensor, pipeline):
        assert len(errors) == 7
        assert max(errors.values()) <= 2e-6, errors


def plain_beside_cut() -> list[float]:
    """Norms of a model with plain torch layers beside ours, and what they should be."""
    mesh = shared_mesh(2)
    model = nn.ModuleList([ColumnParallelLinear(8, 12, group=mesh.tp, seed=1, name="cut"), nn.LayerNorm(8)])
    optimizer = ZeroRedundancyOptimizer(model.parameters(), LAMB, mesh=mesh, average=False)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    return [float(optimizer.norms()[0]), math.sqrt(12 * 8 + 12 + 8 + 8)]


def test_plain_layers_beside_cut_ones_count_once(ranks: Any) -> None:
    for found, wanted in ranks(4).run(plain_beside_cut):
        assert found == pytest.approx(wanted, rel=1e-6)


def same_name_twice() -> str:
    mesh = Mesh(pipeline=2, device="cpu")
    layer = ColumnParallelLinear(8, 12, group=mesh.tp, seed=1, name="layers.0")
    optimizer = ZeroRedundancyOptimizer(layer.parameters(), LAMB, mesh=mesh)
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_tensor_held_twice_is_an_error_on_every_rank(ranks: Any) -> None:
    for said in ranks(4).run(same_name_twice):
        assert "must together hold each canonical tensor once" in said
        assert "layers.0.weight of shape (12, 8): 192 of 96 elements" in said
        assert said.endswith("Give mesh=, and each layer a name of its own")
