"""The faults of tests/mutants are well formed, and are put where they say; scripts/check_mutants.py runs them."""

import ast
from dataclasses import replace

import pytest

from scripts.check_mutants import Mutant, Result, load_mutants, stale_mutants

LEAST = 400
"""Faults that fit the source: stale ones are not run, and many of them would go unnoticed."""
SOURCE = """
LIMIT = 3

class Meter:
    unit: str = "s"

    def read(self, value, scale=2):
        # A comment.
        if value and (
            scale
        ):
            self.value = f"{value}"
            return None
        elif value > LIMIT:
            return value * (scale + 1)

def read(value):
    value = 'a b'
    return [value for value in value if value]
"""
MUTANT = Mutant("id", "meter:Meter.read", "value and scale", "value", "It breaks.", ("tests/unit",))


@pytest.mark.parametrize(
    ("at", "find", "new", "expected"),
    [
        ("meter:Meter.read", "value and scale", "scale", "if scale:"),
        ("meter:Meter.read", "scale + 1", "scale - 1 if scale else 1", "return value * (scale - 1 if scale else 1)"),
        ("meter:Meter.read", "2", "3", "scale=3"),
        ("meter:Meter.read", "self.value = f'{value}'\nreturn None", "return 1", "scale:\n            return 1\n"),
        ("meter:Meter.read", "scale=2):", "scale=2, offset=0):", "scale=2, offset=0):"),
        ("meter:Meter.read", "if value and ( scale", "if ( value", "if ( value\n"),
        ("meter:read", 'value = "a b"', "value = 0", "def read(value):\n    value = 0\n"),
        ("meter:", "LIMIT = 3", "LIMIT = 4", "LIMIT = 4\n"),
    ],
)
def test_a_piece_is_found_by_syntax(at: str, find: str, new: str, expected: str) -> None:
    changed = replace(MUTANT, at=at, find=find, replace=new).apply(SOURCE)
    assert expected in changed
    assert expected not in SOURCE + ast.unparse(ast.parse(SOURCE))


@pytest.mark.parametrize(
    ("at", "find", "times"),
    [
        ("meter:Meter.read", "value and LIMIT", 0),
        ("meter:Meter.read", "scale", 2),
        ("meter:Meter.write", "value and scale", 0),
    ],
)
def test_a_stale_fault_is_an_error(at: str, find: str, times: int) -> None:
    with pytest.raises(ValueError, match=f"its piece must occur once in {at}, and does {times} times"):
        replace(MUTANT, at=at, find=find).apply(SOURCE)


def test_stale_faults_are_listed() -> None:
    tests = "tests/arch/test_mutants.py::test_a_stale_fault_is_an_error"
    fits = replace(MUTANT, at="units:size", find="value", tests=("tests/unit", tests, f"{tests}[meter:Meter.read]"))
    gone = replace(fits, id="gone", find="values")
    broken = replace(fits, id="broken", find="return _scaled(value, 1024.0, _SIZE_SUFFIXES)", replace="break")
    untested = replace(fits, id="untested", tests=("tests/unit/test_gone.py::test_this",))
    renamed = replace(fits, id="renamed", tests=(f"{tests}[meter:Meter.read]", f"{tests}s"))
    reasons = stale_mutants([fits, gone, broken, untested, renamed])
    assert list(reasons) == ["gone", "broken", "untested", "renamed"]
    assert reasons["renamed"] == f"no file has its tests: {tests}s"
    assert reasons["gone"] == "its piece must occur once in units:size, and 0 files have it once"
    assert "'break' outside loop" in reasons["broken"]


@pytest.mark.slow
def test_enough_faults_fit_the_source() -> None:
    mutants = load_mutants()
    assert len(mutants) - len(stale_mutants(mutants)) >= LEAST


def test_each_fault_has_a_name_of_its_own_a_sentence_and_tests() -> None:
    mutants = load_mutants()
    names = [mutant.id for mutant in mutants]
    assert len(set(names)) == len(names) >= LEAST
    for mutant in mutants:
        assert mutant.at.count(":") == 1, f"{mutant.id} names a module and a function"
        assert mutant.breaks.endswith("."), f"{mutant.id} says in a sentence what breaks"
        assert "|" not in mutant.breaks, f"{mutant.id} is shown in a table"
        assert mutant.find != mutant.replace, f"{mutant.id} changes nothing"
        assert mutant.tests, f"{mutant.id} names the tests that must fail"


def test_a_time_out_is_noticed_only_where_the_fault_may_hang() -> None:
    assert not Result(MUTANT, "timed out").is_caught
    assert Result(replace(MUTANT, hangs=True), "timed out").is_caught
    assert not Result(MUTANT, "broken").is_caught
