"""Experts of one block beside the implementations of transformers, and steps of sparse models beside others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import ranks
from report import Report, Table, target

_SIZES = ["model.hidden_size=512", "model.num_hidden_layers=2", "model.num_attention_heads=8", "model.vocab_size=4096"]
_SIZES += ["model.max_position_embeddings=512", "train.sequence_length=512", "train.micro_batch=8"]
_SIZES += ["train.global_batch=16", "model.num_key_value_heads=8"]
# Routers stay as they are made, which gives ranks nearly equal loads.
_EQUAL = ["optimizer.lr=1e-9", "optimizer.min_lr=0"]
_SPARSE = [
    "model.num_experts=16",
    "model.num_experts_per_tok=4",
    "model.moe_intermediate_size=256",
    "model.head_dim=64",
]
_DENSE = ["model.family=qwen3", "model.intermediate_size=1024", "model.head_dim=64"]
_LEARNS = "the recipe's learning rate"
STEPS = {
    "sparse": ("qwen3-moe-tiny", [*_SIZES, *_SPARSE, *_EQUAL]),
    "sparse, EP 2": ("qwen3-moe-tiny", [*_SIZES, *_SPARSE, *_EQUAL, "parallel.expert=2"]),
    f"sparse, {_LEARNS}": ("qwen3-moe-tiny", [*_SIZES, *_SPARSE]),
    f"sparse, EP 2, {_LEARNS}": ("qwen3-moe-tiny", [*_SIZES, *_SPARSE, "parallel.expert=2"]),
    "dense": ("llama2-tiny", [*_SIZES, *_EQUAL, *_DENSE]),
}
"""Recipes and overrides of models with as many active FLOPs a token."""
EXPERTS, PER_TOKEN, HIDDEN, WIDTH, TOKENS = 64, 8, 512, 256, 4096
OURS = "shardwise"
THEIRS = ("eager", "grouped_mm")


def measure(rounds: int) -> dict[str, Any]:
    """On one process: seconds of each round, all implementations in turn, and differences from transformers' eager."""
    import torch
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

    from shardwise.layers.experts import sum_of_experts

    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(TOKENS, HIDDEN, generator=generator) for _ in range(2))
    weights, experts = torch.randn(TOKENS, EXPERTS, generator=generator).softmax(-1).topk(PER_TOKEN)
    experts, order = experts.sort(dim=-1)
    weights = weights.gather(1, order)
    gate_up = 0.02 * torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator)
    down = 0.02 * torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator)

    def theirs(name: str) -> Callable[..., Any]:
        config = OlmoeConfig(
            hidden_size=HIDDEN, intermediate_size=WIDTH, num_experts=EXPERTS, num_experts_per_tok=PER_TOKEN
        )
        config._experts_implementation = name
        module = OlmoeExperts(config)

        def call(x: Any, weights: Any, gate_up: Any, down: Any) -> Any:
            given = {"gate_up_proj": gate_up, "down_proj": down}
            return torch.func.functional_call(module, given, (x, experts, weights))

        return call

    def ours(x: Any, weights: Any, gate_up: Any, down: Any) -> Any:
        return sum_of_experts(x, weights, experts, gate_up, down)

    calls = {OURS: ours, **{name: theirs(name) for name in THEIRS}}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    results: dict[str, list[Any]] = {}
    for number in range(rounds + 1):
        for name, call in calls.items():
            inputs = [tensor.clone().requires_grad_() for tensor in (x, weights, gate_up, down)]
            start = time.perf_counter()
            y = call(*inputs)
            y.backward(dy)
            if number:
                seconds[name].append(time.perf_counter() - start)
            results[name] = [y.detach(), *(tensor.grad for tensor in inputs)]
    differences = {
        name: max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(result, results["eager"], strict=True))
        for name, result in results.items()
    }
    return {"seconds": {name: times for name, times in seconds.items() if times}, "differences": differences}


def run(rounds: int) -> Report:
    found = ranks.run("experts", "measure", 1, rounds=max(rounds, 5))[0]
    medians = {name: statistics.median(times) for name, times in found["seconds"].items()}
    fastest = min(seconds for name, seconds in medians.items() if name != OURS)
    label = {OURS: OURS, **{name: f"transformers, {name}" for name in THEIRS}}
    rows = [
        [label[name], f"{seconds:.3f} s", f"{seconds / medians[OURS]:.2f}", f"{found['differences'][name]:.1e}"]
        for name, seconds in medians.items()
    ]
    by_rank = ranks.run("calibration", "stepped", 2, cells=list(STEPS.values()), rounds=max(rounds, 4))
    by_step = [list(map(max, zip(*times, strict=True))) for times in zip(*by_rank, strict=True)]
    found["steps"] = dict(zip(STEPS, by_step, strict=True))
    step = {name: statistics.median(times) for name, times in found["steps"].items()}
    of_steps = [[name, f"{seconds:.3f} s", f"{seconds / step['sparse']:.2f}"] for name, seconds in step.items()]
    ratios = [
        [loads, f"{step[f'sparse, EP 2{end}'] / step[f'sparse{end}']:.3f}"]
        for loads, end in {"nearly equal loads": "", _LEARNS: f", {_LEARNS}"}.items()
    ]
    of_loads = Table(("a step at EP 2 over one at EP 1", "times"), ratios)
    sizes = "2 blocks of width 512, 16 experts of width 256, 4 a token; dense: an MLP of width 1,024"
    columns = (
        f"{EXPERTS} experts, {PER_TOKEN} a token, width {HIDDEN} → {WIDTH}, {TOKENS:,} tokens, float32",
        "median",
        f"times {OURS}",
        "largest difference from eager",
    )
    return Report(
        "experts",
        "Experts of a block",
        [Table(columns, rows), Table((f"step of 2 ranks: {sizes}", "median", "times sparse"), of_steps), of_loads],
        found,
        [
            target(
                "a step at EP 2 over EP 1, equal loads",
                step["sparse, EP 2"] / step["sparse"],
                1.05,
                at_least=False,
            ),
            target("a sparse step over a dense one", step["sparse"] / step["dense"], 1.25, at_least=False),
            target(
                f"{OURS} over the fastest of transformers: times as fast", fastest / medians[OURS], 1.3, at_least=True
            ),
        ],
        [
            "Forward and backward, one thread, all implementations in turn in one process. transformers' `batched_mm` "
            "copies the weights of an expert for each row, 32 GiB here, and was left out.",
            "Steps of Qwen3 and Qwen3-MoE: 16 samples of 512 tokens, DP 2, AdamW, all models in turn in two processes. "
            "Nearly equal loads: the learning rate is 1e-9, so that routers stay as in their first step. At the "
            "recipe's own rate they collapse on random text, and the rank with more rows decides on the time. The "
            "asked ratio of EP 2 over EP 1, at most 1.05, is judged on nearly equal loads.",
        ],
    )
