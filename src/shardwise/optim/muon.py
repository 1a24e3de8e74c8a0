"""Muon: momentum whose matrices are orthogonalized, and AdamW for what is no matrix of a layer.

Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et al., arXiv:2502.16982. It
is exact under ZeRO-1 and tensor parallelism, as one rank computes the update of each whole matrix: see
`Muon.step_slices`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from shardwise.distributed.placement import of_or_whole
from shardwise.distributed.torch_private import step_optimizer, without_compiler
from shardwise.layers.embedding import ParallelEmbedding, ParallelLMHead, ReplicatedEmbedding
from shardwise.optim.gradient_norms import ElementRun, chunk_elements
from shardwise.optim.matrix_exchange import Matrix, MatrixExchange, MatrixPart
from shardwise.optim.wrapped_class import ModelSlices, RoundedSlices, SliceOptimizer, gradient_of

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7
_SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MOST_STEPS = 99


class Muon(SliceOptimizer):
    """Orthogonalized momentum for matrices, and `torch.optim.AdamW` for parameter groups with `use_muon` False.

    For each matrix W `[out, in]` with gradient G, where `orthogonalized` brings all singular values near 1:

        M ← μ M + (1 − μ) G
        U = orthogonalized(μ M + (1 − μ) G), with `nesterov`; else orthogonalized(M)
        W ← (1 − lr · λ) W − lr · s · U

    The factor s of the step is √max(1, out / in) with `original`, and with `match_rms_adamw` 0.2 · √max(out, in), which
    gives the step the size of AdamW's, so that its learning rates suit. The result is that of `torch.optim.Muon`,
    which always iterates in bfloat16.

    Alone, each parameter is one matrix. Through `ZeroRedundancyOptimizer(params, Muon, …)` each canonical matrix is
    orthogonalized by itself, whole and by one rank, at any layout: Q, K and V of a fused weight are three. Embeddings
    and heads belong into a group with `use_muon` False, as biases and normalisations do.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate; groups may have their own.
        weight_decay: λ.
        momentum: μ.
        nesterov: True for Nesterov's momentum.
        ns_steps: steps of the Newton–Schulz iteration, from 1 to 99.
        ns_dtype: `float32` or `bfloat16`, in which matrices are iterated; None: bfloat16 on accelerators, float32 on
            the CPU.
        adjust_lr_fn: `original` or `match_rms_adamw`.
        split_heads: True to take each attention head of Q, K and V as a matrix. It needs the placements of shardwise's
            layers, and so `ZeroRedundancyOptimizer`.
        betas: decay rates of AdamW's moments.
        eps: ε of AdamW.
        fused: True for AdamW's fused kernel.

    Raises:
        ValueError: an option is out of its range, or a parameter of a group with `use_muon` is no matrix.
        RuntimeError: a gradient of a matrix is sparse or complex.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: Literal["float32", "bfloat16"] | None = None,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original",
        split_heads: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        problems = []
        if not 0 <= momentum < 1:
            problems.append(f"momentum ({momentum}) must lie in [0, 1)")
        if not 1 <= ns_steps <= _MOST_STEPS:
            problems.append(f"ns_steps ({ns_steps}) must be from 1 to {_MOST_STEPS}")
        if ns_dtype is not None and ns_dtype not in _DTYPES:
            problems.append(f"ns_dtype ({ns_dtype!r}) must be None, 'float32' or 'bfloat16'")
        if adjust_lr_fn not in _SCALES:
            problems.append(f"adjust_lr_fn ({adjust_lr_fn!r}) must be 'original' or 'match_rms_adamw'")
        if problems:
            raise ValueError("; ".join(problems))
        # It checks the other options, and never has parameters of its own.
        adamw_class = cast("type[torch.optim.AdamW]", without_compiler(torch.optim.AdamW))
        self._adamw = adamw_class(
            [nn.Parameter(torch.empty(0))], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused
        )
        self.ns_dtype = ns_dtype
        self.split_heads = split_heads
        self._exchange: MatrixExchange | None = None
        options = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, self._adamw.defaults | options | {"use_muon": True})

    @classmethod
    def require_tensor(cls, shape: tuple[int, ...], options: dict[str, Any]) -> None:
        """Raise ValueError for a `shape` that is no matrix's, unless AdamW updates a group with these `options`."""
        if options.get("use_muon", True) and len(shape) != 2:
            raise ValueError(
                f"a parameter of shape {list(shape)} must be a matrix, of two dimensions, to be updated by Muon: put "
                "it into a parameter group with use_muon=False, which AdamW updates"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add `param_group`, as `torch.optim.Optimizer` does. Without `use_muon` False, it has matrices alone."""
        super().add_param_group(param_group)
        if not self.has_slices:
            for p in self.param_groups[-1]["params"]:
                self.require_tensor(tuple(p.shape), self.param_groups[-1])

    def step_tensors(self) -> None:
        for i in self.whole_tensor_groups():
            group = self.param_groups[i]
            for p in group["params"]:
                if p.grad is not None:
                    direction = self.direction(p, group, torch.empty_like(p)).to(self._iteration_dtype(p.device))
                    p.mul_(1 - _rate(group) * group["weight_decay"])
                    p.add_(orthogonalized(direction, group["ns_steps"]), alpha=_negative_rate(group, tuple(p.shape)))
        self._step_adamw()

    @torch.no_grad()
    def step_slices(self, model: ModelSlices) -> None:
        """Update the slices of many matrices that this rank owns, as `model` has them; every rank of the model does so.

        Momentum is a matter of elements, whose results are written over the gradients. Then each matrix goes to one
        rank of the stage, by FLOPs, which orthogonalizes it and sends the others what they own of the result. Of
        E elements of matrices, a stage's ranks together send less than E there and, with ZeRO-1, less than E back.
        """
        for i in self.whole_tensor_groups():
            group = self.param_groups[i]
            for bucket in model.groups[i]:
                self.direction(bucket.master, group, gradient_of(bucket))
                bucket.master.mul_(1 - _rate(group) * group["weight_decay"])
        self._step_adamw()
        for matrix, part, update in self._updates(model, lambda part: part.of(gradient_of(part.bucket))):
            alpha = _negative_rate(self.param_groups[matrix.group], matrix.shape)
            part.of(part.bucket.master.detach()).add_(update, alpha=alpha)

    @torch.no_grad()
    def step_rounded(self, model: ModelSlices, slices: RoundedSlices) -> None:
        """Update the matrices of `model` as `step_slices` does, with stochastic rounding by `slices`.

        Directions and updates take the place of the gradients, in their dtype.
        """
        buckets = [(self.param_groups[i], bucket) for i in self.whole_tensor_groups() for bucket in model.groups[i]]
        for _, bucket in buckets:
            for chunk in ElementRun.owned(bucket).split(chunk_elements(bucket)):
                chunk.gradient().copy_(slices.load_direction(chunk)[1])
                slices.store(chunk)
        for matrix, part, update in self._updates(model, lambda part: part.of(part.bucket.gradient)):
            alpha = _negative_rate(self.param_groups[matrix.group], matrix.shape)
            part.of(part.bucket.gradient).copy_(update * alpha)
        # The state was rounded before, and is stored as it is: no bits are cut off.
        for group, bucket in buckets:
            for chunk in ElementRun.owned(bucket).split(chunk_elements(bucket)):
                slices.load(chunk).mul_(1 - _rate(group) * group["weight_decay"]).add_(chunk.gradient())
                slices.store(chunk)

    def _updates(
        self, model: ModelSlices, take: Callable[[MatrixPart], Tensor]
    ) -> Iterator[tuple[Matrix, MatrixPart, Tensor]]:
        """Yield each part of a matrix that this rank owns with its orthogonalized direction. Collective over a stage.

        `take` gives the direction of a part, `[*box.size]`.
        """
        if self._exchange is None or self._exchange.model is not model:
            self._exchange = MatrixExchange(model, self.whole_tensor_groups(), by_head=self.split_heads)

        def compute(matrix: Matrix, direction: Tensor) -> Tensor:
            return orthogonalized(direction, self.param_groups[matrix.group]["ns_steps"])

        return self._exchange.updates(take, compute, self._iteration_dtype(model.device))

    @staticmethod
    def _needs_whole_tensors(group: dict[str, Any]) -> bool:
        return bool(group["use_muon"])

    def direction(self, p: nn.Parameter, group: dict[str, Any], out: Tensor) -> Tensor:
        """Take the gradient of p `[…]`, of the parameter group `group`, into the momentum, and write to `out`."""
        gradient = self._gradient(p)
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        return torch.lerp(gradient, momentum, group["momentum"], out=out) if group["nesterov"] else out.copy_(momentum)

    def _step_adamw(self) -> None:
        self._adamw.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        self._adamw.state = self.state
        step_optimizer(self._adamw)

    def _iteration_dtype(self, device: torch.device) -> torch.dtype:
        return _DTYPES[self.ns_dtype or ("float32" if device.type == "cpu" else "bfloat16")]


def orthogonalized(matrix: Tensor, steps: int) -> Tensor:
    """Return a matrix `[O, I]` with its singular values brought into about [0.7, 1.2], by a Newton–Schulz iteration.

    X₀ = G / ‖G‖, then in each step X ← a X + (b A + c A²) X with A = X Xᵀ, and a, b, c of Keller Jordan, whose slope
    at 0 is large. A matrix with more rows than columns is iterated transposed, as A is then smaller.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _rate(group: dict[str, Any]) -> float:
    return float(group["lr"])


def _negative_rate(group: dict[str, Any], shape: tuple[int, ...]) -> float:
    """Return the factor by which a matrix `[O, I]` of the group moves along its orthogonalized direction."""
    rows, columns = shape
    return -_rate(group) * _SCALES[group["adjust_lr_fn"]](rows, columns)


def block_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices that Muon updates: those of a model's blocks, its module lists' entries, without embeddings.

    A rank's stages are a list too, whose entries are no blocks.
    """
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and part is not model]
    embeddings = nn.Embedding, ParallelEmbedding, ReplicatedEmbedding, ParallelLMHead
    matrices = (
        parameter
        for modules in lists
        for module in modules.modules()
        if not isinstance(module, embeddings)
        for parameter in module.parameters(recurse=False)
        if len(of_or_whole(parameter).pieces[0].shape) == 2
    )
    return list(dict.fromkeys(matrices))
