"""Q, K, V in one matmul against three, gate and up in one against two: the same block, forward and backward."""

from __future__ import annotations

import os
from typing import Any

import ranks
import torch
from measure import interleaved, slowest
from report import Report, Table
from torch import Tensor, nn

from shardwise.config import LlamaConfig
from shardwise.distributed import collectives
from shardwise.distributed.mesh import Mesh, join
from shardwise.distributed.placement import Init
from shardwise.layers.linear import ColumnParallelLinear, LayerOptions
from shardwise.models.blocks import BlockContext, LayerFactory, ModelPart
from shardwise.models.llama import LlamaBlock
from shardwise.models.rotary import Rotary

SIZES = (
    {"hidden": 256, "heads": 8, "intermediate": 688, "sequence": 256, "batch": 16},
    {"hidden": 1024, "heads": 16, "intermediate": 2752, "sequence": 256, "batch": 4},
)
LAYOUTS = (("1 process", 1, False), ("TP 2", 2, False), ("TP 2 + SP", 2, True))
ROUNDS = 5
"""Rounds of this section for each one asked for: its steps are short."""


class Separate(nn.Module):
    """Column-parallel layers of one input, each with a matmul and a collective of its own."""

    def __init__(self, hidden: int, outputs: dict[str, int], sequence_parallel: bool, options: LayerOptions) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            ColumnParallelLinear(
                hidden,
                output,
                bias=False,
                gather_output=False,
                sequence_parallel_enabled=sequence_parallel,
                name=name,
                **options,
            )
            for name, output in outputs.items()
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)

    def joined(self, x: Tensor) -> Tensor:
        return torch.cat(self(x), dim=-1)


def separated(config: LlamaConfig, block: LlamaBlock, sequence_parallel: bool, options: LayerOptions) -> LlamaBlock:
    """A block with the same weights, whose projections are layers of their own."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    attention, mlp = block.self_attn, block.mlp
    qkv = {f"model.layers.0.self_attn.{part}_proj": hidden for part in "qkv"}
    gate_up = {f"model.layers.0.mlp.{part}_proj": intermediate for part in ("gate", "up")}
    attention.qkv = Separate(hidden, qkv, sequence_parallel, options)  # type: ignore[assignment]
    mlp.gate_up = Separate(hidden, gate_up, sequence_parallel, options)  # type: ignore[assignment]
    return block


def measure(size: dict[str, int], sequence_parallel: bool, rounds: int) -> dict[str, Any]:
    """On one rank: seconds of a block's forward and backward pass, both ways, and how far their results differ."""
    join()
    torch.manual_seed(0)
    mesh = Mesh(tensor=int(os.environ["WORLD_SIZE"]))
    config = LlamaConfig(
        family="llama",
        vocab_size=64,
        hidden_size=size["hidden"],
        intermediate_size=size["intermediate"],
        num_hidden_layers=1,
        num_attention_heads=size["heads"],
        max_position_embeddings=size["sequence"],
    )
    options: LayerOptions = {"group": mesh.tp, "seed": 1, "init": Init.normal(0.02)}
    factory = LayerFactory(mesh.tp, sequence_parallel, "none", ModelPart(), vocab_multiple=1, options=options)
    merged = LlamaBlock(config, 0, factory)
    separate = separated(config, LlamaBlock(config, 0, factory), sequence_parallel, options)
    shape = (size["sequence"] // (mesh.tp.size if sequence_parallel else 1), size["batch"], config.hidden_size)
    x, dy = torch.randn(shape).requires_grad_(), torch.randn(shape)
    context = BlockContext(rotary_tables={None: Rotary(config).tables(size["sequence"], x)})
    with torch.no_grad():
        expected = merged(x, context)
        difference = float((expected - separate(x, context)).abs().max() / expected.abs().max())

    def step(module: LlamaBlock) -> None:
        module.zero_grad()
        x.grad = None
        module(x, context).backward(dy)

    calls = {"merged": lambda: step(merged), "separate": lambda: step(separate)}
    seconds = interleaved(calls, rounds, warmup=3, before=lambda: collectives.barrier(mesh.world))
    return {"seconds": seconds, "difference": difference}


def run(rounds: int) -> Report:
    rows, figures = [], []
    for size in SIZES:
        for label, world, sequence_parallel in LAYOUTS:
            print(f"  hidden {size['hidden']}, {label}", flush=True)
            options = {"size": size, "sequence_parallel": sequence_parallel, "rounds": ROUNDS * rounds}
            results = ranks.run("fused", "measure", world, **options)
            times = slowest([result["seconds"] for result in results])
            ratio = times["separate"] / times["merged"]
            difference = max(result["difference"] for result in results)
            figures.append({"size": size, "layout": label, **times, "ratio": ratio, "difference": difference})
            rows.append(
                [
                    f"hidden {size['hidden']:,}, {size['sequence'] * size['batch']:,} tokens, {label}",
                    f"{times['merged'] * 1000:.1f} ms",
                    f"{times['separate'] * 1000:.1f} ms",
                    f"{ratio:.2f}",
                ]
            )
    return Report(
        "fused",
        "One matmul for Q, K, V and one for gate and up, against separate ones",
        [Table(("a Llama block, forward + backward", "merged", "separate", "separate / merged"), rows)],
        {"rows": figures},
        notes=[
            f"Medians of {ROUNDS * rounds} interleaved rounds in the same processes, of the slower rank. Same weights; "
            f"outputs differ by at most {max(row['difference'] for row in figures):.0e} relative. With sequence "
            "parallelism each separate layer gathers its input and reduce-scatters its gradient by itself."
        ],
    )
