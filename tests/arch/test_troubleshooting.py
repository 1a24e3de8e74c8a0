"""docs/troubleshooting quotes messages as the code writes them and as tests assert them; messages name its entries.

troubleshooting.yaml has the test that asserts the message of each entry.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
import yaml

from shardwise.base.errors import see
from shardwise.cli import main
from shardwise.runs.folder import EVENTS
from tests.arch.source import ROOT, package_files, tree

FOLDER = ROOT / "docs/troubleshooting"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
ENTRIES = {
    f"{page}#{name}": body
    for page, text in PAGES.items()
    for name, body in re.findall(r"^### (\S+)\n\n(.*?)(?=^##|\Z|^Next:)", text, re.MULTILINE | re.DOTALL)
}

ASSERTED_BY = yaml.safe_load((ROOT / "tests/arch/troubleshooting.yaml").read_text(encoding="utf-8"))


def named(module: ast.AST) -> Iterator[tuple[str, str]]:
    """Each entry that a statement's message names by `see`, with the constant text of the statement."""
    for statement in ast.walk(module):
        if isinstance(statement, ast.stmt) and not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            inner = [node for node in ast.walk(statement) if node is not statement and isinstance(node, ast.stmt)]
            if inner:
                continue
            nodes = list(ast.walk(statement))
            texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            for node in nodes:
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "see":
                    (entry,) = node.args
                    assert isinstance(entry, ast.Constant), "an address must be readable in the code"
                    yield str(entry.value), "".join(texts)


@cache
def sites() -> dict[str, list[str]]:
    """Entry → the messages of the package that name it."""
    found: dict[str, list[str]] = {}
    for path in package_files():
        if "see(" not in path.read_text(encoding="utf-8"):
            continue
        for entry, text in named(tree(path)):
            found.setdefault(entry, []).append(text)
    return found


def test_each_message_that_has_an_entry_names_it_and_each_address_leads_to_one() -> None:
    assert len(ENTRIES) >= 60
    assert len(ENTRIES) == sum(text.count("\n### ") for text in PAGES.values()), "two entries have one address"
    names = {entry.partition("#")[2] for entry in ENTRIES}
    assert len(names) == len(ENTRIES), "two entries have one name"
    assert set(ASSERTED_BY) == names
    assert set(sites()) == set(ENTRIES)


def test_the_command_line_explains_each_entry(capsys: pytest.CaptureFixture[str]) -> None:
    for entry in ENTRIES:
        command = see(entry).strip(" ()`").split()
        assert main(command[1:]) == 0
        said = capsys.readouterr().out
        assert [line.split()[0] for line in said.split("\n\n")] == ["Message:", "Cause:", "Fix:"]
        # The page's own words, without the addresses of its links.
        body = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", ENTRIES[entry]).removeprefix("> ")
        words = body.replace("**Cause.**", "Cause:").replace("**Fix.**", "Fix:")
        assert said.removeprefix("Message:").split() == words.split()


def test_its_events_exist() -> None:
    written = re.findall(r'(?:_event\(\s*|\{"event": )"(\w+)"', (ROOT / "src/shardwise/train/reporter.py").read_text())
    assert set(written) == set(EVENTS)
    pages = [*PAGES.values(), (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")]
    named = [event for text in pages for event in re.findall(r"\bevents? `([^`]+)`", text)]
    assert named
    assert set(named) <= set(EVENTS)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_message_is_quoted_as_the_code_writes_it_and_a_test_asserts_it(name: str) -> None:
    found = re.fullmatch(r"> (.+)\n\n\*\*Cause\.\*\* .+\n\*\*Fix\.\*\* .+\n+", ENTRIES[name], re.DOTALL)
    assert found, f"{name} lacks its message, its cause or its fix"
    test = ASSERTED_BY[name.partition("#")[2]]
    asserted = (ROOT / test).read_text(encoding="utf-8")
    for part in (part.strip(" ,;(") for part in found[1].split("…")):
        assert part in asserted or part in asserted.replace("\\", ""), f"{test} asserts no {part!r} of {name}"
    quoted = ENTRIES[name].partition("\n")[0].removeprefix("> ")
    parts = [part.strip(" ,;(") for part in quoted.split("…")]
    assert any(part and part in text for text in sites()[name] for part in parts), f"no message of {name} has its quote"
