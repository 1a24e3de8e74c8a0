"""Which keys a token may attend to where documents lie one after another in a sample.

Shapes: S sequence, B batch; n = ceil(S / BLOCK) blocks of a sequence. A document starts at `starts_SB[s, b]` for its
token s, so that query s sees the keys from there to s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries and keys of one block, as torch's kernels have them by default."""


def dense_mask(starts_SB: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask that is added to the scores, `[B, 1, S, S]`: 0 for keys that are seen, else -inf."""
    places = torch.arange(len(starts_SB), device=starts_SB.device)
    first_BS1 = starts_SB.T.unsqueeze(2)
    seen = (places >= first_BS1) & (places <= places.unsqueeze(1))
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf")).unsqueeze(1)


def block_mask(starts_SB: Tensor) -> BlockMask:
    """The same for FlexAttention (arXiv:2412.05496), which computes only the blocks in which a key is seen.

    Found from the starts alone: n² numbers a sample, and nothing of the size S². A block of keys is whole where it lies
    behind the start of each query of a block and before the first of these queries.
    """
    from torch.nn.attention.flex_attention import BlockMask

    length = len(starts_SB)
    starts_BS = starts_SB.T.contiguous()
    number = -(-length // BLOCK)
    padded = F.pad(starts_BS, (0, number * BLOCK - length), value=length)
    padded[:, length:] = starts_BS[:, -1:]
    of_block_BnK = padded.view(-1, number, BLOCK)
    first_Bn, last_Bn = of_block_BnK.amin(-1), of_block_BnK.amax(-1)
    keys = torch.arange(number, device=starts_SB.device)
    earlier_nn = keys < keys.unsqueeze(1)
    is_whole = (keys * BLOCK >= last_Bn.unsqueeze(-1)) & earlier_nn
    is_seen = (keys >= first_Bn.unsqueeze(-1) // BLOCK) & (keys <= keys.unsqueeze(1))

    def sees(b: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= starts_BS[b, query])

    partial, whole = (_listed(each.unsqueeze(1)) for each in (is_seen & ~is_whole, is_whole))
    return BlockMask.from_kv_blocks(*partial, *whole, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length))


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the last dim are chosen, and the numbers of these, which come first."""
    order = torch.argsort(chosen.to(torch.int32), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()
