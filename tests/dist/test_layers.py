"""Sharded layers against plain torch: outputs, gradients of the input and of every canonical tensor."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.distributed import placement
from shardwise.layers.embedding import ParallelEmbedding, ParallelLMHead
from shardwise.layers.linear import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from shardwise.layers.norm import LayerNorm, RMSNorm
from tests.dist.dense import check, each, error, fill, gradient_errors, leaves, mesh, random, run

S, B, INPUTS, OUTPUTS = 8, 3, 12, 20
DEGREES = (1, 4)
BOOLS = (False, True)
Part = Callable[[Tensor], Tensor]
Dense = Callable[[Tensor, dict[str, Tensor]], dict[str, Tensor]]
HEAD, Q_HEADS = 4, 8


def options(tp: int, sequence: bool) -> dict[str, Any]:
    """Of every layer."""
    return {"sequence_parallel_enabled": sequence, "seed": 1, "group": mesh(tp).tp}


def sequence_part(x: Tensor, tp: int, sequence: bool) -> Tensor:
    return x.chunk(tp)[mesh(tp).tp.rank].clone() if sequence else x.clone()


def feature_part(x: Tensor, tp: int) -> Tensor:
    return x.chunk(tp, dim=-1)[mesh(tp).tp.rank].clone()


def linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def uncut(x: Tensor) -> Tensor:
    return x.clone()


def compared(layer: nn.Module, dense: Dense, into: Part, out: Part) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Errors of the outputs and of all gradients on this rank, and the canonical weights with their gradients.

    Args:
        dense: of a whole input and the canonical weights, each output by its name.
        into, out: this rank's part of an input and of an output.
    """
    weights = leaves(fill(layer))
    x = random(1, S, B, INPUTS).requires_grad_()
    wanted = dense(x, weights)
    pulls = {name: random(2 + number, *y.shape) for number, (name, y) in enumerate(wanted.items())}
    torch.stack([(wanted[name] * pull).sum() for name, pull in pulls.items()]).sum().backward()
    mine = into(x.detach()).requires_grad_()
    outputs = layer(mine)
    found = dict(zip(wanted, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))
    torch.stack([(found[name] * out(pull)).sum() for name, pull in pulls.items()]).sum().backward()
    errors = {f"output {name}": error(found[name], out(y)) for name, y in wanted.items()}
    errors["gradient of the input"] = error(mine.grad, into(x.grad))
    return errors | gradient_errors(layer, weights), weights


def column(tp: int, sequence: bool, bias: bool, gather: bool) -> dict[str, float]:
    layer = ColumnParallelLinear(INPUTS, OUTPUTS, bias, gather, name="col", **options(tp, sequence))
    out = uncut if gather else partial(feature_part, tp=tp)
    into = partial(sequence_part, tp=tp, sequence=sequence)
    errors, weights = compared(layer, lambda x, weights: {"y": linear(x, weights, "col")}, into, out)
    assert ("col.bias" in weights) == bias
    return errors


@pytest.mark.parametrize("tp", DEGREES)
def test_column_parallel_linear(tp: int, ranks: Any) -> None:
    check(run(ranks, tp, each, column, list(itertools.product([tp], BOOLS, BOOLS, BOOLS))))


def row(tp: int, sequence: bool, bias: bool, parallel: bool) -> dict[str, float]:
    layer = RowParallelLinear(INPUTS, OUTPUTS, bias, parallel, name="row", **options(tp, sequence))
    into = partial(feature_part, tp=tp) if parallel else uncut
    out = partial(sequence_part, tp=tp, sequence=sequence)
    errors, weights = compared(layer, lambda x, weights: {"y": linear(x, weights, "row")}, into, out)
    assert ("row.bias" in weights) == bias
    if bias:
        assert_partial(layer.bias, weights["row.bias"], sequence and tp > 1)
    return errors


def assert_partial(parameter: nn.Parameter | None, wanted: Tensor, partial: bool) -> None:
    """The record says whether a replicated gradient is partial, and it is so."""
    record = placement.of(parameter)
    assert all(piece.partial == partial for piece in record.pieces), f"partial must be {partial}"
    whole = error(parameter.grad, wanted.grad) < 1e-5
    assert whole != partial, "the gradient that the record calls partial is whole, or the other way round"


@pytest.mark.parametrize("tp", DEGREES)
def test_row_parallel_linear(tp: int, ranks: Any) -> None:
    kinds = ((False, False), (False, True), (True, True))
    check(run(ranks, tp, each, row, [(tp, sequence, bias, parallel) for sequence, parallel in kinds for bias in BOOLS]))


def merged(tp: int, sequence: bool, bias: bool, gather: bool) -> dict[str, float]:
    sizes = {"gate": 8, "up": 12}
    layer = MergedColumnParallelLinear(
        INPUTS, tuple(sizes.values()), bias, gather, names=tuple(sizes), **options(tp, sequence)
    )
    into = partial(sequence_part, tp=tp, sequence=sequence)
    out = uncut if gather else partial(feature_part, tp=tp)
    return compared(layer, lambda x, weights: {name: linear(x, weights, name) for name in sizes}, into, out)[0]


@pytest.mark.parametrize("tp", DEGREES)
def test_merged_column_parallel_linear(tp: int, ranks: Any) -> None:
    check(run(ranks, tp, each, merged, list(itertools.product([tp], BOOLS, BOOLS, BOOLS))))


def held_heads(tp: int, rank: int, kv_heads: int) -> slice:
    """Features of the K/V heads that serve a rank's query heads, worked out head by head."""
    queries = range(rank * Q_HEADS // tp, (rank + 1) * Q_HEADS // tp)
    serving = sorted({query * kv_heads // Q_HEADS for query in queries})
    return slice(serving[0] * HEAD, (serving[-1] + 1) * HEAD)


def gqa(tp: int, sequence: bool, kv_heads: int, bias: bool, gather: bool) -> dict[str, float]:
    group = mesh(tp).tp
    widths, names = (Q_HEADS * HEAD, kv_heads * HEAD), ("q", "k", "v")
    layer = GQAQKVColumnParallelLinear(
        INPUTS, widths, bias, gather, head_dim=HEAD, names=names, **options(tp, sequence)
    )
    weights = leaves(fill(layer))
    whole_x = random(1, S, B, INPUTS).requires_grad_()
    whole = {name: linear(whole_x, weights, name) for name in "qkv"}
    where = [
        {"q": slice(r * Q_HEADS * HEAD // tp, (r + 1) * Q_HEADS * HEAD // tp)}
        | dict.fromkeys("kv", held_heads(tp, r, kv_heads))
        for r in range(tp)
    ]
    if gather:  # every rank uses the whole output alike: one loss
        pulls = {name: random(i, *whole[name].shape) for i, name in enumerate("qkv")}
        torch.stack([(whole[name] * pulls[name]).sum() for name in "qkv"]).sum().backward()
        mine = {name: tensor.detach() for name, tensor in whole.items()}
    else:  # each rank uses its heads in its own way, copies of a K/V head too
        terms = []
        for rank, slices in enumerate(where):
            for i, name in enumerate("qkv"):
                used = whole[name][..., slices[name]]
                terms.append((used * random(10 * rank + i, *used.shape)).sum())
        torch.stack(terms).sum().backward()
        mine = {name: whole[name][..., where[group.rank][name]].detach() for name in "qkv"}
        pulls = {name: random(10 * group.rank + i, *mine[name].shape) for i, name in enumerate("qkv")}
    x = sequence_part(whole_x.detach(), tp, sequence).requires_grad_()
    found = dict(zip("qkv", layer(x), strict=True))
    torch.stack([(found[name] * pulls[name]).sum() for name in "qkv"]).sum().backward()
    record = placement.of(layer.weight)
    copied = [piece.name for piece in record.pieces if piece.partial]
    assert copied == (["k.weight", "v.weight"] if tp > kv_heads else []), f"partial pieces: {copied}"
    return {
        **{f"output {name}": error(found[name], mine[name]) for name in "qkv"},
        "gradient of the input": error(x.grad, sequence_part(whole_x.grad, tp, sequence)),
        **gradient_errors(layer, weights),
    }


@pytest.mark.parametrize("tp", DEGREES)
def test_gqa_qkv(tp: int, ranks: Any) -> None:
    check(run(ranks, tp, each, gqa, list(itertools.product([tp], BOOLS, (1, 2, 4, 8), BOOLS, BOOLS))))


def embedding(tp: int, sequence: bool, vocabulary: int, padding: int | None, multiple: int = 1) -> dict[str, float]:
    layer = ParallelEmbedding(vocabulary, 6, padding, row_multiple=multiple, name="e", **options(tp, sequence))
    assert layer.weight.shape[0] == -(-vocabulary // (tp * multiple)) * multiple
    weights = leaves(fill(layer))
    ids = torch.randint(vocabulary, (S, B), generator=torch.Generator().manual_seed(0))
    ids[:2, 0] = torch.tensor([0, vocabulary - 1])
    if padding is not None:
        ids[3:5, 1] = padding
    pull = random(2, S, B, 6)
    whole = F.embedding(ids, weights["e.weight"], padding)
    (whole * pull).sum().backward()
    before = ids.clone()
    found = layer(ids)
    (found * sequence_part(pull, tp, sequence)).sum().backward()
    assert torch.equal(ids, before), "the ids were changed in place"
    return {"output": error(found, sequence_part(whole, tp, sequence)), **gradient_errors(layer, weights)}


@pytest.mark.parametrize("tp", DEGREES)
def test_embedding(tp: int, ranks: Any) -> None:
    # 9 rows over 4 ranks leave one with none, as do 11 in runs of 8 or 16.
    sizes = [*itertools.product((8, 9), (None, 0, 7)), *((11, 7, multiple) for multiple in (1, 4, 8, 16))]
    cases = [(tp, sequence, *size) for sequence in BOOLS for size in sizes]
    check(run(ranks, tp, each, embedding, cases), 0.0 if tp == 1 else 1e-6)


def out_of_range(tp: int, wrong: int) -> str:
    layer = ParallelEmbedding(9, 4, name="e", seed=1, group=mesh(tp).tp)
    try:
        layer(torch.tensor([[0, wrong]]))
    except IndexError as refusal:
        return str(refusal)
    return "accepted"


@pytest.mark.parametrize(("tp", "wrong"), [(2, -1), (4, 11)])
def test_ids_outside_the_vocabulary_are_refused_where_padding_would_hold_them(tp: int, wrong: int, ranks: Any) -> None:
    assert run(ranks, tp, out_of_range, tp, wrong) == [f"id ({wrong}) must be in [0, 9)"] * tp


def norm(tp: int, sequence: bool, kind: type[RMSNorm] | type[LayerNorm]) -> dict[str, float]:
    layer = kind(INPUTS, 1e-5, name="n", **options(tp, sequence))
    start = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    assert bool((start["weight"] == 1).all())
    assert kind is RMSNorm or bool((start["bias"] == 0).all())

    def dense(x: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        if kind is RMSNorm:
            return {"y": x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weights["n.weight"]}
        return {"y": F.layer_norm(x, (INPUTS,), weights["n.weight"], weights["n.bias"], 1e-5)}

    part = partial(sequence_part, tp=tp, sequence=sequence)
    errors, weights = compared(layer, dense, part, part)
    for name, parameter in layer.named_parameters():
        assert_partial(parameter, weights[f"n.{name}"], sequence and tp > 1)
    return errors


@pytest.mark.parametrize("tp", DEGREES)
def test_norms_are_partial_under_sequence_parallelism(tp: int, ranks: Any) -> None:
    """Fault 1 of the reference: this sum was lost, and the copies drifted apart without a word."""
    check(run(ranks, tp, each, norm, list(itertools.product([tp], BOOLS, (RMSNorm, LayerNorm)))))


def padded_head(tp: int, sequence: bool, vocabulary: int, multiple: int) -> dict[str, float]:
    """Logits and loss with padded rows that are anything but 0: they get no probability, and no gradient."""
    layer = ParallelLMHead(
        INPUTS, vocabulary, bias_name="head.bias", row_multiple=multiple, name="head", **options(tp, sequence)
    )
    assert layer.weight.shape[0] == -(-vocabulary // (tp * multiple)) * multiple
    weights = leaves(fill(layer))
    held = max(0, min(layer.weight.shape[0], vocabulary - mesh(tp).tp.rank * layer.weight.shape[0]))
    with torch.no_grad():
        layer.weight[held:] = 100.0
    targets = torch.randint(vocabulary, (S, B), generator=torch.Generator().manual_seed(0))
    whole_x = random(1, S, B, INPUTS).requires_grad_()
    logits = whole_x @ weights["head.weight"].t() + weights["head.bias"]
    whole, pull = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), random(2, *logits.shape)
    (whole + (logits * pull).sum()).backward()
    x = sequence_part(whole_x.detach(), tp, sequence).requires_grad_()
    loss, found = layer.loss(x, targets), layer(x)
    (loss + (found * pull).sum()).backward()
    assert not layer.weight.grad[held:].any()
    assert sum(one.numel for _, _, one in placement.placements(layer)) == held * (INPUTS + 1)
    assert torch.equal(layer.likeliest(whole_x.detach()), logits.argmax(dim=-1))
    return {
        "loss": error(loss, whole),
        "logits": error(found, logits),
        "gradient of the input": error(x.grad, sequence_part(whole_x.grad, tp, sequence)),
        **gradient_errors(layer, weights),
    }


@pytest.mark.parametrize("tp", DEGREES)
def test_padded_rows_get_neither_probability_nor_gradient(tp: int, ranks: Any) -> None:
    sizes = ((8, 1), (9, 1), (9, 4), (9, 16))
    check(run(ranks, tp, each, padded_head, [(tp, sequence, *size) for sequence in BOOLS for size in sizes]))


def copied_model_keeps_its_records() -> list[bool]:
    tp = mesh(2).tp
    model = torch.nn.Sequential(ColumnParallelLinear(4, 8, group=tp), RMSNorm(8, group=tp))
    copied = copy.deepcopy(model)
    same = [placement.of(a) is placement.of(b) for a, b in zip(model.parameters(), copied.parameters(), strict=True)]
    x = torch.ones(2, 1, 4)
    emptied = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    kept = [placement.of(a) is placement.of(b) for a, b in zip(model.parameters(), emptied.parameters(), strict=True)]
    emptied.load_state_dict(model.state_dict(), assign=True)
    kept += [placement.of(a) is placement.of(b) for a, b in zip(model.parameters(), emptied.parameters(), strict=True)]
    equal = [torch.equal(model(x), other(x)) for other in (emptied, copied)]
    return [*same, *kept, *equal, copied[0].group is model[0].group]


def test_a_copied_emptied_or_loaded_model_is_cut_as_its_original(ranks: Any) -> None:
    for rank, facts in enumerate(ranks(2).run(copied_model_keeps_its_records)):
        assert all(facts), f"rank {rank}: records, output or group of the copy differ: {facts}"


def penalty(tp: int, sequence: bool) -> dict[str, float]:
    """The gradient of a gradient penalty, through an MLP whose matmuls are cut: the square of the input's gradient."""
    options: Any = {"sequence_parallel_enabled": sequence, "seed": 1, "group": mesh(tp).tp}
    layers = nn.ModuleDict(
        {
            "norm": RMSNorm(INPUTS, name="norm", **options),
            "up": ColumnParallelLinear(INPUTS, OUTPUTS, True, False, name="up", **options),
            "down": RowParallelLinear(OUTPUTS, INPUTS, False, True, name="down", **options),
        }
    )
    weights = leaves(fill(layers))
    whole_x, pull = random(1, S, B, INPUTS).requires_grad_(), random(2, S, B, INPUTS)
    scale = (whole_x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    hidden = F.gelu(linear(whole_x * scale * weights["norm.weight"], weights, "up"))
    (wanted,) = torch.autograd.grad((linear(hidden, weights, "down") * pull).sum(), whole_x, create_graph=True)
    wanted.square().sum().backward()
    x = sequence_part(whole_x.detach(), tp, sequence).requires_grad_()
    y = layers["down"](F.gelu(layers["up"](layers["norm"](x))))
    (found,) = torch.autograd.grad((y * sequence_part(pull, tp, sequence)).sum(), x, create_graph=True)
    found.square().sum().backward()
    return {
        "gradient of the penalty by the input": error(x.grad, sequence_part(whole_x.grad, tp, sequence)),
        **gradient_errors(layers, weights),
    }


@pytest.mark.parametrize("sequence", BOOLS)
@pytest.mark.parametrize("tp", DEGREES)
def test_gradients_of_gradients(tp: int, sequence: bool, ranks: Any) -> None:
    check(run(ranks, tp, penalty, tp, sequence))
