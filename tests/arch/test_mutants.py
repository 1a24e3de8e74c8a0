"""The programs of scripts/: faults of tests/mutants, the budget of lines, `make release-check`, `make test-changed`."""

import ast
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

import shardwise
from scripts import release_check
from scripts.changed_tests import concerned, modules
from scripts.check_budget import BUDGET, limits, lines_by_room, lowered, problems
from scripts.check_budget import main as check_budget
from scripts.check_mutants import Mutant, Result, load_mutants, stale_mutants
from tests.arch.source import CASES

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
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n\n### Added\n"
RELEASED = "[project]\nname = 'x'\n[project.urls]\nRepository = 'https://host.example/x'\nIssues = 'https://host.example/x/issues'\n"
CITATION = "cff-version: 1.2.0\nversion: 1.2.0\ntitle: x\n"


@pytest.mark.parametrize(("at", "find", "new", "expected"), CASES["pieces of code"])
def test_a_piece_is_found_by_syntax(at: str, find: str, new: str, expected: str) -> None:
    changed = replace(MUTANT, at=at, find=find, replace=new).apply(SOURCE)
    assert expected in changed
    assert expected not in SOURCE + ast.unparse(ast.parse(SOURCE))


@pytest.mark.parametrize(("at", "find", "times"), CASES["stale faults"])
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
    assert not Result(MUTANT, "timed out").is_caught
    assert Result(replace(MUTANT, hangs=True), "timed out").is_caught
    assert not Result(MUTANT, "broken").is_caught


def test_rooms_are_folders_of_the_package_and_packages_beside_it(tmp_path: Path) -> None:
    for name, lines in (
        ("shardwise/__init__.py", 1),
        ("shardwise/a/b/c.py", 2),
        ("shardwise/a/d.py", 3),
        ("side/e.py", 4),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x\n" * lines)
    assert lines_by_room(tmp_path) == {"shardwise": 1, "a": 5, "side": 4}


def test_a_room_above_its_row_fails_and_saved_lines_are_taken_back() -> None:
    found = Counter({"a": 1_200, "b": 10, "c": 5})
    assert problems(found, {"a": 1_200, "b": 10, "c": 5}) == []
    over, unknown, gone = problems(found, {"a": 1_000, "b": 10, "d": 1})
    assert over.startswith("a (1,200 lines) must have at most 1,000 lines: take 200 out, or raise its row in BUDGET")
    assert unknown == "c (5 lines) must have a row in BUDGET"
    assert gone == "d of BUDGET is no room of the source: remove its row"
    text = "# A comment.\na            1,000\nb               10\n"
    assert limits(lowered(text, Counter({"a": 900, "b": 20}))) == {"a": 900, "b": 10}
    assert lowered(text, Counter({"a": 900, "b": 20})).startswith("# A comment.\n")
    assert problems(lines_by_room(), limits(BUDGET.read_text(encoding="utf-8"))) == []
    assert check_budget([]) == 0


@pytest.mark.parametrize(
    ("version", "old", "new", "problem"),
    [
        ("1.3.0", "\nversion: 1.2.0", "\nversion: 1.3.0", "must have a section '## [1.3.0] - DATE'"),
        ("1.2.0", " - 2026-01-31", "", "must have a section '## [1.2.0] - DATE'"),
        ("1.2.0", "ed]\n", "ed]\n\n- A thing.\n", "Unreleased of CHANGELOG.md must be empty"),
        ("1.2.0", "\nversion: 1.2.0", "", "version in CITATION.cff must be 1.2.0"),
        ("1.2.0", RELEASED, "[project]", "must have the addresses Repository and Issues"),
    ],
)
def test_a_text_that_is_not_ready(version: str, old: str, new: str, problem: str) -> None:
    texts = (text.replace(old, new) for text in (CHANGELOG, CITATION, RELEASED))
    (found,) = release_check.text_problems(version, *texts)
    assert problem in found


def test_a_release_that_is_ready_and_what_a_wheel_lacks_or_has_beside_the_package() -> None:
    assert release_check.text_problems("1.2.0", CHANGELOG, CITATION, RELEASED) == []
    files = ["shardwise/__init__.py", "shardwise/py.typed"]
    assert release_check.wheel_problems([*files, "shardwise-1.2.0.dist-info/METADATA"], files) == []
    found = release_check.wheel_problems(["shardwise/a.py", "tests/b.py"], ["shardwise/a.py", "shardwise/py.typed"])
    assert [problem.partition(":")[0] for problem in found] == [
        "the wheel must hold shardwise/py.typed",
        "the wheel must not hold tests/b.py",
    ]
    assert release_check.version() == shardwise.__version__
    assert set(release_check.interpreters(["/nowhere/python3.13"])) <= set(release_check.PYTHONS)


@pytest.mark.slow
def test_the_tests_that_notice_a_fault_of_a_file_are_run_when_it_has_changed() -> None:
    """The faults of tests/mutants whose files are named by their module alone."""
    files = defaultdict[str, list[str]](list)
    for path in (path for path in modules().values() if path.startswith("src/")):
        files[Path(path).stem].append(path)
    asked = defaultdict[str, set[str]](set)
    for mutant in load_mutants():
        if len(places := files[mutant.at.partition(":")[0]]) == 1:
            asked[places[0]] |= {test.partition("::")[0] for test in mutant.tests}
    assert len(asked) > 150
    for path, named in asked.items():
        tests = concerned([path])
        assert [name for name in named if not any(Path(test).is_relative_to(name) for test in tests)] == [], path


@pytest.mark.parametrize(("changed", "runs", "leaves"), CASES["changed files"])
def test_imports_say_what_runs(changed: str, runs: str, leaves: str) -> None:
    tests = concerned([changed])
    assert f"tests/{runs}.py" in tests
    assert f"tests/{leaves}.py" not in tests
    assert (Path(__file__).parents[2] / f"tests/{leaves}.py").exists()


def test_all_run_where_what_they_stand_on_has_changed() -> None:
    assert len(concerned(["pyproject.toml"])) == len([name for name in modules() if ".test_" in name])
