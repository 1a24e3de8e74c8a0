"""How should the gradient of a weight be added to its float32 buffer?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from first_gpu.session import Figures, Session
from first_gpu.timing import tflops, timed

TITLE = "Weight gradients in float32 buffers"
NOTE = (
    "dW = dYᵀ X of one product of 4,096 tokens, added to a float32 buffer. Bytes a parameter, without the operands of "
    "the product, by arithmetic. Error: of the sum of 4 micro-batches against float64, relative, in the Frobenius norm."
)
COLUMNS = "way product ms bytes tflops error_of_sum watts"
_MICRO_BATCHES = 4
Add = Callable[[Tensor, Tensor, Tensor], object]


def _cast_and_add(total: Tensor, dy: Tensor, x: Tensor) -> None:
    total.add_((dy.t() @ x).float())


def _add(total: Tensor, dy: Tensor, x: Tensor) -> None:
    total.add_(dy.t() @ x)


def _product_in_float32(total: Tensor, dy: Tensor, x: Tensor) -> None:
    total.add_(torch.mm(dy.t(), x, out_dtype=torch.float32))


def _addmm(total: Tensor, dy: Tensor, x: Tensor) -> None:
    torch.addmm(total, dy.t(), x, out_dtype=torch.float32, out=total)


WAYS: dict[str, tuple[Add, int]] = {
    "product alone, in bfloat16": (lambda total, dy, x: dy.t() @ x, 2),
    "product, cast, add": (_cast_and_add, 2 + 6 + 12),
    "product, add bfloat16 to float32": (_add, 2 + 10),
    "product in float32, add": (_product_in_float32, 4 + 12),
    "addmm into the buffer": (_addmm, 8),
}
"""Way → the function, and bytes that it moves for each parameter."""


def run(session: Session) -> None:
    sizes = session.sizes
    shapes = {"down": (sizes.hidden, sizes.mlp), "QKV": (3 * sizes.hidden, sizes.hidden)}
    for product, shape in shapes.items():
        for way, (add, nbytes) in WAYS.items():
            labels = {"way": way, "product": product, "bytes": nbytes}
            session.measure(labels, lambda add=add, shape=shape: _measure(session, add, *shape))


def _measure(session: Session, add: Add, outputs: int, inputs: int) -> Figures:
    tokens = session.sizes.tokens[0]
    batches = [(session.random(tokens, outputs), session.random(tokens, inputs)) for _ in range(_MICRO_BATCHES)]
    total = torch.zeros(outputs, inputs, dtype=torch.float32, device=session.device)
    for dy, x in batches:
        add(total, dy, x)
    error = None
    if total.any():
        # A part of the rows is enough, and products in float64 are slow.
        rows = slice(0, max(1, outputs // 8))
        exact = sum(dy[:, rows].double().t() @ x.double() for dy, x in batches)
        assert isinstance(exact, Tensor)
        error = ((total[rows].double() - exact).norm() / exact.norm()).item()
    found = timed(session, [lambda dy=dy, x=x: add(total, dy, x) for dy, x in batches])
    return found | {"tflops": tflops(2 * tokens * outputs * inputs, found["ms"]), "error_of_sum": error}
