"""Hugging Face's `config.json` in both directions, against transformers' own configuration classes."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from shardwise.base.errors import ConfigError, listing
from shardwise.config import FamilyConfig, config_from_sections, load_config
from shardwise.config.hugging_face import _families_by_model_type, from_hugging_face, read_hugging_face, to_hugging_face
from tests.rows import rows_of
from tests.unit.config.hub import FILES, GPT2, LLAMA2_7B, MISTRAL_7B, QWEN2_5_7B, SMOLLM3_3B

ROWS = rows_of(__file__)

REST = {"train": {"steps": 1, "global_batch": 1, "sequence_length": 8}, "optimizer": {"lr": 1e-3}}
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99}
KINDS = listing(_families_by_model_type(), "or")


def model_of(values: dict[str, Any]) -> FamilyConfig:
    return config_from_sections({"model": from_hugging_face(values, "config.json"), **REST}).model


def problems(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_hugging_face(values, "config.json")
    return [problem.removeprefix("config.json: ") for problem in caught.value.problems]


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}


def reread(model: FamilyConfig, folder: Path) -> Any:
    """What transformers reads of the file that we write."""
    (folder / "config.json").write_text(json.dumps(to_hugging_face(model)))
    return transformers.AutoConfig.from_pretrained(folder)


def meaning(config: Any) -> dict[str, Any]:
    """What is left when origin and token ids, which are not the model's, are taken away."""
    outside = ["architectures", "dtype", "transformers_version", "_name_or_path", "bos_token_id", "eos_token_id"]
    # Other programs read these beside `n_positions` and `layer_types`, which transformers reads.
    outside += ["n_ctx", "sliding_window_pattern", "_sliding_window_pattern"]
    return {key: value for key, value in config.to_dict().items() if key not in outside}


def theirs(name: str) -> Any:
    kind, keys = ROWS["configs"][name]
    return getattr(transformers, f"{kind}Config")(**keys)


@pytest.mark.parametrize("name", ROWS["configs"])
def test_round_trip_through_transformers(name: str, tmp_path: Path) -> None:
    config = theirs(name)
    model = model_of(config.to_dict())
    assert meaning(reread(model, tmp_path)) == meaning(config)
    written = to_hugging_face(model)
    assert model_of(written) == model
    written.pop("rope_parameters", None)
    assert model_of(written) == model, "transformers 4 reads the older spellings"
    # Every way that transformers writes is read.
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert model_of(written) == model_of(config.to_diff_dict()) == model
    assert read_hugging_face(tmp_path) == read_hugging_face(tmp_path / "config.json")


def test_two_ways_to_say_the_same_and_what_other_programs_read() -> None:
    assert to_hugging_face(model_of(theirs("gpt2").to_dict()))["n_ctx"] == 1024
    gemma = without(theirs("gemma3").to_dict(), "sliding_window_pattern", "_sliding_window_pattern")
    sliding, full = "sliding_attention", "full_attention"
    for layers, types, interval in (
        (6, None, 6),
        (3, [sliding, sliding, sliding], 4),
        (3, [full, sliding, full], None),
    ):
        written = to_hugging_face(model_of({**gemma, "num_hidden_layers": layers, "layer_types": types}))
        assert written.get("sliding_window_pattern") == interval
        if interval is not None:
            alone = transformers.Gemma3TextConfig(num_hidden_layers=layers, sliding_window_pattern=interval)
            assert alone.layer_types == list(written["layer_types"]), "by the interval alone"
    mixtral = {"model_type": "mixtral"}
    assert "head_dim" not in to_hugging_face(model_of(mixtral))
    scaled = mixtral | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert to_hugging_face(model_of(scaled))["head_dim"] == 128, "transformers scales no null"
    # No window in Mistral, whose own default is one, and no field that a class lacks where it says nothing.
    assert to_hugging_face(model_of(MISTRAL_7B))["sliding_window"] is None
    assert "head_dim" not in to_hugging_face(model_of(QWEN2_5_7B))
    assert to_hugging_face(model_of({**QWEN2_5_7B, "head_dim": 64}))["head_dim"] == 64
    neuronx = {"sequence_parallel_enabled": False, "selective_checkpoint_enabled": True, "move_model_to_device": True}
    bert, blocks = {"model_type": "bert"}, without(SMOLLM3_3B, "no_rope_layers")
    for values, same in (
        ({**GPT2, "torch_dtype": "float16"}, GPT2),
        ({**without(GPT2, "n_embd", "n_head"), "hidden_size": 768, "num_attention_heads": 12}, GPT2),
        ({**LLAMA2_7B, "pad_token_id": 0, **neuronx}, LLAMA2_7B),
        ({**LLAMA2_7B, "hidden_act": "swish"}, LLAMA2_7B),
        (bert | {"hidden_act": "gelu_python"}, bert),
        (blocks, SMOLLM3_3B),
        (blocks | {"no_rope_layer_interval": 6}, {**SMOLLM3_3B, "no_rope_layers": [1, 1, 1, 1, 1, 0] * 6}),
        ({**LLAMA2_7B, "rope_scaling": {"factor": 2.0}}, LLAMA2_7B),  # fault 10: without a type it scales nothing
        ({**LLAMA2_7B, "rope_parameters": {"rope_theta": 1e4, "factor": 2}}, LLAMA2_7B),
    ):
        assert model_of(values) == model_of(same), values
    # Null heads are as many as those of queries, where an absent field means another number.
    assert model_of(MISTRAL_7B | {"num_key_value_heads": None}).num_key_value_heads == 32
    assert model_of({"model_type": "smollm3", "num_key_value_heads": None}).num_key_value_heads == 16


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "GPT2", "Bert"])
def test_an_absent_field_has_hugging_faces_default(name: str) -> None:
    config_class = getattr(transformers, f"{name}Config")
    model = model_of({"model_type": config_class.model_type})
    assert model == model_of(config_class().to_dict())
    if name == "Llama":
        assert (model.norm_eps, load_config("llama2-tiny").model.norm_eps) == (1e-6, 1e-5), "it is not ours"


@pytest.mark.parametrize("values", FILES.values(), ids=FILES)
def test_files_of_the_hub(values: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(values)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(values))
    expected = meaning(transformers.AutoConfig.from_pretrained(tmp_path / "theirs"))
    unread = ROWS["unread"][model.family]
    assert without(meaning(reread(model, tmp_path)), *unread) == without(expected, *unread)


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("Qwen3-30B-A3B", {"rope_theta": 1000000.0, "num_experts": 128, "num_local_experts": 128}),
        ("Mixtral-8x7B-v0.1", {"rope_theta": 1000000.0, "num_local_experts": 8}),
        ("GLM-4.5-Air", {"rope_theta": 1000000, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 0}),
    ],
)
def test_a_sparse_family_writes_what_other_programs_need(name: str, needed: dict[str, Any]) -> None:
    """mlx-lm 0.32 reads the rotary fields at the top alone, and llama.cpp makes a block of each predicted token."""
    written = to_hugging_face(model_of(FILES[name]))
    assert {key: written[key] for key in needed} == needed
    assert model_of(written) == model_of(FILES[name])


@pytest.mark.parametrize("scaling", ROWS["rope_scalings"], ids=lambda scaling: scaling["rope_type"])
@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_rope_in_old_and_new_spelling(kind: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    theta, sizes = 20000.0, {"model_type": kind, "max_position_embeddings": 1024, **SMALL}
    whole = kind != "gpt_neox"
    theta_field = "rope_theta" if whole else "rotary_emb_base"
    legacy = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    part = {} if whole else {"partial_rotary_factor": 0.5}
    old_part = {} if whole else {"rotary_pct": 0.5}
    new = model_of({**sizes, "rope_parameters": {**scaling, "rope_theta": theta, **part}})
    assert model_of({**sizes, theta_field: theta, **old_part, "rope_scaling": scaling}) == new
    assert model_of({**sizes, theta_field: theta, **old_part, "rope_scaling": legacy}) == new
    assert new.rotary_dim == (16 if whole else 8)
    read = reread(new, tmp_path)
    assert read.rope_parameters == {**scaling, "rope_theta": theta, **part}


def test_unsupported_fields_and_files_that_are_no_configuration(tmp_path: Path) -> None:
    unsupported = {
        "scale_attn_by_inverse_layer_idx": True,
        "activation_function": "quick_gelu",
        "alibi": True,
        "quantization_config": {"bits": 4},
    }
    assert problems(GPT2 | unsupported) == [
        'activation_function ("quick_gelu") is not supported: only "gelu", "gelu_new", "gelu_fast", '
        '"gelu_pytorch_tanh" or "relu"',
        "scale_attn_by_inverse_layer_idx (true) is not supported: only false",
        "alibi (true) is not supported: only false",
        'quantization_config ({"bits": 4}) is not supported: only null',
    ]
    assert problems({**GPT2, "hidden_size": 512}) == ["hidden_size (512) and n_embd (768) must be equal"]
    assert problems({**GPT2, "n_ctx": 512}) == ["n_ctx (512) and n_positions (1024) must be equal"]
    for name in ("rope_scaling", "rope_parameters"):  # fault 10: one error, and not another for what it lacks
        told = [f'{name} ("linear") must be an object']
        assert problems({**LLAMA2_7B, "rope_theta": 5e5, name: "linear"}) == told
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "cut.json").write_text('{"model_type": ')
    (tmp_path / "list.json").write_text("[]")
    for path, told in (
        (tmp_path, r"the folder .* holds no config\.json"),
        (tmp_path / "none", r"there is no file or folder .*none"),
        (tmp_path / "binary.json", r"binary\.json cannot be read"),
        (tmp_path / "cut.json", r"cut\.json is not JSON: Expecting value \(line 1, column 16\)"),
        (tmp_path / "list.json", r"list\.json must hold a JSON object"),
    ):
        with pytest.raises(ConfigError, match=told):
            read_hugging_face(path)


@pytest.mark.parametrize(("base", "fields", "problem"), ROWS["not_supported"])
def test_what_is_not_supported(base: str | None, fields: dict[str, Any], problem: str) -> None:
    (found,) = problems(FILES.get(base or "", {}) | fields)
    assert found.startswith(problem.replace("KINDS", KINDS))


def means_nothing(kind: str, fields: dict[str, Any]) -> bool:
    plain = {"model_type": kind} | dict.fromkeys(_families_by_model_type()[kind].config_file.absent)
    return from_hugging_face(plain | fields, "config.json") == from_hugging_face(plain, "config.json")


@pytest.mark.parametrize("kind", _families_by_model_type())
def test_fault_08_notes_of_a_published_file_mean_nothing(kind: str) -> None:
    """Names, tools, text generation, kernels and other heads; all by their kinds."""
    notes = {
        "is_llama_config": True, "transformers.js_config": {"kv_cache_dtype": {}}, "unsloth_fixed": True,
        "custom_pipelines": {"text-generation": {"impl": "x.Y"}}, "n_special": 0, "predict_special_tokens": True,
        "_num_labels": 2, "_flash_attn_2_enabled": True, "max_sequence_length": 2048, "eos_token_ids": 0,
        "mask_token_id": 4, "min_p": 0.1, "summary_type": "cls_index", "use_flash_attn": True, "xla_device": True,
        "embedding_multiplier": 1, "num_local_experts": None,
    }  # fmt: skip
    assert means_nothing(kind, notes)


def test_fault_08_the_user_says_which_fields_mean_nothing(tmp_path: Path) -> None:
    """Recorded in the configuration, and only for fields of which nothing is known."""
    file, notes = tmp_path / "config.json", {"notes": 1, "more notes": 2}
    file.write_text(json.dumps({**LLAMA2_7B, **notes, "vision_config": {}}))
    section = {"config": str(tmp_path), "ignore": ["notes"]}
    with pytest.raises(ConfigError) as caught:
        config_from_sections({"model": section, **REST})
    first, second = [problem.partition("config.json: ")[2] for problem in caught.value.problems]
    assert first == "vision_config ({}) is not supported: only null"
    assert second.endswith("""set 'model.ignore=[notes,"more notes"]'""")
    file.write_text(json.dumps({**LLAMA2_7B, **notes}))
    config = config_from_sections({"model": section | {"ignore": [*notes]}, **REST})
    model = model_of(LLAMA2_7B)
    assert config.model.model_dump(mode="json") == model.model_dump(mode="json") | {"ignore": [*notes]}
    assert config_from_sections(config.model_dump(mode="json")) == config
    assert "ignore" not in to_hugging_face(model)
    for name in ["embedding_multiplier", "hidden_size", "rope_theta", "sliding_window", "pretraining_tp"]:
        with pytest.raises(
            ConfigError, match=f"model.ignore must not name {name}, which changes what a model computes"
        ):
            from_hugging_face({**LLAMA2_7B, name: 3}, "config.json", [name])


def test_fault_09_the_file_of_the_model_says_where_its_special_tokens_are(tmp_path: Path) -> None:
    """Unless the loaded weights or the user say it."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA2_7B))
    named = {"model": {"config": str(tmp_path)}, **REST}
    config = config_from_sections(named)
    assert config.companions == str(tmp_path)
    assert config.recorded()["checkpoint"]["companions"] is None, "the place may be gone when the run is resumed"
    assert config_from_sections(config.recorded()).companions is None
    assert config_from_sections(config.recorded()) == config
    assert config_from_sections(named | {"checkpoint": {"load": "weights"}}).companions is None
    assert config_from_sections(named | {"checkpoint": {"companions": "other"}}).companions == "other"
    assert load_config("llama2-tiny").companions is None


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"layer_norm_eps": 1e-5, "type_vocab_size": 2, "n_embd": 64, "resid_pdrop": 0.1}),
        ("qwen2", {"attention_bias": True, "pretraining_tp": 2}),
        ("gpt2", {"rope_theta": 5e5, "num_key_value_heads": 4}),
    ],
)
def test_fault_08_a_field_that_only_another_family_reads_can_be_left_out(kind: str, fields: dict[str, Any]) -> None:
    plain = {"model_type": kind}
    with pytest.raises(ConfigError, match=r"set model\.ignore=\[") as caught:
        from_hugging_face(plain | fields, "config.json")
    (problem,) = caught.value.problems
    assert problem.endswith(f"set model.ignore=[{','.join(fields)}]")
    section = from_hugging_face(plain | fields, "config.json", list(fields))
    assert section == from_hugging_face(plain, "config.json") | {"ignore": list(fields)}
