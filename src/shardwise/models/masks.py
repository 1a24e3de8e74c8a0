"""The keys that each query of causal attention sees, and the forms in which kernels are told so.

Shapes of masks: Q queries, L keys, B batch (1 if all samples are alike); n = ceil(Q / BLOCK) blocks of queries and
m = ceil(L / BLOCK) blocks of keys; N documents of all samples, T = S·B tokens. Inputs of attention: q `[Q, B, n, d]`
of n query heads of width d, k and v `[L, B, m, d]`, where the number m of key and value heads divides n.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.distributed import devices
from shardwise.distributed.torch_private import let_length_change
from shardwise.models.parameter_counts import LONG

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries and keys of one block, as torch's kernels have them by default."""
_BEYOND = 2**62  # a place behind all tokens of any sequence
_MOST_DOCUMENTS = 2**16 - 2
"""Documents of one call: CUDA starts no more blocks of threads along a grid's second dimension than 65,535."""


class DocumentSizes(NamedTuple):
    """Sizes of the documents of a micro-batch that a kernel must be told by the host."""

    number: int  # documents of all samples
    longest: int  # tokens of the longest one

    @classmethod
    def of(cls, starts_SB: npt.NDArray[np.int64] | None) -> DocumentSizes | None:
        """Count by the first place of each token's document; None where documents do not attend by themselves."""
        if starts_SB is None:
            return None
        positions_SB = np.arange(len(starts_SB))[:, None] - starts_SB
        return cls(int(np.count_nonzero(positions_SB == 0)), int(positions_SB.max()) + 1)


@dataclass(frozen=True)
class AttentionMask:
    """The query at place p sees the key at place j if `start ≤ j ≤ p` and `j > p - window`.

    The methods' argument `keys` is the number of tokens of the sequence up to the last query.
    """

    places: tuple[range, ...]  # places of the queries, as runs of places that follow one another
    starts_SB: Tensor | None = None  # first place of each query's document, `[Q, B]`; None: 0
    window: int | None = None  # keys that a query sees at most, its own included; None: no limit
    key_places: tuple[range, ...] | None = None  # places of the keys, as runs; None: all places of the sequence
    documents: DocumentSizes | None = None  # sizes of the documents of `starts_SB`; None: the host does not know them

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

    def by_document(self, keys: int, *, is_compiled: bool) -> DocumentsMask:
        """Return the mask for a kernel that takes each document by itself.

        The kernel starts threads for each document and each block of the longest one, and its backward pass has a block
        of scratch memory for each document. So both sizes are those of the micro-batch, and not the largest possible.
        """
        assert self.starts_SB is not None
        assert self.documents is not None
        # Documents that begin up to each token.
        is_first_T = (self.starts_SB == _numbers(self.places, self.starts_SB.device).unsqueeze(1)).T.flatten()
        number_T = is_first_T.cumsum(0)
        # The compiler takes equal sizes for one: there is an odd number of bounds, and an even one of rows.
        number = self.documents.number + self.documents.number % 2
        numbers = torch.arange(number + 1, device=number_T.device)
        # The first token up to which more documents begin; T where there is none.
        bounds = torch.searchsorted(number_T, numbers, right=True, out_int32=True)
        # Newer releases of torch have another kernel for at most one block, and a graph has one kernel.
        blocks = max(2, -(-self.documents.longest // BLOCK))
        rows = torch.empty(blocks * BLOCK, dtype=torch.int8, device=number_T.device)
        if is_compiled:
            let_length_change(bounds)
            let_length_change(rows)
        return DocumentsMask(bounds, rows, self.window if self.limits(keys) else None)

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
        if is_fused and self._is_by_document(like, keys, head_dim):
            return self.by_document(keys, is_compiled=is_compiled)
        has_kernel = is_fused and not is_cached and head_dim >= devices.least_flex_head_width(like.device)
        if has_kernel and (is_compiled or keys >= LONG):
            return BlocksMask(self.blocks(keys, like.device))
        return self.dense(keys, like.dtype, like.device)

    def _is_by_document(self, like: Tensor, keys: int, head_dim: int) -> bool:
        """Return whether a kernel of the device takes each document by itself.

        The kernel takes each query with keys of the same tokens. The tokens of a rank that shares samples need keys of
        other ranks, and documents in two of its parts would need the same keys twice: the kernel has no overlapping
        keys. With one order of sums its backward pass holds a gradient of q for each of many groups of thread blocks.
        """
        if self.documents is None or self.places != (range(keys),) or torch.are_deterministic_algorithms_enabled():
            return False
        if self.documents.number > _MOST_DOCUMENTS:
            return False
        return devices.attends_by_document(like.device, like.dtype, head_dim)


class KernelMask(ABC):
    """A mask that comes with its own way of attention: one kernel, which keeps no probabilities."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Return `softmax(scale · q kᵀ) v` over the keys that each query sees, `[Q, B, n, d]`; scale None is 1 / √d."""


@dataclass(frozen=True)
class BlocksMask(KernelMask):
    """The blocks in which a key is seen, for FlexAttention."""

    blocks: BlockMask

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        is_grouped = q.shape[1] != k.shape[1]
        out: Tensor = flex_attention()(q, k, v, block_mask=self.blocks, scale=scale, enable_gqa=is_grouped)
        return out.permute(2, 0, 1, 3)


def flex_attention() -> Callable[..., Any]:
    """Return FlexAttention, which outside of a compiled graph is a graph of its own."""
    from torch.nn.attention.flex_attention import flex_attention  # slow to import, and seldom needed

    return cast(Callable[..., Any], flex_attention) if torch.compiler.is_compiling() else _compiled_flex_attention()


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@dataclass(frozen=True)
class DocumentsMask(KernelMask):
    """The documents of a micro-batch, sample after sample, in tensors whose sizes one compiled graph takes as they are.

    Attributes:
        bounds: first token of each document, and T, `[N + 1]` in int32; the last documents may be empty.
        rows: as many elements as the longest document has tokens, or some more. A graph takes a number that changes
            from call to call as a size alone.
        window: as in `PiecesMask`.
    """

    bounds: Tensor
    rows: Tensor
    window: int | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # slow to import, and seldom needed

        # The samples follow one another in the kernel's tensors: several are copied, one is not.
        q_T, k_T, v_T = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
        longest = len(self.rows)
        # The kernel counts the keys before a query's own; -1: all.
        window = (-1 if self.window is None else self.window - 1, 0)
        is_grouped = q.shape[2] != k.shape[2]
        options: dict[str, Any] = {"scale": scale, "window_size": window, "enable_gqa": is_grouped}
        out_T = cast(Tensor, varlen_attn(q_T, k_T, v_T, self.bounds, self.bounds, longest, longest, **options))
        out: Tensor = out_T.unflatten(0, (q.shape[1], -1))
        return out.transpose(0, 1)


@dataclass(frozen=True)
class PiecesMask(KernelMask):
    """The numbers of an `AttentionMask` in tensors, so that one compiled graph serves all ranks."""

    ends: Tensor  # first place, and end, of each run of queries; on the host
    starts_SB: Tensor | None  # as in `AttentionMask`
    window: int | None
    key_places: tuple[range, ...] | None = None  # as in `AttentionMask`

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        # One operator of a compiled graph, so that the number of documents and their places change no graph. It is
        # defined by `define_attention_by_pieces`.
        operator = torch.ops.shardwise.attention_by_pieces
        return cast(Tensor, operator(q, k, v, self.starts_SB, self.ends, self.window, scale)[0])


Mask: TypeAlias = Tensor | KernelMask
"""A mask that is dense, or added to scores; or one of a kernel."""


def _numbers(runs: tuple[range, ...], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


def _counts_and_indices(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen entries of the last dim, and all indices of it with the chosen ones first."""
    order = torch.argsort(chosen.to(torch.int32), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()
