"""Where a part of a local tensor lies in the canonical one, and state of another class; also test_checkpoint.py."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwise import LAMB, Muon, ZeroRedundancyOptimizer, load_checkpoint, save_checkpoint
from shardwise.base.tensor_box import Box
from shardwise.distributed.placement import Init, Piece
from shardwise.optim.state_digest import StateHash, box_sum, digest_place
from tests.unit.optim.net import Pair, assert_equal, decaying_groups, make, sharded, train


@pytest.mark.parametrize("transposed", [False, True])
def test_a_box_of_a_piece_is_the_same_elements_of_the_canonical_tensor(transposed: bool) -> None:
    """Of GPT-2's weights, too, which are `[in, out]`, in a local tensor that has other pieces before this one."""
    piece = Piece("w", (6, 4), Box((2, 0), (3, 4)), Box((5, 0), (3, 4)), Init.constant(0.0))
    canonical = torch.arange(24).view(6, 4)
    if transposed:
        piece, canonical = piece.transpose(), canonical.t()
    local = torch.zeros(9, 4, dtype=torch.int64)
    piece.of(local).copy_(canonical[piece.box.slices])
    for box in (Box((5, 0), (3, 4)), Box((6, 1), (1, 2)), Box((6, 0), (2, 4))):
        found, wanted = local[box.slices], canonical[piece.canonical(box).slices]
        assert torch.equal(found.t() if transposed else found, wanted)


CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
}
MAY_LOAD = {("sgd", "momentum"), ("momentum", "sgd"), ("adamw", "amsgrad"), ("amsgrad", "adamw")}
"""The options of the state count, so it is the same class; AdamW is Adam with another decay."""


@pytest.mark.parametrize("saved", CLASSES)
def test_fault_22_state_of_a_class_that_keeps_other_state_is_refused(saved: str) -> None:
    """Else a state would be missing in the next step, or be dropped; the optimizer is as it was."""

    def made(kind: str) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
        model = nn.Linear(3, 2)
        optimizer_class, options = CLASSES[kind]
        return model, sharded(model, optimizer_class, **options)

    def step(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()

    model, optimizer = made(saved)
    step(model, optimizer)
    for kind, (optimizer_class, _) in CLASSES.items():
        other, its_optimizer = made(kind)
        before = str(its_optimizer.state_dict())
        if kind == saved or (saved, kind) in MAY_LOAD:
            its_optimizer.load_state_dict(optimizer.state_dict())
        else:
            name = optimizer_class.__name__
            text = rf"optimizer state \(.*, of \w+\) must be what {name} keeps \(.*\): make the optimizer of the class"
            with pytest.raises(ValueError, match=text):
                its_optimizer.load_state_dict(optimizer.state_dict())
            assert str(its_optimizer.state_dict()) == before
        step(other, its_optimizer)


STOCHASTIC = {"optimizer_dtype": torch.bfloat16, "rounding": "stochastic", "rounding_seed": 5}


@pytest.mark.parametrize(
    ("wrapped", "dtype", "options"),
    [
        (torch.optim.AdamW, torch.float32, {}),
        (torch.optim.AdamW, torch.bfloat16, {"gradient_dtype": torch.float32}),
        (torch.optim.AdamW, torch.bfloat16, STOCHASTIC),
        (torch.optim.AdamW, torch.float32, {"state_dtype": torch.bfloat16}),
        (LAMB, torch.float32, {}),
        (LAMB, torch.bfloat16, STOCHASTIC),
        (Muon, torch.float32, {}),
        (None, torch.float32, {}),
    ],
)
def test_a_run_that_continues_from_a_file_is_equal_to_the_bit(
    wrapped: type[torch.optim.Optimizer] | None, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """With its schedule; None is LAMB without the wrapper."""

    def build(model: nn.Module, lr: float) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
        of_groups = decaying_groups(model)
        if wrapped is Muon:
            of_groups[1]["use_muon"] = False
        if wrapped is None:
            optimizer: torch.optim.Optimizer = LAMB(of_groups, lr=lr)
        else:
            optimizer = ZeroRedundancyOptimizer(of_groups, wrapped, lr=lr, **options)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

    model, resumed = make().to(dtype), make(seed=1).to(dtype)
    optimizer, scheduler = build(model, 0.01)
    train(model, optimizer, 4, 0, scheduler)
    file = io.BytesIO()
    torch.save([each.state_dict() for each in (model, optimizer, scheduler)], file)
    train(model, optimizer, 4, 4, scheduler)
    file.seek(0)
    for each, state in zip((resumed, *(made := build(resumed, 0.5))), torch.load(file, weights_only=True), strict=True):
        each.load_state_dict(state)
    train(resumed, made[0], 4, 4, made[1])
    assert_equal(resumed, model)


def in_memory_order(turns: bool) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    """A model whose weights lie transposed or with their channels last, or as torch makes them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, (2, 1)), nn.Flatten(), nn.Linear(16, 5))
    if turns:
        model.to(memory_format=torch.channels_last)
        model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    return model, sharded(model, LAMB, lr=0.1)


@pytest.mark.parametrize("turns", [True, False])
def test_fault_01_weights_that_are_not_contiguous_are_restored(turns: bool, tmp_path: Path) -> None:
    """Into either memory format, with their state, and with LAMB's norms of each."""
    x = torch.arange(30.0).view(2, 3, 5, 1).sin()

    def step(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> list[Tensor]:
        model(x).square().sum().backward()
        optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    saved = in_memory_order(turns)
    step(*saved)
    save_checkpoint(tmp_path, *saved, step=1)
    wanted = step(*saved)
    for other_turns in (True, False):
        restored = in_memory_order(other_turns)
        load_checkpoint(tmp_path, *restored)
        for found, right in zip(step(*restored), wanted, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-7)
        if turns != other_turns:
            with pytest.raises(ValueError, match="which must be this optimizer's"):
                restored[1].load_state_dict(saved[1].state_dict())


class CountsInGroup(torch.optim.Optimizer):
    """Adam as pytorch_optimizer and prodigyopt write it: the steps, and a largest rate, are in the parameter group."""

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "lr_max": float("-inf")})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["lr_max"] = max(group["lr_max"], group["lr"])
            rate = group["lr_max"] / (1 - group["betas"][0] ** group["step"])
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["betas"][0])
                p.sub_(mean, alpha=rate)


def test_numbers_that_a_class_keeps_in_its_groups_are_restored(tmp_path: Path) -> None:
    """Into other buckets too, and saved again before a step; options that the class leaves alone are the new ones."""
    model = make()
    optimizer = sharded(model, CountsInGroup, lr=0.02, grad_clipping=False)
    train(model, optimizer, 3)
    save_checkpoint(tmp_path / "a", model, optimizer, step=3)
    optimizer.param_groups[0]["lr"] = 0.01
    for folder, following, bucket_mib in (("a", "b", 32), ("b", "c", 1e-5)):
        restored = make(seed=1)
        other = sharded(restored, CountsInGroup, bucket_mib=bucket_mib, grad_clipping=False)
        load_checkpoint(tmp_path / folder, restored, other)
        (group,) = other.param_groups
        assert (group["step"], group["lr_max"], group["lr"]) == (3, 0.02, 0.01)
        assert type(group["step"]) is int
        save_checkpoint(tmp_path / following, restored, other, step=3)
    train(model, optimizer, 3, 3)
    train(restored, other, 3, 3)
    assert_equal(restored, model)


class Estimates(CountsInGroup):
    """A class that begins to keep a number in groups whose weights decay."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            if group.get("weight_decay"):
                group["d"] = 0.5


def test_a_number_of_one_group_stays_there(tmp_path: Path) -> None:
    model = make()
    optimizer = ZeroRedundancyOptimizer(decaying_groups(model), Estimates, grad_clipping=False)
    train(model, optimizer, 2)
    save_checkpoint(tmp_path, model, optimizer, step=2)
    restored = make(seed=1)
    other = ZeroRedundancyOptimizer(decaying_groups(restored), Estimates, grad_clipping=False)
    load_checkpoint(tmp_path, restored, other)
    assert [group.get("d") for group in other.param_groups] == [0.5, None]
    assert [group["step"] for group in other.param_groups] == [2, 2]


class Scaled(CountsInGroup):
    """A class whose constructor adds an option to its groups."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            group["scale"] = 1.0

    def step(self, closure: Any = None) -> None:
        assert all(group["scale"] == 1.0 for group in self.param_groups)
        super().step()


def test_each_bucket_of_a_group_begins_with_the_count_of_the_step_before() -> None:
    """Also in the first step, and with updates ahead: the results are those of the class alone."""
    pairs = [Pair(Scaled, {"bucket_mib": 1e-5, "grad_clipping": False}) for _ in range(2)]
    for step in range(3):
        for is_ahead, pair in enumerate(pairs):
            if is_ahead:
                pair.optimizer.update_in_backward()
            with pair.optimizer.accumulate(last=True):
                pair.backward(step)
            pair.step()
    for pair in pairs:
        assert len(pair.optimizer.buckets) > 1
        assert pair.optimizer.param_groups[0]["step"] == pair.reference.param_groups[0]["step"] == 3
        pair.assert_close()


def test_fault_22_what_is_no_state_of_the_optimizer_is_refused() -> None:
    """In one sentence, and the optimizer is as it was."""
    for changed, lacking in [(None, "state, param_groups, masters and layout"), ({"masters": ...}, "masters")]:
        model = nn.Linear(3, 2, dtype=torch.bfloat16)
        optimizer = sharded(model)
        model(torch.ones(4, 3, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        before = optimizer.state_dict()
        given = changed and {key: value for key, value in {**before, **changed}.items() if value is not ...}
        told = f"must be what ZeroRedundancyOptimizer.state_dict() gave, and it lacks {lacking}: state of another"
        with pytest.raises(ValueError, match=re.escape(f"{told} optimizer cannot be loaded")):
            optimizer.load_state_dict(given)
        assert str(optimizer.state_dict()) == str(before)


SHAPE = (6, 10)
PLACE = digest_place(step=3, samples=24, tokens=768, position=24, seed=7)


def numbers(dtype: str = "f4", shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


def whole(values: np.ndarray) -> int:
    return box_sum(values, values.shape, Box.whole(values.shape))


def test_sums_have_each_bit_each_place_and_add_up() -> None:
    for dtype in ["f2", "f4", "f8"]:
        values = numbers(dtype, (3, 4))
        bits = values.view(f"u{values.itemsize}")
        sums = {whole(values)}
        for index in np.ndindex(values.shape):
            for bit in range(8 * values.itemsize):
                bits[index] ^= bits.dtype.type(1) << bits.dtype.type(bit)
                sums.add(whole(values))
                bits[index] ^= bits.dtype.type(1) << bits.dtype.type(bit)
        assert len(sums) == 1 + values.size * 8 * values.itemsize
    for dtype in ["f4", "f8"]:
        values = numbers(dtype)
        sums = {whole(values), whole(np.roll(values, 1, axis=0)), whole(np.roll(values, 1, axis=1))}
        for a, b in (((0, 0), (0, 1)), ((0, 0), (1, 0)), ((2, 3), (3, 2)), ((5, 9), (0, 0))):
            swapped, negated = values.copy(), values.copy()
            swapped[a], swapped[b] = values[b], values[a]
            negated[a] *= -1
            negated[b] *= -1
            sums |= {whole(swapped), whole(negated)}
        assert len(sums) == 3 + 8
    for shape in [(), (7,), (4, 5), (2, 3, 4)]:
        values = numbers("f4", shape)
        cut = values.size // 2
        boxes = [*Box.of_run(0, cut, shape), *Box.of_run(cut, values.size - cut, shape)]
        assert sum(box_sum(values[box.slices], shape, box) for box in boxes) % 2**64 == whole(values)


def test_the_whole_hash_has_names_states_and_the_place() -> None:
    sums = {"model": {"a": 1, "b": 2}, "exp_avg": {"a": 3, "b": 4}}
    states = [
        StateHash(PLACE, sums),
        StateHash({**PLACE, "position": 32}, sums),
        StateHash(PLACE, {**sums, "model": {"a": 2, "b": 1}}),
        StateHash(PLACE, {**sums, "model": {"a": 1, "c": 2}}),
        StateHash(PLACE, {"model": sums["exp_avg"], "exp_avg": sums["model"]}),
    ]
    assert len({state.text for state in states}) == len(states)
    assert StateHash(PLACE, dict(reversed(sums.items()))).text == states[0].text
    assert len(states[0].text) == 16
