"""A further key is one field of its section: reading, overrides, messages, records and the schema follow from it."""

from collections.abc import Iterator

import pytest
from pydantic import Field

from shardwise.base.errors import ConfigError
from shardwise.config import load, pydantic_errors, run_config, schema, sections

_RECIPE = """
model: {family: llama, vocab_size: 64, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
  intermediate_size: 32, max_position_embeddings: 32}
train: {steps: 4, global_batch: 2, sequence_length: 8, further: 3}
optimizer: {lr: 0.1}
"""


class TrainConfig(sections.TrainConfig):
    further: int = Field(default=1, gt=0, description="a further key")


class _Config(run_config.Config):
    train: TrainConfig = Field(description="how long and in what portions")


@pytest.fixture(autouse=True)
def further_key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(load, "Config", _Config)
    monkeypatch.setattr(pydantic_errors, "Config", _Config)
    monkeypatch.setattr(schema, "Config", _Config)
    pydantic_errors.known_paths.cache_clear()
    yield
    pydantic_errors.known_paths.cache_clear()


@pytest.fixture
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "further.yaml"
    path.write_text(_RECIPE)
    return str(path)


def test_a_recipe_and_the_command_line_set_it(recipe: str) -> None:
    read, changed = (load.load_config(recipe, overrides) for overrides in ((), ("train.further=5",)))
    assert read.recorded()["train"]["further"] == 3
    assert changed.recorded()["train"]["further"] == 5
    assert load.config_from_sections(changed.recorded()).recorded() == changed.recorded()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.further=0", r"train.further \(0\) must be greater than 0"),
        ("train.further=no", r"train.further \('no'\) must be a whole number"),
        ("train.furthr=2", r"train.furthr: unknown key; did you mean train.further\?"),
    ],
)
def test_its_problems_have_the_words_of_all_keys(recipe: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load.load_config(recipe, [override])


def test_the_schema_has_it() -> None:
    train = schema.recipe_schema()["$defs"]["TrainConfig"]["properties"]
    assert train["further"] == {
        "default": 1, "description": "a further key", "exclusiveMinimum": 0, "title": "Further", "type": "integer"
    }  # fmt: skip
