"""A plain module, which takes `[batch, sequence]` and returns logits, as a class that a run trains."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.layers.loss import IGNORE_INDEX

PLAIN_MODULE = (
    "of a plain module that takes ids [batch, sequence] and returns logits, `Trained = shardwise.batch_first(Module)` "
    "makes the class to name"
)
"""What mends the usual first error with a class of the user's, for the end of a message."""


def batch_first(model_class: type[nn.Module]) -> type[nn.Module]:
    """The class to train in place of a plain one, whose weights have the same names.

        Trained = shardwise.batch_first(MyModule)  # model.family=my_file:Trained

    `forward(ids, targets)`, both `[S, B]`, returns the sum of the cross-entropies of all targets that are not -100, in
    float32. It trains with data parallelism and ZeRO; other degrees need sharded layers (docs/own-model.md).

    Args:
        model_class: a module whose method `logits`, or else `forward`, takes ids `[B, S]` and returns logits
            `[B, S, V]`: as they are, as the attribute `logits` of its output or as the first such tensor of a tuple.
    """
    plain: Any = getattr(model_class, "logits", model_class.forward)

    class BatchFirst(model_class):  # type: ignore[misc, valid-type]
        def logits(self, ids_SB: Tensor) -> Tensor:
            return _logits(plain(self, ids_SB.t())).transpose(0, 1)

        def forward(self, ids_SB: Tensor, targets_SB: Tensor) -> Tensor:
            logits_SBV = self.logits(ids_SB).float()
            return F.cross_entropy(
                logits_SBV.flatten(0, 1), targets_SB.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
            )

    BatchFirst.__name__ = BatchFirst.__qualname__ = model_class.__name__
    return BatchFirst


def _logits(returned: Any) -> Tensor:
    """The logits `[B, S, V]` in what a module returned.

    Raises:
        TypeError: there are none.
    """
    found = getattr(returned, "logits", returned)
    for tensor in found if isinstance(found, tuple | list) else (found,):
        if isinstance(tensor, Tensor) and tensor.dim() == 3:
            return tensor
    raise TypeError(f"forward must return logits [batch, sequence, vocabulary], not a {type(returned).__name__}")
