"""What a block stack and a step hold, tensor by tensor, against `cost`: with recompute, and at each stage of ZeRO."""

import functools
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.config import Config, Layout, check_layout
from shardwise.estimates.activations import BlockStack
from shardwise.estimates.communication import step_transfers, wire_bytes
from shardwise.estimates.memory import expected_memory, memory_by_rank
from shardwise.estimates.rank_workload import RankWorkload
from shardwise.layers.dropout import DropoutKey
from shardwise.models.attention_pieces import define_attention_by_pieces
from shardwise.models.blocks import BlockContext, run_blocks
from shardwise.models.build import build_model
from shardwise.models.masks import AttentionMask
from shardwise.train.build import build_trainer
from tests.block_stacks import block_stack
from tests.dist import cells
from tests.dist.cells import check_sent, sent
from tests.dist.dense import mesh as shared_mesh
from tests.dist.training import FAMILIES, MODELS, Sections, cases, make_config, make_data, sizes
from tests.live_tensors import LiveTensors
from tests.sweeps import few

TOLERANCE = 0.10
RECOMPUTE = ("none", "selective", "full")
# More tokens than features: activations dominate, not the gradients of weights.
SIZES = sizes(1000, 64, 256, layers=4, heads=4, positions=128)
FACTS = MODELS["memory"]
"""Families whose blocks hold other things than Llama's."""
DROPOUT = cells.DROPOUT | dict.fromkeys(FACTS, ("attention_dropout",))
STACKS = [*itertools.product(FAMILIES, (None, "fast", "invariant"), (1, 2)), *((model, None, 2) for model in FACTS)]
OFTEN = (("gpt", "fast", 2), ("bert", "fast", 1), ("llama", None, 1))
PRECISIONS: list[tuple[dict[str, Any], int]] = [
    ({"mode": "bfloat16"}, 2), ({"mode": "float32"}, 1), ({"mode": "bfloat16", "matmul": "fp8"}, 2)
]  # fmt: skip
STATE = sizes(1000, 256, 704, layers=8, heads=4, positions=64)
"""A model with few tokens, whose state dominates: each block is more than a bucket must have."""
SHARDED = cases("memory")
PIPELINED = (("gpt", "none", 0.0, 2), ("llama", "full", 0.0, 2), ("bert", "selective", 0.1, 4))
SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev")
CASES = [(*model, schedule) for model in PIPELINED for schedule in SCHEDULES]


class _Gradient(torch.autograd.Function):
    """A number whose gradient by y is 1 everywhere, a tensor made when it is asked for."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.like = y.shape, y.dtype
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        shape, dtype = ctx.like
        return torch.ones(shape, dtype=dtype)


@dataclass
class Held:
    """Bytes at the end of the forward pass and at most; the blocks' output, and the gradient of their input."""

    kept: int
    peak: int
    output: Tensor = field(repr=False)
    gradient: Tensor = field(repr=False)


def measure(config: Config) -> Held:
    """Run the blocks of a model forward and backward on this rank."""
    torch.set_num_threads(1)
    mesh = shared_mesh(config.parallel.tensor)
    layout, train, precision = check_layout(config, mesh.world.size), config.train, config.precision.resolved(False)
    dtype = getattr(torch, precision.parameter)
    model: Any = build_model(config, mesh.tp, sequence_parallel=layout.sequence_parallel, dtype=dtype)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    key = None
    if config.model.has_dropout:
        key = DropoutKey(train.seed, 1, torch.arange(train.micro_batch), 0, train.dropout_mode)
    width = model.config.hidden_size
    shape = (train.sequence_length // (layout.tensor if layout.sequence_parallel else 1), train.micro_batch, width)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(mesh.tp.rank)).to(dtype)
    rotary = getattr(model, "rotary", None)  # its tables are no activations
    windows = {config.model.window(layer) for layer in range(config.model.num_hidden_layers)}
    masks: dict[int | None, Any] = {None: torch.ones(train.micro_batch, 1, 1, train.sequence_length).bool()}
    if config.model.causal:
        define_attention_by_pieces()
        fused = config.model.attention_dropout_p == 0
        for window in windows:
            mask = AttentionMask((range(train.sequence_length),), window=window)
            masks[window] = mask.form(
                start, keys=train.sequence_length, head_dim=model.config.head_dim, is_compiled=False, is_fused=fused
            )
    tables = {} if rotary is None else dict.fromkeys(windows, rotary.tables(train.sequence_length, start))
    context = BlockContext(key, masks, rotary_tables=tables)
    x = start.requires_grad_()
    live = LiveTensors([x, *model.parameters(), *(p.grad for p in model.parameters())])
    with live:
        y = run_blocks(model.layers, x.clone(), context, train.recompute)  # which the blocks alone may hold
        kept = live.settled() - y.nbytes
        loss: Tensor = _Gradient.apply(y)
    output = y.detach().clone()
    del y
    with live:
        loss.backward()
    return Held(kept, live.peak, output, x.grad)


def configuration(model: str, dropout: str | None, tensor: int, recompute: str, **sections: dict[str, Any]) -> Config:
    p = dict.fromkeys(DROPOUT[model], 0.1 if dropout else 0.0)
    train = {"recompute": recompute, "dropout_mode": dropout or "fast", "sequence_length": 128, "micro_batch": 2}
    return make_config(
        model=SIZES | (FAMILIES | FACTS)[model] | p,
        parallel={"tensor": tensor, "sequence": tensor > 1} | sections.pop("parallel", {}),
        train=train | sections.pop("train", {}),
        **sections,
    )


def expected(config: Config, layout: Layout) -> BlockStack:
    return block_stack(RankWorkload.of(config, layout, False))


def check_held(found: int, wanted: int, where: str, tolerance: float = TOLERANCE) -> None:
    off = wanted / found - 1
    assert abs(off) <= tolerance, f"{where}: held {found:,}, cost has {wanted:,} ({off:+.1%})"


@functools.cache
def held_alone(model: str, dropout: str | None, recompute: str) -> Held:
    return measure(configuration(model, dropout, 1, recompute))


@pytest.mark.parametrize(("model", "dropout", "tensor"), few(STACKS, *OFTEN))
def test_a_block_stack_holds_what_cost_has(model: str, dropout: str | None, tensor: int, ranks: Any) -> None:
    first = None
    # One process does not cut the sequence.
    for recompute, regathers in itertools.product(RECOMPUTE, (False, True)[:tensor]):
        config = configuration(model, dropout, tensor, recompute, parallel={"sequence_regather": regathers})
        wanted = expected(config, check_layout(config, tensor))
        everyone = ranks(tensor).run(measure, config) if tensor > 1 else [held_alone(model, dropout, recompute)]
        for rank, found in enumerate(everyone):
            where = f"{recompute}, {regathers=}, rank {rank}"
            check_held(found.kept, wanted.kept, f"after the forward pass, {where}", tolerance=0.01)
            check_held(found.peak, wanted.peak, where)
            if rank == 0:
                first = first or found
                assert torch.equal(found.output, first.output), f"{where}: other outputs than without recompute"
                assert torch.equal(found.gradient, first.gradient), f"{where}: other gradients than without recompute"


@pytest.mark.parametrize("model", few((*FAMILIES, *FACTS), "gpt"))
def test_other_dtypes_and_batches(model: str) -> None:
    """Where attention copies other things, norms and probabilities are in another dtype than x, and inputs in fp8."""
    for (precision, micro_batch), recompute in itertools.product(PRECISIONS, RECOMPUTE):
        if "matmul" in precision and model in FACTS:
            continue
        config = configuration(model, "fast", 1, recompute, precision=precision, train={"micro_batch": micro_batch})
        wanted, found = expected(config, check_layout(config, 1)), measure(config)
        check_held(found.peak, wanted.peak, f"{precision}, {recompute}")


def measure_step(config: Config) -> int:
    """Most that this rank holds in an optimizer step but the first, from the model's construction on."""
    torch.set_num_threads(1)
    parallel, grains = config.parallel, tuple(config.grains.items())
    mesh = shared_mesh(parallel.tensor, parallel.pipeline, grains, context=parallel.context)
    data = make_data(
        config.model.vocab_size, length=config.train.sequence_length, pairs="nsp" in config.model.objectives
    )
    with LiveTensors() as live:
        trainer = build_trainer(config, mesh, data)
        trainer.step()
        live.peak = 0
        trainer.step()
    return live.peak


@pytest.mark.slow
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(("context", "keys", "grain"), [(4, "gather", None), (4, "ring", None), (2, "gather", 4)])
def test_shared_samples_hold_the_cost(recompute: str, context: int, keys: str, grain: int | None, ranks: Any) -> None:
    """Most memory is that of keys and values."""
    bits = {} if grain is None else {"bitwise": True, "data_grain": 1}
    sizes = {"vocab_size": 32, "intermediate_size": 16, "num_key_value_heads": 4, "max_position_embeddings": 512}
    config = make_config(
        model=SIZES | FAMILIES["llama"] | sizes,
        parallel={"context": context, "context_keys": keys, "context_grain": grain, "grain": 1},
        train={"recompute": recompute, "sequence_length": 512, "micro_batch": 1, "global_batch": 4} | bits,
    )
    memory = expected_memory(config, check_layout(config, context))
    for rank, peak in enumerate(ranks(context).run(measure_step, config)):
        check_held(peak, memory.total, f"rank {rank}")


@dataclass
class ShardedStep:
    """What a rank held at most and sent in its second step, and the bytes of its buckets."""

    peak: int
    sent: Counter[tuple[str, str]]
    calls: Counter[tuple[str, str]]
    parameters: int
    gradients: int


def measure_sharded(config: Config) -> ShardedStep:
    torch.set_num_threads(1)
    parallel = config.parallel
    grains = tuple(config.grains.items())
    mesh = shared_mesh(parallel.tensor, parallel.pipeline, grains, context=parallel.context, expert=parallel.expert)
    data = make_data(config.model.vocab_size, length=64, pairs="nsp" in config.model.objectives)
    with LiveTensors() as live:
        trainer = build_trainer(config, mesh, data)
        buckets = trainer.optimizer.buckets
        live.watch(flat for bucket in buckets for flat in (bucket.values, bucket.gradients))
        trainer.step()
        live.settled()
        live.peak = 0
        sent(mesh)
        trainer.step()
    return ShardedStep(
        live.peak,
        *sent(mesh),
        parameters=sum(bucket.value_bytes for bucket in buckets),
        gradients=sum(bucket.gradient_bytes for bucket in buckets),
    )


@pytest.mark.parametrize(("model", "optimizer", "sections"), few(SHARDED, SHARDED[3]))
def test_a_sharded_step_is_what_cost_has(model: str, optimizer: dict[str, Any], sections: Sections, ranks: Any) -> None:
    train = {"global_batch": 8, "micro_batch": 1, "sequence_length": 16} | sections.get("train", {})
    others = {name: values for name, values in sections.items() if name != "train"}
    config = make_config(
        model=STATE | FAMILIES[model], optimizer={"bucket_mib": None} | optimizer, train=train, **others
    )
    layout = check_layout(config, 4)
    memory = memory_by_rank(config, layout)
    for rank, found in enumerate(ranks(4).run(measure_sharded, config)):
        place = layout.coordinates(rank)
        estimate = memory[place["pp"]]
        assert (found.parameters, found.gradients) == (estimate.parameters, estimate.gradients), f"rank {rank}"
        # Pipelines miss 2 %, by at most 3 % as measured: the estimate does not know that a split backward pass
        # holds several gradients of weights for a moment, nor that a gradient is copied apart from a block's peak.
        limit = 0.02 if layout.pipeline == 1 else 0.035
        check_held(found.peak, estimate.total, f"rank {rank}", limit)
        transfers = step_transfers(config, layout, pipeline_rank=place["pp"], data_rank=place["dp"])
        check_sent(found.sent, wire_bytes(transfers), found.calls, f"rank {rank}")


def test_live_tensors_are_counted_once_and_until_they_are_free() -> None:
    mine = torch.zeros(100)
    with LiveTensors([mine]) as live:
        a = torch.ones(1000)
        view = a.view(10, 100)
        assert live.now == 4000
        b = a + mine.sum()
        assert live.now == 8000
        del a, view
        assert live.now == 4000
        mine.add_(1)
        c = torch.ones(250)
    assert live.now == 5000
    del b, c
    assert (live.now, live.peak) == (0, 8004)


@pytest.mark.parametrize(("model", "recompute", "dropout", "degree", "schedule"), few(CASES, CASES[1], CASES[4]))
def test_a_step_of_a_pipeline_holds_what_cost_has(
    model: str, recompute: str, dropout: float, degree: int, schedule: str, ranks: Any
) -> None:
    sizes = SIZES | FAMILIES[model] | dict.fromkeys(DROPOUT[model], dropout)
    config = make_config(
        model=sizes | {"num_hidden_layers": max(2 * degree, SIZES["num_hidden_layers"])},
        parallel={"pipeline": degree, "schedule": schedule},
        train={"micro_batch": 2, "global_batch": 8 * degree, "sequence_length": 64, "recompute": recompute},
    )
    memory = memory_by_rank(config, check_layout(config, degree))
    for rank, peak in enumerate(ranks(degree).run(measure_step, config)):
        check_held(peak, memory[rank].total, f"rank {rank}", tolerance=0.04)
