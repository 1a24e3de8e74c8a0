"""Which layouts a verification compares, and how `--layouts` chooses them."""

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config import load_config
from shardwise.verify.layouts import layouts_to_verify, parse_layouts

RECIPE = load_config("llama2-tiny")


@pytest.mark.parametrize(("given", "number"), [([], 25), (["all"], 912), (["parallel.pipeline=8", "all"], 18)])
def test_every_layout_of_eight_ranks_occurs_once(given: list[str], number: int) -> None:
    cells = layouts_to_verify(RECIPE, "cpu", 8, parse_layouts(given))
    assert len(cells) == len(set(cells)) == number
    assert all(cell.tensor * cell.context * cell.pipeline * cell.data == 8 for cell in cells)
    assert not [cell for cell in cells if cell.sequence and cell.tensor == 1], "SP without TP is no layout of its own"
    assert not [cell for cell in cells if cell.zero and cell.data * cell.context == 1], (
        "ZeRO-1 of one rank is none either"
    )
    assert not [cell for cell in cells if (cell.schedule is None) != (cell.pipeline == 1)]


def test_keys_that_are_not_named_keep_the_recipes_values_and_other_texts_are_refused() -> None:
    recipe = load_config("llama2-tiny", ["parallel.schedule=zbv", "train.recompute=full"])
    cells = layouts_to_verify(recipe, "cpu", 4, {})
    assert {cell.schedule for cell in cells} == {None, "zbv"}
    assert {cell.recompute for cell in cells} == {"full"}
    named = layouts_to_verify(recipe, "cpu", 4, parse_layouts(["parallel.schedule=1f1b,gpipe", "train.recompute=all"]))
    assert {cell.schedule for cell in named} == {None, "1f1b", "gpipe"}
    assert {cell.recompute for cell in named} == {"none", "selective", "full"}
    for given, text in [
        ("parallel.tensr=2", "unknown key; did you mean parallel.tensor?"),
        ("precision.mode=float32", "unknown key; it chooses among parallel.tensor, "),
        ("parallel.tensor", "must read parallel.tensor=VALUE, parallel.tensor=VALUE,VALUE or parallel.tensor=all"),
        ("parallel.tensor=0", r"--layouts parallel.tensor \(0\) must be a degree, such as 2"),
        ("parallel.sequence=1", r"--layouts parallel.sequence \(1\) must be false or true"),
    ]:
        with pytest.raises(ConfigError, match=text):
            parse_layouts([given])
