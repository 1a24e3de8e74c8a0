"""The blocks of keys that documents leave are those of the dense mask."""

import pytest
import torch
from torch import Tensor

from shardwise.models.documents import BLOCK, block_mask, dense_mask


def starts(length: int, firsts: list[list[int]]) -> Tensor:
    """`[S, B]` of samples whose documents begin at `firsts`."""

    def of_sample(first: Tensor) -> Tensor:
        return first[torch.bucketize(torch.arange(length), first, right=True) - 1]

    return torch.stack([of_sample(torch.tensor(first)) for first in firsts], dim=1)


@pytest.mark.parametrize("length", [BLOCK, 3 * BLOCK, 3 * BLOCK + 5, 40])
def test_blocks_are_those_of_the_dense_mask(length: int) -> None:
    firsts = [
        [0],
        [0, 7, 30],
        [0, *range(1, length, 31)],
        [0, min(length - 1, BLOCK)],
        [0, min(length - 1, BLOCK + 72)],
    ]
    starts_SB, places = starts(length, firsts), torch.arange(length)
    seen_BSS = dense_mask(starts_SB, torch.float32)[:, 0] == 0
    mask, number = block_mask(starts_SB), -(-length // BLOCK)
    for b, seen_SS in enumerate(seen_BSS):
        assert torch.equal(mask.mask_mod(torch.tensor(b), None, places[:, None], places), seen_SS)
        for i, rows in enumerate(seen_SS.split(BLOCK)):
            blocks = rows.split(BLOCK, dim=1)
            partial = set(mask.kv_indices[b, 0, i, : mask.kv_num_blocks[b, 0, i]].tolist())
            whole = set(mask.full_kv_indices[b, 0, i, : mask.full_kv_num_blocks[b, 0, i]].tolist())
            assert not partial & whole
            assert partial | whole == {j for j in range(number) if blocks[j].any()}, "blocks with a key that is seen"
            assert all(blocks[j].all() for j in whole), "a whole block has a key that is not seen"
