"""Whether an optimizer updates each element by itself, found out by running it.

ZeRO-1 gives the wrapped optimizer flat slices of many parameters. That is right for Adam, SGD and their like, and
wrong for a
class that looks at a whole parameter: LAMB's trust ratio, Muon's matrix, Adafactor's factors, LBFGS's line search.
"""

from __future__ import annotations

from typing import Any

import torch


def require_elementwise(optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any]) -> None:
    """Refuse a class whose update of a matrix differs from its update of the matrix's slices.

    Raises:
        ValueError: with the class's name and what it did.
    """
    name = optimizer_class.__name__
    advice = "ZeRO-1 gives it flat slices of parameters, so it must update each element by itself, as AdamW does"
    generator = torch.Generator().manual_seed(0)
    weight, gradients = (torch.randn(shape, generator=generator) for shape in ((6, 4), (3, 6, 4)))
    gradients[:, 3:] *= 100.0  # rows of different size, so that a norm over all of them shows
    try:
        whole = _run(optimizer_class, defaults, [weight.clone()], [[g] for g in gradients])
        halves = list(weight.clone().flatten().chunk(2))
        sliced = _run(optimizer_class, defaults, halves, [list(g.flatten().chunk(2)) for g in gradients])
    except Exception as error:
        raise ValueError(
            f"optimizer_class {name} cannot be sharded: {advice}; on a slice it fails with: {error}"
        ) from error
    if not torch.allclose(whole[0].flatten(), torch.cat(sliced), rtol=1e-5, atol=1e-7):
        raise ValueError(
            f"optimizer_class {name} cannot be sharded: {advice}; its result depends on the whole parameter"
        )


def _run(
    optimizer_class: type[torch.optim.Optimizer],
    defaults: dict[str, Any],
    tensors: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
) -> list[torch.Tensor]:
    parameters = [torch.nn.Parameter(t) for t in tensors]
    trial = {**defaults, **({"lr": 0.01} if "lr" in defaults else {})}
    optimizer = optimizer_class(parameters, **trial)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [p.detach() for p in parameters]
