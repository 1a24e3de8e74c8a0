"""A model in place of a recipe: its shape, its tokenizer, and a training by its width."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config import load_config, load_config_with_values, recipe_name, require_data
from shardwise.config.model_recipes import model_recipe_remark
from shardwise.config.recipe_files import is_model_recipe, own_data, recipe_text
from tests.e2e.command import within
from tests.unit.config.hub import FILES, QWEN3_8B


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "Qwen3-8B").mkdir()
    (tmp_path / "Qwen3-8B/config.json").write_text(json.dumps(QWEN3_8B))
    return tmp_path / "Qwen3-8B"


@pytest.mark.parametrize("values", FILES.values(), ids=FILES)
def test_any_model_that_is_read_trains(values: dict[str, Any], tmp_path: Path) -> None:
    """The keys are those of its file, and a batch, a rate and a length that fit them."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    config = load_config(str(tmp_path))
    assert config.model == load_config("gpt-tiny", [f"model.config={file}"]).model
    train = config.train
    assert train.sequence_length <= config.known_shapes.max_position_embeddings
    assert 2**19 <= train.global_batch * train.sequence_length <= 2**22
    assert 1.5e-4 <= config.optimizer.lr <= 6e-4
    with pytest.raises(ConfigError, match="must name its data by ") as refused:
        require_data(config, str(tmp_path))
    for line in str(refused.value).splitlines()[1:]:
        keys = [word for word in line.split() if "=" in word]
        assert load_config(str(tmp_path), keys).data.is_named


@pytest.mark.parametrize(("steps", "warmup"), [(100, 2), (7, 0), ("1T", 4768), ("3M", 1)])
def test_the_warmup_follows_the_steps_and_the_last_rate_the_first(folder: Path, steps: int | str, warmup: int) -> None:
    keys = [f"train.steps={steps}", "optimizer.lr=1e-5"]
    config = load_config(str(folder), keys)
    assert (config.optimizer.warmup_steps, config.optimizer.lr, config.optimizer.min_lr) == (warmup, 1e-5, 1e-6)
    assert load_config_with_values(str(folder), {"train.steps": steps, "optimizer.lr": 1e-5}) == config
    given = load_config(str(folder), [*keys, "optimizer.warmup_steps=1", "optimizer.min_lr=0"]).optimizer
    assert (given.warmup_steps, given.min_lr) == (1, 0)
    assert config.data.split_weights[:2] == (95, 5), "text is held out"


def test_the_places_of_a_model_and_what_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    (folder / "odd.json").write_text((folder / "config.json").read_text())
    for named in (str(folder), "./Qwen3-8B", "Qwen3-8B", "Qwen3-8B/config.json", "./Qwen3-8B/odd.json"):
        assert is_model_recipe(named)
        assert load_config(named).model == load_config("qwen3-8b").model
    for named in ("Qwen3-8B/", "Qwen3-8B/config.json", "Qwen/Qwen3-8B@v1"):
        assert recipe_name(named) == "Qwen3-8B"
    monkeypatch.chdir(folder)
    assert recipe_name("config.json") == recipe_name(".") == "Qwen3-8B"
    assert load_config("config.json") == load_config(".")
    # A shipped recipe, a run and a misspelt path stay what they are, and no request is sent for them.
    monkeypatch.chdir(folder.parent)
    (folder / "config.yaml").write_text("model: {}")
    (folder.parent / "gpt2").mkdir()
    (folder.parent / "gpt2/config.json").write_text(json.dumps(FILES["pythia-6.9b"]))
    paths = ("mine.yaml", "acme/mine.yaml", "Qwen3-8B/none", "./none/here", "a/b/c")
    for named in ("Qwen3-8B", "gpt2", "lama3-tiny", "", *paths):
        assert not is_model_recipe(named)
    assert load_config("gpt2").model.family == "gpt"
    with pytest.raises(ConfigError, match="is a run's folder"):
        recipe_text(str(folder))


def test_its_tokenizer_comes_along_and_rates_and_batches_are_the_published_ones(folder: Path) -> None:
    assert own_data(str(folder)) == "data.path=YOUR_TEXT.jsonl data.tokenizer=YOUR_TOKENIZER_FOLDER"
    assert "weights are new" in (said := model_recipe_remark(str(folder), load_config(str(folder))))
    assert "tokenizer is that of" not in said
    (folder / "tokenizer.json").write_text("{}")
    config = load_config(str(folder / "config.json"), ["train.steps=7"])
    assert config.data.tokenizer == str(folder)
    assert own_data(str(folder)) == "data.path=YOUR_TEXT.jsonl"
    loading = load_config(str(folder), [f"checkpoint.load={folder}"])
    assert "weights" not in (said := model_recipe_remark(str(folder), loading))
    assert f"is that of {folder}, and the training is train.sequence_length=" in said
    said = model_recipe_remark(str(folder / "config.json"), config)
    assert f"(checkpoint.load={folder} starts" in said
    assert "(checkpoint.load=acme/tiny checkpoint.revision=v1 starts" in model_recipe_remark("acme/tiny@v1", config)
    assert f"tokenizer is that of {folder};" in said
    assert "train.sequence_length=4096 train.global_batch=1024 train.steps=7 optimizer.lr=0.0003 " in said
    # Those of Llama 3 8B and 70B, and of Llama 2 for the batch of both.
    for width, rate, zero in ((4096, 3e-4, 3), (8192, 1.5e-4, 3), (1024, 6e-4, 1)):
        (folder / "config.json").write_text(json.dumps({**QWEN3_8B, "hidden_size": width}))
        config = load_config(str(folder))
        assert (config.optimizer.lr, config.optimizer.zero) == (rate, zero)
        assert config.train.global_batch == (1024 if width > 2048 else 256)


def test_the_commands_take_it(folder: Path) -> None:
    """One line on standard error says what is taken; the rest is as for a recipe."""
    shown = within("train", "Qwen3-8B", "--dry-run", "--device", "h100:8", "--nodes", "8", at=folder.parent)
    assert shown.code == 0, shown.err
    assert "Qwen3-8B: a dry run" in shown.out
    assert "(8,190,735,360)" in shown.out
    assert shown.err.startswith("the model has the shape of Qwen3-8B; its weights are new ")
    assert len(shown.err.splitlines()) == 1
    written = within("recipes", "Qwen3-8B", "--write", "my.yaml", at=folder.parent)
    assert written.code == 0, written.err
    again = within("train", "my.yaml", "--dry-run", "--device", "h100:8", "--nodes", "8", at=folder.parent).succeeded()
    assert again.out.splitlines()[1:] == shown.out.splitlines()[1:]
    wrong = within("plan", "Qwen3-8B", "--device", "h100:8", "--tokens", "100", at=folder.parent)
    assert "--tokens (100) must be a number with k, M, B or T" in wrong.failed(2)
