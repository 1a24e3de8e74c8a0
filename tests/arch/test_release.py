"""What `make release-check` finds in the texts and in a wheel; the environments are made by the command alone."""

import pytest

import shardwise
from scripts import release_check

CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n\n### Added\n"
PROJECT = "[project]\nname = 'x'\n[project.urls]\nRepository = 'https://host.example/x'\nIssues = 'https://host.example/x/issues'\n"
CITATION = "cff-version: 1.2.0\nversion: 1.2.0\ntitle: x\n"


def test_a_release_that_is_ready() -> None:
    assert release_check.text_problems("1.2.0", CHANGELOG, CITATION, PROJECT) == []
    files = ["shardwise/__init__.py", "shardwise/py.typed"]
    assert release_check.wheel_problems([*files, "shardwise-1.2.0.dist-info/METADATA"], files) == []


@pytest.mark.parametrize(
    ("version", "changelog", "citation", "project", "problem"),
    [
        (
            "1.3.0",
            CHANGELOG,
            CITATION.replace("n: 1.2.0\nt", "n: 1.3.0\nt"),
            PROJECT,
            "must have a section '## [1.3.0] - DATE'",
        ),
        ("1.2.0", CHANGELOG.replace(" - 2026-01-31", ""), CITATION, PROJECT, "must have a section '## [1.2.0] - DATE'"),
        (
            "1.2.0",
            CHANGELOG.replace("ed]\n", "ed]\n\n- A thing.\n"),
            CITATION,
            PROJECT,
            "Unreleased of CHANGELOG.md must be empty",
        ),
        (
            "1.2.0",
            CHANGELOG,
            CITATION.replace("\nversion: 1.2.0", ""),
            PROJECT,
            "version in CITATION.cff must be 1.2.0",
        ),
        ("1.2.0", CHANGELOG, CITATION, "[project]", "must have the addresses Repository and Issues"),
    ],
)
def test_a_text_that_is_not_ready(version: str, changelog: str, citation: str, project: str, problem: str) -> None:
    (found,) = release_check.text_problems(version, changelog, citation, project)
    assert problem in found


def test_files_that_a_wheel_lacks_or_has_beside_the_package() -> None:
    found = release_check.wheel_problems(["shardwise/a.py", "tests/b.py"], ["shardwise/a.py", "shardwise/py.typed"])
    assert [problem.partition(":")[0] for problem in found] == [
        "the wheel must hold shardwise/py.typed",
        "the wheel must not hold tests/b.py",
    ]


def test_the_version_is_that_of_the_package() -> None:
    assert release_check.version() == shardwise.__version__


def test_interpreters_that_do_not_run_are_none() -> None:
    assert set(release_check.interpreters(["/nowhere/python3.13"])) <= set(release_check.PYTHONS)
