"""ZeRO over real ranks: the same training as one process, the state cut, and every misuse an error on all ranks."""

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise import ColumnParallelLinear, ZeroRedundancyOptimizer
from shardwise.base.errors import ConfigError
from shardwise.distributed.mesh import Group
from tests.dist.training import cases

STEPS, BATCH, MICRO = 3, 16, 2


def make_model(seed: int = 0) -> nn.Module:
    """Odd sizes everywhere, so that padding and shares of it are part of every test."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.LayerNorm(33), nn.Linear(33, 19), nn.Tanh(), nn.Linear(19, 5))


def loss_of(model: nn.Module, step: int, rank: int = 0, ranks: int = 1, micro: int = 0, micros: int = 1) -> Tensor:
    """The mean over this part of the step's batch."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 7, generator=generator, device="cpu")
    y = torch.randint(0, 5, (BATCH,), generator=generator, device="cpu")
    mine = slice(rank * micros + micro, None, ranks * micros)
    first = next(model.parameters())
    return nn.functional.cross_entropy(model(x[mine].to(first.device, first.dtype)).float(), y[mine].to(first.device))


def train(
    *,
    overlap: bool = False,
    steps: int = STEPS,
    clear: str | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[list[Tensor], nn.Module, ZeroRedundancyOptimizer]:
    """Steps of two micro-batches; the mean losses, and what was trained."""
    group = Group.world()
    model = make_model().to(dtype)
    chosen: dict[str, Any] = {"max_norm": 0.5, "lr": 1e-2, **options}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, model=model, **chosen)
    losses = []
    for step in range(steps):
        if clear is not None:
            model.zero_grad(set_to_none=clear == "none")
        total = torch.zeros(())
        for micro in range(MICRO):
            part = loss_of(model, step, group.rank, group.size, micro, MICRO) / MICRO
            if overlap:
                with optimizer.accumulate(last=micro == MICRO - 1):
                    part.backward()
            else:
                part.backward()
            total += part.detach()
        dist.all_reduce(total)
        losses.append(total / group.size)
        optimizer.step()
    return losses, model, optimizer


@functools.cache
def reference() -> tuple[list[Tensor], list[Tensor]]:
    """Plain AdamW on the whole batch in one process."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, [p.detach() for p in model.parameters()]


def difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest relative difference of two lists of tensors, each in its norm."""
    with torch.no_grad():
        return max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(found, wanted, strict=True))


VARIANTS = cases("zero")
SAME_SUMS = [
    name
    for name, options in VARIANTS.items()
    if "bucket_mib" not in options and (options.get("stage", 1) == 1 or options.get("reduce") == "step")
]


def train_variants() -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    made = {}
    for name, options in VARIANTS.items():
        losses, model, optimizer = train(**options)
        with optimizer.gathered():
            made[name] = (losses, [p.detach().clone() for p in model.parameters()])
    return made


def test_trains_as_adamw_in_one_process(ranks: Any) -> None:
    """Whatever the buckets, the overlap, who clears gradients and how, or whether state is cut."""
    outcomes = ranks(4).run(train_variants)
    wanted_losses, wanted = reference()
    for name, (losses, weights) in outcomes[0].items():
        for rank in range(1, 4):
            assert all(map(torch.equal, outcomes[rank][name][1], weights)), f"{name}: rank {rank} drifted"
        assert difference(losses, wanted_losses) <= 1e-6, name
        assert difference(weights, wanted) <= 1e-6, name
    first, *others = (outcomes[0][name] for name in SAME_SUMS)
    assert len(others) == 7
    for losses, weights in others:
        assert all(map(torch.equal, losses, first[0])), "the overlap changes a bit"
        assert all(map(torch.equal, weights, first[1])), "the overlap changes a bit"


class Sharing(nn.Module):
    """Two blocks, of which the second one uses a weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x)) @ self.blocks[0].weight  # type: ignore[operator]


def in_shards(model: nn.Module, lr: float) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=lr, stage=3, model=model, bucket_mib=1e-5)


def read_elsewhere() -> list[str]:
    model = Sharing()
    optimizer = in_shards(model, 0.1)
    messages = []
    for read in (lambda: model.blocks[1].weight.sum(), lambda: model(torch.ones(2, 7))):
        with pytest.raises(ConfigError) as raised:
            read()
        messages.append(str(raised.value))
    with optimizer.gathered():
        model(torch.ones(2, 7)).sum().backward()
        model.blocks[1].weight.detach().fill_(2.0)
    with optimizer.gathered():
        assert bool((model.blocks[1].weight == 2.0).all())
    for dtype in (torch.float32, torch.bfloat16):
        step_and_load_inside(dtype)
    return messages


def step_and_load_inside(dtype: torch.dtype) -> None:
    model = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)]).to(dtype)
    optimizer = in_shards(model, 0.5)
    with optimizer.gathered():
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        state = copy.deepcopy(optimizer.state_dict())
        for p in model.parameters():
            p.detach().fill_(1.0)
        sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        with optimizer.gathered():
            optimizer.step()
        stepped = [p.detach().clone() for p in model.parameters()]
        assert all(p.min() > 0.5 and p.max() < 1 for p in stepped), "the step began with other values"
    with optimizer.gathered():
        assert all(map(torch.equal, stepped, model.parameters())), "the step's values are lost"
        model.load_state_dict(saved)
        optimizer.load_state_dict(state)
    with optimizer.gathered():
        assert all(map(torch.equal, saved.values(), model.parameters())), "the loaded values are lost"


def test_a_released_parameter_is_refused_by_name(ranks: Any) -> None:
    for messages in ranks(2).run(read_elsewhere):
        for message, name in zip(messages, ("blocks.1.weight", "blocks.0.weight"), strict=True):
            assert f"with optimizer.zero (3) the parameter {name} must be read in the forward pass" in message


def test_stage_3_needs_the_model() -> None:
    with pytest.raises(ValueError, match=r"stage \(3\) must have model="):
        ZeroRedundancyOptimizer(make_model().parameters(), torch.optim.SGD, lr=0.1, stage=3)


def unclipped(**options: Any) -> list[Tensor]:
    _, model, _ = train(grad_clipping=False, **options)
    return [p.detach() for p in model.parameters()]


def bucket_sizes() -> list[list[Tensor]]:
    sizes = [{"bucket_mib": 1e-5}, {"bucket_mib": 2e-3, "overlap": True}, {"bucket_mib": 1e-2}, {"bucket_mib": 1e3}]
    return [unclipped(**size) for size in [*sizes, {"stage": 0}]]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_bucket_size_changes_no_bit(world: int, ranks: Any) -> None:
    """Fault 14 of the reference: NaN beyond a bucket size. Between two ranks an all-reduce adds up alike, too."""
    *sizes, reduced = ranks(world).run(bucket_sizes)[0]
    for weights in [*sizes[1:], *([reduced] if world == 2 else [])]:
        assert all(map(torch.equal, weights, sizes[0]))


def rank_dependent() -> list[float]:
    """What differs between ranks: initial weights, which parameters are used, which gradient is ready first."""
    rank = dist.get_rank()
    results = []
    model = make_model(seed=rank)
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD)
    wanted = make_model(seed=0)
    results.append(difference(list(model.parameters()), list(wanted.parameters())))

    # Rank 0 does not use the layer in the middle: its gradient counts as 0 there. Stage 2 reduces each pass.
    for stage, overlap, passes in ((1, False, 1), (1, True, 1), (2, False, 2)):
        model, reference = nn.Sequential(*make_model().children())[:4], nn.Sequential(*make_model().children())[:4]
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, lr=0.1, grad_clipping=False, bucket_mib=1e-5, stage=stage
        )
        for step in range(3):
            optimizer.zero_grad()
            model.zero_grad(set_to_none=step % 2 == 0)
            for number in range(passes):
                with optimizer.accumulate(last=overlap):
                    branch(model, step + 7 * number, rank).backward()
            optimizer.step()
            for number in range(passes):
                sum(branch(reference, step + 7 * number, r) for r in range(2)).backward()  # type: ignore[union-attr]
            for p in reference.parameters():
                with torch.no_grad():
                    p -= 0.1 * p.grad / 2 if p.grad is not None else 0.0
                p.grad = None
        results.append(difference(list(model.parameters()), list(reference.parameters())))

    # Buckets start in one order although ranks call out in opposite ones.
    model, started = make_model(), []
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, bucket_mib=1e-5)
    loss_of(model, 0, rank, 2).backward()
    parameters = list(model.parameters())
    for p in parameters if rank else reversed(parameters):
        optimizer.gradient_ready(p)
        started.append([b.reduced for b in optimizer.buckets].count(True))
    optimizer.step()
    for number in (started[0], started[-2], started[-1]):
        results.append(float(number))
    return results


def branch(model: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))
    first, _, norm, middle = list(model)[:4]  # type: ignore[call-overload]
    hidden = norm(first(x))
    return (middle(hidden) if rank else hidden).square().mean()


def test_ranks_need_not_agree(ranks: Any) -> None:
    outcomes = ranks(2).run(rank_dependent)
    for found in outcomes:
        assert found[0] == 0.0, "initial weights are not rank 0's"
        assert max(found[1:4]) <= 1e-6
    everything = len(list(make_model().parameters()))
    assert outcomes[0][4:] == [1, everything - 1, everything], "in bucket order each call starts one"
    assert outcomes[1][4:] == [0, 0, everything], "in the opposite order all wait for the first bucket"


def misuse() -> list[str]:
    rank, said = dist.get_rank(), []

    def attempt(action: Callable[[], object]) -> None:
        try:
            action()
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
        else:
            said.append("no error")

    model = make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    with optimizer.accumulate():
        loss_of(model, 0, rank, 2).backward()
    loss_of(model, 1, rank, 2).backward()  # overlapped
    attempt(loss_of(model, 2, rank, 2).backward)

    # Dropping gradients whose reduction is under way leaves nothing behind.
    optimizer.zero_grad()
    fresh, again = make_model(), ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    reference = ZeroRedundancyOptimizer(fresh.parameters(), torch.optim.AdamW)
    with again.accumulate(last=True):
        loss_of(model, 3, rank, 2).backward()
    again.zero_grad()
    for net, chosen in ((model, again), (fresh, reference)):
        loss_of(net, 4, rank, 2).backward()
        chosen.step()
    said.append(f"dropped: {difference(list(model.parameters()), list(fresh.parameters()))}")

    wrapped = DistributedDataParallel(make_model())
    for parameters in (wrapped.parameters(), wrapped.module.parameters()):
        attempt(functools.partial(ZeroRedundancyOptimizer, parameters, torch.optim.AdamW))
    inside = make_model()
    optimizer = ZeroRedundancyOptimizer(inside.parameters(), torch.optim.AdamW)
    later = DistributedDataParallel(inside)
    loss_of(later, 0, rank, 2).backward()
    attempt(optimizer.step)

    cut = ColumnParallelLinear(4, 6, group=Group(dist.group.WORLD, name="tp"))
    attempt(lambda: ZeroRedundancyOptimizer(cut.parameters(), torch.optim.AdamW))
    return said


def test_misuse_is_an_error_on_every_rank(ranks: Any) -> None:
    for said in ranks(2).run(misuse):
        assert said[0].startswith("backward() came after this step's gradients were reduced: put all but")
        assert said[1] == "dropped: 0.0"
        for text in said[2:5]:
            assert text.startswith("the model is wrapped in DistributedDataParallel, which reduces every gradient")
        assert said[5].startswith("a parameter is cut over 2 tensor-parallel ranks: give mesh=")


def roundtrip(dtype: torch.dtype) -> list[Any]:
    """Three steps, a file, three more; against the file read by a fresh optimizer."""
    rank, ranks_ = dist.get_rank(), dist.get_world_size()

    def more(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> list[Tensor]:
        for step in range(100, 103):
            loss_of(model, step, rank, ranks_).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    options = {"dtype": dtype, "gradient_dtype": torch.float32}
    _, model, optimizer = train(steps=3, **options)  # type: ignore[arg-type]
    weights, state = io.BytesIO(), io.BytesIO()
    torch.save(model.state_dict(), weights)
    torch.save(optimizer.state_dict(), state)
    size = state.tell()
    wanted = more(model, optimizer)
    for file in (weights, state):
        file.seek(0)
    _, model, optimizer = train(steps=1, **options)  # type: ignore[arg-type]
    saved = torch.load(state, weights_only=True)
    model.load_state_dict(torch.load(weights, weights_only=True))
    optimizer.load_state_dict(saved)
    same = all(map(torch.equal, more(model, optimizer), wanted))
    saved["layout"]["rank"] = (rank + 1) % ranks_
    try:
        optimizer.load_state_dict(saved)
    except ValueError as error:
        return [same, size, sum(optimizer.state_bytes()[k] for k in ("state", "masters")), str(error)]
    return [same, size, 0, "no error"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_survives_a_file(dtype: torch.dtype, ranks: Any) -> None:
    for same, size, held, error in ranks(2).run(roundtrip, dtype):
        assert same
        assert held < size < held + 8192, "the file holds more than this rank's part"
        assert error.startswith("optimizer state is of layout {'rank': ")


def groups_and_meshes() -> list[float]:
    """Four ranks in two independent pairs, by group= and by mesh=."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    results = []
    for options in ({"group": pairs[rank // 2]}, {"group": Group(pairs[rank // 2])}):
        model = make_model()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, **options)  # type: ignore[arg-type]
        loss_of(model, rank // 2, rank % 2, 2).backward()
        results.append(float(optimizer.norms()[0]))
        optimizer.step()
    whole = make_model()
    loss_of(whole, rank // 2).backward()
    results.append(float(nn.utils.get_total_norm([p.grad for p in whole.parameters() if p.grad is not None])))
    return results


def test_group_may_be_part_of_the_job(ranks: Any) -> None:
    outcomes = ranks(4).run(groups_and_meshes)
    for by_process_group, by_group, wanted in outcomes:
        assert by_process_group == by_group == pytest.approx(wanted, rel=1e-6)
    assert outcomes[0][2] != outcomes[2][2]


def plain_step(average: bool, max_norm: float | None) -> tuple[list[float], float]:
    """What SGD at a rate of 1 makes of four zeros whose gradients are 1, 2, … by rank, and their norm."""
    weight = nn.Parameter(torch.zeros(4))
    clipping: dict[str, Any] = {"grad_clipping": False} if max_norm is None else {"max_norm": max_norm}
    optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=1.0, average=average, **clipping)
    (weight.sum() * (Group.world().rank + 1)).backward()
    norm = float(optimizer.norms()[0])
    optimizer.step()
    return weight.tolist(), norm


@pytest.mark.parametrize(("average", "gradient"), [(True, 1.5), (False, 3.0)])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_gradients_are_averaged_or_summed(average: bool, gradient: float, max_norm: float | None, ranks: Any) -> None:
    """AdamW would not tell, nor would clipping: both make the same of a gradient that is twice as long."""
    step = min(2 * gradient, max_norm or 100.0) / 2
    for weight, norm in ranks(2).run(plain_step, average, max_norm):
        assert norm == pytest.approx(2 * gradient)
        assert weight == pytest.approx([-step] * 4, rel=1e-5)
