"""Element-wise functions whose bits do not depend on the number of elements.

torch's CPU kernels compute full vectors of elements by one function, and the last elements, if they fill no vector, by
another one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_VECTOR = 64
"""Elements that torch's CPU kernels compute at once, at most."""
_SERIAL = 2**14
"""Elements that torch's CPU kernels do not divide over threads."""


def in_full_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `function(x)`, computed of x made dense, and longer by zeros if vectors are not full."""
    flat = x.reshape(-1)
    padding = -flat.numel() % _VECTOR
    if not padding:
        return function(flat).view(x.shape)
    return function(F.pad(flat, (0, padding)))[: flat.numel()].view(x.shape)


def in_vectors(function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """Return an element-wise function of operands of equal shapes, computed by vector kernels and not by threads."""
    flat = [operand.reshape(-1) for operand in operands]
    count = flat[0].numel()
    padded = [F.pad(operand, (0, -count % _VECTOR)).split(_SERIAL) for operand in flat]
    results = [function(*part) for part in zip(*padded, strict=True)]
    return torch.cat(results)[:count].view(operands[0].shape)
