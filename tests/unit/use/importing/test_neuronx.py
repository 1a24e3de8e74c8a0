"""neuronx-distributed's checkpoints of Llama, GPT-NeoX and BERT, as each of its layouts has them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from shardwise.base.errors import ConfigError
from shardwise_use.importing.neuronx import open_neuronx
from tests.hugging_face import save
from tests.sweeps import few
from tests.unit.use.importing import checks
from tests.unit.use.importing.checks import assert_equal, assert_same_model, changed, states_of
from tests.unit.use.importing.neuronx_shards import write


def check(tmp_path: Path, model: Any, **options: Any) -> None:
    folder = write(model, tmp_path / "step_100", **options)
    opened = open_neuronx(folder, tmp_path / "saved")
    assert_same_model(opened, model, tmp_path)


@pytest.mark.parametrize(("style", "tp", "pp"), [("separate", 1, 1), ("fused", 4, 1), ("separate", 2, 2)])
def test_llama(tmp_path: Path, style: str, tp: int, pp: int) -> None:
    model = save("llama", tmp_path / "saved", vocab_size=64, num_key_value_heads=4)
    check(tmp_path, model, tp=tp, pp=pp, style=style)


@pytest.mark.parametrize(("style", "adjacent"), [("grouped", True), ("grouped-fused", False)])
@pytest.mark.parametrize(
    ("heads", "kv", "tp", "copies"),
    few(
        [(8, 2, 2, 1), (8, 2, 4, 2), (8, 2, 8, 4), (8, 2, 4, 4), (8, 4, 2, 2), (4, 1, 4, 4)], (8, 2, 4, 2), (4, 1, 4, 4)
    ),
)
def test_llama_with_grouped_heads(
    tmp_path: Path, style: str, adjacent: bool, heads: int, kv: int, tp: int, copies: int
) -> None:
    model = save("llama", tmp_path / "saved", vocab_size=64, num_attention_heads=heads, num_key_value_heads=kv)
    check(tmp_path, model, tp=tp, style=style, copies=copies, adjacent=adjacent)


@pytest.mark.parametrize(("xser", "old"), [(True, False), (True, True)])
def test_files(tmp_path: Path, xser: bool, old: bool) -> None:
    model = save("llama", tmp_path / "saved", vocab_size=64)
    check(tmp_path, model, tp=2, pp=2, style="grouped", xser=xser, old=old)


@pytest.mark.parametrize(("case", "tp"), [("neox", 4), ("neox-tied", 2)])
def test_gpt_neox(tmp_path: Path, case: str, tp: int) -> None:
    check(tmp_path, save(case, tmp_path / "saved", vocab_size=64), tp=tp)


@pytest.mark.parametrize(
    ("tp", "xser", "old", "vocabulary_cut"), [(1, False, True, True), (2, False, True, False), (4, True, False, True)]
)
def test_bert(tmp_path: Path, tp: int, xser: bool, old: bool, vocabulary_cut: bool) -> None:
    """Its vocabulary of 61 is padded at each degree."""
    check(tmp_path, save("bert", tmp_path / "saved"), tp=tp, xser=xser, old=old, vocabulary_cut=vocabulary_cut)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    model = save("llama", tmp_path / "saved", vocab_size=64)
    return write(model, tmp_path / "step_100", tp=4, style="grouped", copies=2)


def rewrite(folder: Path, rank: int, change: Callable[[dict[str, Any]], object]) -> None:
    changed(folder / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt", change)


def problems(folder: Path) -> list[str]:
    return checks.problems(open_neuronx, folder, folder.parent / "saved", FOLDER=folder)


def test_unrelated_heads_are_no_replicas_that_drifted(shards: Path) -> None:
    """A configuration with fewer key/value heads than the shards have would merge heads that differ."""
    config = shards.parent / "saved/config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"num_key_value_heads": 1}))
    with pytest.raises(ConfigError) as caught:
        open_neuronx(shards, shards.parent / "saved", allow_drift=True)
    assert len(caught.value.problems) == 2
    for problem in caught.value.problems:
        assert re.search(r"1[3-5]\d% of their norm\): they differ by more than their norm, as unrelated", problem)


def test_other_folders_and_decoders_are_refused(tmp_path: Path) -> None:
    folder = write(save("bert", tmp_path / "saved"), tmp_path / "step_100", tp=2)
    rewrite(folder, 1, lambda state: state["cls.predictions.decoder.weight"].add_(1))
    (found,) = problems(folder)
    assert found.startswith("FOLDER: cls.predictions.decoder.weight must equal bert.embeddings.word_embeddings.weight")
    save("llama", tmp_path / "saved")
    assert "there is no folder of that name" in problems(tmp_path / "nothing")[0]
    (tmp_path / "run/step_100/model").mkdir(parents=True)
    (found,) = problems(tmp_path / "run")
    assert found.endswith("; it holds the checkpoints step_100: name one")
    with pytest.raises(ConfigError, match=r"--config .* must be a Hugging Face config.json or its folder"):
        open_neuronx(tmp_path / "run", tmp_path / "nothing")


def test_a_checkpoint_must_be_completed_and_its_copies_agree(shards: Path) -> None:
    (shards / "checkpoint").write_text("1")
    assert problems(shards) == ["FOLDER must be a checkpoint that was completed: it has no file 'done'"]
    (shards / "done").write_text("1")
    open_neuronx(shards, shards.parent / "saved")
    rewrite(shards, 3, lambda state: state["model.layers.1.self_attn.qkv_proj.weight_k"].add_(0.25))
    (found,) = problems(shards)
    assert re.match(r"FOLDER: .*1\.self_attn\.qkv_proj must hold each of its 2 key/value heads .* 2 times", found)
    opened = open_neuronx(shards, shards.parent / "saved", allow_drift=True)
    assert re.match(r"replicas of 1 tensor differ, at most by \d\d\.\d\d% of their norm", opened.notes[0])
    assert_equal(states_of(opened)["model"], load_file(shards.parent / "saved/model.safetensors"))
