"""docs/troubleshooting.md quotes messages as the tests that provoke them assert them."""

import re

import pytest

from tests.arch.source import ROOT, config_fields

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"^### (\S+)\n\n(.*?)(?=^##|\Z|^Next:)", PAGE, re.MULTILINE | re.DOTALL))


def test_there_are_entries() -> None:
    assert len(ENTRIES) >= 15
    assert len(ENTRIES) == PAGE.count("\n### "), "two entries have one address"


@pytest.mark.parametrize("name", ENTRIES)
def test_a_message_is_quoted_as_a_test_asserts_it(name: str) -> None:
    found = re.fullmatch(
        r"> (.+)\n\n<!-- asserted-by: (\S+) -->\n\*\*Cause\.\*\* .+\n\*\*Fix\.\*\* .+\n+", ENTRIES[name], re.DOTALL
    )
    assert found, f"{name} lacks its message, its test, its cause or its fix"
    asserted = (ROOT / found[2]).read_text(encoding="utf-8")
    for part in found[1].split("…"):
        assert part.strip(" ,(") in asserted, f"{found[2]} asserts no {part!r}, which {name} quotes"


def test_its_keys_exist() -> None:
    sections = "|".join({key.partition(".")[0] for key in config_fields()})
    named = set(re.findall(rf"`((?:{sections})\.[a-z_]+)", PAGE))
    assert named
    assert named <= set(config_fields())
