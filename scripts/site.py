"""Copy the pages of the documentation to build/pages, from which MkDocs makes the site (mkdocs.yml).

A page keeps its place, so that links between pages are those of the repository. A link to a file that is no page shows
the file's text on a page of its own; one to a folder leads to the folder's list of files.

For programs that read the site, `llms.txt` lists the pages (https://llmstxt.org), and each page is there as Markdown
too, at the address of its file in the repository.
"""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.write_docs import API, NAME_OF_API

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "pages"
SOURCES = (
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "skills", "benchmarks/README.md",
    "benchmarks/results", "tests/strict/README.md",
)  # fmt: skip
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(?=[)#])")
_ENTRY = re.compile(r"(?:- |\d+\. )\[([^]]+)\]\(([^)]+\.md)\): (.+)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "sh"}


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    for name in SOURCES:
        source = ROOT / name
        for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if file.is_file():
                _copy(file)
    api = PAGES / API.relative_to(ROOT)
    api.write_text(NAME_OF_API.sub(r"::: \2.\3\n", api.read_text(encoding="utf-8")), encoding="utf-8")
    for page in sorted(PAGES.rglob("*.md")):
        _relink(page)
    (PAGES / "llms.txt").write_text("\n".join(_index()) + "\n", encoding="utf-8")


def on_config(config: dict[str, Any]) -> dict[str, Any]:
    """Set the site's address and its link to the repository from `[project.urls]`; MkDocs calls it before a build."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    repository = urls.get("Repository")
    name = repository and repository.rstrip("/").rpartition("/")[2]
    config |= {"repo_url": repository, "repo_name": name, "site_url": urls.get("Documentation")}
    return config


def on_post_build(config: Mapping[str, Any]) -> None:
    """Copy the pages as Markdown into the site; MkDocs calls it after a build (`hooks` in mkdocs.yml)."""
    for page in sorted(PAGES.rglob("*.md")):
        target = Path(config["site_dir"]) / page.relative_to(PAGES)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, target)


def _index() -> Iterator[str]:
    """The lines of llms.txt: the sections and sentences of docs/README.md, with links from the site's root."""
    yield from ("# shardwise", "", "> Pretrain transformer language models across any mesh of devices.", "")
    yield "Each page is Markdown at the address given here. [The README](README.md) introduces shardwise."
    for line in (ROOT / "docs/README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            yield from ("", line, "")
        elif found := _ENTRY.fullmatch(line):
            text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", found[3])  # its links are those of docs/
            yield f"- [{found[1]}]({os.path.normpath(f'docs/{found[2]}')}): {text}"


def _copy(file: Path) -> None:
    target = PAGES / file.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)


def _relink(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    page.write_text(_LINK.sub(lambda found: _target(page, found[1]), text), encoding="utf-8")


def _target(page: Path, link: str) -> str:
    """The link of a page as the site has it."""
    target = Path(os.path.normpath(page.parent / link))
    original = ROOT / target.relative_to(PAGES) if target.is_relative_to(PAGES) else target
    if original.suffix in (".md", ".svg", ".png") or not original.exists():
        return link  # MkDocs says which link leads nowhere
    shown = target / "index.md" if original.is_dir() else target.with_name(f"{target.name}.md")
    if not shown.exists():
        shown.parent.mkdir(parents=True, exist_ok=True)
        shown.write_text(_listing(original) if original.is_dir() else _shown(original), encoding="utf-8")
        if original.is_dir():
            _relink(shown)  # each of its files gets a page
    return os.path.relpath(shown, page.parent)


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".md", *_LANGUAGES))
    lines = [f"- [{name}]({name})" for name in names]
    return f"# {folder.relative_to(ROOT)}\n\n" + "\n".join(lines) + "\n"


def _shown(file: Path) -> str:
    language = _LANGUAGES.get(file.suffix, "text")
    return f"# {file.relative_to(ROOT)}\n\n````{language}\n{file.read_text(encoding='utf-8')}````\n"


if __name__ == "__main__":
    main()
