"""Weights of Hugging Face folders as they are found on the hub: what is read, and what is refused with every reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.canonical_tensors import canonical_tensors
from shardwise.checkpoint.format.model_files import model_differences
from shardwise.checkpoint.load_weights import load_hugging_face
from shardwise.checkpoint.storage.root import Root
from shardwise.config import FamilyConfig, UserModelConfig, checked_model_section, config_from_sections, load_config
from shardwise.config.load import load_config_with_values
from shardwise.distributed.mesh import Mesh
from shardwise.models.build import build_model
from tests.hugging_face import CASES, described, export_hugging_face, save

Weights = dict[str, Tensor]
TRAIN = {"steps": 1, "global_batch": 1, "sequence_length": 8}


def build(model: FamilyConfig, **changes: Any) -> tuple[nn.Module, FamilyConfig, Mesh]:
    """A model of the configuration, drawn; `changes` are keys of it that differ."""
    config = config_from_sections({"model": model.model_dump() | changes, "train": TRAIN, "optimizer": {"lr": 1e-3}})
    mesh = Mesh(device="cpu")
    built = build_model(config, mesh.tp, sequence_parallel=False, dtype=torch.float32)
    return built, config.model, mesh


def load(folder: Path, **changes: Any) -> Weights:
    """The canonical tensors of a model into which the folder was loaded."""
    model, config, mesh = build(described(folder), **changes)
    load_hugging_face(model, config, mesh, folder)
    return dict(canonical_tensors(model))


def problems(folder: Path, **changes: Any) -> list[str]:
    """All problems of the folder, with its name left out; the model keeps its weights."""
    model, config, mesh = build(described(folder), **changes)
    before = {name: tensor.clone() for name, tensor in canonical_tensors(model)}
    with pytest.raises(ConfigError) as caught:
        load_hugging_face(model, config, mesh, folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in canonical_tensors(model))
    return [problem.replace(str(folder), "FOLDER") for problem in caught.value.problems]


def rewrite(folder: Path, change: Callable[[Weights], Weights]) -> Weights:
    """Write other weights in place of the folder's; returns those that it had."""
    weights = load_file(folder / "model.safetensors")
    save_file(change(dict(weights)), folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def rewrite_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def assert_equal(found: Weights, wanted: Weights) -> None:
    assert set(found) == set(wanted)
    differing = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not differing, differing


def buffers(pattern: str) -> Weights:
    return {pattern.format(layer): torch.ones(1, 1, 4, 4) for layer in range(2)}


def renamed(old: str, new: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name.replace(old, new): tensor for name, tensor in weights.items()}


def openai_gpt2(weights: Weights) -> Weights:
    """The hub's gpt2: no prefix, no head, a mask in each layer."""
    bare = renamed("transformer.", "")(weights)
    return bare | buffers("h.{}.attn.bias") | buffers("h.{}.attn.masked_bias")


def google_bert(weights: Weights) -> Weights:
    """The hub's bert-large-uncased: TensorFlow's names of norms, the tied decoder spelled out, and a buffer."""
    gammas = renamed("LayerNorm.weight", "LayerNorm.gamma")(weights)
    return renamed("LayerNorm.bias", "LayerNorm.beta")(gammas) | {
        "cls.predictions.decoder.weight": weights["bert.embeddings.word_embeddings.weight"].clone(),
        "cls.predictions.decoder.bias": weights["cls.predictions.bias"].clone(),
        "bert.embeddings.position_ids": torch.arange(24).unsqueeze(0),
    }


def pythia(weights: Weights) -> Weights:
    for name in ("bias", "masked_bias", "rotary_emb.inv_freq"):
        weights |= buffers(f"gpt_neox.layers.{{}}.attention.{name}")
    return weights


def llama_of_2023(dtype: torch.dtype) -> Callable[[Weights], Weights]:
    frequencies = buffers("model.layers.{}.self_attn.rotary_emb.inv_freq")
    return lambda weights: weights | {name: tensor.to(dtype) for name, tensor in frequencies.items()}


def with_copy(name: str, source: str) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {name: weights[source].clone()}


FOUND: dict[str, tuple[str, Callable[[Weights], Weights]]] = {
    "OpenAI's GPT-2": ("gpt", openai_gpt2),
    "Google's BERT": ("bert", google_bert),
    "Pythia": ("neox", pythia),
    "NeoX as transformers 5 names it": ("neox", renamed("embed_out", "lm_head")),
    "NeoX with its tied head": ("neox-tied", with_copy("embed_out.weight", "gpt_neox.embed_in.weight")),
    "Llama with buffers of a format that no weight has": ("llama", llama_of_2023(torch.complex64)),
    "Llama without its head": ("llama-tied", renamed("model.", "")),
    "Llama with its tied head alone": ("llama-tied", renamed("model.embed_tokens.weight", "lm_head.weight")),
}


@pytest.mark.parametrize("found", FOUND)
def test_spellings_of_the_hub(found: str, tmp_path: Path) -> None:
    case, spelled = FOUND[found]
    save(case, tmp_path)
    weights = rewrite(tmp_path, spelled)
    assert set(load_file(tmp_path / "model.safetensors")) != set(weights)
    assert_equal(load(tmp_path), weights)


def test_weights_of_another_dtype_and_in_shards(tmp_path: Path) -> None:
    save("neox", tmp_path)
    rewrite(tmp_path, lambda weights: {name: tensor.to(torch.float16) for name, tensor in weights.items()})
    weights = {name: tensor.float() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert_equal(load(tmp_path), weights)
    model = save("gpt", tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    assert_equal(load(tmp_path / "many"), load(tmp_path / "one"))
    next((tmp_path / "many").glob("model-00002-*")).unlink()
    assert problems(tmp_path / "many")[0].startswith("FOLDER lacks model-00002-of-")


def test_every_missing_unexpected_and_misshapen_tensor_in_one_error(tmp_path: Path) -> None:
    save("llama", tmp_path)

    def damage(weights: Weights) -> Weights:
        for layer in range(2):
            del weights[f"model.layers.{layer}.mlp.up_proj.weight"]
        del weights["lm_head.weight"]
        weights["score.weight"] = torch.zeros(3, 32)
        weights["model.layers.1.self_attn.k_proj.bias"] = torch.zeros(16)
        weights["model.norm.weight"] = torch.ones(31)
        weights["model.layers.0.mlp.down_proj.weight"] = torch.zeros(32, 48, dtype=torch.int8)
        weights["model.layers.1.mlp.down_proj.weight"] = torch.ones(32, 48).to(torch.float8_e8m0fnu)
        return weights

    rewrite(tmp_path, damage)
    assert problems(tmp_path) == [
        "checkpoint.load (FOLDER) lacks model.layers.{0…1}.mlp.up_proj.weight [48, 32]",
        "checkpoint.load (FOLDER) lacks lm_head.weight [61, 32]",
        "checkpoint.load (FOLDER) has model.layers.1.self_attn.k_proj.bias [16], which the model lacks",
        "checkpoint.load (FOLDER) has score.weight [3, 32], which the model lacks",
        "checkpoint.load (FOLDER): shape of model.norm.weight [31] must be [32]",
        "checkpoint.load (FOLDER): dtype of model.layers.1.mlp.down_proj.weight (F8_E8M0) must be float64, float32, "
        "float16 or bfloat16: quantized weights cannot be trained",
        "checkpoint.load (FOLDER): dtype of model.layers.0.mlp.down_proj.weight (I8) must be float64, float32, float16 "
        "or bfloat16: quantized weights cannot be trained",
    ]


@pytest.mark.parametrize(
    ("case", "copy", "source"),
    [
        ("llama-tied", "lm_head.weight", "model.embed_tokens.weight"),
        ("bert", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ],
)
def test_copies_of_a_tied_weight_that_differ_are_refused(case: str, copy: str, source: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    rewrite(tmp_path, lambda weights: weights | {copy: weights[source] + 1})
    assert problems(tmp_path) == [
        f"checkpoint.load (FOLDER): {copy} must equal {source}: the model has one weight for both"
    ]


def test_fields_of_the_config_that_disagree(tmp_path: Path) -> None:
    save("neox", tmp_path)
    rewrite_config(tmp_path, use_parallel_residual=False, layer_norm_eps=1e-6, hidden_act="relu")
    found = problems(tmp_path, use_parallel_residual=True, layer_norm_eps=1e-5, hidden_act="gelu")
    assert found == [
        "model.hidden_act (gelu) must be that of FOLDER/config.json (relu)",
        "model.layer_norm_eps (1e-05) must be that of FOLDER/config.json (1e-06)",
        "model.use_parallel_residual (True) must be that of FOLDER/config.json (False); "
        "model.config=FOLDER takes the folder's model, without these keys beside it",
    ]
    save("gpt", tmp_path)
    free = {"resid_pdrop": 0.0, "embd_pdrop": 0.3, "attn_pdrop": 0.2, "ffn_dropout": 0.1, "initializer_range": 0.1}
    assert_equal(load(tmp_path, **free, activation_function="gelu_pytorch_tanh"), load(tmp_path))
    save("llama", tmp_path / "llama")
    assert_equal(load(tmp_path / "llama", max_position_embeddings=4096), load(tmp_path / "llama"))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
# By what changes: the model, fields of its file, and the recipe's keys.
ROTATIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "base": ("llama", {}, {"rope_theta": 5e6}),
    "scaled": ("qwen3", {}, {"rope_scaling": YARN}),
    "scaled no more": ("llama", {"rope_scaling": YARN}, {"rope_scaling": None}),
    "share of a head": ("neox", {}, {"rotary_pct": 0.5}),
    "blocks": ("smollm3", {}, {"no_rope_layers": (0, 1)}),
}


@pytest.mark.parametrize("change", ROTATIONS)
def test_fault_07_a_stated_change_of_positions_keeps_the_weights_and_is_said(change: str, tmp_path: Path) -> None:
    case, fields, keys = ROTATIONS[change]
    save(case, tmp_path)
    rewrite_config(tmp_path, **({"rope_parameters": None} if fields else {}), **fields)
    before = described(tmp_path)
    assert_equal(load(tmp_path, **keys), load(tmp_path))
    ((key, value),) = keys.items()
    value, old = (list(v) if isinstance(v, tuple) else v for v in (value, getattr(before, key)))
    said = model_differences(checked_model_section(before.model_dump() | keys, "a recipe"), Root.of(tmp_path)).changes
    file = tmp_path / "config.json"
    assert said == (f"model.{key} ({value}) replaces that of {file} ({old}), with the same weights",)
    unstated = {name: inner for name, inner in before.model_dump().items() if name != key}
    assert model_differences(checked_model_section(unstated, "a recipe"), Root.of(tmp_path)).changes == ()


def test_fault_07_a_default_and_a_named_file_state_no_positions(tmp_path: Path) -> None:
    save("llama", tmp_path)
    rewrite_config(tmp_path, rope_parameters={**DYNAMIC, "rope_theta": 5e5})
    keys = {"rope_theta", "rope_scaling", "max_position_embeddings"}
    unstated = {name: value for name, value in described(tmp_path).model_dump().items() if name not in keys}
    found = model_differences(checked_model_section(unstated, "a recipe"), Root.of(tmp_path))
    assert found.changes == ()
    assert [problem.replace(str(tmp_path), "FOLDER") for problem in found.problems] == [
        "model.max_position_embeddings (2048) must be that of FOLDER/config.json (24)",
        "model.rope_theta (10000.0) must be that of FOLDER/config.json (500000.0)",
        f"model.rope_scaling (None) must be that of FOLDER/config.json ({DYNAMIC}); "
        "model.config=FOLDER takes the folder's model, without these keys beside it",
    ]
    # Else the base model's file would undo, with a line, how the positions of the loaded weights were extended.
    for name, theta in (("base", 1e4), ("run", 5e6)):
        save("llama", tmp_path / name)
        rewrite_config(tmp_path / name, rope_parameters={"rope_type": "default", "rope_theta": theta})
    run = Root.of(tmp_path / "run")
    (problem,) = model_differences(of_file(tmp_path / "base"), run).problems
    assert problem.startswith("model.rope_theta (10000.0) must be that of ")
    (change,) = model_differences(of_file(tmp_path / "base", "model.rope_theta=20000.0"), run).changes
    assert change.startswith("model.rope_theta (20000.0) replaces that of ")
    recipe = {"model": {"config": str(tmp_path / "base"), "rope_theta": 3e4}, "train": TRAIN, "optimizer": {"lr": 1e-3}}
    (change,) = model_differences(load_config_with_values(recipe, {}).model, run).changes
    assert change.startswith("model.rope_theta (30000.0) replaces that of ")


def of_file(folder: Path, *overrides: str) -> Any:
    """The model of a recipe that takes it from the file in a folder, beside weights."""
    return load_config("llama2-tiny", [f"model.config={folder}", f"checkpoint.load={folder}", *overrides]).model


def test_damaged_and_pickled_files_are_one_sentence(tmp_path: Path) -> None:
    model = save("gpt", tmp_path)
    path = tmp_path / "model.safetensors"
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    for content, text in (
        (path.read_bytes()[:-100], "is damaged: "),
        (pointer, "is a Git LFS pointer, not the weights: run `git lfs pull`"),
    ):
        path.write_bytes(content)
        (found,) = problems(tmp_path)
        assert found.startswith(f"FOLDER/model.safetensors {text}")
        assert "\n" not in found
    path.unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (found,) = problems(tmp_path)
    assert "opening a pickle can run any code that its author put there" in found


@pytest.mark.parametrize("case", CASES)
def test_all_families(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    assert_equal(load(tmp_path), load_file(tmp_path / "model.safetensors"))


class Own(nn.Module):
    """A user's model, of plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_a_model_of_ones_own_has_its_own_names(tmp_path: Path) -> None:
    config = UserModelConfig(family="my.package:Own", vocab_size=5, width=4)
    mesh, model, again = Mesh(device="cpu"), Own(), Own()
    export_hugging_face(model, config, mesh, tmp_path / "own")
    assert set(load_file(tmp_path / "own/model.safetensors")) == {"embedding.weight"}
    assert json.loads((tmp_path / "own/config.json").read_text())["width"] == 4
    load_hugging_face(again, config, mesh, tmp_path / "own")
    assert torch.equal(again.embedding.weight, model.embedding.weight)
    rewrite(tmp_path / "own", lambda weights: {"model.embedding.weight": weights["embedding.weight"]})
    with pytest.raises(ConfigError, match=r"lacks embedding\.weight"):
        load_hugging_face(again, config, mesh, tmp_path / "own")
