"""The JSON Schema of recipes accepts what `load_config` reads and refuses what it refuses."""

import json
import re
from typing import Any

import jsonschema
import pytest

from shardwise.base.errors import ConfigError
from shardwise.base.yaml_and_json import dump_yaml, parse_yaml
from shardwise.cli import main
from shardwise.config import load_config, recipe_names
from shardwise.config.load import config_from_sections
from shardwise.config.recipe_files import recipe_text
from shardwise.config.schema import recipe_schema
from tests.arch.source import ROOT
from tests.rows import rows_of

ROWS = rows_of(__file__)

SCHEMA = recipe_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def places(values: Any) -> list[str]:
    """The dotted paths at which the schema refuses `values`."""
    return [".".join(map(str, error.absolute_path)) for error in VALIDATOR.iter_errors(values)]


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_and_its_resolved_configuration_fit(name: str) -> None:
    assert not places(parse_yaml(recipe_text(name), name))
    assert not places(parse_yaml(dump_yaml(load_config(name).model_dump(mode="json")), name))


def test_recipes_of_pages_own_models_and_other_spellings_fit(capsys: pytest.CaptureFixture[str]) -> None:
    found = 0
    for page in ROOT.glob("docs/**/*.md"):
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            values = parse_yaml(block, page.name)
            if isinstance(values, dict) and set(values) <= set(SCHEMA["properties"]):
                found += 1
                wrong = [place for place in places(values) if place]  # a part of a recipe lacks sections
                assert not wrong, f"{page.name}: {wrong}"
    assert found
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    values = parse_yaml(recipe_text("gpt2"), "")
    model = values["model"]

    def refused(**model: Any) -> list[str]:
        return places({**values, "model": model})

    assert refused(config="folder/config.json", hidden_size=8) == []
    assert refused(family="mine:Model", vocab_size=8, anything=[1]) == []
    assert refused(hidden_size=8) == ["model"]
    width = model.pop("hidden_size")
    assert refused(n_embd=width, **model) == []
    assert refused(**model)
    assert main(["recipes", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    assert main(["recipes", "gpt2", "--schema"]) == 2
    assert "--schema" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "place"), ROWS["refused"])
def test_what_load_refuses_is_refused_at_its_place(change: dict[str, Any], place: str) -> None:
    values = parse_yaml(recipe_text("llama2-tiny"), "")
    for section, keys in change.items():
        values[section] = {**values.get(section, {}), **keys} if isinstance(keys, dict) else keys
    assert place in places(values)
    with pytest.raises(ConfigError):
        config_from_sections(values)
