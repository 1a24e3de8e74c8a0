"""Muon against `torch.optim.Muon` and AdamW, alone and through the wrapper, in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import GQAQKVColumnParallelLinear, Muon, ZeroRedundancyOptimizer
from shardwise.distributed.placement import Outputs

STEPS = 20
LR, ADAMW_LR = 1e-2, 3e-3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 8))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [{"params": matrices}, {"params": others, "use_muon": False, "lr": ADAMW_LR, "weight_decay": 0.0}]


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = STEPS) -> None:
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(x).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def plain_loop(**options: Any) -> nn.Module:
    model = net()
    matrices, others = (group["params"] for group in groups(model))
    muon = torch.optim.Muon(matrices, lr=LR, **options)
    train(model, muon, torch.optim.AdamW(others, lr=ADAMW_LR, weight_decay=0.0))
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"adjust_lr_fn": "original", "weight_decay": 0.5},
        {"adjust_lr_fn": "match_rms_adamw", "nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.5, "ns_steps": 3},
    ],
)
def test_trains_as_torchs_muon_and_adamw(options: dict[str, Any]) -> None:
    wanted = plain_loop(**options)
    alone, wrapped = net(), net()
    train(alone, Muon(groups(alone), lr=LR, ns_dtype="bfloat16", **options))
    wrapping = {"ns_dtype": "bfloat16", "grad_clipping": False, "bucket_mib": 1e-4}
    train(wrapped, ZeroRedundancyOptimizer(groups(wrapped), Muon, lr=LR, **wrapping, **options))
    for found in (alone, wrapped):
        torch.testing.assert_close([*found.parameters()], [*wanted.parameters()], rtol=0, atol=1e-6)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: Muon([nn.Parameter(torch.zeros(3))]), r"of shape \[3\] must be a matrix, of two dimensions"),
    (
        lambda: ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(3))], Muon),
        r"put it into a parameter group with use_muon=False",
    ),
    (lambda: Muon(net().parameters(), ns_steps=0, momentum=1.0), r"momentum \(1.0\) must .*; ns_steps \(0\) must"),
]


def test_wrong_options_are_refused_and_outputs_are_cut_into_heads() -> None:
    for make, said in WRONG:
        with pytest.raises(ValueError, match=said):
            make()

    def rows(outputs: Outputs, by_head: bool) -> list[list[int]]:
        return [[row for run in runs for row in run] for runs in outputs.matrices(by_head=by_head)]

    assert rows(Outputs(4, 4), True) == [[4, 5, 6, 7]]
    heads = Outputs(4, 4, head_dim=2)
    assert (rows(heads, False), rows(heads, True)) == ([[4, 5, 6, 7]], [[4, 5], [6, 7]])
    taking_turns = Outputs(0, 12, head_dim=2, maps=3)
    assert rows(taking_turns, False) == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert len(rows(taking_turns, True)) == 6


def test_a_head_is_a_matrix_where_heads_are_split() -> None:
    """Through the wrapper, as the whole layer by torch's Muon on each head."""
    layer = GQAQKVColumnParallelLinear(8, (16, 8), bias=False, head_dim=4, names=("q", "k", "v"), seed=1)
    heads = [nn.Parameter(head.detach().clone()) for head in layer.weight.split(4)]
    gradient = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(0))
    options = {"ns_dtype": "bfloat16", "split_heads": True, "grad_clipping": False}
    optimizer = ZeroRedundancyOptimizer(layer.parameters(), Muon, lr=LR, **options)
    layer.weight.grad = gradient.clone()
    optimizer.step()
    for head, part in zip(heads, gradient.split(4), strict=True):
        head.grad = part
    torch.optim.Muon(heads, lr=LR).step()
    wanted: Tensor = torch.cat([head.detach() for head in heads])
    torch.testing.assert_close(layer.weight.detach(), wanted, rtol=0, atol=1e-6)
