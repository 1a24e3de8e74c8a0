"""One record for each optimizer of `optimizer.name`: its class, its state, and what the ranks send for it.

A new optimizer is a file with its class and a record here. The class lies in `optim/` if it needs more than an element
to update an element (`optim/slice_optimizer.py`); any other elementwise `torch.optim` class can be named as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

DEFAULT_OPTIMIZER = "adamw"


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer, as the configuration, the planner, the dry run, the trainer and `verify` know it.

    Attributes:
        name: value of `optimizer.name`.
        path: the class, as package.module:Name. It is imported only where a training is built, as torch starts slowly.
        keys: keys of the section `optimizer` that are arguments of the class by the same name. `weight_decay` is an
            option of each parameter group and not among them.
        states: names of the tensors that the class keeps with a value for each element of a parameter. All have the
            dtype of the masters, `precision.optimizer`: torch gives a loaded state this dtype too.
        eps: default of `optimizer.eps`.
        has_fused_kernel: True if the class takes `fused`, which updates all tensors by one kernel.
        has_trust_ratios: True if the step of each canonical tensor is scaled by the norm of the tensor over that of its
            direction. The ranks sum both norms of each tensor once a step; a tensor without decay has no ratio.
        miniature_lr: learning rate at which `verify` trains. Its steps move the losses, and the differences that
            rounding makes, which grow with it, stay small.
        summary: line of the dry run; `{tensors}` stands for the canonical tensors of the model.
    """

    name: str
    path: str
    keys: tuple[str, ...]
    states: tuple[str, ...]
    eps: float
    miniature_lr: float
    summary: str
    has_fused_kernel: bool = False
    has_trust_ratios: bool = False

    def load_class(self) -> Any:
        """Import the class and return it."""
        module, _, name = self.path.partition(":")
        return getattr(import_module(module), name)

    def kept_tensors(self, *, separate_masters: bool) -> int:
        """Return the number of tensors in the optimizer's dtype: the states, and masters unless parameters serve."""
        return len(self.states) + separate_masters


OPTIMIZERS = {
    spec.name: spec
    for spec in (
        OptimizerSpec(
            name="adamw",
            path="torch.optim:AdamW",
            keys=("lr", "betas", "eps"),
            states=("exp_avg", "exp_avg_sq"),
            eps=1e-8,
            miniature_lr=1e-3,
            summary="AdamW",
            has_fused_kernel=True,
        ),
        OptimizerSpec(
            name="lamb",
            path="shardwise.optim.lamb:LAMB",
            keys=("lr", "betas", "eps", "trust_clip"),
            states=("exp_avg", "exp_avg_sq"),
            eps=1e-6,
            miniature_lr=1e-2,
            summary="LAMB: the ranks agree on two norms of {tensors}, whole whatever the layout",
            has_trust_ratios=True,
        ),
    )
}
"""The records by name, in the order in which messages list them."""
