"""Attention whose keys come rank by rank, in each form of the masks, against its definition."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from shardwise.distributed.collectives import Pending
from shardwise.distributed.mesh import Group
from shardwise.layers.context import runs_of_places
from shardwise.models import attention_pieces, ring_attention
from shardwise.models.masks import AttentionMask, BlocksMask, Mask
from tests.sweeps import few
from tests.unit.layers.makers import pretend_group
from tests.unit.models.test_masks import error, seen, starts

RANKS = 3
LENGTH = 2 * RANKS * 50
CPU = torch.device("cpu")
FORMS: dict[str, Callable[[AttentionMask], Mask]] = {
    "pieces": lambda mask: mask.pieces(LENGTH),
    "dense": lambda mask: mask.dense(LENGTH, torch.float64, CPU),
    "blocks": lambda mask: BlocksMask(mask.blocks(LENGTH, CPU)),
}
CASES_OF_BLOCKS = [("blocks", None, False), ("blocks", 120, True)]


def rows_of(x: Tensor, rank: int) -> Tensor:
    return torch.cat([x[run.start : run.stop] for run in runs_of_places(LENGTH // RANKS, rank, RANKS)])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("form", "window", "has_documents"),
    [
        *few(
            itertools.product(("pieces", "dense"), (None, 1, 20, 120), (False, True)),
            *(("pieces", window, True) for window in (None, 1, 20, 120)),
            ("dense", 20, True),
            ("pieces", None, False),
        ),
        *CASES_OF_BLOCKS,
    ],
)
def test_attention_by_parts_equals_attention_over_all_keys(
    form: str, window: int | None, has_documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_pieces, "SHORT", 16)
    monkeypatch.setattr(attention_pieces, "FEW", 30)
    monkeypatch.setattr(ring_attention, "flex_attention", lambda: flex_attention)
    numbers = torch.Generator().manual_seed(0)

    def drawn(heads: int) -> Tensor:
        return torch.randn(LENGTH, 2, heads, 8, dtype=torch.float64, generator=numbers)

    q, k, v = (drawn(heads) for heads in (4, 2, 2))
    has_gradients = form != "blocks"  # FlexAttention has no gradient on a CPU
    inputs = [x.requires_grad_(has_gradients) for x in (q, k, v)]
    starts_SB = starts(LENGTH, [[0, 40, 41, 133], [0, 170]]) if has_documents else None
    whole = seen(AttentionMask((range(LENGTH),), starts_SB, window), LENGTH, 2).unsqueeze(1)
    expected = F.scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in inputs), whole, enable_gqa=True)
    expected = expected.permute(2, 0, 1, 3)
    dy = drawn(4)
    gradients = [torch.zeros_like(x) for x in inputs]
    for rank in range(RANKS):
        places = runs_of_places(LENGTH // RANKS, rank, RANKS)
        own_starts = None if starts_SB is None else rows_of(starts_SB, rank)
        mask = AttentionMask(places, own_starts, window)
        key_places = [runs_of_places(LENGTH // RANKS, other, RANKS) for other in range(RANKS)]
        masks = [FORMS[form](replace(mask, key_places=places)) for places in key_places]
        returned = pretend(monkeypatch, k, v)
        ring = ring_attention.RingMask(masks, pretend_group(rank, RANKS))
        y = ring.attend(*(rows_of(x, rank) for x in inputs), None)
        assert error(y, rows_of(expected, rank)) <= 1e-12
        if has_gradients:
            for total, term in zip(gradients, torch.autograd.grad(y, inputs, rows_of(dy, rank)), strict=True):
                total += term
            for other, terms in returned.items():
                for total, term in zip(gradients[1:], terms, strict=True):
                    for run, part in zip(key_places[other], term.chunk(2), strict=True):
                        total[run.start : run.stop] += part
    if has_gradients:
        wanted = torch.autograd.grad(expected, inputs, dy)
        assert error(*(torch.cat([t.flatten() for t in of_inputs]) for of_inputs in (gradients, wanted))) <= 1e-12


def pretend(monkeypatch: pytest.MonkeyPatch, k: Tensor, v: Tensor) -> dict[int, Any]:
    """Let keys of other ranks arrive without messages, and keep the gradients that would be sent, by their ranks."""
    returned: dict[int, Any] = {}

    def passed_round(_: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
        for distance in range(RANKS):
            rank = (group.rank - distance) % RANKS
            yield rank, torch.stack([rows_of(x, rank) for x in (k, v)]).detach()

    def shift_async(x: Tensor, group: Group, distance: int) -> Pending:
        returned[group.rank + distance] = x
        return Pending(torch.zeros_like(x))

    monkeypatch.setattr(ring_attention, "passed_round", passed_round)
    monkeypatch.setattr(ring_attention.collectives, "shift_async", shift_async)
    return returned
