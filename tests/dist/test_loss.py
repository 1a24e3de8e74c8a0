"""Losses over a vocabulary that is cut, against `F.cross_entropy` (fault 4 of the reference)."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layers.loss import linear_cross_entropy, parallel_cross_entropy
from tests.dist.dense import check, each, error, mesh, random, run
from tests.sweeps import few

S, B, H = 8, 3, 12
DEGREES = (1, 4)
PADDING = 1e4
"""What stands in padded columns: it would take all of the probability."""


def targets(vocabulary: int, ignore_index: int | None = None) -> Tensor:
    drawn = torch.randint(vocabulary, (S, B), generator=torch.Generator().manual_seed(5))
    drawn[0, :2] = torch.tensor([0, vocabulary - 1])
    if ignore_index is not None:
        drawn[2:4, 1:] = ignore_index
        drawn[5] = ignore_index
    return drawn


def columns(whole: Tensor, tp: int, fill: float) -> tuple[Tensor, slice]:
    """This rank's columns of `[…, V]`, padded, and which of V they are."""
    vocabulary, rank = whole.shape[-1], mesh(tp).tp.rank
    width = -(-vocabulary // tp) + (1 if tp == 1 else 0)  # one process has padding too
    held = slice(min(rank * width, vocabulary), min((rank + 1) * width, vocabulary))
    local = torch.full((*whole.shape[:-1], width), fill, dtype=whole.dtype)
    local[..., : held.stop - held.start] = whole[..., held]
    return local, held


def by_logits(tp: int, vocabulary: int, smoothing: float, ignore_index: int | None, dtype: torch.dtype) -> Any:
    whole = (random(1, S, B, vocabulary) * 4).to(dtype).requires_grad_()
    target = targets(vocabulary, ignore_index)
    pull = random(2, S, B)
    rules: Any = {"label_smoothing": smoothing, "ignore_index": -100 if ignore_index is None else ignore_index}
    wanted = F.cross_entropy(whole.float().flatten(0, 1), target.flatten(), reduction="none", **rules).view(S, B)
    (wanted * pull).sum().backward()
    local, held = columns(whole.detach(), tp, PADDING)
    before, target_before = local.clone(), target.clone()
    local.requires_grad_()
    options = {} if ignore_index is None else {"ignore_index": ignore_index}
    found = parallel_cross_entropy(local, target, smoothing, group=mesh(tp).tp, vocab_size=vocabulary, **options)
    assert found.dtype == torch.float32
    found.backward(pull, retain_graph=True)
    (again,) = torch.autograd.grad(found, local, pull)
    assert local.grad.dtype == dtype
    assert torch.equal(again, local.grad), "the second backward pass gives another gradient"
    assert torch.equal(local.detach(), before), "the logits were changed in place"
    assert torch.equal(target, target_before), "the targets were changed in place"
    size = held.stop - held.start
    errors = {
        "loss": error(found, wanted),
        "gradient": error(local.grad[..., :size], whole.grad[..., held]),
        "gradient of the padding": float(local.grad[..., size:].abs().sum()),
    }
    if ignore_index is not None:
        ignored = target == ignore_index
        errors["loss of what is ignored"] = float(found.detach()[ignored].abs().sum())
        errors["gradient of what is ignored"] = float(local.grad[ignored].abs().sum())
    return errors


@pytest.mark.parametrize("tp", DEGREES)
def test_parallel_cross_entropy(tp: int, ranks: Any) -> None:
    """Vocabularies that are even, padded, and of which a rank has no column."""
    cases = list(itertools.product([tp], (8, 13, 9), (0.0, 0.1, 1.0), (None, -100, 3), [torch.float32]))
    check(run(ranks, tp, each, by_logits, cases))


@pytest.mark.parametrize("tp", DEGREES)
def test_bfloat16_logits_give_a_float32_loss(tp: int, ranks: Any) -> None:
    outcomes = run(ranks, tp, by_logits, tp, 13, 0.1, None, torch.bfloat16)
    check([{"loss": outcome["loss"]} for outcome in outcomes])
    check(outcomes, 2**-8)


class Case:
    """The dense head and loss, and this rank's share of its inputs."""

    def __init__(self, tp: int, sequence: bool, vocabulary: int, smoothing: float = 0.0, scale: float = 0.37) -> None:
        self.group, self.tp, self.vocabulary = mesh(tp).tp, tp, vocabulary
        self.sequence, self.smoothing, self.scale = sequence, smoothing, scale
        self.target = targets(vocabulary, -100)
        x, weight = random(1, S, B, H).requires_grad_(), random(2, vocabulary, H).requires_grad_()
        self.wanted = F.cross_entropy(
            (x @ weight.t()).flatten(0, 1), self.target.flatten(), reduction="sum", label_smoothing=smoothing
        )
        (self.wanted * scale).backward()
        self.wanted_dx = x.grad.chunk(tp)[self.group.rank] if sequence else x.grad
        local, held = columns(weight.detach().t(), tp, PADDING)
        padded_dw, _ = columns(weight.grad.t(), tp, 0.0)
        self.wanted_dw, self.held = padded_dw.t(), held.stop - held.start
        mine = x.detach().chunk(tp)[self.group.rank] if sequence else x.detach()
        self.x = mine.clone().requires_grad_()
        self.weight = local.t().contiguous().requires_grad_()

    def loss(self, chunk_elements: int | None = None) -> Tensor:
        return linear_cross_entropy(
            self.x,
            self.weight,
            self.target,
            group=self.group,
            sequence_parallel_enabled=self.sequence,
            label_smoothing=self.smoothing,
            vocab_size=self.vocabulary,
            chunk_elements=chunk_elements,
        )

    def errors(self, loss: Tensor, dx: Tensor | None, dw: Tensor | None) -> dict[str, float]:
        return {
            "loss": error(loss, self.wanted),
            "gradient of x": error(dx, self.wanted_dx),
            "gradient of the weight": error(dw, self.wanted_dw),
            "gradient of the padding": float(dw[self.held :].abs().sum()),
        }


def chunked(tp: int, sequence: bool, vocabulary: int, smoothing: float, rows: int | None) -> dict[str, float]:
    case = Case(tp, sequence, vocabulary, smoothing)
    tokens_a_row = B * (tp if sequence else 1)
    loss = case.loss(None if rows is None else rows * tokens_a_row * case.weight.shape[0])
    before = case.x.detach().clone(), case.weight.detach().clone()
    (loss * case.scale).backward()
    assert torch.equal(case.x.detach(), before[0]), "the inputs were changed in place"
    assert torch.equal(case.weight.detach(), before[1]), "the inputs were changed in place"
    return case.errors(loss, case.x.grad, case.weight.grad)


@pytest.mark.parametrize(
    ("tp", "sequence"), few(itertools.product(DEGREES, (False, True)), *((tp, tp > 1) for tp in DEGREES))
)
def test_linear_cross_entropy_at_every_chunk_size(tp: int, sequence: bool, ranks: Any) -> None:
    here = S // tp if sequence else S
    rows = (*range(here + 1), None)  # 0: even one row is more than is asked for
    cases = list(itertools.product([tp], [sequence], (8, 9, 13), (0.0, 0.1), rows))
    check(run(ranks, tp, each, chunked, cases))


def in_two_passes(tp: int, sequence: bool) -> dict[str, float]:
    """First the inputs' gradients, then the weights', as zero-bubble schedules ask for them; then both at once."""
    case = Case(tp, sequence, 13)
    loss = case.loss(100) * case.scale
    (dx,) = torch.autograd.grad(loss, case.x, retain_graph=True)
    (dw,) = torch.autograd.grad(loss, case.weight, retain_graph=True)
    first = case.errors(loss / case.scale, dx.clone(), dw.clone())
    both = torch.autograd.grad(loss, (case.x, case.weight), retain_graph=True)
    second = {f"again: {what}": value for what, value in case.errors(loss / case.scale, *both).items()}
    return first | second


@pytest.mark.parametrize("tp", DEGREES)
def test_gradients_may_be_asked_for_in_two_passes(tp: int, ranks: Any) -> None:
    check(run(ranks, tp, each, in_two_passes, [(tp, False), (tp, True)]))


def test_a_second_derivative_of_a_loss_is_refused() -> None:
    """Their gradients are made of what the forward pass left, which is no function of the input any more."""
    case = Case(1, False, 13)
    logits = random(1, S, B, 13).requires_grad_()
    for name, loss, leaf in (
        ("linear_cross_entropy", case.loss(), case.x),
        ("parallel_cross_entropy", parallel_cross_entropy(logits, targets(13)).sum(), logits),
    ):
        with pytest.raises(RuntimeError, match=f"{name} has no second derivative: leave out create_graph=True, or use"):
            torch.autograd.grad(loss, leaf, create_graph=True)


def partly_frozen(tp: int) -> dict[str, float]:
    """Every subset of x, weight and bias that may need gradients, as a frozen head or the training of biases alone."""
    whole = [random(1, S, B, H), random(2, 13, H), random(3, 13)]
    wanted_leaves = [tensor.clone().requires_grad_() for tensor in whole]
    logits = F.linear(*wanted_leaves)
    target = targets(13, -100)
    wanted = torch.autograd.grad(
        F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), wanted_leaves
    )
    mine = [wanted[0], columns(wanted[1].t(), tp, 0.0)[0].t(), columns(wanted[2], tp, 0.0)[0]]
    local = [whole[0], columns(whole[1].t(), tp, 0.0)[0].t().contiguous(), columns(whole[2], tp, 0.0)[0]]
    errors = {}
    for subset in itertools.product((False, True), repeat=3):
        x, weight, bias = leaves = [t.clone().requires_grad_(need) for t, need in zip(local, subset, strict=True)]
        loss = linear_cross_entropy(x, weight, target, bias=bias, group=mesh(tp).tp, vocab_size=13, chunk_elements=100)
        assert loss.requires_grad == any(subset)
        if any(subset):
            loss.backward()
        for what, leaf, gradient, need in zip(("x", "weight", "bias"), leaves, mine, subset, strict=True):
            assert (leaf.grad is not None) == need, f"{what} of {subset}"
            if leaf.grad is not None:
                errors[f"gradient of {what}, trained {subset}"] = error(leaf.grad, gradient)
    return errors


@pytest.mark.parametrize("tp", DEGREES)
def test_any_of_hidden_states_weight_and_bias_may_be_frozen(tp: int, ranks: Any) -> None:
    check(run(ranks, tp, partly_frozen, tp))
