"""Every private name of torch that the package uses, and why. Nothing else imports `torch.*._name`."""

from __future__ import annotations

import torch
from torch import Tensor


def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x weightᵀ` by oneDNN, for float32 on a CPU: x `[…, K]`, weight `[N, K]` → `[…, N]`; any strides; no gradient.

    `torch.nn.functional.linear` gives float32 to MKL whatever the processor. The operator is the one that torch's own
    compiler emits for linear layers on a CPU.
    """
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product
