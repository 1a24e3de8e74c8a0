"""Every private name of torch that the package uses, and why. Nothing else imports `torch.*._name`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_COMPILER = "torch._dynamo"


def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x weightᵀ` by oneDNN, for float32 on a CPU: x `[…, K]`, weight `[N, K]` → `[…, N]`; any strides; no gradient.

    `torch.nn.functional.linear` gives float32 to MKL whatever the processor. The operator is the one that torch's own
    compiler emits for linear layers on a CPU.
    """
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def postpone_compiler() -> None:
    """Let optimizers be made without importing torch's compiler, which takes as long as importing torch itself.

    Some methods of `torch.optim.Optimizer` are marked as not to be traced, and the mark imports the compiler at the
    first call, to ask it for an untraced version. Until somebody else imports it, the method itself is that version.
    """
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        method = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        if not hasattr(method, "__dynamo_disable"):
            setattr(method, "__dynamo_disable", _Untraced(method))


class _Untraced:
    """Stands in for a method's untraced version as long as nothing can trace it."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __call__(self, *args: Any, **options: Any) -> Any:
        if _COMPILER not in sys.modules:
            return self._method(*args, **options)
        untraced = torch._dynamo.disable(self._method, wrapping=False)
        setattr(self._method, "__dynamo_disable", untraced)
        return untraced(*args, **options)


def step_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` of a class of torch's, likewise; its step hooks run only where the compiler is there."""
    if _COMPILER in sys.modules:
        optimizer.step()
    else:
        with torch.no_grad():  # which the decorators of `step` see to
            inspect.unwrap(type(optimizer).step)(optimizer)
