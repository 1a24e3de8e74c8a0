"""neuronx-nemo-megatron's checkpoints of GPT and Llama, as each of its layouts has them."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import GPTConfig, LlamaConfig
from shardwise_use.importing import nemo
from tests.hugging_face import VOCABULARY, save
from tests.sweeps import few
from tests.unit.use.importing import checks
from tests.unit.use.importing.checks import assert_same_model, changed
from tests.unit.use.importing.nemo_shards import NAME, Source, gpt_config, llama_config, write

open_nemo = functools.partial(nemo.open_nemo, weights_only=True)
"""Of the weights alone; test_optimizer_shards.py has the optimizer's state."""


@pytest.mark.parametrize("case", ["gpt", "gpt-untied"])
@pytest.mark.parametrize(
    ("tp", "pp", "xser"), few([(1, 1, False), (2, 1, True), (1, 2, False), (2, 2, True)], (2, 2, True), (1, 2, False))
)
def test_gpt(tmp_path: Path, case: str, tp: int, pp: int, xser: bool) -> None:
    model = save(case, tmp_path / "saved", n_layer=4)
    folder = write(Source(model, gpt_config(model)), tmp_path / "nemo", tp=tp, pp=pp, xser=xser)
    opened = open_nemo(folder, VOCABULARY)
    assert opened.layout == {"tensor": tp, "pipeline": pp}
    assert_same_model(opened, model, tmp_path)


@pytest.mark.parametrize(("groups", "tp", "pp"), [(4, 1, 1), (2, 2, 2)])
def test_llama(tmp_path: Path, groups: int, tp: int, pp: int) -> None:
    model = save("llama", tmp_path / "saved", num_key_value_heads=groups)
    folder = write(Source(model, llama_config(model)), tmp_path / "nemo", tp=tp, pp=pp, xser=True)
    assert_same_model(open_nemo(folder, VOCABULARY), model, tmp_path)


def test_stages_of_unequal_length(tmp_path: Path) -> None:
    """NeMo's flexible_pipeline_parallel_stages: layers are counted from 0 in each stage."""
    model = save("gpt", tmp_path / "saved", n_layer=4)
    folder = write(Source(model, gpt_config(model)), tmp_path / "nemo", tp=1, pp=2)
    moved: dict[str, Any] = {}

    def take(state: dict[str, Any]) -> None:
        moved.update({name: state.pop(name) for name in [*state] if ".layers.1." in name})

    def put(state: dict[str, Any]) -> None:
        for name in [name for name in state if ".layers.1." in name]:
            state[name.replace(".layers.1.", ".layers.2.")] = state[name]
            state[name] = state[name.replace(".layers.1.", ".layers.0.")]
            state[name.replace(".layers.1.", ".layers.0.")] = moved[name]

    rewrite(folder, lambda saved: take(saved["state_dict"]), "tp_rank_00_pp_rank_000")
    rewrite(folder, lambda saved: put(saved["state_dict"]), "tp_rank_00_pp_rank_001")
    assert_same_model(open_nemo(folder, VOCABULARY), model, tmp_path)


def test_settings_of_the_model(tmp_path: Path) -> None:
    model = save("gpt", tmp_path / "saved")
    llama = save("llama", tmp_path / "llama")

    def config(name: str, of: dict[str, Any], source: Any = model) -> Any:
        return open_nemo(write(Source(source, of), tmp_path / name), VOCABULARY).config

    fused = config("fused", gpt_config(model))
    assert isinstance(fused, GPTConfig)
    assert (fused.activation_function, fused.initializer_range) == ("gelu_new", 0.021)
    assert config("exact", gpt_config(model, bias_activation_fusion=False)).activation_function == "gelu"
    rotary = {"position_freq_base": 10000, "position_abf_factor": 50, "sliding_window_size": 24}
    stretched = config("stretched", llama_config(llama, **rotary), llama)
    assert isinstance(stretched, LlamaConfig)
    assert stretched.rope_theta == 500000.0


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object], rank: str = "mp_rank_01") -> None:
    changed(folder / rank / NAME, change)


def problems(source: Path, vocab_size: int | None = VOCABULARY) -> list[str]:
    return checks.problems(open_nemo, source, vocab_size, SOURCE=source)


def test_replicas_that_drifted_are_taken_where_it_is_allowed(tmp_path: Path) -> None:
    """After stochastic rounding norms, biases of row-parallel layers and the two copies of a tied embedding differ."""
    model = save("gpt", tmp_path / "saved")
    folder = write(Source(model, gpt_config(model)), tmp_path / "nemo", tp=2, pp=2)

    def drift(saved: dict[str, Any]) -> None:
        for name, tensor in saved["state_dict"].items():
            if name.endswith(("layernorm.bias", "self_attention.dense.bias", "model.word_embeddings.weight")):
                tensor += 0.25 if "word" in name else 0.125

    rewrite(folder, drift, "tp_rank_01_pp_rank_000")
    rewrite(folder, drift, "tp_rank_01_pp_rank_001")
    rank = "on every tensor-parallel rank, and differs between rank 0 and rank 1: replicas have drifted apart"
    tied, *others = (each.partition(" (--allow-drift takes")[0] for each in problems(folder))
    assert tied.startswith("SOURCE: head.weight must equal word.weight, the model has one weight for both")
    names = ("layers.{0…1}.input_norm", "layers.{0…1}.dense", "layers.{0…1}.post_norm", "final_norm")
    assert others == [f"SOURCE: {name}.bias must be the same {rank}" for name in names]
    opened = open_nemo(folder, VOCABULARY, allow_drift=True)
    (note,) = opened.notes
    assert re.fullmatch(r"replicas of 8 tensors differ, at most by \d\d\.\d\d% of their norm \(.+\): .+ taken", note)
    assert_same_model(opened, model, tmp_path)
