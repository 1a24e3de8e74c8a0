"""A model as a Hugging Face folder: what is in it, and that `transformers` makes the same model of it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from shardwise.checkpoint.canonical_tensors import canonical_tensors
from shardwise.checkpoint.export_model import export_hugging_face
from shardwise.checkpoint.storage.root import StoreError
from shardwise.config import LlamaConfig
from shardwise.data.tokens.tokenizer import train_tokenizer
from shardwise.distributed.mesh import Mesh
from shardwise.models.llama import Llama

MODEL: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "wide-heads": {"head_dim": 16},
    "llama3": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}


def build(dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Llama, LlamaConfig, Mesh]:
    config, mesh = LlamaConfig.model_validate(MODEL | changes), Mesh(device="cpu")
    model = Llama(config, mesh.tp, seed=3, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    return model, config, mesh


def stored(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no mapping
                assert name not in found, f"{name} is in two files"
                found[name] = file.get_tensor(name)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_computes_the_same_logits(variant: str, tmp_path: Path) -> None:
    model, config, mesh = build(**VARIANTS[variant])
    export_hugging_face(model, config, mesh, tmp_path / "model")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    problems = {kind: found for kind, found in report.items() if found}
    assert not problems, f"transformers misses or ignores weights: {problems}"
    ids = torch.arange(40).view(20, 2) * 3 % 131
    with torch.no_grad():
        ours = model.logits(ids).transpose(0, 1)
        logits = theirs(ids.T).logits
    error = (logits - ours).norm() / ours.norm()
    assert error <= 1e-5, f"{variant}: transformers' logits are off by {error:.1e} of their norm"


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    model, config, mesh = build(tie_word_embeddings=True)
    export_hugging_face(model, config, mesh, tmp_path / "model")
    assert "lm_head.weight" not in stored(tmp_path / "model")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "model").tie_word_embeddings is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_config_is_the_models(dtype: torch.dtype, tmp_path: Path) -> None:
    model, config, mesh = build(dtype, attention_bias=True)
    export_hugging_face(model, config, mesh, tmp_path / "model")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    assert theirs.architectures == ["LlamaForCausalLM"]
    assert theirs.dtype == dtype, "transformers would load the weights in another dtype"
    for key in (*(set(MODEL) - {"family"}), "head_dim", "attention_bias", "rms_norm_eps", "hidden_act"):
        assert getattr(theirs, key) == getattr(config, key), f"{key} differs in config.json"
    assert all(tensor.dtype == dtype for tensor in stored(tmp_path / "model").values())


def test_shards_have_an_index_and_stay_small(tmp_path: Path) -> None:
    model, config, mesh = build()
    limit = 20_000
    export_hugging_face(model, config, mesh, tmp_path / "model", max_shard_bytes=limit)
    folder = tmp_path / "model"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(names) >= 4
    assert names == [f"model-{i + 1:05}-of-{len(names):05}.safetensors" for i in range(len(names))]
    assert sorted(set(index["weight_map"].values())) == names
    whole = dict(canonical_tensors(model))
    found = stored(folder)
    assert set(index["weight_map"]) == set(found) == set(whole)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor), f"{name} changed on its way to disk"
    for shard in names:
        members = [found[name].nbytes for name, place in index["weight_map"].items() if place == shard]
        assert sum(members) <= limit or len(members) == 1, f"{shard} holds {sum(members)} bytes, at most {limit}"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in whole.items())


def test_the_tokenizer_comes_along_and_its_special_tokens_are_the_models(tmp_path: Path) -> None:
    """Without them transformers would end a text at Llama 2's `</s>`, id 2: in this vocabulary a letter."""
    model, config, mesh = build(vocab_size=300)
    text = [path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    tokenizer = train_tokenizer(text, 300, "json")
    tokenizer.save(tmp_path / "tokenizer")
    special = [json.loads((tmp_path / "tokenizer" / name).read_text()) for name in COMPANIONS]
    for values in special:
        values["bos_token"] = {"content": "a", "lstrip": False}
    for name, values in zip(COMPANIONS, special, strict=True):
        (tmp_path / "tokenizer" / name).write_text(json.dumps(values))
    export_hugging_face(model, config, mesh, tmp_path / "model", tokenizer=tmp_path / "tokenizer")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", *COMPANIONS,
    }  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for found in (theirs.config, theirs.generation_config):
        assert found.eos_token_id == tokenizer.end_of_document_id
        assert found.bos_token_id == tokenizer.token_id("a")


def test_without_a_tokenizer_no_token_is_special(tmp_path: Path) -> None:
    model, config, mesh = build()
    export_hugging_face(model, config, mesh, tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert theirs.config.eos_token_id is theirs.config.bos_token_id is None
    assert theirs.generation_config.eos_token_id is None


def test_the_folder_appears_complete_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config, mesh = build()
    folder = tmp_path / "checkpoints/model"
    fsync, calls = os.fsync, 0

    def full_disk(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(StoreError, match="the disk is full"):
        export_hugging_face(model, config, mesh, folder, max_shard_bytes=20_000)
    assert calls == 2
    assert not list(folder.parent.iterdir()), "half a model looks like a whole one, or takes the room of one"
    monkeypatch.undo()
    for _ in range(2):  # the second one replaces the first
        export_hugging_face(model, config, mesh, folder)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model"], (
        "the failed attempt left something behind"
    )
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
