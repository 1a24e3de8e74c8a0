"""The budget of lines: a room that grows, a room without a row, and a row without a room are named."""

from collections import Counter
from pathlib import Path

from scripts.check_budget import BUDGET, limits, lines_by_room, lowered, main, problems


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


def test_a_room_above_its_row_fails() -> None:
    found = Counter({"a": 1_200, "b": 10, "c": 5})
    assert problems(found, {"a": 1_200, "b": 10, "c": 5}) == []
    over, unknown, gone = problems(found, {"a": 1_000, "b": 10, "d": 1})
    assert over.startswith("a (1,200 lines) must have at most 1,000 lines: take 200 out, or raise its row in BUDGET")
    assert unknown == "c (5 lines) must have a row in BUDGET"
    assert gone == "d of BUDGET is no room of the source: remove its row"


def test_saved_lines_are_taken_back() -> None:
    text = "# A comment.\na            1,000\nb               10\n"
    assert limits(lowered(text, Counter({"a": 900, "b": 20}))) == {"a": 900, "b": 10}
    assert lowered(text, Counter({"a": 900, "b": 20})).startswith("# A comment.\n")


def test_the_source_is_within_its_budget() -> None:
    assert problems(lines_by_room(), limits(BUDGET.read_text(encoding="utf-8"))) == []
    assert main([]) == 0
