"""The record that knows how the model is cut: boxes, tilings, and the same initial tensor at every layout (fault 3)."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwise.distributed import placement
from shardwise.distributed.mesh import Group
from shardwise.distributed.placement import SEEDED_ROWS, Box, Init, Piece, Placement
from shardwise.layers.embedding import ParallelEmbedding
from shardwise.layers.linear import GQAQKVColumnParallelLinear, MergedColumnParallelLinear
from shardwise.layers.norm import RMSNorm
from tests.unit.layers.makers import pretend_group

NORMAL = Init.normal(0.02)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    start = tuple(draw(st.integers(0, n)) for n in shape)
    return shape, Box(start, tuple(draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True)))


@given(boxes())
@settings(deadline=None, max_examples=100)
def test_runs_list_the_elements_of_the_box_in_order(case: tuple[tuple[int, ...], Box]) -> None:
    shape, box = case
    indices = itertools.product(*(range(a, a + n) for a, n in zip(box.start, box.size, strict=True)))
    strides = torch.empty(shape).stride()
    wanted = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in indices]
    runs = box.runs(shape)
    found = [offset + i for offset, length in runs for i in range(length)]
    assert found == wanted, f"{box} in {shape}"
    assert box.numel == len(wanted)
    assert len(runs) <= max(1, box.numel), f"{box} in {shape}: empty runs in {runs}"
    positions = torch.arange(torch.Size(shape).numel()).view(shape)
    assert positions[box.slices].flatten().tolist() == wanted


@given(boxes(), st.integers(0, 60), st.integers(0, 60))
@settings(deadline=None, max_examples=100)
def test_runs_within_elements_are_those_that_hold_one(
    case: tuple[tuple[int, ...], Box], start: int, length: int
) -> None:
    shape, box = case
    wanted = [run for run in box.runs(shape) if run[0] < start + length and run[0] + run[1] > start]
    assert box.runs(shape, slice(start, start + length)) == wanted, f"{box} in {shape}"


def test_runs_of_a_few_rows_of_many_cost_little() -> None:
    """A chunk of a cut matrix asks for its own rows; all of these would not fit in memory."""
    box = Box((0, 1), (2**40, 2))
    assert box.runs((2**40, 4), slice(2**30, 2**30 + 8)) == [(2**30 + 1, 2), (2**30 + 5, 2)]


def times_held(pieces: list[Piece], shape: tuple[int, ...]) -> Tensor:
    held = torch.zeros(shape, dtype=torch.int64)
    for piece in pieces:
        held[piece.box.slices] += 1
    return held


@given(st.integers(1, 8), st.integers(1, 40), st.integers(0, 2))
@settings(deadline=None, max_examples=60)
def test_rows_tile_the_tensor(degree: int, rows: int, tail: int) -> None:
    shape = (rows, *(3,) * tail)
    for copies in (c for c in range(1, degree + 1) if degree % c == 0):
        pieces = [
            placement.Piece.rows("w", shape, pretend_group(rank, degree), NORMAL, at=5, copies=copies)
            for rank in range(degree)
        ]
        held = times_held(pieces, shape)
        assert bool((held == copies).all()), f"{rows} rows over {degree} ranks, {copies} copies: held {held.tolist()}"
        for rank, piece in enumerate(pieces):
            assert piece.local.start == (5,) + (0,) * tail, "the box sits at `at` in the local tensor"
            assert piece.local.size == piece.box.size
            assert piece.partial == (copies > 1), "the gradient of a copied box is partial"
            neighbours = range(rank // copies * copies, rank // copies * copies + copies)
            assert piece.copies.size == copies
            assert all(pieces[other].box == piece.box for other in neighbours), "neighbours hold the same box"
            if copies > 1:
                assert piece.copies.ranks == tuple(neighbours)


@pytest.mark.parametrize("degree", [1, 3, 8])
def test_columns_and_replicated_tile_the_tensor(degree: int) -> None:
    shape = (5, 3 * degree)
    groups = [pretend_group(rank, degree) for rank in range(degree)]
    cut = [placement.Piece.columns("w", shape, group, NORMAL) for group in groups]
    assert bool((times_held(cut, shape) == 1).all()), f"columns over {degree} ranks overlap or leave a gap"
    assert all(piece.local == Box.whole((5, 3)) and not piece.partial for piece in cut)
    for partial in (False, True):
        whole = [placement.Piece.replicated("w", shape, group, NORMAL, partial=partial) for group in groups]
        assert bool((times_held(whole, shape) == degree).all())
        assert all(piece.copies is group for piece, group in zip(whole, groups, strict=True))
        assert all(piece.partial == (partial and degree > 1) for piece in whole)


def test_gradients_that_stay_partial_rounded_draws_and_padding() -> None:
    for grain in [None, 4]:
        group = pretend_group(1, 2)
        group.grain = grain
        norm = RMSNorm(6, sequence_parallel_enabled=True, group=group, seed=0, name="norm")
        of_norm = placement.of(norm.weight)
        pieces = (placement.Piece.replicated("w", (6,), group, NORMAL, partial=True),)
        of_user = placement.of(placement.make_parameter((6,), pieces, group, seed=0))
        assert (of_norm.pieces[0].partial, of_norm.is_ordered) == (grain is None, grain is not None)
        assert (of_user.pieces[0].partial, of_user.is_ordered) == (True, False)
    for dtype in [torch.bfloat16, torch.float64]:
        before = torch.get_rng_state()
        assert torch.equal(drawn(CUTS["rows"], 0, 1, dtype), drawn(CUTS["rows"], 0, 1).to(dtype))
        assert torch.equal(torch.get_rng_state(), before), "a seeded draw advanced torch's default generator"
    for rank in range(4):
        layer = ParallelEmbedding(9, 4, group=pretend_group(rank, 4), name="e", seed=1)
        record = placement.of(layer.weight)
        held = record.pieces[0].box.size[0]
        assert layer.weight.shape == (3, 4)
        assert bool((layer.weight[held:] == 0).all()), "padding rows are drawn"
        assert bool((layer.weight[:held] != 0).all()), "held rows are not drawn"
        assert record.numel == held * 4


CUTS: dict[str, Callable[[Group, Init], Piece]] = {
    "rows": lambda group, init: placement.Piece.rows("w", (144, 24), group, init),
    "padded rows": lambda group, init: placement.Piece.rows("w", (131, 24), group, init),
    "columns": lambda group, init: placement.Piece.columns("w", (131, 24), group, init),
    "replicated": lambda group, init: placement.Piece.replicated("w", (131, 24), group, init, partial=True),
    "copied rows": lambda group, init: placement.Piece.rows("w", (12, 24), group, init, copies=2 - group.size % 2),
}


def drawn(cut: Callable[[Group, Init], Piece], rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The canonical tensor as one rank sees it, NaN where it holds nothing."""
    group = pretend_group(rank, size)
    piece = cut(group, NORMAL)
    parameter = placement.make_parameter(piece.box.size, (piece,), group, seed=11, dtype=dtype)
    whole = torch.full(piece.shape, float("nan"), dtype=dtype)
    whole[piece.box.slices] = parameter.detach()[piece.local.slices]
    return whole


@pytest.mark.parametrize("degree", [1, 3, 8])
@pytest.mark.parametrize("cut", CUTS)
def test_initial_weights_are_bit_equal_at_every_layout(cut: str, degree: int) -> None:
    reference = drawn(CUTS[cut], 0, 1)
    assert not reference.isnan().any()
    for rank in range(degree):
        found = drawn(CUTS[cut], rank, degree)
        held = ~found.isnan()
        assert torch.equal(found[held], reference[held]), f"{cut}: rank {rank} of {degree} drew other values"


def test_shards_blocks_names_and_seeds_draw_differently() -> None:
    """BERT-TP seeded every shard alike: equal shards, standard deviation too small by the root of TP."""
    shards = []
    for rank in range(4):
        group = pretend_group(rank, 4)
        piece = placement.Piece.rows("w", (4 * SEEDED_ROWS, 256), group, NORMAL)
        shards.append(placement.make_parameter((SEEDED_ROWS, 256), (piece,), group, seed=1).detach())
    for a, b in itertools.combinations(range(4), 2):
        assert not torch.equal(shards[a], shards[b]), f"shards {a} and {b} are the same"
        correlation = float((shards[a] * shards[b]).mean() / 0.02**2)
        assert abs(correlation) < 0.05, f"shards {a} and {b} are correlated ({correlation:.3f})"
    for rank, shard in enumerate([*shards, torch.cat(shards)]):
        assert abs(float(shard.std()) / 0.02 - 1) < 0.03, f"standard deviation of shard {rank}: {float(shard.std())}"

    def draw(seed: int, name: str, rows: int = 2 * SEEDED_ROWS) -> Tensor:
        piece = placement.Piece.rows(name, (rows, 8), Group(), NORMAL)
        return placement.make_parameter((rows, 8), (piece,), Group(), seed=seed).detach()

    first = draw(1, "a")
    assert torch.equal(first, draw(1, "a"))
    assert not torch.equal(first, draw(2, "a")), "the seed changes nothing"
    assert not torch.equal(first, draw(1, "b")), "two tensors of one run are the same"
    assert not torch.equal(first[:SEEDED_ROWS], first[SEEDED_ROWS:]), "two runs of rows are the same"
    assert torch.equal(first[:SEEDED_ROWS], draw(1, "a", 3 * SEEDED_ROWS)[:SEEDED_ROWS]), "full runs depend on the rest"


@pytest.mark.parametrize(("degree", "kv_heads"), [(1, 2), (2, 8), (8, 2), (4, 4)])
def test_fused_qkv_is_three_canonical_tensors(degree: int, kv_heads: int) -> None:
    pieces: dict[str, list[Piece]] = {}
    for rank in range(degree):
        options = {"group": pretend_group(rank, degree), "names": ("q", "k", "v"), "seed": 1}
        layer = GQAQKVColumnParallelLinear(16, (32, 4 * kv_heads), head_dim=4, **options)
        record = placement.of(layer.weight)
        covered = torch.zeros(layer.weight.shape, dtype=torch.int64)
        for piece in record.pieces:
            pieces.setdefault(piece.name, []).append(piece)
            covered[piece.local.slices] += 1
        assert bool((covered == 1).all()), "pieces overlap in the local tensor, or leave a gap"
    assert list(pieces) == ["q.weight", "k.weight", "v.weight"]
    copies = max(1, degree // kv_heads)
    for name, held, wanted in (("q", 32, 1), ("k", 4 * kv_heads, copies), ("v", 4 * kv_heads, copies)):
        count = times_held(pieces[f"{name}.weight"], (held, 16))
        assert bool((count == wanted).all()), f"{name}: rows are held {count.unique().tolist()} times, not {wanted}"
        assert all(piece.partial == (wanted > 1) for piece in pieces[f"{name}.weight"])


def test_records_of_parameters() -> None:
    merged = MergedColumnParallelLinear(4, (2, 2), names=("gate", "up"))
    model = nn.ModuleDict({"plain": nn.Linear(2, 3), "mlp": merged, "emb": ParallelEmbedding(5, 4)})
    names = {path: [piece.name for piece in record.pieces] for path, _, record in placement.placements(model)}
    assert names == {
        "plain.weight": ["plain.weight"],
        "plain.bias": ["plain.bias"],
        "mlp.weight": ["gate.weight", "up.weight"],
        "mlp.bias": ["gate.bias", "up.bias"],
        "emb.weight": ["emb.weight"],
    }
    embedding = ParallelEmbedding(5, 4)
    head = nn.Module()
    head.weight = embedding.weight
    listed = list(placement.placements(nn.ModuleDict({"emb": embedding, "head": head})))
    assert [path for path, _, _ in listed] == ["emb.weight"]
    record = placement.of_or_whole(nn.Parameter(torch.ones(3, 4)), "foreign")
    (piece,) = record.pieces
    assert (piece.name, piece.shape, piece.box, piece.local) == ("foreign", (3, 4), Box.whole((3, 4)), piece.box)
    assert not piece.partial
    assert record.numel == 12
    # `canonical_tensors` exchanges the pieces of all parameters with equal holders at once.
    group = pretend_group(0, 2)
    pieces = [Piece.columns(name, (4, 4), group, NORMAL) for name in ("gate", "up")]
    assert len({Placement((piece,), group).holders for piece in pieces}) == 1
