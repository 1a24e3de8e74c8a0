"""Keys that are refused, each by a sentence that names the key: the rows of refusals.yaml."""

import re
from pathlib import Path

import pytest

from shardwise.base.yaml_and_json import parse_yaml
from tests.unit.config.refusals import layout_of, problems

ROWS = parse_yaml(Path(__file__).with_name("refusals.yaml").read_text("utf-8"), "refusals.yaml")
BITWISE = "train.bitwise=true"
WORDS = re.compile(r"(?:(?P<recipe>[a-z]+-[a-z]+) )?(?:(?P<world>\d+)(?: |$))?(?P<keys>.*)")


def refused(words: str) -> tuple[list[str], list[str], str, int | None]:
    """The sentences, the keys, the recipe and the number of ranks where a layout refuses them."""
    found = WORDS.fullmatch(words)
    keys = [key for key in re.split(r" (?=[a-z_]+(?:\.[a-z_0-9]+)+=)", found["keys"]) if key]
    recipe, world = found["recipe"] or "llama2-tiny", found["world"] and int(found["world"])
    return problems(*keys, recipe=recipe, world=world), keys, recipe, world


@pytest.mark.parametrize("words", ROWS["alone"] | ROWS["complete"])
def test_one_mistake_is_one_sentence(words: str) -> None:
    found, keys, recipe, world = refused(words)
    assert len(found) == 1, found
    if words in ROWS["complete"]:
        assert found == [ROWS["complete"][words]]
    else:
        assert found[0].startswith(ROWS["alone"][words]), found
    if BITWISE in keys:  # without it each of them is a training
        keys.remove(BITWISE)
        assert layout_of(keys, recipe, world).world == world


@pytest.mark.parametrize("words", ROWS["among others"] | ROWS["complete among others"])
def test_a_mistake_is_told_among_others(words: str) -> None:
    found, *_ = refused(words)
    if words in ROWS["among others"]:
        assert ROWS["among others"][words] in "\n".join(found)
    else:
        assert ROWS["complete among others"][words] in found
