"""How fast are Llama 2 7B's matrix products, as our layers make them, in bfloat16 and in fp8?"""

from __future__ import annotations

from collections.abc import Callable

import torch

from first_gpu.session import Figures, Session
from first_gpu.timing import copies, tflops, timed
from shardwise.distributed.mesh import Group
from shardwise.distributed.torch_private import scaled_matmul
from shardwise.layers.chunks import loss_chunk_elements
from shardwise.layers.fp8 import GRADIENT, OPERAND, Scaling, fp8_linear

TITLE = "Matrix products"
NOTE = (
    "Y = X Wᵀ of T tokens, dX = dY W and dW = dYᵀ X, with the operands' layouts as in the layers; Q, K and V are one "
    "product, gate and up too. The head computes a chunk of tokens at a time. fp8: operands converted before, e4m3 and "
    "for dY e5m2, one scale for each, fast accumulation of Y, dW in float32. fp8 layer: the layer's own passes, with "
    "scales, rounding and copies, eager. Clock and power are those of dW. A call's inputs are in no cache."
)
COLUMNS = "product dtype tokens y_tflops dx_tflops dw_tflops sm_mhz watts"
Make = Callable[[Session, str, int, int, int], Callable[[], torch.Tensor]]
"""Makes the inputs of Y, dX or dW of so many tokens, outputs and inputs; returns the product as a function."""


def products(session: Session) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the weight of each product."""
    sizes = session.sizes
    return {
        "QKV": (3 * sizes.hidden, sizes.hidden),
        "out": (sizes.hidden, sizes.hidden),
        "gate and up": (2 * sizes.mlp, sizes.hidden),
        "down": (sizes.hidden, sizes.mlp),
        "head": (sizes.vocabulary, sizes.hidden),
    }


def run(session: Session) -> None:
    chunk = loss_chunk_elements(session.sizes.vocabulary, accelerator=True) // session.sizes.vocabulary // 16 * 16
    shapes = products(session)
    for dtype, make in (("bfloat16", _bfloat16), ("fp8", _fp8), ("fp8 layer", _fp8_layer)):
        cases = [(product, tokens) for tokens in session.sizes.tokens for product in shapes]
        cases.append(("head", chunk))
        if make is _fp8_layer:
            # The head is no layer with fp8 products, and one number of tokens shows what rounding takes.
            cases = [case for case in cases if case[0] != "head" and case[1] == session.sizes.tokens[0]]
        for product, tokens in session.few(cases):
            session.measure(
                {"product": product, "dtype": dtype, "tokens": tokens},
                lambda make=make, tokens=tokens, shape=shapes[product]: _figures(session, make, tokens, *shape),
            )


def _figures(session: Session, make: Make, tokens: int, outputs: int, inputs: int) -> Figures:
    figures: Figures = {}
    nbytes = 2 * (tokens * inputs + outputs * inputs + tokens * outputs)
    for result in ("y", "dx", "dw"):
        calls = [make(session, result, tokens, outputs, inputs) for _ in range(copies(nbytes))]
        found = timed(session, calls)
        ms = found.pop("ms")
        figures |= {**found, f"{result}_ms": ms, f"{result}_tflops": tflops(2 * tokens * inputs * outputs, ms)}
    return figures


def _bfloat16(session: Session, result: str, t: int, o: int, i: int) -> Callable[[], torch.Tensor]:
    if result == "y":
        x, weight = session.random(t, i), session.random(o, i, std=0.02)
        return lambda: torch.nn.functional.linear(x, weight)
    if result == "dx":
        dy, weight = session.random(t, o), session.random(o, i, std=0.02)
        return lambda: dy @ weight
    dy, x = session.random(t, o), session.random(t, i)
    return lambda: dy.t() @ x


def _fp8(session: Session, result: str, t: int, o: int, i: int) -> Callable[[], torch.Tensor]:
    """The product [M, K] · [K, N]; the kernel takes the first operand by rows and the second by columns."""
    m, n, k = {"y": (t, o, i), "dx": (t, i, o), "dw": (o, i, t)}[result]
    is_forward = result == "y"
    first = session.random(m, k).to(OPERAND if is_forward else GRADIENT)
    second = session.random(n, k).to(OPERAND).t()
    one = torch.ones((), dtype=torch.float32, device=session.device)
    dtype = torch.float32 if result == "dw" else torch.bfloat16
    return lambda: scaled_matmul(first, second, one, one, dtype, fast=is_forward)


def _fp8_layer(session: Session, result: str, t: int, o: int, i: int) -> Callable[[], torch.Tensor]:
    scaling = Scaling(Group(), cuts_outputs=True)
    x, weight = session.random(t, i), session.random(o, i, std=0.02)
    if result == "y":
        return lambda: fp8_linear(x, weight, None, scaling)
    wanted = (x if result == "dx" else weight).requires_grad_()
    y = fp8_linear(x, weight, None, scaling)
    dy = session.random(t, o)
    return lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True)[0]
