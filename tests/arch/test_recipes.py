"""Every shipped recipe is valid, and quickly so; the tutorials' recipes have the published numbers."""

import json
import re
from pathlib import Path

import pytest
import yaml

from scripts.quickstart_layout import overrides
from shardwise.base.errors import ConfigError
from shardwise.config import Config, UserModelConfig, check_layout, load_config, require_data
from shardwise.estimates.memory import expected_memory
from shardwise.layers.chunks import vocabulary_rows
from shardwise.models.parameter_counts import matmul_parameter_count, parameter_count
from tests.arch.source import PACKAGE, ROOT
from tests.e2e.command import within
from tests.sweeps import few
from tests.unit.config.hub import FILES

RECIPES = sorted(path.stem for path in (PACKAGE / "config/recipes").glob("*.yaml"))
TINY = [name for name in RECIPES if name.endswith("-tiny")]
PUBLISHED = yaml.safe_load((ROOT / "tests/arch/published.yaml").read_text(encoding="utf-8"))
HUB_MODELS = {name: published["hub"] for name, published in PUBLISHED.items() if "hub" in published}
OF_80_GB = {name: published["tokens"] for name, published in PUBLISHED.items() if "tokens" in published}


def ranks_of_one_copy(config: Config) -> int:
    """Of a sparse model, the ranks that divide its experts have one copy of these together."""
    return config.parallel.ranks * config.parallel.expert


def test_the_recipes_of_this_version_are_here() -> None:
    dense = {"llama2-tiny", "llama3-tiny", "gpt-tiny", "gpt-neox-tiny", "bert-tiny", "gpt2-xl-tiny", "gpt3-tiny"}
    tiny = dense | {"olmoe-tiny", "qwen3-moe-tiny", "mixtral-tiny", "glm4-moe-tiny"}
    assert set(RECIPES) == {"quickstart", "llama-small", "sft-tiny", *tiny, *PUBLISHED}


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_recipe_has_the_published_numbers(recipe: str) -> None:
    config, published = load_config(recipe), PUBLISHED[recipe]
    for section, keys in published["keys"].items():
        found = {key: getattr(getattr(config, section), key) for key in keys}
        assert {key: [*value] if isinstance(value, tuple) else value for key, value in found.items()} == keys
    assert check_layout(config, published["world"]).data == published["data"]
    assert parameter_count(config.model) == published["parameters"]
    if "active" in published:
        embedding = config.model.vocab_size * config.model.hidden_size
        assert matmul_parameter_count(config.model) + embedding == published["active"]


@pytest.mark.parametrize("recipe", HUB_MODELS)
def test_recipe_has_the_model_of_the_hub(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FILES[HUB_MODELS[recipe]]))
    assert load_config(recipe, [f"model.config={tmp_path}"]).model == load_config(recipe).model


@pytest.mark.parametrize("recipe", few(RECIPES, "bert-large", "gpt3-175b", "gpt3-tiny", "olmoe-1b-7b", "quickstart"))
def test_dry_run_shows_layout_and_size(recipe: str, tmp_path: Path) -> None:
    published = PUBLISHED.get(recipe)
    world = published["world"] if published else ranks_of_one_copy(load_config(recipe))
    shown = within("train", recipe, "--nproc", str(world), "--dry-run", at=tmp_path).succeeded().out
    assert f"= {world} rank" in shown
    assert "FLOPs per token" in shown
    if recipe == "gpt3-tiny":
        assert "TP 2 + SP × PP 2 × DP 1 = 4 ranks, ZeRO-1" in shown
    if published:
        assert re.search(rf"DP {published['data']}( \(EP \d+\))? =", shown)
        assert f"({published['parameters']:,})" in shown


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_on_what_its_user_knows(recipe: str) -> None:
    """Either it names built-in text, or a run without data is refused with lines that name some."""
    config = load_config(recipe)
    if config.data.is_named:
        assert recipe not in PUBLISHED
        return
    with pytest.raises(ConfigError, match="must name its data by ") as refused:
        require_data(config, recipe)
    lines = re.sub(r"\n {10,}", " ", str(refused.value)).splitlines()[1:]
    published, trial = (line.partition(":")[0].strip() for line in lines[-2:])
    assert published in ("The tutorial's data", "Public text"), f"{recipe}.yaml: a comment must name published data"
    assert trial == "For a trial", f"{recipe}.yaml: the last comment on data must be that for a trial"
    for line in lines:
        keys = [word for word in line.split() if "=" in word]
        assert load_config(recipe, keys).data.is_named, line
    assert line.split()[:4] == ["For", "a", "trial:", "data.dataset=python"]
    assert load_config(recipe, keys).model.vocab_size <= 1 << 15, "Python's sources have text for about 40,000 tokens"
    _, held_out, test = config.data.split_weights
    assert config.train.eval_every > 0 or held_out == test == 0, "it would neither train on all text nor evaluate"


@pytest.mark.parametrize("recipe", TINY)
def test_tiny_recipe_holds_its_promise(recipe: str) -> None:
    """Tiny recipes are compared across layouts at 1e-5 relative: above LR 1e-3 rounding alone would grow past that."""
    config = load_config(recipe)
    assert config.precision.resolved(accelerator=True).parameter == "float32"
    assert config.optimizer.lr <= 1e-3
    assert config.data.dataset == ("chat" if recipe == "sft-tiny" else "tiny")
    model = config.model
    assert not isinstance(model, UserModelConfig)
    assert not model.has_dropout
    assert model.num_attention_heads >= 4
    assert model.num_hidden_layers >= 8
    if recipe == "gpt2-xl-tiny":  # heads that no even degree divides, as in the model that it is named after
        assert model.num_attention_heads % 2
        assert model.vocab_size % 2
    else:
        cut = ["parallel.tensor=4", "parallel.sequence=true", "parallel.pipeline=1"]
        assert check_layout(load_config(recipe, cut), 4).tensor == 4


def test_pp4_is_the_same_training_in_another_layout() -> None:
    one, other = load_config("gpt-neox-20b"), load_config("gpt-neox-20b-pp4")
    assert one.parallel != other.parallel
    assert one.model_copy(update={"parallel": other.parallel}) == other


@pytest.mark.parametrize(
    ("recipe", "rows", "padded"), [("gpt3-23b", 6400, 51200), ("gpt3-46b", 6400, 51200), ("gpt3-175b", 1664, 53248)]
)
def test_gpt3_has_the_published_padding_devices_and_batch(recipe: str, rows: int, padded: int) -> None:
    """Megatron's vocabulary; 32 sequences for each node; 16 GiB for each rank.

    2 GiB of them are for what the estimate leaves out: Python, torch, the device's context.
    """
    config, world = load_config(recipe), PUBLISHED[recipe]["world"]
    parallel = config.parallel
    assert vocabulary_rows(50257, parallel.tensor, parallel.vocab_multiple) == rows
    assert rows * parallel.tensor == padded
    for accelerator in (False, True):
        memory = expected_memory(config, check_layout(config, world), accelerator)
        assert memory.total < 14 * 2**30, f"{recipe} needs {memory.total / 2**30:.1f} GiB on a rank"
    for ranks in (256, 512, 1024):
        train = config.with_batch_for(ranks).train
        assert train.global_batch == ranks
        assert check_layout(config.with_batch_for(ranks), ranks).accumulation(train) == parallel.ranks


@pytest.mark.parametrize("recipe", OF_80_GB)
def test_a_current_model_fits_its_devices_and_trains_the_published_tokens(recipe: str) -> None:
    """A tenth of 80 GB stays free, as `shardwise plan` asks for."""
    config, world = load_config(recipe), PUBLISHED[recipe]["world"]
    memory = expected_memory(config, check_layout(config, world), True)
    assert memory.total < 0.9 * 80e9, f"{recipe} needs {memory.total / 1e9:.1f} GB on a rank"
    train = config.train
    assert train.steps * train.global_batch * train.sequence_length == pytest.approx(OF_80_GB[recipe] * 1e12, rel=1e-4)
    text = (PACKAGE / f"config/recipes/{recipe}.yaml").read_text(encoding="utf-8")
    assert f"{world // 8} node" in text
    for keys in re.findall(r"# Before longer texts: +((?:model\.\S+ )+)", text):
        assert parameter_count(load_config(recipe, keys.split()).model) == PUBLISHED[recipe]["parameters"]


def test_printed_recipe_is_the_shipped_file(tmp_path: Path) -> None:
    printed = within("recipes", "bert-large", at=tmp_path).succeeded().out
    assert printed == (PACKAGE / "config/recipes/bert-large.yaml").read_text(encoding="utf-8")


def test_the_quickstart_runs_on_any_number_of_accelerators() -> None:
    """Without any, `make train` and `shardwise train quickstart` are one run, in float32 on every processor."""
    for accelerators in (1, 2, 3, 4, 6, 8, 16):
        layout = check_layout(load_config("quickstart", overrides(accelerators)), accelerators)
        assert (layout.data, layout.tensor) == (accelerators, 1)
    assert overrides(0) == []
    assert load_config("quickstart").precision.mode is None
