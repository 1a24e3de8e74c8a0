"""The keys that each query of causal attention sees, and the forms in which kernels are told so.

Shapes of masks: Q queries, L keys, B batch (1 if all samples are alike); n = ceil(Q / BLOCK) blocks of queries and
m = ceil(L / BLOCK) blocks of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.distributed import devices
from shardwise.models.parameter_counts import LONG

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries and keys of one block, as torch's kernels have them by default."""
_BEYOND = 2**62
"""A place behind all tokens of any sequence."""


@dataclass(frozen=True)
class AttentionMask:
    """The query at place p sees the key at place j if `start ≤ j ≤ p` and `j > p - window`.

    The methods' argument `keys` is the number of tokens of the sequence up to the last query.

    Attributes:
        places: places of the queries, as runs of places that follow one another.
        starts_SB: first place of each query's document, `[Q, B]`; None: 0.
        window: keys that a query sees at most, its own included; None: no limit.
        key_places: places of the keys, as runs; None: all places of the sequence.
    """

    places: tuple[range, ...]
    starts_SB: Tensor | None = None
    window: int | None = None
    key_places: tuple[range, ...] | None = None

    @property
    def queries(self) -> int:
        """Number of queries."""
        return sum(len(run) for run in self.places)

    def limits(self, keys: int) -> bool:
        """Return whether the window keeps any of `keys` keys from a query."""
        return self.window is not None and self.window < keys

    def is_plain(self, keys: int) -> bool:
        """Return whether kernels need no mask: all queries see all earlier keys, or the last query sees all keys."""
        if self.starts_SB is not None or self.limits(keys) or len(self.places) > 1 or self.key_places is not None:
            return False
        return self.places[0] == range(keys) or self.places[0] == range(keys - 1, keys)

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the places of the first and the last key that each query sees, `[B, Q]` and `[Q]`."""
        last_Q = _numbers(self.places, device)
        first_BQ = torch.zeros_like(last_Q).unsqueeze(0)
        if self.starts_SB is not None:
            first_BQ = self.starts_SB.T
        if self.window is not None:
            first_BQ = torch.maximum(first_BQ, last_Q - (self.window - 1))
        return first_BQ, last_Q

    def dense(self, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the mask that is added to the scores, `[B, 1, Q, L]`: 0 for keys that a query sees, else -inf."""
        first_BQ, last_Q = self.bounds(device)
        keys_L = _numbers(self.key_places or (range(keys),), device)
        seen_BQL = (keys_L >= first_BQ.unsqueeze(2)) & (keys_L <= last_Q.unsqueeze(1))
        mask_BQL = torch.zeros(seen_BQL.shape, dtype=dtype, device=device).masked_fill_(~seen_BQL, float("-inf"))
        return mask_BQL.unsqueeze(1)

    def blocks(self, keys: int, device: torch.device) -> BlockMask:
        """Return the mask for FlexAttention (arXiv:2412.05496), which computes only the blocks in which a key is seen.

        It is made of the bounds alone: n·m numbers a sample, and nothing of the size Q·L.
        """
        from torch.nn.attention.flex_attention import BlockMask

        first_BQ, last_Q = self.bounds(device)
        first_BQ = first_BQ.contiguous()
        rows = torch.arange(-(-self.queries // BLOCK) * BLOCK, device=device).view(-1, BLOCK)
        rows_nK = rows.clamp(max=self.queries - 1)  # the last query fills up the last block
        first_BnK = first_BQ[:, rows_nK]
        last_nK = last_Q[rows_nK]
        keys_L = _numbers(self.key_places or (range(keys),), device)
        # Behind the last key a block is filled up with places that no query sees.
        keys_mK = F.pad(keys_L, (0, -len(keys_L) % BLOCK), value=_BEYOND).view(-1, BLOCK)
        lowest_m = keys_mK.amin(-1)
        highest_m = keys_mK.amax(-1)
        # Every query of a block sees every key of a block that lies between all of their bounds.
        begins_late = lowest_m >= first_BnK.amax(-1).unsqueeze(-1)
        ends_early = highest_m <= last_nK.amin(-1).unsqueeze(-1)
        is_full = begins_late & ends_early
        ends_late = highest_m >= first_BnK.amin(-1).unsqueeze(-1)
        begins_early = lowest_m <= last_nK.amax(-1).unsqueeze(-1)
        is_seen = ends_late & begins_early
        is_whole = self.key_places is None

        def sees(b: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            sample = b if len(first_BQ) > 1 else 0
            place = key if is_whole else keys_L[key]
            return (place <= last_Q[query]) & (place >= first_BQ[sample, query])

        partial = _counts_and_indices((is_seen & ~is_full).unsqueeze(1))
        full = _counts_and_indices(is_full.unsqueeze(1))
        lengths = (self.queries, len(keys_L))
        return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=lengths)

    def pieces(self, keys: int) -> PiecesMask:
        """Return the mask for attention by pieces."""
        ends = [end for run in self.places for end in (run.start, run.stop)]
        window = self.window if self.limits(keys) else None
        return PiecesMask(torch.tensor(ends, device="cpu"), self.starts_SB, window, self.key_places)

    def form(
        self, like: Tensor, *, keys: int, head_dim: int, is_compiled: bool, is_fused: bool, is_cached: bool = False
    ) -> Mask | None:
        """Return the mask in the form that attention takes; None where kernels need none.

        Args:
            like: a tensor with the device and the dtype of queries.
            is_compiled: true if attention is a part of a compiled graph.
            is_fused: true if one kernel computes attention; false if the probabilities are in memory.
            is_cached: true if the number of keys differs from call to call, as with a cache.
        """
        if self.is_plain(keys):
            return None
        if is_fused and like.device.type == "cpu":
            return self.pieces(keys)
        has_kernel = is_fused and not is_cached and head_dim >= devices.least_flex_width(like.device)
        if has_kernel and (is_compiled or keys >= LONG):
            return self.blocks(keys, like.device)
        return self.dense(keys, like.dtype, like.device)


@dataclass(frozen=True)
class PiecesMask:
    """The numbers of an `AttentionMask` in tensors, so that one compiled graph serves all ranks.

    Attributes:
        ends: first place, and end, of each run of queries; on the host.
        starts_SB: as in `AttentionMask`.
        window: the window, if it hides any key.
        key_places: as in `AttentionMask`.
    """

    ends: Tensor
    starts_SB: Tensor | None
    window: int | None
    key_places: tuple[range, ...] | None = None


Mask: TypeAlias = Union[Tensor, "BlockMask", PiecesMask]
"""The forms of a mask: dense, or added to scores; by blocks, for FlexAttention; the bounds alone, for CPUs."""
Masks: TypeAlias = Mask | tuple[Mask, ...]
"""The mask of all keys, or where keys come rank by rank, one for the keys of each rank."""


def _numbers(runs: tuple[range, ...], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


def _counts_and_indices(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen entries of the last dim, and all indices of it with the chosen ones first."""
    order = torch.argsort(chosen.to(torch.int32), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()
