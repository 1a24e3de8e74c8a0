"""What Llama's attention is given, and how it begins. Against Hugging Face: tests/dist/test_families.py."""

from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

import shardwise
from shardwise.cli import main
from shardwise.config import LlamaConfig
from shardwise.config import model as families
from shardwise.config.decoders import DecoderConfig
from shardwise.config.families import NormedWidth, NormPlace
from shardwise.config.hugging_face import read_hugging_face
from shardwise.config.hugging_face_names import ConfigFile
from shardwise.layers.dropout import DropoutKey
from shardwise.models.attention import AttentionCore
from shardwise.models.llama import Llama

SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


def config(**sizes: Any) -> LlamaConfig:
    return LlamaConfig(family="llama", **SIZES | sizes)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_no_mask_is_built_for_causal_attention(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = F.scaled_dot_product_attention
    calls: list[dict[str, Any]] = []

    def watched(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *args: Any, **rest: Any) -> Tensor:
        assert not args, "dropout and causality go by keyword"
        calls.append({"attn_mask": attn_mask, "heads": (q.shape[1], k.shape[1], v.shape[1]), **rest})
        return plain(q, k, v, attn_mask, **rest)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    ids = torch.zeros(8, 2, dtype=torch.int64)
    Llama(config(num_key_value_heads=kv_heads), seed=1)(ids, ids).backward()
    assert len(calls) == 2, "attention does not go through scaled_dot_product_attention"
    for call in calls:
        assert call["attn_mask"] is None, "a mask was built"
        assert call["is_causal"] is True
        assert not call.get("dropout_p")
        assert call["heads"] == (4, kv_heads, kv_heads), "K/V heads were copied for each query head"


@pytest.mark.parametrize("reset", [False, True])
def test_a_padded_sequence_has_the_angles_of_its_own_length(reset: bool) -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    model = Llama(config(initializer_range=0.5, max_position_embeddings=4, rope_scaling=scaling), seed=1)
    lengths_B = torch.tensor([8, 5, 0])
    ids_SB = torch.arange(24).view(8, 3) * (torch.arange(8)[:, None] < lengths_B)
    positions_SB = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])[:, None].expand(8, 3) if reset else None
    with torch.no_grad():
        found = model.hidden(ids_SB, positions_SB=positions_SB, lengths_B=lengths_B)
        for b, length in enumerate(lengths_B.tolist()[:2]):
            positions = None if positions_SB is None else positions_SB[:length, b : b + 1]
            alone = model.hidden(ids_SB[:length, b : b + 1], positions_SB=positions)
            torch.testing.assert_close(found[:length, b : b + 1], alone, rtol=1e-5, atol=1e-5)
    assert found.isfinite().all()


def test_init_is_the_configs_and_attention_step_by_step_the_fused_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"initializer_range": 0.3, "vocab_size": 640, "attention_bias": True, "mlp_bias": True}
    for path, parameter in Llama(config(**sizes), seed=1).named_parameters():
        values = parameter.detach()
        if path.endswith("bias") or "norm" in path:
            assert bool((values == float("norm" in path)).all()), path
        else:
            assert float(values.std()) == pytest.approx(0.3, rel=0.1), path
    # As dropout of the probabilities asks for; here none of them is dropped.
    monkeypatch.setattr(AttentionCore, "_drop", lambda _self, probabilities, _key: probabilities)
    model = Llama(config(num_key_value_heads=2, attention_dropout=0.5, initializer_range=0.5), seed=1)
    ids = torch.arange(16).view(8, 2)
    key = DropoutKey(seed=0, step=1, samples_B=torch.arange(2), first_sample=0)
    torch.testing.assert_close(model(ids, ids.flip(0), key), model(ids, ids.flip(0)))


RECIPE = """
model: {family: probe, vocab_size: 300, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
        num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 16, probe_eps: 1.0e-4}
train: {steps: 2, global_batch: 2, micro_batch: 2, sequence_length: 16, eval_every: 0}
optimizer: {lr: 1.0e-3}
precision: {mode: float32}
data: {dataset: tiny}
"""


class ProbeConfig(DecoderConfig):
    """A combination of facts that no published family has."""

    config_file: ClassVar[ConfigFile] = ConfigFile(
        "probe",
        "ProbeForCausalLM",
        defaults={"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        | {"num_attention_heads": 1},
        names={"probe_eps": "layernorm_epsilon"},
    )
    norm_place: ClassVar[NormPlace] = "output"
    query_key_norm: ClassVar[NormedWidth] = "head"
    attention_bias: ClassVar[bool] = True
    attention_output_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = True
    keys: ClassVar[dict[str, str]] = DecoderConfig.keys | {"norm_eps": "probe_eps"}

    family: Literal["probe"] = Field(description="the architecture")
    probe_eps: float = Field(default=1e-6, gt=0, description="a key of its own, which a file calls otherwise")


@pytest.fixture
def recipe(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(families.FAMILIES, "probe", ProbeConfig)
    (own_folder / "probe.yaml").write_text(RECIPE)
    return "probe.yaml"


def test_it_trains_is_exported_and_read_again(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", recipe, "--dry-run"]) == 0
    assert "probe" in capsys.readouterr().out
    config = shardwise.load_recipe(recipe)
    run = shardwise.train(config)
    assert [event["step"] for event in run.metrics()] == [1, 2]

    folder = shardwise.export_checkpoint(run.path, "exported")
    assert families.FAMILIES["probe"].model_validate(read_hugging_face(Path(folder))) == config.model
    read = shardwise.load_recipe(recipe, model={"config": folder}, checkpoint={"load": folder}, train={"steps": 1})
    assert read.known_shapes.norm_eps == 1e-4
    assert len(shardwise.train(read).metrics()) == 1
