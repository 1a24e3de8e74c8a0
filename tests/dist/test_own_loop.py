"""What a user's own loop does with the optimizer over real ranks: other parameters, clipping by hand, loss scaling."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import LAMB, ColumnParallelLinear, Mesh, RMSNorm, ZeroRedundancyOptimizer
from shardwise.base.errors import ConfigError
from shardwise.verify.canonical_values import canonical_weights
from tests.dist.dense import mesh as shared_mesh
from tests.dist.own_models import Sharded
from tests.dist.test_zero import difference, loss_of, make_model


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
    one, other = ranks(2).run(frozen_parameters)
    assert one == other
    assert one[6] == 1.0
    assert one[-1] == 0.0


def other_parameters() -> list[str]:
    """Sets of parameters that differ between ranks, each given in a way of its own."""
    rank = dist.get_rank()
    model = make_model()
    named = list(model.named_parameters())
    equal = [("a", nn.Parameter(torch.zeros(3))), ("b", nn.Parameter(torch.zeros(3)))]
    said = []
    given: list[list[Any]] = [
        [p for _, p in (named[::-1] if rank else named)],
        equal[::-1] if rank else equal,
        [p for _, p in named[: len(named) - rank]],
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
    one, other = ranks(2).run(other_parameters)
    assert one == other
    start = "all ranks must give the optimizer the same parameters in the same order; parameter"
    float32 = "of torch.float32 in group 0"
    differences = [
        f"0 is [33, 7] {float32} on rank 0, but [5] {float32} on rank 1",
        f"0 is a [3] {float32} on rank 0, but b [3] {float32} on rank 1",
        f"7 is [5] {float32} on rank 0, but missing on rank 1",
    ]
    assert one[:-1] == [f"{start} {difference}" for difference in differences]
    assert one[-1] == f"1 group: {start} 0 is [2] {float32} on rank 0, but [3] {float32} on rank 1"


def stepped_after_norms(measures: bool) -> list[Tensor]:
    """Weights after a step in which parameters were added, with the gradient norm asked for before or not."""
    mesh = shared_mesh(2)
    norms = [RMSNorm(4, group=mesh.tp, sequence_parallel_enabled=True) for _ in range(2)]
    optimizer = ZeroRedundancyOptimizer(norms[0].parameters(), torch.optim.SGD, lr=0.1, max_norm=None, mesh=mesh)
    x = torch.arange(1.0, 5.0).view(1, 4) + mesh.tp.rank
    norms[1](norms[0](x)).square().sum().backward()
    if measures:
        optimizer.norms()
    optimizer.add_param_group({"params": list(norms[1].parameters())})
    optimizer.step()
    return [norm.weight.detach() for norm in norms]


def test_parameters_may_be_added_after_the_norm_was_measured(ranks: Any) -> None:
    """The gradients that are summed already, over data and sequence, are not summed again."""
    measured, plain = (ranks(2).run(stepped_after_norms, measures) for measures in (True, False))
    for found, wanted in zip(measured, plain, strict=True):
        assert all(map(torch.equal, found, wanted))
        assert not torch.equal(wanted[0], torch.ones(4))
        assert not torch.equal(wanted[1], torch.ones(4))


def fresh_weights(tensor: int) -> dict[str, Tensor]:
    """Canonical weights of layers without `seed=`, which ranks make after each has drawn other numbers."""
    mesh = shared_mesh(tensor)
    torch.manual_seed(mesh.world.rank)
    model = Sharded(131, group=mesh.tp).to(mesh.device)
    return canonical_weights(model)


def test_layers_without_a_seed_agree_on_the_first_ranks(ranks: Any) -> None:
    """Embedding, linear layers and head, whole, are those that one process draws."""
    wanted = fresh_weights(1)
    for found in ranks(2).run(fresh_weights, 2):
        assert found.keys() == wanted.keys()
        for name, weight in wanted.items():
            assert torch.equal(found[name], weight), f"{name} is not what one process draws"


def clipped(stage: int) -> list[Any]:
    """Gradient norms and the weights after 5 steps; with overlap and without, state cut or whole."""
    rank, found = dist.get_rank(), []
    for overlap in (False, True):
        model = make_model()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, bucket_mib=2e-3, stage=stage)
        norms = []
        for step in range(5):
            with optimizer.accumulate(last=overlap):
                loss_of(model, step, rank, 2).backward()
            norms.append(optimizer.clip_grad_norm_(0.2))
            optimizer.step()
        found.append((torch.stack(norms), [p.detach() for p in model.parameters()]))
    return found


def test_clips_the_whole_models_gradient_by_hand_with_and_without_overlap(ranks: Any) -> None:
    """As torch's function does in one process; it sees half-reduced gradients here, or those of one rank."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    norms = []
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.2))
        optimizer.step()
    for stage in (1, 0):
        for outcome in ranks(2).run(clipped, stage):
            for found, weights in outcome:
                assert difference([found], [torch.stack(norms)]) <= 1e-6
                assert difference(weights, [p.detach() for p in model.parameters()]) <= 1e-6


FLAWED = {1: 1, 4: 0}
"""The steps whose gradient is not finite, each on one rank only."""


def scaled(overlap: bool, options: dict[str, Any]) -> list[Any]:
    """Scales after each step, and the weights at the end; one element of one rank's gradient becomes inf."""
    rank, step = dist.get_rank(), 0

    def flaw(gradient: Tensor) -> Tensor:
        at = torch.zeros_like(gradient)
        at.view(-1)[0] = float("inf") if FLAWED.get(step) == rank else 0.0
        return gradient + at

    model = make_model()
    next(model.parameters()).register_hook(flaw)
    chosen = {"optimizer_class": torch.optim.SGD, "lr": 0.1, "max_norm": 0.05, "bucket_mib": 2e-3, **options}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), **chosen)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(7):
        with optimizer.accumulate(last=overlap):
            scaler.scale(loss_of(model, step, rank, 2)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [scales, [p.detach() for p in model.parameters()]]


@pytest.mark.parametrize(
    "options",
    [{}, {"stage": 0}, {"optimizer_class": LAMB, "lr": 0.01}, {"gradient_dtype": torch.float16}],
    ids=["sharded", "whole", "lamb", "half gradients"],
)
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_all_ranks_skip_a_scaled_step_not_finite_on_one(overlap: bool, options: dict[str, Any], ranks: Any) -> None:
    """And halve their scales together; the other steps are those of one process without a scaler."""
    (scales, weights), (other_scales, other_weights) = ranks(2).run(scaled, overlap, options)
    assert scales == other_scales == [1024.0, 512.0, 512.0, 1024.0, 512.0, 512.0, 1024.0]
    assert all(map(torch.equal, weights, other_weights))
    model = make_model()
    optimizer = options.get("optimizer_class", torch.optim.SGD)(model.parameters(), lr=options.get("lr", 0.1))
    for step in range(7):
        if step not in FLAWED:
            optimizer.zero_grad()
            loss_of(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    close = 1e-3 if "gradient_dtype" in options else 1e-6
    assert difference(weights, [p.detach() for p in model.parameters()]) <= close


def scaled_and_cut() -> tuple[float, float]:
    """Two tensor-parallel ranks, no data parallelism: inf in the part of one rank."""
    mesh = Mesh(tensor=2)
    layer = ColumnParallelLinear(4, 6, group=mesh.tp, seed=1, name="layer")
    optimizer = ZeroRedundancyOptimizer(layer.parameters(), torch.optim.SGD, lr=0.1, mesh=mesh)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = layer.weight.detach().clone()
    scaler.scale(layer(torch.ones(3, 1, 4)).sum()).backward()
    if mesh.tp.rank == 1:
        layer.weight.grad[0, 0] = float("nan")
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), float((layer.weight.detach() - before).abs().max())


def test_tensor_parallel_ranks_skip_a_scaled_step_together(ranks: Any) -> None:
    assert ranks(2).run(scaled_and_cut) == [(1.0, 0.0)] * 2
