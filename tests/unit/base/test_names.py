import pytest

from shardwise.base.files import name_problem


def test_a_name_of_a_folder() -> None:
    for name in ("a", "a.txt", ".hidden", "...", "a..b", "~", "a b", "ü", "part-?.txt"):
        assert name_problem(name) is name_problem(f"deep/{name}", nested=True) is None
        assert name_problem(f"deep/{name}") == f"'deep/{name}' lies in another folder"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("/etc/x", "is absolute"),
        ("..", "leads out of its folder"),
        ("a/../../x", "leads out of its folder"),
        ("a/./b", "has a part without a name"),
        ("a\x1b[2J", "has a backslash or a control character"),
        ("..\\a", "has a backslash or a control character"),
        (None, "None is no text"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_name_that_leads_elsewhere(name: object, problem: str, nested: bool) -> None:
    found = name_problem(name, nested=nested)
    assert found.endswith(problem)
    assert "\x1b" not in found, "a terminal obeys it"
