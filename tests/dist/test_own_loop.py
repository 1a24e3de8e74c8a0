"""What a user's own loop does with the optimizer over real ranks: other parameters, clipping by hand, loss scaling."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise import ZeroRedundancyOptimizer
from shardwise.errors import ConfigError
from shardwise.testing import RankPool
from tests.dist.test_zero import make_model

# ---- parameters


def frozen_parameters() -> list[float]:
    """Frozen ones that differ between ranks: of several dtypes, without elements, and not contiguous."""
    rank = dist.get_rank()
    model = make_model(seed=rank)
    model[0].requires_grad_(False)
    torch.manual_seed(rank)
    frozen = [
        *model[0].parameters(),
        nn.Parameter(torch.randn(3, 5).t(), requires_grad=False),
        nn.Parameter(torch.randint(0, 100, (7,), dtype=torch.int8), requires_grad=False),
        nn.Parameter(torch.randn(3, dtype=torch.bfloat16), requires_grad=False),
        nn.Parameter(torch.randn(2, dtype=torch.complex64), requires_grad=False),
        nn.Parameter(torch.tensor(rank == 0), requires_grad=False),
        nn.Parameter(torch.zeros(0, 3), requires_grad=False),
    ]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = ZeroRedundancyOptimizer([*trained, *frozen[:-1]], torch.optim.SGD)
    optimizer.add_param_group({"params": [frozen[-1], later := nn.Parameter(torch.ones(2) * rank)]})
    return [float(p.detach().to(torch.complex128).abs().sum()) for p in (*frozen, *trained, later)]


def test_frozen_parameters_take_the_first_ranks_values(ranks: Any) -> None:
    pool: RankPool = ranks(2)
    one, other = pool.run(frozen_parameters)
    assert one == other
    assert one[6] == 1.0
    assert one[-1] == 0.0


def other_parameters() -> list[str]:
    """Sets of parameters that differ between ranks, each given in a way of its own."""
    rank = dist.get_rank()
    model = make_model()
    named = list(model.named_parameters())
    equal = [("a", nn.Parameter(torch.zeros(3))), ("b", nn.Parameter(torch.zeros(3)))]
    turned = torch.zeros(4, 6).t() if rank else torch.zeros(6, 4)
    half = torch.bfloat16 if rank else torch.float32
    said = []
    given: list[list[Any]] = [
        [p for _, p in (named[::-1] if rank else named)],
        equal[::-1] if rank else equal,
        [p for _, p in named[: len(named) - rank]],
        [nn.Parameter(turned)],
        [nn.Parameter(torch.zeros(3, dtype=half))],
        [nn.Parameter(torch.zeros(3), requires_grad=rank == 0), named[0][1]],
        [{"params": [named[0][1]]}, {"params": [named[1][1]]}] if rank else [{"params": [p for _, p in named[:2]]}],
    ]
    for parameters in given:
        try:
            ZeroRedundancyOptimizer(parameters, torch.optim.SGD)
        except ConfigError as error:
            said.append(str(error))
        else:
            said.append("no error")
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD)
    try:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2 + rank))]})
    except ConfigError as error:
        said.append(f"{len(optimizer.param_groups)} group: {error}")
    return said


def test_other_parameters_on_another_rank_are_refused_with_the_first_difference(ranks: Any) -> None:
    """Another order of equal shapes, too, where the parameters have names."""
    pool: RankPool = ranks(2)
    one, other = pool.run(other_parameters)
    assert one == other
    start = "all ranks must give the optimizer the same parameters in the same order; parameter"
    float32 = "of torch.float32 in group 0"
    differences = [
        f"0 is [33, 7] {float32} on rank 0, but [5] {float32} on rank 1",
        f"0 is a [3] {float32} on rank 0, but b [3] {float32} on rank 1",
        f"7 is [5] {float32} on rank 0, but missing on rank 1",
        f"0 is [6, 4] {float32} on rank 0, but [6, 4] with strides [1, 6] {float32} on rank 1",
        f"0 is [3] {float32} on rank 0, but [3] of torch.bfloat16 in group 0 on rank 1",
        f"0 is [3] {float32} on rank 0, but [3] {float32} (frozen) on rank 1",
        f"1 is [33] {float32} on rank 0, but [33] of torch.float32 in group 1 on rank 1",
    ]
    assert one[:-1] == [f"{start} {difference}" for difference in differences]
    assert one[-1] == f"1 group: {start} 0 is [2] {float32} on rank 0, but [3] {float32} on rank 1"
