"""A decoder that differs by facts is one class in one table. Then every command knows it, and no other file changes."""

from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import Field

import shardwise
from shardwise.cli import main
from shardwise.config import model as families
from shardwise.config.decoders import DecoderConfig
from shardwise.config.families import NormedWidth, NormPlace
from shardwise.config.hugging_face import read_hugging_face
from shardwise.config.hugging_face_names import ConfigFile

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
