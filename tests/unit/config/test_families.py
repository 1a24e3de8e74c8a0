"""The families: what all of them answer, and what each refuses."""

from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.base.yaml_and_json import dump_yaml, parse_yaml
from shardwise.config import Config, ModelConfig, UserModelConfig, check_layout, config_from_sections
from tests.rows import rows_of

ROWS = rows_of(__file__)

SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
OWN = {"family": "my.package:Model", "vocab_size": 512}


def config_of(model: dict[str, Any], **sections: dict[str, Any]) -> Config:
    values: dict[str, Any] = {
        "model": model,
        "train": {"steps": 1, "global_batch": 8, "sequence_length": 64},
        "optimizer": {"lr": 1e-3},
    }
    return config_from_sections(
        {key: {**values.get(key, {}), **sections.get(key, {})} for key in {**values, **sections}}
    )


def model_of(family: str, **changes: Any) -> ModelConfig:
    return config_of({"family": family, **SIZES, **changes}).model


def problems(model: dict[str, Any], world: int = 1, **sections: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_layout(config_of(model, **sections), world)
    return caught.value.problems


def test_positions_windows_other_names_of_keys_and_keys_of_own_models() -> None:
    every_fourth = model_of("smollm3", num_hidden_layers=6)
    assert [every_fourth.rotates(layer) for layer in range(6)] == [True, True, True, False, True, True]
    assert model_of("smollm3", num_hidden_layers=6, no_rope_layers=[1, 1, 1, 0, 1, 1, 0, 1]) == every_fourth
    assert model_of("smollm3", num_hidden_layers=6, no_rope_layers=None) == every_fourth
    for changes, windows in (
        ({"sliding_window": 3}, [3, 3, 3, 3]),
        ({"sliding_window": 3, "layer_types": 2}, [3, None, 3, None]),
        ({"sliding_window": None}, [None] * 4),
    ):
        model = model_of("qwen2", num_hidden_layers=4, **changes)
        assert [model.window(layer) for layer in range(4)] == windows
    names = {"n_embd": 64, "n_inner": 256, "n_layer": 2, "n_head": 4, "n_positions": 64, "hidden_act": "gelu"}
    model = config_of({"family": "gpt", "vocab_size": 512, **names, "layer_norm_eps": 1e-4}).model
    assert model == model_of("gpt", activation_function="gelu", layer_norm_epsilon=1e-4)
    assert model_of("gpt", n_embd=64) == model_of("gpt")
    assert problems({"family": "gpt", **SIZES, "n_embd": 32, "n_head": 2}) == [
        "model.n_embd (32) and model.hidden_size (64) are one quantity: give one of them",
        "model.n_head (2) and model.num_attention_heads (4) are one quantity: give one of them",
    ]
    assert model_of("gpt", intermediate_size=None).intermediate_size == 256, "four times as wide"
    assert model_of("gpt_neox", rotary_emb_base=5000) == model_of("gpt_neox", rope_theta=5000)
    config = config_of({**OWN, "depth": 3, "nested": {"width": 5}})
    assert isinstance(config.model, UserModelConfig)
    assert config.model.model_dump()["nested"] == {"width": 5}
    assert (config.model.objectives, config.model.causal, config.model.has_dropout) == (("lm",), True, False)
    assert config_from_sections(parse_yaml(dump_yaml(config.model_dump()), "test")) == config
    assert check_layout(config_of(OWN, parallel={"tensor": 7}), 7).tensor == 7


@pytest.mark.parametrize(("family", "changes", "problem"), ROWS["refused"])
def test_what_a_family_refuses(family: str, changes: dict[str, Any], problem: str) -> None:
    found = problems({"family": family, **SIZES, **changes})
    assert len(found) == 1, found
    assert found[0].startswith(problem)


@pytest.mark.parametrize(("changes", "problem"), ROWS["own"])
def test_own_models_are_held_to_what_they_say(changes: dict[str, Any], problem: str) -> None:
    found = problems({**OWN, **changes}, world=2, parallel={"tensor": 2})
    assert len(found) == 1, found
    assert found[0].startswith(problem)


def test_masking_belongs_to_bert_and_what_a_configuration_lacks_is_named() -> None:
    masking = {"max_predictions": 20, "masked_fraction": 0.2}
    assert check_layout(config_of({"family": "bert", **SIZES}, data=masking), 1)
    found = problems({"family": "gpt", **SIZES}, data=masking)
    assert [text.split(" must")[0] for text in found] == ["data.max_predictions (20)", "data.masked_fraction (0.2)"]
    assert problems({"family": "bert", **SIZES}, data={"max_predictions": 65}) == [
        "data.max_predictions (65) must be at most train.sequence_length (64)"
    ]
    assert problems(SIZES) == [
        "model.family is missing (the architecture: llama, mistral, qwen2, qwen3, olmo2, olmo3, smollm3, gemma3, "
        "olmoe, qwen3_moe, mixtral, glm4_moe, gpt, gpt_neox or bert, or package.module:Class for your own)"
    ]
    assert config_of(OWN, checkpoint={"load": "gpt2", "revision": "main"}).checkpoint.revision == "main"
    assert problems(OWN, checkpoint={"revision": "main"}) == [
        "checkpoint.revision ('main') needs checkpoint.load, the hub id"
    ]
