"""What is counted of a model that no formula knows, and what is said of its memory when that runs out."""

import pytest
import torch
from torch import nn

from shardwise import ParallelEmbedding, ParallelLMHead, ZeroRedundancyOptimizer
from shardwise.config.optimizer_specs import OPTIMIZERS
from shardwise.optim.state import kept_bytes, state_bytes
from shardwise.train.build import _count_parameters
from tests.unit.layers.groups import pretend_group


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rank", [0, 3])
def test_each_canonical_element_counts_once(rank: int, tied: bool) -> None:
    """On any rank: one of the last ones holds padding, and a tied weight is one."""
    group = pretend_group(rank, 4)
    embedding = ParallelEmbedding(9, 8, group=group, seed=1, name="embedding")
    weight = embedding.weight if tied else None
    head = ParallelLMHead(8, 9, tied_weight=weight, group=group, seed=1, name="head")
    model = nn.ModuleList([embedding, head, nn.Linear(3, 2)])
    assert _count_parameters(model) == 72 * (1 if tied else 2) + 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_the_buffers(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4).requires_grad_(False)).to(dtype)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, gradient_dtype=torch.float32, lr=1e-3)
    expected = kept_bytes(model, optimizer, state_bytes(optimizer, OPTIMIZERS["adamw"], all_masters=False))
    elements, frozen = 96, 36  # 64 + 8, each aligned to 32
    assert expected["parameters"] == (elements + frozen) * dtype.itemsize
    assert expected["gradients"] == elements * 4
    model(torch.ones(2, 8, dtype=dtype)).sum().backward()
    optimizer.step()
    held = optimizer.state_bytes()
    assert expected["optimizer"] == held["state"] + held["masters"]
