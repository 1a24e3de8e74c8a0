"""Norms with a grain: each layout of the same weights and gradients gives the same bits."""

import functools
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from shardwise import (
    GQAQKVColumnParallelLinear,
    Mesh,
    ParallelEmbedding,
    ParallelLMHead,
    RMSNorm,
    RowParallelLinear,
    ZeroRedundancyOptimizer,
)
from shardwise.distributed.placement import named_pieces, placements
from shardwise.optim import exact_sums
from shardwise.optim.gradient_norms import CanonicalNorms, ElementRun
from shardwise.optim.sharding import Ranks
from tests.dist.dense import random, run

GRAIN = 4
HIDDEN = 64


@functools.cache
def mesh(tensor: int) -> Mesh:
    """Made once a process, as `tests.dist.dense.mesh` is."""
    return Mesh(tensor=tensor, device="cpu", grains={"tp": GRAIN, "dp": GRAIN})


@dataclass(frozen=True)
class Case:
    """A layout, and the values of which norms are measured.

    Attributes:
        tensor: tensor-parallel degree; the other ranks are data-parallel.
        stage: stage of ZeRO.
        bucket_mib: size of a bucket, which changes where the buckets are cut.
        scale: factor of all gradients.
    """

    tensor: int = 1
    stage: int = 1
    bucket_mib: float = 0.02
    scale: float = 1.0


@dataclass(frozen=True)
class Found:
    """What one rank measures, of gradients and then of parameters, of the model and then of each canonical tensor.

    Attributes:
        norms: L2 norms.
        squares: their squares before they are rounded.
    """

    norms: list[float]
    squares: list[Fraction]


def layers(group: Any) -> nn.ModuleDict:
    """Layers of a Llama, and those whose vectors are cut at places of their own."""
    options: dict[str, Any] = {"group": group, "seed": 1}
    heads: dict[str, Any] = {"output_sizes": (64, 16), "gather_output": False, "bias": True}
    return nn.ModuleDict(
        {
            # 67 rows: the last rank's are padded.
            "embedding": ParallelEmbedding(67, HIDDEN, name="embedding", **options),
            # Two K/V heads: on four ranks they are copies.
            "qkv": GQAQKVColumnParallelLinear(HIDDEN, names=["q", "k", "v"], head_dim=8, **heads, **options),
            # Its bias has 24 elements for each part, but 4 of them are of the keys, and 4 of the values.
            "fused": GQAQKVColumnParallelLinear(HIDDEN, names=["fused"] * 3, head_dim=4, **heads, **options),
            # 6 input features for each part: an atom has 2 elements.
            "narrow": RowParallelLinear(24, HIDDEN, bias=True, input_is_parallel=True, name="narrow", **options),
            "wide": RowParallelLinear(128, HIDDEN, bias=False, input_is_parallel=True, name="wide", **options),
            "norm": RMSNorm(HIDDEN, name="norm", **options),
            # 256 rows, of which each part has 64 and is padded to 72.
            "head": ParallelLMHead(HIDDEN, 256, bias_name="head.bias", row_multiple=24, name="head", **options),
        }
    )


def gradient_of(name: str, shape: tuple[int, ...]) -> Tensor:
    """Gradients whose elements differ in size by many orders of magnitude."""
    seed = sum(name.encode())
    return random(seed, *shape) * torch.exp(4 * random(seed + 1, *shape))


def measure(case: Case) -> Found:
    """Measure all norms on this rank."""
    ranks = mesh(case.tensor)
    model = layers(ranks.tp)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, mesh=ranks, stage=case.stage, bucket_mib=case.bucket_mib, lr=0.1
    )
    for _, parameter, record in placements(model, ranks.tp):
        gradient = torch.zeros_like(parameter)
        for piece in record.pieces:
            piece.of(gradient).copy_(gradient_of(piece.name, piece.shape)[piece.box.slices] * case.scale)
        parameter.grad = gradient
    canonical = CanonicalNorms(
        [optimizer.buckets], named_pieces(optimizer.param_groups, 0), ranks.device, Ranks(ranks.replicas, ranks), None
    )
    with patch.object(exact_sums, "norms", wraps=exact_sums.norms) as rounding:
        of_model = torch.stack(optimizer.norms())
        of_tensors = canonical.measure([0], ElementRun.gradient, ElementRun.master)
    # The gradients of data-parallel ranks are equal here, and `measure` sees their sum.
    of_tensors[0] /= ranks.dp.size
    squares = []
    for call in rounding.call_args_list:
        sums = exact_squares(*call.args)
        half = len(sums) // 2
        squares += [total / ranks.dp.size**2 for total in sums[:half]] + sums[half:]
    return Found([*of_model.tolist(), *of_tensors.flatten().tolist()], squares)


def exact_squares(added_limbs: Tensor, divisor: int) -> list[Fraction]:
    """The sums that are rounded to norms: a norm in float32 has too few bits to tell in which order it was added."""
    return [
        Fraction(sum(limb << (24 * place) for place, limb in enumerate(limbs)), divisor)
        for limbs in added_limbs.tolist()
    ]


@functools.cache
def one_process(scale: float) -> Found:
    """What a model has that is not cut."""
    return measure(Case(scale=scale))


LAYOUTS = [
    (2, Case()),
    (2, Case(tensor=2)),
    (4, Case()),
    (4, Case(stage=0)),
    (4, Case(bucket_mib=100.0)),
    (4, Case(tensor=2)),
    (4, Case(tensor=2, stage=0, bucket_mib=100.0)),
    (4, Case(tensor=4)),
]


@pytest.mark.parametrize(("world", "case"), LAYOUTS, ids=str)
def test_norms_have_the_bits_of_one_process(world: int, case: Case, ranks: Any) -> None:
    for found in run(ranks, world, measure, case):
        assert found == one_process(case.scale)


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_tiny_and_huge_gradients(scale: float, ranks: Any) -> None:
    """Their squares are no float32 numbers; data-parallel ranks have sums of four times the size of one rank's."""
    wanted = one_process(scale)
    assert wanted.norms[0] == pytest.approx(one_process(1.0).norms[0] * scale, rel=1e-6, abs=0)
    for found in run(ranks, 4, measure, replace(Case(), scale=scale)):
        assert found == wanted
