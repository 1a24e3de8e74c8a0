"""Layers in one process: what they refuse, how they are named and drawn, and that alone they are torch's layers."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.base.errors import ArgumentError, ConfigError
from shardwise.config.other_names import ARGUMENTS
from shardwise.distributed import placement
from shardwise.distributed.mesh import Group, Mesh
from shardwise.distributed.placement import Init
from shardwise.layers.arguments import refuse_unknown
from shardwise.layers.context import chunks_of_rank, runs_of_places
from shardwise.layers.dropout import Dropout, DropoutKey
from shardwise.layers.embedding import ParallelEmbedding, ParallelLMHead, ReplicatedEmbedding
from shardwise.layers.linear import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from shardwise.layers.loss import linear_cross_entropy, parallel_cross_entropy
from shardwise.layers.matmul import let_products_add
from shardwise.layers.norm import LayerNorm, RMSNorm
from shardwise.layers.recompute import compose
from shardwise.models.blocks import ACTIVATIONS
from shardwise.models.llama import Gate, gated
from shardwise.models.rotary import rotate
from tests.unit.layers.makers import MAKERS, pretend_group

FOUR = pretend_group(1, 4)
REFUSED: dict[str, Callable[[], object]] = {
    r"output size \(10\) .* size \(4\)": lambda: MergedColumnParallelLinear(8, (8, 10), group=FOUR, names=("a", "b")),
    r"input size \(10\) .* size \(4\)": lambda: RowParallelLinear(10, 8, group=FOUR),
    r"sequence_.* \(True\) .* input_is_parallel": lambda: RowParallelLinear(8, 8, sequence_parallel_enabled=True),
    r"query heads \(6\) .* size \(4\)": lambda: GQAQKVColumnParallelLinear(8, (24, 8), head_dim=4, group=FOUR),
    r"K/V heads \(3\) .* size \(4\)": lambda: GQAQKVColumnParallelLinear(8, (48, 12), head_dim=4, group=FOUR),
    r"key/value size \(2\) .* head_dim \(4\)": lambda: GQAQKVColumnParallelLinear(8, (16, 2), head_dim=4),
    r"padding_idx \(8\) must be in \[-8, 8\)": lambda: ParallelEmbedding(8, 4, 8),
    r"names \(1\) .* output_sizes \(2\)": lambda: MergedColumnParallelLinear(8, (8, 8), names=("a",)),
    r"names \(1\) must be 3": lambda: GQAQKVColumnParallelLinear(8, (16, 8), head_dim=4, names=("q",)),
    r"init \(0.01\) must be a shardwise.Init": lambda: RMSNorm(8, init=0.01),  # type: ignore[arg-type]
    r"columns of w \(10\) .* size \(4\)": lambda: placement.Piece.columns("w", (4, 10), FOUR, Init.constant(0)),
    # Most often because a column-parallel layer gathers its output, as it does by default.
    r"a layer's input \(16\) must be that of this rank's weight \(32\): .*gather_output=False": lambda: (
        RowParallelLinear(32, 8, input_is_parallel=True)(ColumnParallelLinear(8, 16)(torch.zeros(3, 1, 8)))
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_sizes_that_cannot_be_cut_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_alone_layers_are_torchs_and_a_seed_needs_a_name() -> None:
    for kind in [ColumnParallelLinear, RowParallelLinear, ParallelEmbedding, ParallelLMHead, RMSNorm]:
        with pytest.raises(ValueError, match="a layer with a seed needs a name: its weights are drawn from"):
            MAKERS[kind](seed=1)
    torch.manual_seed(3)
    first, second = ColumnParallelLinear(4, 6), ColumnParallelLinear(4, 6)
    torch.manual_seed(3)
    again = ColumnParallelLinear(4, 6)
    assert torch.equal(first.weight, again.weight), "torch.manual_seed does not decide the weights"
    assert not torch.equal(first.weight, second.weight), "two layers without names drew the same weights"
    x = torch.randn(5, 2, 8)
    column, row = ColumnParallelLinear(8, 6), RowParallelLinear(8, 6)
    for layer in (column, row):
        torch.nn.init.normal_(layer.bias)  # type: ignore[arg-type]
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    ids = torch.tensor([[0, 3], [2, 1]])
    table = ParallelEmbedding(4, 8, 2)
    assert torch.equal(table(ids), F.embedding(ids, table.weight))
    table(ids).sum().backward()
    assert table.weight.grad.abs().sum(dim=1).tolist() == [8, 8, 0, 8], "the padding row must receive no gradient"
    with pytest.raises(IndexError):
        table(torch.tensor([[4]]))


def test_arguments_of_the_tutorials_are_taken_and_of_other_libraries_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    column, row = (kind(8, 12, False, True) for kind in (ColumnParallelLinear, RowParallelLinear))
    assert column.weight.shape == row.weight.shape == (12, 8)
    assert column.bias is row.bias is None
    assert column.gather_output
    assert row.input_is_parallel
    assert [ParallelEmbedding(10, 4, index).padding_idx for index in (3, -1)] == [3, 9]
    assert LayerNorm(4, 0.5).eps == RMSNorm(4, 0.5).eps == 0.5
    merged = MergedColumnParallelLinear(8, (4, 8), group=FOUR, names=("a", "b"), seed=1)
    assert "8 -> [1, 2] of Group(tp 1/4)" in repr(merged)
    monkeypatch.setenv("WORLD_SIZE", "4")  # where a missing group= would be warned of: the refusal comes first
    foreign: dict[str, Any] = {"init_method": nn.init.ones_, "stride": 1}
    told = r"does not take init_method \(give init=, .*\) or stride \(leave it out: .*\)$"
    with pytest.raises(ArgumentError, match=told):
        ColumnParallelLinear(4, 8, **foreign)
    loss_arguments: dict[str, Any] = {"tp_group": object()}
    with pytest.raises(ArgumentError, match=r"parallel_cross_entropy does not take tp_group \(give group=\)"):
        parallel_cross_entropy(torch.zeros(1, 1, 4), torch.zeros(1, 1, dtype=torch.int64), **loss_arguments)
    unknown: dict[str, Any] = {"zzz": 1}
    with pytest.raises(ArgumentError, match=r"RMSNorm does not take zzz; it takes normalized_shape, eps, .* and seed$"):
        RMSNorm(4, **unknown)


IDS = torch.zeros(2, 1, dtype=torch.int64)
SEQUENCE = {"sequence_parallel_enabled": True}
CUT = (ColumnParallelLinear, GQAQKVColumnParallelLinear, RowParallelLinear, ParallelEmbedding, ParallelLMHead)
WITHOUT_GROUP: dict[str, Callable[..., object]] = {kind.__name__: MAKERS[kind] for kind in CUT}
WITHOUT_GROUP |= {kind.__name__: partial(MAKERS[kind], **SEQUENCE) for kind in (RMSNorm, ReplicatedEmbedding)}
WITHOUT_GROUP |= {
    "Dropout": partial(Dropout, 0.5, layer=0, site=0, **SEQUENCE),
    "parallel_cross_entropy": partial(parallel_cross_entropy, torch.zeros(2, 1, 4), IDS),
    "linear_cross_entropy": partial(linear_cross_entropy, torch.zeros(2, 1, 4), torch.zeros(4, 4), IDS),
}


@pytest.mark.parametrize("owner", WITHOUT_GROUP)
def test_without_a_group_in_a_job_of_several_ranks_one_is_warned(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.layers.arguments._warned", [])
    make = WITHOUT_GROUP[owner]
    make(group=None)  # alone: nothing to share
    monkeypatch.setenv("WORLD_SIZE", "4")
    make(group=Group())
    LayerNorm(4)  # the same with a group
    with pytest.warns(UserWarning, match=f"{owner} was given no group=, so each of the 4 ranks of this job") as warned:
        make(group=None)
    assert [warning.filename for warning in warned] == [__file__], "the warning does not point at the caller"
    for other in WITHOUT_GROUP.values():
        other(group=None)


@pytest.mark.parametrize("given", [Mesh(device="cpu"), 8, True, "tp", [0, 1]], ids=repr)
def test_what_is_no_group_is_refused_with_what_to_pass(given: Any) -> None:
    for make in WITHOUT_GROUP.values():
        with pytest.raises(ArgumentError, match=r"group \(.*\) must be the ranks of one axis: .*mesh\.tp of Mesh"):
            make(group=given)


def test_fault_03_shapes_of_norms_and_sizes_of_heads() -> None:
    for shape in [(4,), [4], torch.Size([4])]:
        norm = LayerNorm(shape)
        norm.load_state_dict(nn.LayerNorm(shape).state_dict())
        x = torch.randn(2, 3, 4)
        assert torch.equal(norm(x), nn.LayerNorm(shape)(x))
        assert RMSNorm(shape).weight.shape == (4,)
        for wrong in ((4, 4), "4", ("4",), 4.0):
            with pytest.raises(ArgumentError, match=r"normalized_shape \(.*4.*\) must be one size, the hidden size"):
                LayerNorm(wrong)  # type: ignore[arg-type]
    # 4 K/V heads and 16 query heads of 8 features: the same pieces as with `head_dim`.
    for ranks, multiplier, copies in [(1, 1, 1), (4, 1, 1), (16, 4, 4)]:
        group = pretend_group(ranks - 1, ranks)
        rest: dict[str, Any] = {
            "bias": False,
            "gather_output": False,
            "group": group,
            "seed": 0,
            "names": ("q", "k", "v"),
        }
        told = GQAQKVColumnParallelLinear(8, (128, 32), head_dim=8, **rest)
        derived = GQAQKVColumnParallelLinear(8, [128, 32], kv_size_multiplier=multiplier, **rest)
        assert derived._copies == told._copies == [1, copies, copies]
        pieces = [placement.of_or_whole(qkv.weight).pieces for qkv in (derived, told)]
        boxes = [[(piece.box, piece.local) for piece in each] for each in pieces]
        assert boxes[0] == boxes[1]
    make = partial(GQAQKVColumnParallelLinear, 8, group=pretend_group(0, 16))
    with pytest.raises(ValueError, match=r"kv_size_multiplier \(3\) .* size \(16\).* give head_dim="):
        make((128, 32), kv_size_multiplier=3)
    with pytest.raises(ValueError, match=r"kv_size_multiplier \(2\) must be 4, .* 4 K/V heads"):
        make((128, 32), head_dim=8, kv_size_multiplier=2)
    for sizes in (64, (64, 32, 32), (64, 0), "64"):
        with pytest.raises(ArgumentError, match=r"output_sizes \(.*\) must be two numbers above 0"):
            make(sizes, head_dim=8)


@pytest.mark.parametrize(("act", "dtype"), [("silu", torch.bfloat16), ("gelu_tanh", torch.float32)], ids=str)
def test_a_gated_activation_has_the_bits_of_single_operations(dtype: torch.dtype, act: Gate) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 44).to(dtype).requires_grad_()
    dy = torch.randn(5, 3, 22).to(dtype)
    gate, up = x.split(22, dim=-1)
    wanted = ACTIVATIONS[act](gate) * up
    found = gated(x * 1, act)
    assert torch.equal(found, wanted)
    assert torch.equal(*(torch.autograd.grad(y, x, dy)[0] for y in (found, wanted)))


def test_second_derivatives_and_graphs_with_dropped_results() -> None:
    x = torch.randn(3, 2, 2, 8, dtype=torch.float64).requires_grad_()
    cos, sin = torch.randn(2, 3, 1, 1, 3, dtype=torch.float64)
    for function in (partial(gated, act="silu"), partial(gated, act="gelu_tanh"), partial(rotate, cos=cos, sin=sin)):
        assert torch.autograd.gradgradcheck(function, x)
    # A schedule that splits backward passes never frees the part that is used by the first half alone.
    x = torch.randn(4, 8, requires_grad=True)
    y = compose(torch.exp, torch.sin, x, drops=True)  # the exponential saves its own output
    held = weakref.ref(y)
    del y
    assert held() is None


def test_products_overwrite_inputs_that_they_own_and_add_to_gradients() -> None:
    torch.manual_seed(0)
    layer = RowParallelLinear(6, 8, bias=False, input_is_parallel=True, group=Group(), dtype=torch.bfloat16)
    let_products_add([layer.weight])
    x = torch.randn(4, 2, 6).bfloat16().requires_grad_()
    wanted = torch.autograd.grad(layer(x * 1).square().sum(), x)[0]
    cast(Any, layer.weight).owns_input = True
    product = x * 1
    y = layer(product).square().sum()
    before = product.detach().clone()
    for keeps in (True, False):
        assert torch.equal(torch.autograd.grad(y, x, retain_graph=keeps)[0], wanted)
        assert torch.equal(product.detach(), before) == keeps
    assert torch.equal(product.detach(), wanted)
    # And without it, or with one of another dtype, autograd adds.
    layer = ColumnParallelLinear(8, 6, group=Group(), dtype=torch.bfloat16)
    x = torch.randn(4, 2, 8).bfloat16().requires_grad_()
    bias = cast(nn.Parameter, layer.bias)
    wanted = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight, bias])
    let_products_add([layer.weight])
    for dtype in (torch.bfloat16, torch.float32):
        layer.weight.grad = None
        layer.weight.grad_dtype = dtype
        hooks: list[torch.Tensor] = []
        handle = layer.weight.register_post_accumulate_grad_hook(hooks.append)
        for _ in range(2):
            x.grad = None
            bias.grad = None
            layer(x).square().sum().backward()
        handle.remove()
        found = x.grad, layer.weight.grad, bias.grad
        assert all(map(torch.equal, found, (wanted[0], 2 * wanted[1].to(dtype), wanted[2])))
        assert len(hooks) == 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_token_is_on_one_rank_and_ranks_of_a_grain_have_neighbors(ranks: int) -> None:
    length = 4 * ranks
    tokens = torch.arange(length)
    pairs = set()
    seen = []
    for rank in range(ranks):
        group = pretend_group(rank, ranks)
        own = chunks_of_rank(tokens, group)
        assert own.tolist() == [place for run in runs_of_places(len(own), rank, ranks) for place in run]
        pairs.add(int((own + 1).sum()))
        seen += own.tolist()
    assert sorted(seen) == tokens.tolist()
    assert len(pairs) == 1, "queries of all ranks see equally many keys"
    tokens = torch.arange(16)
    in_order = torch.cat([chunks_of_rank(tokens, pretend_group(rank, 4)) for rank in range(4)])
    for rank, wanted in enumerate(in_order.chunk(ranks)):
        group = pretend_group(rank, ranks)
        group.grain = 4
        assert chunks_of_rank(tokens, group).tolist() == wanted.tolist()


class Layer:
    def __init__(self, group: object = None) -> None: ...


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["groupe"], "Layer does not take groupe (did you mean group?)"),
        (["pin", "groups", "seed"], "Layer does not take pin (leave it out) or groups (give group=)"),
        (["pin", "zzz"], "Layer does not take pin (leave it out) or zzz; it takes group and seed"),
    ],
)
def test_unknown_arguments_are_one_sentence(given: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARGUMENTS, "layers", {"pin": "leave it out", "groups": "give group="})
    with pytest.raises(ArgumentError) as raised:
        refuse_unknown(Layer, dict.fromkeys(given), ["seed"])
    assert str(raised.value) == message
    assert isinstance(raised.value, TypeError)
    assert isinstance(raised.value, ConfigError)


S, B, H = 12, 4, 16
MODES = ["fast", "invariant"]


def key(mode: str = "fast", *, step: int = 3, first: int = 8, samples: int = B) -> DropoutKey:
    return DropoutKey(1, step, torch.arange(first, first + samples), first, mode)  # type: ignore[arg-type]


def dropped(group: Group | None = None, **options: bool) -> Dropout:
    return Dropout(0.5, layer=0, site=1, group=group, **options)


def masked(layer: Dropout, k: DropoutKey, rows: int = S, samples: int = B, width: int = H) -> torch.Tensor:
    return layer(torch.ones(rows, samples, width), k)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("p", [0.1, 0.9])
def test_keeps_the_share_and_the_mean(mode: str, p: float) -> None:
    y = masked(Dropout(p, layer=0, site=1), key(mode), 64, B, 512)
    share = float((y == 0).float().mean())
    n = y.numel()
    assert abs(share - p) <= 5 * (p * (1 - p) / n) ** 0.5
    assert torch.allclose(y[y != 0], torch.tensor(1 / (1 - p)))


@pytest.mark.parametrize("mode", MODES)
def test_the_key_decides_whatever_ran_before_and_gradients_pass_through_the_mask(mode: str) -> None:
    layer = Dropout(0.5, layer=2, site=1)
    first = masked(layer, key(mode))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert torch.equal(masked(layer, key(mode)), first)
    assert torch.equal(torch.get_rng_state(), before), "dropout moved torch's own generator"
    others = [
        masked(layer, key(mode, step=4)),
        masked(layer, key(mode, first=12)),
        masked(Dropout(0.5, layer=3, site=1), key(mode)),
        masked(Dropout(0.5, layer=2, site=2), key(mode)),
    ]
    for number, other in enumerate(others):
        agreeing = float((other == first).float().mean())
        assert abs(agreeing - 0.5) < 0.1, f"mask {number} is related to the first: they agree on {agreeing:.0%}"
    layer = Dropout(0.25, layer=0, site=1)
    x = torch.ones(S, B, H, requires_grad=True)
    assert layer(x, None) is x, "without a key nothing is dropped"
    y = layer(x, key(mode))
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_masks_of_ranks_are_parts_of_one_mask_or_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [pretend_group(r, 2) for r in range(2)]
    shards = [masked(dropped(group, sequence_parallel_enabled=True), key()) for group in groups]
    copies = [masked(dropped(group), key()) for group in groups]
    assert torch.equal(*copies)
    assert abs(float((shards[0] == shards[1]).float().mean()) - 0.5) < 0.1
    # As the input of a row-parallel layer is cut: `invariant` masks are columns of the whole, `fast` ones differ.
    whole = masked(dropped(), key("invariant"))
    cut = [dropped(pretend_group(r, 4), input_is_parallel=True) for r in range(4)]
    columns = [masked(layer, key("invariant"), width=H // 4) for layer in cut]
    assert torch.equal(torch.cat(columns, dim=-1), whole)
    fast = [masked(layer, key(), width=H // 4) for layer in cut]
    assert abs(float((fast[0] == fast[1]).float().mean()) - 0.5) < 0.2, "two ranks draw related masks"
    with pytest.raises(ValueError, match="must not both be true: one dim is cut"):
        dropped(sequence_parallel_enabled=True, input_is_parallel=True)
    # By sequence shards, by samples and by what is hashed at once: each draws its part of the whole.
    whole = masked(dropped(), key("invariant"))
    cut = [dropped(pretend_group(r, 4), sequence_parallel_enabled=True) for r in range(4)]
    shards = [masked(layer, key("invariant"), S // 4) for layer in cut]
    assert torch.equal(torch.cat(shards), whole)
    halves = [masked(dropped(), key("invariant", first=f, samples=2), S, 2) for f in (8, 10)]
    assert torch.equal(torch.cat(halves, dim=1), whole)
    monkeypatch.setattr("shardwise.layers.dropout.MASK_CHUNK_ELEMENTS", 100)
    assert torch.equal(masked(dropped(), key("invariant")), whole)


def test_invariant_masks_are_those_of_splitmix64() -> None:
    """The first elements of one sample, by Python's integers."""

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    k = key("invariant")
    stream = mix(8 ^ k.number(0, 1))
    numbers = [mix((stream + i * 0x9E3779B97F4A7C15) % 2**64) for i in range(H)]
    wanted = [(n - 2**64 if n >= 2**63 else n) >= int(0.3 * 2.0**64) - 2**63 for n in numbers]
    found = masked(Dropout(0.3, layer=0, site=1), k)[0, 0] != 0
    assert found.tolist() == wanted
