"""The key-value cache of a causal model, for generation.

Legend, per rank: L tokens for which there is room, S new tokens, B batch, m key and value heads of the rank, d head
width.
"""

from __future__ import annotations

from torch import Tensor


class KeyValueCache:
    """Keys and values of the first `length` tokens, so that a forward pass computes only those of new tokens.

    A rank keeps the m key and value heads that it holds: 2 · layers · L · B · m · d elements in the dtype of the
    activations. They are allocated once, by the first forward pass, and never grow.

    Args:
        room: L, the largest number of tokens.

    Attributes:
        length: number of tokens in the cache.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's k and v `[S, B, m, d]` of the next S tokens; returns all of them, `[length + S, B, m, d]`.

        `length` stays: call `advance` once all layers have the new tokens.

        Raises:
            ValueError: there is no room for the tokens.
        """
        end = self.length + k.shape[0]
        if end > self.room:
            raise ValueError(f"the tokens ({end}) must be at most those that the cache has room for ({self.room})")
        if layer not in self._layers:
            self._layers[layer] = (k.new_empty(self.room, *k.shape[1:]), v.new_empty(self.room, *v.shape[1:]))
        keys, values = self._layers[layer]
        keys[self.length : end] = k
        values[self.length : end] = v
        return keys[:end], values[:end]  # views: nothing is copied

    def advance(self, count: int) -> None:
        """Count `count` new tokens."""
        self.length += count

    @property
    def bytes(self) -> int:
        """Bytes that are allocated on this rank, unused room included; 0 before the first forward pass."""
        return sum(tensor.nbytes for pair in self._layers.values() for tensor in pair)
