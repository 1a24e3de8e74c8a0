"""A model as a Hugging Face folder: what is in it, and that `transformers` makes the same model of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from shardwise.config import LlamaConfig
from shardwise.data.tokens.tokenizer import train_tokenizer
from shardwise.distributed.mesh import Mesh
from shardwise.models.llama import Llama
from tests.hugging_face import export_hugging_face

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
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", *COMPANIONS,
    }  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for found in (theirs.config, theirs.generation_config):
        assert found.eos_token_id == tokenizer.end_of_document_id
        assert found.bos_token_id == tokenizer.token_id("a")
