"""Pages show before they tell: the first block is a command or a program, and then comes what it prints."""

import re

import pytest

from tests.arch.source import ROOT

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
WITHOUT_COMMAND = {"docs/README.md": "a list of all pages", "docs/api.md": "signatures, which the site fills"}
"""Pages that show no command, each with the reason."""
BEFORE = 80
"""Words of a page at most above its first block: about one screen of a telephone."""
COLUMNS = 80
WORDS = 60_000
"""Words of all pages of docs together, as `wc -w` counts them."""
_BLOCK = re.compile(r"^ *```(?P<language>\w*)[^\n]*\n(?P<code>[\s\S]*?)^ *```", re.MULTILINE)


@pytest.mark.parametrize("page", sorted(set(PAGES) - set(WITHOUT_COMMAND)))
def test_a_page_shows_a_command_and_what_it_prints_first(page: str) -> None:
    blocks = list(_BLOCK.finditer(PAGES[page]))
    assert len(blocks) > 1, "it shows nothing"
    first, second = blocks[:2]
    assert first["language"] in ("sh", "python")
    assert second["language"] == "text", "what it prints follows"
    between = re.sub(r"<!-- .* -->", "", PAGES[page][first.end() : second.start()])
    assert not between.strip(), "nothing stands between a command and what it prints"
    assert len(PAGES[page][: first.start()].split()) <= BEFORE


def test_all_pages_together_are_short_in_the_menu_and_begin_alike() -> None:
    for page in WITHOUT_COMMAND:
        assert "```sh" not in PAGES[page]
    words = {page: len(text.split()) for page, text in PAGES.items() if page != "README.md"}
    assert sum(words.values()) <= WORDS, sorted(words.items(), key=lambda item: -item[1])
    menu = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2].partition("\nnot_in_nav")[0]
    named = set(re.findall(r": ([\w/.-]+\.md)$", menu, re.MULTILINE))
    assert set(PAGES) <= named
    # With the same two commands, in a copy of the repository.
    begin = r"^make train +#.*\nexport PATH=\"\$PWD/\.venv/bin:\$PATH\""
    for page in ("README.md", "docs/quickstart.md", "docs/tutorials/all-five.md"):
        first = next(_BLOCK.finditer(PAGES[page]))
        assert re.match(begin, first["code"]), page
        assert re.search(r"copy of \[?the repository", " ".join(PAGES[page][: first.start()].split()))
        assert not re.search(r"pip install -e|make env|activate", PAGES[page])


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_a_block_is_wide(page: str) -> None:
    wide = [
        line for block in _BLOCK.finditer(PAGES[page]) for line in block["code"].splitlines() if len(line) > COLUMNS
    ]
    assert wide == []
