"""`make test-changed` runs the tests that can notice a change."""

from collections import defaultdict
from pathlib import Path

import pytest

from scripts.changed_tests import concerned, modules
from scripts.check_mutants import load_mutants


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


@pytest.mark.parametrize(
    ("changed", "runs", "leaves"),
    [
        ("src/shardwise_jobs/jobs.py", "cluster/test_jobs", "dist/test_layers"),
        ("src/shardwise/layers/linear.py", "dist/test_layers", "unit/base/test_units"),
        ("src/shardwise/models/bert.py", "dist/test_families", "unit/jobs/test_jobs"),  # imported by a name
        ("src/shardwise_plan/cli/plan.py", "unit/plan/test_plan", "dist/test_layers"),  # a command
        ("src/shardwise/config/recipes/quickstart.yaml", "unit/config/test_load", "unit/base/test_units"),
        ("tests/dist/dense.py", "dist/test_layers", "unit/base/test_units"),
        ("docs/devices.md", "arch/test_docs", "dist/test_layers"),
    ],
)
def test_imports_say_what_runs(changed: str, runs: str, leaves: str) -> None:
    tests = concerned([changed])
    assert f"tests/{runs}.py" in tests
    assert f"tests/{leaves}.py" not in tests
    assert (Path(__file__).parents[2] / f"tests/{leaves}.py").exists()


def test_all_run_where_what_they_stand_on_has_changed() -> None:
    assert len(concerned(["pyproject.toml"])) == len([name for name in modules() if ".test_" in name])
