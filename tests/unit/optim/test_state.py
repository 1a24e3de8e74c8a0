"""Where a part of a local tensor lies in the canonical one. By checkpoints: tests/dist/test_checkpoint.py."""

import pytest
import torch

from shardwise.boxes import Box
from shardwise.placement import Init, Piece


@pytest.mark.parametrize("transposed", [False, True])
def test_a_box_of_a_piece_is_the_same_elements_of_the_canonical_tensor(transposed: bool) -> None:
    """Of GPT-2's weights, too, which are `[in, out]`, in a local tensor that has other pieces before this one."""
    piece = Piece("w", (6, 4), Box((2, 0), (3, 4)), Box((5, 0), (3, 4)), Init.constant(0.0))
    canonical = torch.arange(24).view(6, 4)
    if transposed:
        piece, canonical = piece.transpose(), canonical.t()
    local = torch.zeros(9, 4, dtype=torch.int64)
    piece.of(local).copy_(canonical[piece.box.slices])
    for box in (Box((5, 0), (3, 4)), Box((6, 1), (1, 2)), Box((6, 0), (2, 4))):
        found, wanted = local[box.slices], canonical[piece.canonical(box).slices]
        assert torch.equal(found.t() if transposed else found, wanted)
