"""A plain module as a class that a run trains: one that returns logits, or one that names its blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.layers.loss import IGNORE_INDEX
from shardwise.models.blocks import ModelPart


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
            return _loss(self.logits(ids_SB), targets_SB)

    BatchFirst.__name__ = BatchFirst.__qualname__ = model_class.__name__
    return BatchFirst


def pipelined(model_class: type[nn.Module], *modules: str, batch_first: bool = True) -> type[nn.Module]:
    """The class to train in place of a plain one whose blocks `parallel.pipeline` is to cut into stages.

        Trained = shardwise.pipelined(MyModule, "embedding", "blocks", "norm", "head")  # model.family=my_file:Trained

    The modules take ids, and each the result of the one before, at any layout: the module's own forward is not called.
    `forward(ids, targets)` returns the loss of `batch_first`.

    Args:
        model_class: a module that they make up; weights keep their names.
        modules: their names, in the order of the pass: ids `[B, S]` → x `[B, S, H]` → logits `[B, S, V]`. One is the
            `torch.nn.ModuleList` of the blocks, of which each takes x alone.
        batch_first: false if they take the sequence as the first axis, as layers of shardwise do.
    """

    def swapped(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1) if batch_first else tensor

    class Pipelined(model_class):  # type: ignore[misc, valid-type]
        modules_in_order = modules
        part = ModelPart()

        def logits(self, ids_SB: Tensor, x: Tensor | None = None) -> Tensor:
            if x is not None and x.requires_grad:
                x.register_hook(Tensor.contiguous)  # its gradient is sent to the stage before
            x = swapped(ids_SB if x is None else x)
            for module in map(self.get_submodule, modules):
                for layer in module if isinstance(module, nn.ModuleList) else (module,):
                    x = layer(x)
            if self.part.is_last:
                return swapped(_logits(x))
            return swapped(x).clone(memory_format=torch.contiguous_format)  # to be sent, and torch detaches no view

        def forward(self, ids_SB: Tensor, targets_SB: Tensor, x: Tensor | None = None) -> Tensor:
            out = self.logits(ids_SB, x)
            return _loss(out, targets_SB) if self.part.is_last else out

    Pipelined.__name__ = Pipelined.__qualname__ = model_class.__name__
    return Pipelined


def _loss(logits_SBV: Tensor, targets_SB: Tensor) -> Tensor:
    """The sum of the cross-entropies of all targets that are not -100, in float32."""
    logits_NV = logits_SBV.float().flatten(0, 1)
    return F.cross_entropy(logits_NV, targets_SB.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def _logits(returned: Any) -> Tensor:
    """The logits `[B, S, V]` in what a module returned; TypeError if there are none."""
    found = getattr(returned, "logits", returned)
    for tensor in found if isinstance(found, tuple | list) else (found,):
        if isinstance(tensor, Tensor) and tensor.dim() == 3:
            return tensor
    raise TypeError(f"forward must return logits [batch, sequence, vocabulary], not a {type(returned).__name__}")
