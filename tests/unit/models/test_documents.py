"""Attention within documents, in each of its ways, is that of the dense mask."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from shardwise.models.attention import BLOCK, block_mask, define_document_attention, dense_mask, document_attention


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


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_within_documents_and_its_gradients_are_those_of_the_dense_mask(kv_heads: int) -> None:
    define_document_attention()
    starts_SB, numbers = starts(37, [[0], [0, 7, 30], [0, 1, 2, 36]]), torch.Generator().manual_seed(0)

    def drawn(heads: int) -> Tensor:
        return torch.randn(37, 3, heads, 8, dtype=torch.float64, generator=numbers).requires_grad_()

    q, k, v = inputs = drawn(4), drawn(kv_heads), drawn(kv_heads)
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(torch.ops.shardwise.document_attention.default, (*inputs, starts_SB), test_utils=checks)
    q_, k_, v_ = (t.permute(1, 2, 0, 3) for t in inputs)
    mask = dense_mask(starts_SB, q.dtype)
    expected = F.scaled_dot_product_attention(q_, k_, v_, mask, enable_gqa=True).permute(2, 0, 1, 3)
    found = document_attention(q, k, v, starts_SB)
    torch.testing.assert_close(found, expected)
    dy = torch.randn(found.shape, dtype=torch.float64, generator=numbers)
    gradients = (torch.autograd.grad(out, inputs, dy) for out in (found, expected))
    for name, one, other in zip("qkv", *gradients, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"the gradient of {name}: {text}")
    q_, k_, v_ = (t.detach() for t in (q_, k_, v_))  # it has no gradient on a CPU
    flexible = flex_attention(q_, k_, v_, block_mask=block_mask(starts_SB), enable_gqa=True)
    torch.testing.assert_close(flexible.permute(2, 0, 1, 3), expected)
