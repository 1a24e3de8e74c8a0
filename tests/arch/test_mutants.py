"""The faults of tests/mutants fit the source as it is, and the tests notice each of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.check_mutants import Mutant, Result, load_mutants, sources, table
from tests.arch.source import ROOT

A = Path("a.py")
LEAST = 200
"""Faults, so that none are lost when the source is moved about."""


def is_there(test: str) -> bool:
    """Whether a file of tests, or a function in it, exists."""
    path, _, name = test.partition("::")
    file = ROOT / path
    return file.exists() and (not name or f"def {name.partition('[')[0]}(" in file.read_text(encoding="utf-8"))


def test_each_fault_fits_the_source() -> None:
    """A stale one, whose text is gone or there twice, is to be mended with the change that moved it."""
    problems, texts = [], sources()
    for mutant in load_mutants():
        try:
            file = mutant.file(texts)
            compile(texts[file].replace(mutant.find, mutant.replace), str(file), "exec")
        except (ValueError, SyntaxError) as error:
            problems.append(f"{mutant.id}: {error}")
    assert not problems, "\n".join(problems)


def test_each_fault_has_a_name_of_its_own_a_sentence_and_tests() -> None:
    mutants = load_mutants()
    names = [mutant.id for mutant in mutants]
    assert len(set(names)) == len(names) >= LEAST
    for mutant in mutants:
        assert mutant.breaks.endswith("."), f"{mutant.id} says in a sentence what breaks"
        assert "|" not in mutant.breaks, f"{mutant.id} is shown in a table"
        assert mutant.find != mutant.replace, f"{mutant.id} changes nothing"
        assert mutant.tests, f"{mutant.id} names the tests that must fail"
        missing = [test for test in mutant.tests if not is_there(test)]
        assert not missing, f"{mutant.id} names tests that are not there: {missing}"


def test_named_cases_are_there() -> None:
    """A case of a test, such as test[llama], may get another name with its parameters."""
    cases = sorted({test for mutant in load_mutants() for test in mutant.tests if "[" in test})
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "slow or not slow",
    ]
    found = subprocess.run([*command, *cases], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_stale_fault_is_an_error() -> None:
    mutant, a, b = Mutant("id", "b = 1", "b = 2", "It breaks.", ("tests/unit",)), Path("a.py"), Path("b.py")
    assert mutant.file({a: "a\nb = 1\n", b: "c\n"}) == a
    for texts in ({a: "a\n"}, {a: "b = 1\nb = 1\n"}, {a: "b = 1\n", b: "b = 1\n"}):
        with pytest.raises(ValueError, match=r"mutant id: its text must occur once in the package, and does"):
            mutant.file(texts)


def test_a_time_out_is_noticed_only_where_the_fault_may_hang() -> None:
    plain = Mutant("plain", "b", "c", "It breaks.", ("tests/unit",))
    hanging = Mutant("hanging", "b", "c", "It hangs.", ("tests/unit",), hangs=True)
    assert not Result(plain, A, "timed out", 1.0, "", "").is_caught
    assert Result(hanging, A, "timed out", 1.0, "", "").is_caught
    assert not Result(plain, A, "broken", 1.0, "", "").is_caught


def test_a_part_of_the_faults_updates_the_table() -> None:
    plain = Mutant("plain", "b", "c", "It breaks.", ("tests/unit",))
    other = Mutant("other", "b", "c", "It fails.", ("tests/unit",))
    first = table(
        [Result(plain, A, "survived", 1.0, "", ""), Result(other, A, "caught", 2.0, "t::a", "")], [plain, other], ""
    )
    assert "**1 of 2 are caught.**" in first
    second = table([Result(plain, A, "caught", 1.0, "t::b", "")], [plain, other], first)
    assert "**2 of 2 are caught.**" in second
    assert second.index("`plain`") < second.index("`other`")
    assert "`other`" not in table([], [plain], second), "a fault that is no more has no row"


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_the_tests_notice_each_fault() -> None:
    found = subprocess.run(
        [sys.executable, "scripts/check_mutants.py"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert found.returncode == 0, found.stdout
