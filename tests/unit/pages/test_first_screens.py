"""Pages show before they tell: a command, then what it prints. Pictures are current, and what pages name exists."""

import re
from typing import Any

import pytest
import torch

import shardwise as sw
from scripts import concept_pictures
from scripts.tutorial_common import IMAGES
from shardwise.config.other_names import ARGUMENTS
from shardwise.distributed import collectives
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


STALE = "concept-{}.svg is not current: run `python -m scripts.concept_pictures`"
CONCEPTS = (ROOT / "docs/concepts.md").read_text(encoding="utf-8")


def committed(name: str) -> str:
    return (IMAGES / f"concept-{name}.svg").read_text(encoding="utf-8")


def test_the_pictures_are_current_and_the_page_shows_each() -> None:
    for name, picture in concept_pictures.drawn().items():
        assert committed(name) == str(picture), STALE.format(name)
    names = sorted(path.name for path in IMAGES.glob("concept-*.svg"))
    assert names == sorted(f"concept-{name}.svg" for name in ("checkpoint", "memory", "pipeline", "placement"))
    assert all(f"](images/{name})" in CONCEPTS for name in names)


@pytest.mark.slow
def test_the_picture_of_a_checkpoint_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert committed("checkpoint") == str(concept_pictures.checkpoint_picture(concept_pictures.trained()))


PORTING = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
_, LIBRARIES = PORTING.split("## neuronx-distributed and Megatron-LM")
LIBRARIES, TORCH_XLA = LIBRARIES.split("## torch_xla's ZeRO-1")


def test_our_names_for_those_of_other_libraries_exist_and_the_call_of_torch_xla_works() -> None:
    rows = [row.split("|")[3] for row in LIBRARIES.splitlines() if row.count("|") == 4]
    assert len(rows) > 20
    code = re.findall(r"`([^`]+)`", " ".join(rows[2:]))
    public = {name[0] for name in (re.match(r"[A-Z]\w+|[a-z]+_cross_entropy", text) for text in code) if name}
    assert len(public) > 10
    assert public <= set(sw.__all__)
    functions = [text.removeprefix("collectives.") for text in code if text.startswith("collectives.")]
    assert len(functions) == 7
    assert all(hasattr(collectives, name) for name in functions)
    rows = [row for row in TORCH_XLA.splitlines() if row.startswith("| by name | `")]
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[2])]
    assert len(names) == 6
    for name in names:
        (row,) = (row for row in rows if f"`{name}`" in row)
        wanted = re.findall(r"`([^`]+)`", row.split("|")[3])
        advice = ARGUMENTS["optimizer"][name]
        assert advice == f"use {wanted[0]}" if wanted else advice.startswith("leave it out"), row
    (code,) = re.findall(r"^```python\n(.*?)^```", TORCH_XLA, re.MULTILINE | re.DOTALL)
    scope: dict[str, Any] = {"model": torch.nn.Linear(2, 2).bfloat16(), "torch": torch}
    exec(compile(code, "porting.md", "exec"), scope)
    assert (scope["optimizer"].grad_clipping, scope["optimizer"].max_norm) == (True, 1.0)
    assert {bucket.master.dtype for bucket in scope["optimizer"].buckets} == {torch.float32}
