"""Objectives of routers: the formula on the whole batch, one curve at every layout, and transformers' own number."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.config import Config
from shardwise.config.routing import Routing
from tests.dist.test_experts import CASES, SIZES
from tests.dist.training import make_config

COEFFICIENTS = {"sequence": 0.05, "batch": 0.07, "pooled": 0.03, "z": 0.002}
KEYS = {f"router_{name}_loss": value for name, value in COEFFICIENTS.items()}
SAMPLES = 8


def configuration(sections: dict[str, dict[str, Any]], family: str = "qwen3_moe") -> Config:
    """Blocks 2 and 3, which are a stage of a pipeline of two ranks, have no experts."""
    model = {"family": family, **SIZES, **CASES[family], "vocab_size": 131, "num_hidden_layers": 4}
    model |= {"initializer_range": 0.1} | ({"mlp_only_layers": [2, 3]} if family == "qwen3_moe" else {})
    train = {"micro_batch": 1, "global_batch": SAMPLES, "steps": 4, **sections.get("train", {})}
    optimizer = {**(KEYS if family == "qwen3_moe" else {**KEYS, "router_pooled_loss": 0}), "lr": 0.01}
    return make_config(
        **{**sections, "train": train, "model": model, "optimizer": optimizer | sections.get("optimizer", {})}
    )


def objectives(routed: list[tuple[Tensor, Tensor]], routing: Routing, samples: int) -> dict[str, Tensor]:
    """The formulas, on the logits `[M, N]` and choices `[M, k]` of the whole batch in each layer."""
    found: dict[str, list[Tensor]] = {"sequence": [], "batch": [], "z": []}
    all_rows, all_shares = [], []
    for logits, experts in routed:
        shares = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
        shares = shares / shares.sum(-1, keepdim=True)
        chosen = F.one_hot(experts, routing.experts).sum(1).float()
        by_sample = []
        for sample in range(samples):
            f = chosen[sample::samples].mean(0) * routing.experts / routing.per_token
            by_sample.append((f * shares[sample::samples].mean(0)).sum())
        found["sequence"].append(torch.stack(by_sample).mean())
        found["batch"].append((chosen.mean(0) * shares.mean(0)).sum() * routing.experts / routing.per_token)
        found["z"].append((logits.exp().sum(-1).log() ** 2).mean())
        all_rows.append(chosen)
        all_shares.append(shares)
    means = {name: torch.stack(values).mean() for name, values in found.items()}
    pooled = (torch.cat(all_rows).mean(0) * torch.cat(all_shares).mean(0)).sum() * routing.experts
    return means | {"pooled": pooled}
