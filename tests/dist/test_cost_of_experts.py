"""What ranks that divide experts hold and send, against what is computed before."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.config import Config, check_layout
from shardwise.config.routing import Routing
from shardwise.estimates.communication import step_transfers, wire_bytes
from shardwise.estimates.memory import memory_by_rank
from shardwise.layers import experts
from tests.dist.test_memory import ShardedStep, measure_sharded
from tests.dist.training import make_config, sizes

SIZES = sizes(1000, 256, 128, layers=4, heads=4, positions=64)
FAMILIES: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64,
        "num_key_value_heads": 2, "norm_topk_prob": True, "mlp_only_layers": [1], "intermediate_size": 352,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64,
        "num_key_value_heads": 2, "intermediate_size": 352,
    },
}  # fmt: skip


def by_turns(routing: Routing, scores: Tensor) -> Tensor:
    """Experts of each token by turns, so that all get equally many rows of each rank."""
    rows = torch.arange(len(scores) * routing.per_token, device=scores.device)
    return (rows % routing.experts).view(len(scores), -1).sort(dim=-1).values


def of_first_rank(routing: Routing, scores: Tensor) -> Tensor:
    """The first experts for all tokens."""
    return torch.arange(routing.per_token, device=scores.device).expand(len(scores), -1).contiguous()


def measured(config: Config, is_balanced: bool = True) -> ShardedStep:
    choose = experts.choose
    experts.choose = by_turns if is_balanced else of_first_rank
    try:
        return measure_sharded(config)
    finally:
        experts.choose = choose


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("olmoe", {"zero": 0}, {"parallel": {"expert": 1}}),
    ("olmoe", {"zero": 0}, {"parallel": {"expert": 4}}),
    ("olmoe", {"zero": 1}, {"parallel": {"expert": 2}}),
    ("olmoe", {"zero": 1}, {"parallel": {"expert": 4}, "precision": {"mode": "mixed"}}),
    ("qwen3_moe", {"zero": 2}, {"parallel": {"expert": 2}, "precision": {"mode": "mixed"}}),
    ("mixtral", {"zero": 3}, {"parallel": {"expert": 2}}),
    ("mixtral", {"zero": 3}, {"parallel": {"expert": 4}, "precision": {"mode": "mixed"}}),
    ("glm4_moe", {"zero": 1}, {"parallel": {"expert": 2, "tensor": 2, "sequence": True}}),
    ("glm4_moe", {"zero": 1}, {"parallel": {"expert": 2, "tensor": 2}, "train": {"recompute": "full"}}),
    ("qwen3_moe", {"zero": 1}, {"parallel": {"expert": 4, "context": 2}}),
    ("olmoe", {"zero": 1}, {"parallel": {"expert": 2, "replicate": 2}}),
    ("mixtral", {"zero": 3}, {"parallel": {"expert": 2, "pipeline": 2}}),
]


def configuration(family: str, optimizer: dict[str, Any], sections: dict[str, dict[str, Any]]) -> Config:
    train = {"global_batch": 8, "micro_batch": 1, "sequence_length": 16} | sections.get("train", {})
    others = {name: values for name, values in sections.items() if name != "train"}
    model = SIZES | {"family": family} | FAMILIES[family]
    return make_config(model=model, optimizer={"bucket_mib": None} | optimizer, train=train, **others)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_holds_and_sends_what_cost_has(case: tuple[str, dict[str, Any], dict[str, Any]], ranks: Any) -> None:
    config = configuration(*case)
    layout = check_layout(config, 4)
    memory = memory_by_rank(config, layout)
    assert memory is not None
    for rank, found in enumerate(ranks(4).run(measured, config)):
        place = layout.coordinates(rank)
        estimate = memory[place["pp"]]
        data_rank = place["dp"] * layout.context + place.get("cp", 0)
        transfers = step_transfers(config, layout, pipeline_rank=place["pp"], data_rank=data_rank, tensor_rank=place["tp"])
        planned = wire_bytes(transfers)
        assert planned is not None
        print(rank, f"{estimate.total / found.peak - 1:+.2%}", found.peak, estimate)
        for key in sorted(set(planned) | set(found.sent)):
            print("  ", key, planned.get(key), found.sent.get(key), found.calls.get(key))
        print((found.parameters, found.gradients), (estimate.parameters, estimate.gradients))
