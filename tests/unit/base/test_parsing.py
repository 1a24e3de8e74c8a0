"""Texts: what is parsed and refused, errors, names of files, and the notation of a layout."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base import units
from shardwise.base.errors import ConfigError, DataError, RunError, ShardwiseError
from shardwise.base.files import name_problem
from shardwise.base.mesh_axes import layout_text
from shardwise.base.yaml_and_json import dump_yaml, parse_value, parse_yaml
from shardwise.config import Layout
from shardwise.config.base_section import divisors, nearest_numbers
from shardwise.verify.layouts import Cell
from shardwise_plan.layout_choices import LayoutChoice
from tests.rows import rows_of

ROWS = rows_of(__file__)
SCALARS = {
    "1e-4": 1e-4, "1E5": 1e5, "-2.5": -2.5, ".5": 0.5, "3.": 3.0, "1_000": 1000, "1_0.2": 10.2, "1_": "1_",
    "1__0": "1__0", "1_.5": "1_.5", "-7": -7, "010": "010", "95,5": "95,5", "1:30": "1:30", "2024-01-01": "2024-01-01",
    "true": True, "False": False, "NULL": None, "~": None, "": None, "no": "no", "off": "off", "tRuE": "tRuE",
    ".": ".", "nan": "nan",
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_plain_scalars_follow_the_core_schema(text: str, value: object) -> None:
    for read in (parse_value(text, "test"), parse_yaml(f"key: {text}", "test")["key"]):
        assert read == value
        assert type(read) is type(value)


def test_files_are_read_and_written() -> None:
    assert parse_yaml("a: |\n  1\nb: >-\n  2\nc: '3'", "test") == {"a": "1\n", "b": "2", "c": "3"}
    assert parse_yaml("# only a comment\n", "test") is None
    # Fault 21: aliases and levels within the bounds are read.
    assert parse_yaml("a: &a [1, 2]\nb: [*a, *a]\n", "test") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
    assert parse_yaml("[" * 64 + "]" * 64, "test") is not None
    assert dump_yaml({"folder": Path("graphs")}) == "folder: graphs\n"
    with pytest.raises(ConfigError) as caught:
        parse_yaml("a:\n  b: 1\n  b: 2\nc: 3\nc: 4\n", "my.yaml")
    assert caught.value.problems == ["my.yaml, line 3: a.b is given twice", "my.yaml, line 5: c is given twice"]
    for number in [1e-8, 1e22, math.pi]:
        assert yaml.safe_load(dump_yaml({"lr": number})) == {"lr": number}
    for sign in ["\x1b", "\u2028", "\x85"]:
        text = dump_yaml({"prompt": f"a{sign}b"})
        assert text.removesuffix("\n").isprintable()
        assert parse_yaml(text, "test") == {"prompt": f"a{sign}b"}


BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'x'}]\n" for n in range(12))
LEVELS = "my.yaml must have at most 64 levels of lists and mappings inside each other, and it has more"
VALUES = "my.yaml must have at most 100,000 values, those that aliases repeat included, and it has more"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", r"my.yaml is not valid YAML: .*line 2"),
        ("a: !!python/name:os.system x", r"my.yaml, line 1: a has the tag .*only plain values"),
        ("? [1, 2]\n: 3", r"my.yaml, line 1: a key must be a word"),
        # Fault 21: YAML has bounds.
        ("[" + "1, " * 100_001 + "1]", f"^{VALUES}$"),
        (BOMB, f"^{VALUES}$"),
        ("&a [*a]", f"^{LEVELS}$"),
        ("[" * 10_000 + "]" * 10_000, f"^{LEVELS}$"),
    ],
    ids=lambda text: text[:12],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "my.yaml")


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"))
)


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), LEAVES | st.lists(LEAVES) | st.just({"x": 1})))
def test_what_is_written_is_read_back(values: dict[str, Any]) -> None:
    assert parse_yaml(dump_yaml(values), "test") == values


def test_errors_and_numbers_near_a_value() -> None:
    assert str(ConfigError("a is wrong")) == "a is wrong"
    both = ConfigError(["a is wrong", "b is wrong"])
    assert both.problems == ["a is wrong", "b is wrong"]
    assert str(both) == "- a is wrong\n- b is wrong"
    assert (ShardwiseError("").exit_code, RunError("").exit_code) == (1, 1)
    assert (ConfigError("").exit_code, DataError("").exit_code) == (2, 2)
    assert issubclass(ConfigError, ValueError)
    for sign in ["\x1b", "\u2028", "\ud800"]:
        assert str(ConfigError(f"a{sign}b\tc\nd")) == f"a{ascii(sign)[1:-1]}b\tc\nd"
    for value, valid, expected in [(3, [1, 2, 4, 8], [2, 4]), (4, [1, 4], [4]), (9, [1, 2], [2]), (1, [2, 4], [2])]:
        assert nearest_numbers(value, valid) == expected
    for number, expected in [(1, {1}), (12, {1, 2, 3, 4, 6, 12}), (16, {1, 2, 4, 8, 16}), (2**31 - 1, {1, 2**31 - 1})]:
        assert divisors(number) == expected


def test_a_name_of_a_folder() -> None:
    for name in ("a", "a.txt", ".hidden", "...", "a..b", "~", "a b", "ü", "part-?.txt"):
        assert name_problem(name) is name_problem(f"deep/{name}", nested=True) is None
        assert name_problem(f"deep/{name}") == f"'deep/{name}' lies in another folder"


@pytest.mark.parametrize(("name", "problem"), ROWS["names"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_name_that_leads_elsewhere(name: object, problem: str, nested: bool) -> None:
    found = name_problem(name, nested=nested)
    assert found.endswith(problem)
    assert "\x1b" not in found, "a terminal obeys it"


@pytest.mark.parametrize(("degrees", "text", "short"), ROWS["layouts"])
def test_a_layout_has_one_notation(degrees: list[int], text: str, short: str) -> None:
    tensor, context, pipeline, data, sequence = degrees
    named = {"tensor": tensor, "context": context, "pipeline": pipeline, "data": data}
    world = tensor * context * pipeline * data
    assert layout_text(named, sequence=sequence) == text
    assert layout_text(named, sequence=sequence, ones=False) == short
    assert Layout(world, tensor, sequence, pipeline, context=context).product().startswith(f"{text} = {world} rank")
    choice = LayoutChoice(tensor, sequence, context, pipeline, "1f1b", None, 1, "none", 1)
    assert choice.text(world).startswith(text)
    assert Cell("cpu", world, tensor, sequence, context, pipeline=pipeline).degrees == (short or "one process")


@pytest.mark.parametrize("function", ROWS["units"])
def test_texts(function: str) -> None:
    assert {value: getattr(units, function)(value) for value in ROWS["units"][function]} == ROWS["units"][function]
    assert units.parse_size(400 * "9") is None
