"""What ZeRO-1 can wrap: classes that update each element by itself; all others are refused by name."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwise import ZeroRedundancyOptimizer
from shardwise.optim.wrapped_class import require_elementwise


class Lamb(torch.optim.SGD):
    """Somebody's LAMB: the update is scaled by ‖parameter‖ / ‖update‖."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=float(group["lr"] * p.norm() / p.grad.norm()))


class OneStepSize(torch.optim.SGD):
    """Learns one step size from all parameters at once, as Prodigy and D-Adaptation do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        everything = [p for group in self.param_groups for p in group["params"]]
        size = torch.nn.utils.get_total_norm([p.grad for p in everything])
        for p in everything:
            p.sub_(0.01 * p.grad / size)


class Centralized(torch.optim.SGD):
    """Takes each row's mean out of a matrix's gradient, and leaves vectors alone."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() > 1:
                    p.grad = p.grad - p.grad.mean(dim=1, keepdim=True)
        super().step()


class Late(torch.optim.SGD):
    """Divides by the norm of the whole gradient from its fourth step on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["done"] = group.get("done", 0) + 1
            for p in group["params"] if group["done"] > 3 else ():
                p.grad = p.grad / p.grad.norm()
        super().step()


class Distance(torch.optim.SGD):
    """Prodigy's way: a distance of 1e-6 grows by sums over all weights, so twelve steps hardly move a weight."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            everything = [p for p in group["params"] if p.grad is not None]
            group["d"] = group.get("d", 1e-6) * (1 + float(sum(p.grad.abs().sum() for p in everything)) * 1e-6)
            for p in everything:
                p.sub_(p.grad.sign(), alpha=group["d"] * group["lr"])


class NormMean(torch.optim.SGD):
    """AdaNorm's way: a mean of gradients' norms in the state, which a later gradient with a small norm gets."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            mean = self.state[p].setdefault("mean", torch.zeros(1))
            mean.lerp_(p.grad.norm(), 0.1)
            p.grad = p.grad * max(1.0, float(mean / (2 * p.grad.norm())))
        super().step()


ELEMENTWISE = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
REFUSED = ["LBFGS", "Adafactor", "SparseAdam"] + [name for name in ("Muon",) if hasattr(torch.optim, name)]
OPTIONS: list[dict[str, Any]] = [{name: True} for name in ("fused", "foreach", "amsgrad", "maximize")]
OPTIONS.append({"lr": torch.tensor(1e-3)})
# It wants parameters on an accelerator, where the trial is not.
OPTIONS.append({"capturable": True})


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in ELEMENTWISE), *(("AdamW", options) for options in OPTIONS)]
)
def test_elementwise_classes_pass(name: str, options: dict[str, Any]) -> None:
    require_elementwise(getattr(torch.optim, name), options)


@pytest.mark.parametrize(
    "optimizer_class",
    [*(getattr(torch.optim, name) for name in REFUSED), Lamb, OneStepSize, Centralized, Late, Distance, NormMean],
)
def test_others_are_refused_by_name(optimizer_class: type[torch.optim.Optimizer]) -> None:
    model = nn.Linear(4, 4)
    needs_more = optimizer_class.__name__ in ("LBFGS", "SparseAdam", "Muon")
    why = "its trial failed with: .+" if needs_more else "its result depends on the whole parameter$"
    with pytest.raises(ValueError, match=f"{optimizer_class.__name__} cannot be sharded.* as AdamW does, .*; {why}"):
        ZeroRedundancyOptimizer(model.parameters(), optimizer_class)
    assert model.weight.grad is None


def test_averaged_weights_are_refused_and_the_trial_does_not_touch_the_run() -> None:
    """As schedule-free optimizers do, whose weights of steps are not those to evaluate."""

    class Averaged(torch.optim.SGD):
        def eval(self) -> None: ...

    with pytest.raises(ValueError, match=r"Averaged cannot be sharded: its eval\(\) gives the averaged weights that"):
        ZeroRedundancyOptimizer(nn.Linear(4, 4).parameters(), Averaged)
    # Neither the random numbers nor the default dtype of the user's script matter, or change.
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    torch.set_default_dtype(torch.bfloat16)
    try:
        require_elementwise(torch.optim.AdamW, {})
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.rand(2), wanted)
