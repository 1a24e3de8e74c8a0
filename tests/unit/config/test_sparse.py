"""Sparse families in a configuration: what is refused, which weights are read, and what a rank of experts holds."""

from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.format.manifest import TensorEntry
from shardwise.checkpoint.format.stored_tensors import find_sources
from shardwise.config import Config, check_layout, config_from_sections, load_config
from shardwise.config.hugging_face import from_hugging_face
from shardwise.estimates.memory import expected_memory
from shardwise.pipeline.partition import partition_by_rank


def glm(tensor: int = 1, **keys: Any) -> Config:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    return config_from_sections(
        {
            "model": {"family": "glm4_moe", **sizes, **heads, **keys},
            "train": {"steps": 1, "global_batch": 4, "sequence_length": 8},
            "data": {"dataset": "tiny"},
            "optimizer": {"lr": 0.001},
            "parallel": {"tensor": tensor},
        }
    )


def test_what_a_rank_has_of_experts() -> None:
    with pytest.raises(ConfigError) as caught:
        check_layout(glm(tensor=4), 4)
    assert list(caught.value.problems) == [
        "parallel.tensor (4) must divide model.moe_intermediate_size (6): valid degrees are 1 and 2"
    ]
    # Without experts nothing has this width.
    assert check_layout(glm(tensor=4, first_k_dense_replace=2), 4).tensor == 4
    config = load_config("olmoe-tiny", ["parallel.expert=4"])
    layout = check_layout(config, 4)
    experts = 8 * 8 // 4 * 3 * 64 * 64
    ((_, held),) = partition_by_rank(config, layout)
    found = expected_memory(config, layout)
    # Two moments in float32 of each element; ZeRO-1 cuts those that all four ranks have.
    assert found.optimizer == pytest.approx(8 * (experts + (held - experts) / 4), rel=0.001)
    ((_, alone),) = partition_by_rank(load_config("olmoe-tiny"), check_layout(load_config("olmoe-tiny"), 4))
    assert alone == held + 3 * experts


def test_fields_and_blocks_of_deepseek_that_this_family_lacks() -> None:
    for field, same, other in [("scoring_func", "sigmoid", "softmax"), ("moe_layer_freq", 1, 2)]:
        values = {"model_type": "glm4_moe", field: same}
        assert from_hugging_face(values, "it")["family"] == "glm4_moe"
        with pytest.raises(ConfigError, match="is not supported: only"):
            from_hugging_face({**values, field: other}, "it", ignore=[field])
    shapes = {"model.layers.0.mlp.up_proj.weight": (4, 2)}
    further = {"model.layers.1.eh_proj.weight": (2, 4), "model.layers.1.mlp.up_proj.weight": (4, 2)}
    stored: Any = {name: TensorEntry(shape, "F32", ()) for name, shape in {**shapes, **further}.items()}
    assert find_sources("it", "glm4_moe", shapes, stored) == ({name: [name] for name in shapes}, [])
    # A model that has this block itself is another model.
    _, problems = find_sources("it", "glm4_moe", {**shapes, "model.layers.1.mlp.up_proj.weight": (4, 2)}, stored)
    assert problems == ["it has model.layers.1.eh_proj.weight [2, 4], which the model lacks"]


OBJECTIVES: list[tuple[dict[str, Any], str, str]] = [
    ({"family": "llama"}, "router_z_loss", "llama, which has no experts"),
    ({"family": "a.b:Model", "vocab_size": 64}, "router_batch_loss", "a.b:Model, whose routers nobody knows"),
    ({}, "router_pooled_loss", "glm4_moe, for whose scores transformers defines no balance loss: set optimizer.router_"
     "batch_loss or optimizer.router_sequence_loss"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "key", "why"), OBJECTIVES)
def test_an_objective_needs_routers_for_which_it_is_defined(model: dict[str, Any], key: str, why: str) -> None:
    plain = glm().model_dump(exclude_unset=True)
    if model.get("family") == "llama":
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        model = model | {name: plain["model"][name] for name in sizes}
    values = {**plain, "model": model or plain["model"], "optimizer": {"lr": 0.001, key: 0.01}}
    with pytest.raises(ConfigError) as caught:
        check_layout(config_from_sections(values), 1)
    assert list(caught.value.problems) == [f"optimizer.{key} (0.01) must be 0 with model.family {why}"]
