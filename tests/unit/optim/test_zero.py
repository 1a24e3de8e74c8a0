"""The optimizer in one process: it is the wrapped class, in every way that a training script may use it."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import ZeroRedundancyOptimizer
from shardwise.optim.buckets import Bucket
from shardwise.optim.gradient_norms import ElementRun
from tests.unit.optim.net import PLAIN, Net, Pair, assert_equal, batch, make, set_to_none, sharded, train

CLASSES = [
    ("AdamW", {"foreach": False}),
    ("AdamW", {"foreach": True, "amsgrad": True}),
    ("Adam", {"lr": torch.tensor(1e-2), "foreach": False}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("RMSprop", {"centered": True}),
    ("NAdam", {}),
    ("Rprop", {}),
]
CUTS = [(1e-5, 1), (1e-3, 2), (1000.0, 3)]


@pytest.mark.parametrize(
    ("name", "options", "bucket_mib", "stage"), [(*one, *CUTS[number % 3]) for number, one in enumerate(CLASSES)]
)
def test_bit_equal_to_the_wrapped_class(name: str, options: dict[str, Any], bucket_mib: float, stage: int) -> None:
    wrapped = getattr(torch.optim, name)
    plain, ours = make(), make()
    train(plain, wrapped(plain.parameters(), **copy.deepcopy(options)))
    train(ours, sharded(ours, wrapped, bucket_mib=bucket_mib, stage=stage, model=ours, **PLAIN, **options))
    assert_equal(ours, plain)


@pytest.mark.parametrize("stage", [2, 3])
def test_alone_each_stage_adds_up_micro_batches(stage: int) -> None:
    plain, ours = make(), make()
    around = sharded(ours, torch.optim.SGD, stage=stage, model=ours, lr=0.1, **PLAIN)
    for model, optimizer in ((plain, torch.optim.SGD(plain.parameters(), lr=0.1)), (ours, around)):
        for step in range(4):
            model(batch(step)).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert_equal(ours, plain)


def test_norms_are_exact_and_read_parameters_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One float32 sum over so many squares is off by more than 1e-4 on the CPU."""
    weight = nn.Parameter(torch.ones(20_000_003))
    optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=0.0)
    weight.grad.normal_(generator=torch.Generator().manual_seed(0))
    wanted = float(torch.linalg.vector_norm(weight.grad, dtype=torch.float64))
    gradient_norm, parameter_norm = (float(norm) for norm in optimizer.norms())
    assert gradient_norm == pytest.approx(wanted, rel=1e-6)
    assert parameter_norm == pytest.approx(20_000_003**0.5, rel=1e-6)
    model = make()
    optimizer = sharded(model, torch.optim.SGD, lr=0.1)
    model(batch(0)).backward()
    with monkeypatch.context() as patch:
        patch.setattr(ElementRun, "weights", None)
        gradient_norm = float(optimizer.gradient_norm())
        optimizer.clip_grad_norm_(gradient_norm / 2)
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms = [float(norm) for norm in optimizer.norms()]
    assert norms == pytest.approx([gradient_norm / 2, float(nn.utils.get_total_norm(parameters))], rel=1e-5)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=12, cycle_momentum=True)


def by_lambda(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 0.9**s, lambda s: 1.0 / (1 + s)])


@pytest.mark.parametrize(("schedule", "wrapped"), [(one_cycle, torch.optim.SGD), (by_lambda, torch.optim.AdamW)])
def test_schedulers_drive_it(schedule: Callable[..., Any], wrapped: type[torch.optim.Optimizer]) -> None:
    results = []
    for build in (wrapped, lambda groups, **kw: ZeroRedundancyOptimizer(groups, wrapped, **PLAIN, **kw)):
        model = make()
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        options = {"momentum": 0.9} if wrapped is torch.optim.SGD else {}
        optimizer = build(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}], lr=0.01, **options
        )
        scheduler = schedule(optimizer)
        train(model, optimizer, 8, 0, scheduler)
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        results.append((model, groups, scheduler.get_last_lr()))
    assert_equal(results[1][0], results[0][0])
    assert results[1][1:] == results[0][1:]


def test_named_parameters_closures_and_groups_that_are_added() -> None:
    plain, ours = make(), make()
    reference = torch.optim.AdamW(plain.named_parameters())
    optimizer = ZeroRedundancyOptimizer(ours.named_parameters(), torch.optim.AdamW, **PLAIN)
    for step in range(3):
        losses = []
        for model, chosen in ((plain, reference), (ours, optimizer)):

            def closure(model: Net = model, chosen: Any = chosen, step: int = step) -> Tensor:
                chosen.zero_grad()
                loss = model(batch(step))
                loss.backward()
                return loss

            losses.append(chosen.step(closure))
        assert losses[0] == losses[1]
    assert_equal(ours, plain)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["param_names"][0] == "scale"
    optimizer.load_state_dict(state)
    plain, ours = make(), make()
    reference = torch.optim.AdamW(plain.first.parameters(), lr=0.01)
    optimizer = sharded(ours.first, lr=0.01, **PLAIN)
    train(plain, reference)
    train(ours, optimizer)
    for model, chosen in ((plain, reference), (ours, optimizer)):
        model.zero_grad()
        chosen.add_param_group({"params": model.second.parameters(), "lr": 0.05})
        train(model, chosen, 5, 5)
    assert_equal(ours, plain)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": ours.second.parameters()})
    with pytest.raises(ValueError, match=r"dtype \(torch.complex64\) must be real: keep it as torch"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 2
    train(ours, optimizer, 1, 10)


def set_to_zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def replace(model: nn.Module) -> None:
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p)


@pytest.mark.parametrize("clear", [set_to_zero, set_to_none, replace])
def test_gradients_that_the_user_cleared_or_replaced(clear: Callable[[nn.Module], None]) -> None:
    pair = Pair()
    for step in range(4):
        for model in (pair.plain, pair.ours):
            model(batch(100 + step)).backward()  # dropped
            clear(model)
        for micro in range(3):
            pair.backward(10 * step + micro)
        pair.step()
    pair.assert_equal()


def test_sparse_cleared_and_used_gradients_and_late_ones() -> None:
    models = []
    for sparse in (False, True):
        torch.manual_seed(0)
        models.append(nn.Embedding(11, 4, sparse=sparse))
        optimizer = sharded(models[-1], **PLAIN)
        for step in range(3):
            set_to_none(models[-1])
            models[-1](batch(step)).square().sum().backward()
            optimizer.step()
    assert_equal(*models)
    ours = make()
    optimizer = sharded(ours, torch.optim.SGD, lr=0.1)
    before = [p.detach().clone() for p in ours.parameters()]
    ours(batch(0)).backward()
    for p in ours.parameters():
        p.grad = None
    optimizer.step()
    assert all(torch.equal(p, was) for p, was in zip(ours.parameters(), before, strict=True))
    # Without zero_grad nothing of the last step is left.
    pair = Pair()
    train(pair.plain, pair.reference)
    for step in range(5):
        pair.ours(batch(step)).backward()
        pair.optimizer.step()
        assert all(not p.grad.any() for p in pair.ours.parameters() if p.grad is not None)
    pair.assert_equal()
    # Also in one process: clipping would use a norm without the late gradients.
    model = make()
    optimizer = sharded(model)
    model(batch(0)).backward()
    optimizer.norms()
    with pytest.raises(RuntimeError, match=r"accumulate\(\).*or drop the reduced ones by optimizer.zero_grad\(\)"):
        model(batch(1)).backward()
    optimizer.zero_grad()
    model(batch(1)).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (
            lambda model: model.double(),
            r"was moved to other memory \(by .*\) after its optimizer was made: make it again",
        ),
        (lambda model: model.second.weight.requires_grad_(False), r"shape \(6, 5\) was frozen after its optimizer"),
        (lambda model: model.frozen.requires_grad_(True), "was frozen when the optimizer was made has a gradient"),
        (
            lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
            r"scale of a Net, of shape \(\), replaced a parameter of the optimizer .* without assign=True",
        ),
    ],
)
def test_parameters_changed_behind_its_back(change: Callable[[Net], object], wanted: str) -> None:
    model = make()
    optimizer = sharded(model)
    train(model, optimizer, 1)
    change(model)
    with pytest.raises(RuntimeError, match=wanted):
        train(model, optimizer, 1)


def test_mixed_precision_is_adamw_on_masters() -> None:
    """Gradients add up in float32, the update is on float32 masters, the bfloat16 parameters are their roundings."""
    model = make().bfloat16()
    trained = [p for p in model.parameters() if p.requires_grad and p.numel()]
    masters = [p.detach().float().clone() for p in trained]
    reference = torch.optim.AdamW([m.requires_grad_() for m in masters], lr=0.01)
    optimizer = sharded(model, lr=0.01, gradient_dtype=torch.float32, **PLAIN)
    for step in range(5):
        sums = [torch.zeros_like(m) for m in masters]
        for micro in range(4):
            loss = model(batch(10 * step + micro))
            for total, gradient in zip(sums, torch.autograd.grad(loss, trained, retain_graph=True), strict=True):
                total += gradient.float()
            loss.backward()
        for master, total, p in zip(masters, sums, trained, strict=True):
            assert p.grad.dtype == torch.float32
            assert torch.equal(p.grad, total)
            master.grad = total
        reference.step()
        optimizer.step()
        assert all(torch.equal(p, m.bfloat16()) for p, m in zip(trained, masters, strict=True))


@pytest.mark.parametrize("how", ["load_state_dict", "data"])
def test_new_weights_reach_the_masters(how: str) -> None:
    model, other = make().bfloat16(), make(seed=1).bfloat16()
    optimizer = sharded(model, torch.optim.SGD, lr=1e-6)
    train(model, optimizer, 2)
    masters = [b.master.detach().clone() for b in optimizer.buckets]
    kept = copy.deepcopy(model.state_dict())
    for state in (other.state_dict(), kept):
        if how == "load_state_dict":
            model.load_state_dict(state)
        else:
            for name, p in model.named_parameters():
                p.data.copy_(state[name])
        optimizer.norms()
        optimizer.zero_grad()
        for bucket in optimizer.buckets:
            assert torch.equal(bucket.master.detach().bfloat16(), bucket.values)
    # Weights that were swapped out and in again, as an evaluation of averages does: what they hold beyond bfloat16 is
    # gone with the first swap, which only a snapshot of the optimizer keeps.
    optimizer.load_state_dict({**optimizer.state_dict(), "masters": masters})
    model.load_state_dict(kept)
    optimizer.norms()
    assert all(torch.equal(b.master, m) for b, m in zip(optimizer.buckets, masters, strict=True))


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_versions_alone_tell_what_was_written(
    grad_mode: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without comparisons a step reads no parameter to find that nobody changed one."""
    model = make().bfloat16()
    optimizer = sharded(model, torch.optim.SGD, lr=1e-6)
    optimizer.compares_values = False
    train(model, optimizer, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "adopt_values", None)
        patch.setattr(Bucket, "differs_from_masters", None)
        train(model, optimizer, 2)
    masters = [b.master.detach().clone() for b in optimizer.buckets]
    with grad_mode():
        model.second.weight.clamp_(-0.01, 0.01)
    optimizer.norms()
    for bucket, before in zip(optimizer.buckets, masters, strict=True):
        assert torch.equal(bucket.master.detach().bfloat16(), bucket.values)
        kept = bucket.values == before.bfloat16()
        assert torch.equal(bucket.master[kept], before[kept]), "what was not changed keeps its lower bits"
    assert not all(torch.equal(b.master, before) for b, before in zip(optimizer.buckets, masters, strict=True))
