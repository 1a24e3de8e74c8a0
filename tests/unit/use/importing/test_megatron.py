"""Megatron-LM's checkpoints of GPT-2 and Llama, as each of its layouts has them, become the model that they were."""

import enum
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise_use.importing.megatron import open_megatron
from tests.hugging_face import VOCABULARY, save
from tests.sweeps import few
from tests.unit.use.importing import checks
from tests.unit.use.importing.checks import assert_same_model, changed, in_module
from tests.unit.use.importing.megatron_shards import Source, gpt_args, llama_args, write


def gpt(folder: Path, case: str = "gpt", layers: int = 2, **args: Any) -> tuple[Any, Source]:
    model = save(case, folder / "saved", n_layer=layers)
    return model, Source(model, gpt_args(model, **args))


def assert_imported(folder: Path, made: tuple[Any, Source], style: str, **layout: Any) -> None:
    """The shards that Megatron-LM makes of a model become that model."""
    model, source = made
    shards = write(source, folder / "megatron", style, **layout)
    assert_same_model(open_megatron(shards, VOCABULARY if source.is_gpt2 else None), model, folder)


@pytest.mark.parametrize("version", [0, 1, 2, 3])
@pytest.mark.parametrize("tp", few([1, 2, 4], 2))
def test_gpt2_of_every_version(tmp_path: Path, version: int, tp: int) -> None:
    assert_imported(tmp_path, gpt(tmp_path), "old" if version < 2 else "legacy", tp=tp, version=version)


@pytest.mark.parametrize(("style", "case"), [("legacy", "gpt"), ("core", "gpt-untied"), ("te", "gpt")])
@pytest.mark.parametrize(("pp", "virtual"), few([(2, 1), (2, 2)], (2, 2)))
def test_gpt2_over_a_pipeline(tmp_path: Path, style: str, case: str, pp: int, virtual: int) -> None:
    assert_imported(tmp_path, gpt(tmp_path, case, layers=4), style, tp=2, pp=pp, virtual=virtual)


@pytest.mark.parametrize(
    ("case", "style", "tp", "pp", "fields"),
    [
        ("llama", "legacy", 2, 2, {}),
        ("llama-tied", "core", 2, 2, {}),
        ("llama", "te", 1, 1, {}),
        *(("llama", "core", 4, 1, {"num_key_value_heads": heads}) for heads in (1, 2)),
    ],
)
def test_llama_with_grouped_heads(
    tmp_path: Path, case: str, style: str, tp: int, pp: int, fields: dict[str, Any]
) -> None:
    """The last ones have more ranks than key/value heads."""
    model = save(case, tmp_path / "saved", **fields)
    assert_imported(tmp_path, (model, Source(model, llama_args(model))), style, tp=tp, pp=pp)


def test_llama3_scaling_and_head_size(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = save("llama", tmp_path / "saved", head_dim=16, rope_parameters=scaling, max_position_embeddings=65536)
    args = llama_args(model, use_rope_scaling=True, rope_scaling_factor=32.0)
    assert_imported(tmp_path, (model, Source(model, args)), "te", tp=2)


def test_the_activation_is_what_megatron_computes(tmp_path: Path) -> None:
    model, _ = gpt(tmp_path)

    def activation(name: str, style: str, **args: Any) -> str:
        folder = write(Source(model, gpt_args(model, **args)), tmp_path / name, style)
        return open_megatron(folder, VOCABULARY).config.activation_function

    assert activation("fused", "core", bias_gelu_fusion=True) == "gelu_new"
    assert activation("exact", "core", bias_gelu_fusion=False) == "gelu"
    assert activation("openai", "legacy", bias_gelu_fusion=False, openai_gelu=True) == "gelu_new"
    assert activation("ignored", "core", bias_gelu_fusion=False, openai_gelu=True) == "gelu"


def test_objects_of_megatron_itself_are_left_aside(tmp_path: Path) -> None:
    """A real file holds enumerations of modules that are not installed here."""
    kind = enum.Enum("ModelType", {"encoder_or_decoder": 1})
    model = save("gpt", tmp_path / "saved")
    args = gpt_args(model, model_type=kind.encoder_or_decoder, exit_signal=types.SimpleNamespace(a=1))
    with in_module("megatron.core.enums", kind):
        folder = write(Source(model, args), tmp_path / "megatron", "legacy", tp=2)
    assert_same_model(open_megatron(folder, VOCABULARY), model, tmp_path)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object], name: str = "mp_rank_01") -> None:
    changed(folder / "iter_0000100" / name / "model_optim_rng.pt", change)


def problems(folder: Path, vocab_size: int | None = VOCABULARY) -> list[str]:
    return checks.problems(open_megatron, folder, vocab_size, ITER=folder / "iter_0000100", FOLDER=folder)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write(gpt(tmp_path)[1], tmp_path / "megatron", "legacy", tp=2)


def test_problems_of_shards_are_told_at_once(shards: Path) -> None:
    (found,) = problems(shards, None)
    assert found.startswith("ITER must say how many of the 64 rows of its embedding are tokens")
    assert found.endswith("(--vocab-size 64 keeps all rows)")
    (found,) = problems(shards, 65)
    assert "the vocabulary (65) must be at most the rows of its embedding (64)" in found

    def change(state: dict[str, Any]) -> None:
        held = state["model"]["language_model"]["encoder"]
        del held["layers.0.mlp.dense_h_to_4h.bias"]
        held["layers.1.self_attention.dense.weight"] = torch.zeros(32, 4)
        held["layers.1.self_attention.q_norm.weight"] = torch.zeros(8)
        held["layers.0.post_attention_norm.bias"] = held["layers.0.post_attention_norm.bias"].to(torch.int8)

    rewrite(shards, change)
    assert problems(shards) == [
        "ITER: tensor-parallel rank 1 lacks layers.0.fc1.bias in model",
        "ITER has encoder.layers.1.self_attention.q_norm.weight, of which no GPT-2 or Llama has any",
        "ITER: dtype of layers.0.post_norm.bias (float32 and int8) must be float64, float32, float16 or bfloat16, the "
        "same on every tensor-parallel rank",
        "ITER: shape of layers.1.dense.weight must be the same on every tensor-parallel rank: it is [32, 16], [32, 4]",
    ]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.pop("args"), "must hold the arguments of the training under 'args': they are missing"),
        (lambda state: state.update(checkpoint_version=4.0), "checkpoint_version of ITER (4.0) must be 0, 1, 2 or 3"),
        (lambda state: state.update(model1=state.pop("model")), "must hold 'model', or 'model0', 'model1', …"),
        (lambda state: setattr(state["args"], "num_layers", 3), "as its num_layers (3), and it has 2"),
        (lambda state: setattr(state["args"], "tensor_model_parallel_size", 2**60), "must be whole numbers, at most"),
        (
            lambda state: setattr(state["args"], "position_embedding_type", "rope"),
            "(rope), normalization (LayerNorm) and swiglu (False) must be learned_absolute, LayerNorm and False, a GPT",
        ),
    ],
)
def test_what_a_file_must_have(tmp_path: Path, change: Callable[[dict[str, Any]], object], text: str) -> None:
    folder = write(gpt(tmp_path)[1], tmp_path / "megatron", "legacy")
    rewrite(folder, change, "mp_rank_00")
    (found,) = problems(folder)
    assert text in found


def test_folders_that_are_none(tmp_path: Path) -> None:
    assert problems(tmp_path) == ["FOLDER must hold folders mp_rank_00, mp_rank_01, … or mp_rank_00_000, …"]
    (tmp_path / "zero_to_fp32.py").touch()
    assert "and it is a checkpoint of DeepSpeed's ZeRO: run `python" in problems(tmp_path)[0]
    (tmp_path / "mp_rank_00_000_000").mkdir()
    assert "is of a model with experts" in problems(tmp_path)[0]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert problems(tmp_path)[0].startswith("FOLDER/latest_checkpointed_iteration.txt names iteration 7")
