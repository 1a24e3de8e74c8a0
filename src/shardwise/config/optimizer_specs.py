"""One record for each optimizer of `optimizer.name`: its class, its state, what the ranks send.

A new optimizer is a file with its class and a record here. The class lies in `optim/` if it needs more than an element
to update an element (`optim/wrapped_class.py`); any other elementwise `torch.optim` class can be named as it is.
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
        path: the class, as package.module:Name. It is imported only where a training is built, as torch starts slowly.
        keys: keys of the section `optimizer` that are arguments of the class by the same name; of a section inside it
            with the section's name, as `muon.momentum`. `weight_decay` is an option of each parameter group and not
            among them.
        states: names of the tensors that the class keeps with a value for each element of a parameter.
        matrix_states: names of those that it keeps for matrices of blocks; None: the same.
        update_values: values of an element that a step of the class reads and writes: of master, states and scaled
            gradient, and of tensors between (`tests/unit/optim/test_bytes.py`).
        matrix_update_values: the same of an element of a matrix of a block; None: as many.
        has_fused_kernel: True if the class takes `fused`, which updates all tensors by one kernel.
        has_trust_ratios: True if the step of each canonical tensor is scaled by the norm of the tensor over that of its
            direction. The ranks sum both norms of each tensor once a step; a tensor without decay has no ratio.
        miniature_lr: learning rate at which `verify` trains. Its steps move the losses, and the differences that
            rounding makes, which grow with it, stay small.
        orthogonalizes: True if one rank computes the update of each whole matrix of a block, which the class knows by
            `use_muon` of its parameter group. Other parameters have a learning rate of their own.
        summary: line of the dry run; `{tensors}` stands for the canonical tensors of the model.
    """

    name: str
    path: str
    keys: tuple[str, ...]
    states: tuple[str, ...]
    update_values: int
    eps: float
    miniature_lr: float
    summary: str
    has_fused_kernel: bool = False
    has_trust_ratios: bool = False
    orthogonalizes: bool = False
    matrix_states: tuple[str, ...] | None = None
    matrix_update_values: int | None = None

    @property
    def needs_whole_tensors(self) -> bool:
        """True if the update of an element needs other elements of its tensor."""
        return self.has_trust_ratios or self.orthogonalizes

    def load_class(self) -> Any:
        """Import the class and return it."""
        module, _, name = self.path.partition(":")
        return getattr(import_module(module), name)

    def kept_bytes(self, elements: int, matrices: int, *, master: int, state: int) -> int:
        """Return the bytes of masters and states.

        Args:
            matrices: number of them in matrices of blocks.
            master: bytes of a master; 0 if the parameters serve.
            state: bytes of a value of a state.
        """
        matrix_states = self.states if self.matrix_states is None else self.matrix_states
        states = elements * len(self.states) - matrices * (len(self.states) - len(matrix_states))
        return elements * master + states * state


OPTIMIZERS = {
    spec.name: spec
    for spec in (
        OptimizerSpec(
            name="adamw",
            path="torch.optim:AdamW",
            keys=("lr", "betas", "eps"),
            states=("exp_avg", "exp_avg_sq"),
            update_values=8,
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
            update_values=30,
            eps=1e-6,
            miniature_lr=1e-2,
            summary="LAMB: the ranks agree on two norms of {tensors}, whole whatever the layout",
            has_trust_ratios=True,
        ),
        OptimizerSpec(
            name="muon",
            path="shardwise.optim.muon:Muon",
            keys=(
                *("lr", "betas", "eps", "muon.momentum", "muon.nesterov", "muon.ns_steps", "muon.ns_dtype"),
                *("muon.adjust_lr_fn", "muon.split_heads"),
            ),
            states=("exp_avg", "exp_avg_sq"),
            matrix_states=("momentum_buffer",),
            update_values=8,
            matrix_update_values=20,
            eps=1e-8,
            miniature_lr=1e-3,
            summary="Muon for the matrices of blocks, each orthogonalized whole by one rank; AdamW for all others",
            has_fused_kernel=True,
            orthogonalizes=True,
        ),
    )
}
"""The records by name, in the order in which messages list them."""
