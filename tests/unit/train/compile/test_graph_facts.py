"""What decides which graph a run takes from the cache."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise.config import check_layout, load_config
from shardwise.train.compile.compiled_units import BLOCK
from shardwise.train.compile.graph_cache import Facts
from shardwise.train.compile.graph_facts import _SOURCES, _user_sources, graph_facts

CPU = torch.device("cpu")


def facts(*overrides: str, training: bool = True) -> Facts:
    config = load_config("llama2-tiny", overrides)
    return graph_facts(config, check_layout(config, config.parallel.ranks), CPU, BLOCK, training)


def differing(a: Facts, b: Facts) -> set[str]:
    return {key for key in {*a, *b} if a.get(key) != b.get(key)}


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.num_hidden_layers=2"],
        ["optimizer.lr=1e-5", "train.seed=5", "train.steps=7", "optimizer.warmup_steps=1"],
        ["parallel.pipeline=2", "parallel.schedule=gpipe"],
        ["compile.enabled=true", "compile.require_cached=true", "compile.cache_dir=elsewhere"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_runs_that_share_graphs(overrides: list[str]) -> None:
    assert facts(*overrides) == facts()


@pytest.mark.parametrize(
    ("override", "keys"),
    [
        ("train.micro_batch=1", {"train.micro_batch"}),
        ("parallel.tensor=2", {"parallel.tensor"}),
        ("model.rope_theta=500000.0", {"model.rope_theta"}),
        ("compile.options={max_autotune: true}", {"compile.options"}),
        ("compile.backend=aot_eager", {"compile.backend", "compiler and processor"}),
        ("data.reset_attention_mask=true", {"data.reset_attention_mask"}),
        ("train.dropout_mode=invariant", {"train.dropout_mode"}),
    ],
)
def test_runs_that_do_not(override: str, keys: set[str]) -> None:
    assert differing(facts(), facts(override)) == keys


def test_what_beside_keys_decides_on_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts("train.recompute=full", "train.dropout_mode=invariant", training=False) == facts(training=False)
    # A folder that was renamed would leave the cached graphs of its former code in use.
    root = Path(shardwise.__file__).parent
    for pattern in _SOURCES:
        assert list(root.glob(pattern)), pattern
    files = {path for pattern in _SOURCES for path in root.glob(pattern)}
    assert root / "config/decoders.py" in files, "a factor on the scores of attention is a number in a graph"
    (tmp_path / "owned").mkdir()
    (tmp_path / "owned/__init__.py").touch()
    (tmp_path / "owned/parts.py").write_text("WIDTH = 8\n")
    (tmp_path / "owned/model.py").write_text("from owned.parts import WIDTH\n\n\nclass Model:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("owned.model").Model
    assert {path.name for path in _user_sources(model)} == {"__init__.py", "parts.py", "model.py"}
    for name in ("owned", "owned.parts", "owned.model"):
        del sys.modules[name]
    # Code is compiled for the very processor, and calls other matmuls on those that are not Intel's.
    before = facts()
    assert json.loads(json.dumps(before)) == before
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        patch.setattr("shardwise.train.compile.graph_facts._SOURCES", ("models/llama.py",))
        assert differing(before, facts()) == {"threads", "code"}
    monkeypatch.setattr("shardwise.distributed.devices.cpu_prefers_onednn", lambda: before["matmuls"] != "oneDNN")
    monkeypatch.setattr("shardwise.train.compile.graph_facts._compiler", lambda: "without AVX512")
    assert differing(before, facts()) == {"matmuls", "compiler and processor"}
