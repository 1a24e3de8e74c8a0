"""What the documentation says is so: its code runs, its keys, targets and links exist, its index is complete."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import shardwise as shardwise_package
from scripts import environment_variables, pipeline_tables, site
from scripts.write_docs import (
    API,
    BEGINNINGS,
    DEVICES,
    MODEL_PAGE,
    NAME_OF_API,
    PAGE,
    PORTING,
    READERS,
    api_page,
    devices_page,
    model_page,
    page,
    porting_page,
    readers_page,
    with_addresses,
)
from shardwise.base.errors import see
from shardwise.cli import main
from shardwise.config import load_config, recipe_names
from shardwise.runs.folder import EVENTS
from tests.arch.source import ROOT, config_fields, headings, package_files, tree
from tests.arch.test_audit import is_command
from tests.e2e.command import shardwise
from tests.e2e.test_pages import shape

README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


LOOP = (ROOT / "docs/training-loop.md").read_text(encoding="utf-8")
SCRIPTS = {
    found[1]: block
    for block in re.findall(r"^```python\n(.*?)^```", LOOP, re.MULTILINE | re.DOTALL)
    if (found := re.match(r"# (\w+\.py); run it with: torchrun", block))
}
ORIGINAL = re.compile(r"^## [^\n]*original.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
"""A section of a tutorial that compares with the original."""
OTHER_NAMES = ("docs/comparison.md", "docs/porting.md")
"""Pages with the keys of other programs."""
CONTAINERS = (ROOT / "docs/containers.md").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
LINTER = Path(sys.executable).parent / "hadolint"


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_the_page_trains(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(SCRIPTS[name], encoding="utf-8")
    program = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    done = shardwise(name, at=tmp_path, program=program)
    assert done.code == 0, done.err
    assert "Warning" not in done.err
    shown = LOOP.partition(f"{SCRIPTS[name]}```\n\n<!-- excerpt -->\n```text\n")[2].partition("```")[0]
    assert shape(done.out) == shape(shown if name == "zero1.py" else "")


def test_generated_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make pages`"
    assert MODEL_PAGE.read_text(encoding="utf-8") == model_page(), "run `make pages`"
    assert DEVICES.read_text(encoding="utf-8") == devices_page(), "run `make pages`"
    assert API.read_text(encoding="utf-8") == api_page(), "run `make pages`"
    assert PORTING.read_text(encoding="utf-8") == porting_page(), "run `make pages`"
    assert READERS.read_text(encoding="utf-8") == readers_page(), "run `make pages`"
    assert environment_variables.PAGE.read_text(encoding="utf-8") == environment_variables.page(), "run `make pages`"
    assert pipeline_tables.PAGE.read_text(encoding="utf-8") == pipeline_tables.page(), "run `make pages`"
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for beginning in BEGINNINGS:
        text = beginning.read_text(encoding="utf-8")
        assert text == with_addresses(text, project), "run `make pages`"


def test_zero_shares_out_state_and_nothing_else() -> None:
    """As the page on pipelines says."""
    for without, with_zero in zip(*(pipeline_tables.needed(f"optimizer.zero={n}") for n in (0, 1)), strict=True):
        (before, after) = ({**dict(each.rows()), "optimizer": None} for each in (without, with_zero))
        assert before == after
        assert with_zero.optimizer * 4 == without.optimizer


@pytest.mark.parametrize("page", BEGINNINGS, ids=lambda path: path.stem)
def test_a_fork_sets_its_addresses_in_one_place(page: Path) -> None:
    """pyproject.toml has them; the site's are tested below."""
    none, here, there = (
        f"[project]\nname = 'x'\n[project.urls]\n{urls}"
        for urls in (
            "",
            "Repository = 'https://host.example/us/x'\nIssues = 'https://host.example/us/x/issues'",
            "Repository = 'https://host.example/you/x'",
        )
    )
    text = with_addresses(page.read_text(encoding="utf-8"), none)
    assert "host.example" not in text
    ours = with_addresses(text, here)
    assert "(`git clone https://host.example/us/x`)" in ours
    assert ("(https://host.example/us/x/issues)" in ours) == (page.name == "README.md")
    theirs = with_addresses(ours, there)
    assert "(`git clone https://host.example/you/x`)" in theirs
    assert "/us/" not in theirs
    assert with_addresses(theirs, none) == text


def test_each_environment_variable_of_the_code_is_on_its_page_and_no_other() -> None:
    record = environment_variables.recorded()
    assert len(set(record)) == len(record)
    found = environment_variables.read_in_code({path: tree(path) for path in package_files()})
    assert set(record) == found, "see scripts/environment_variables.py"
    assert {"SHARDWISE_CACHE", "RANK", "SLURM_PROCID", "ROLE_RANK", "CC", "TERM"} <= set(record), "each kind of use"
    assert len(environment_variables.page().split()) < 700


def test_the_index_and_the_menu_of_the_site_have_every_page() -> None:
    docs = ROOT / "docs"
    listed = re.findall(
        r"^(?:- |\d+\. )\[[^]]+\]\(([^)]+)\): \S.*", (docs / "README.md").read_text("utf-8"), re.MULTILINE
    )
    pages = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    assert sorted(link for link in listed if not link.startswith("..")) == sorted(set(pages) - {"README.md"})
    linked = set(re.findall(r"\]\(([^)]+)\)", README))
    tutorials = {f"docs/{page}" for page in pages if page.startswith("tutorials/")}
    assert {"docs/README.md"} | tutorials <= linked, "the README links the index and each tutorial"
    # The menu has the sections of docs/README.md, and each page in them.
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    menu = yaml.safe_load(text.partition("\nnav:\n")[2].partition("\nnot_in_nav")[0])
    sections = {title: entries for part in menu for title, entries in part.items() if isinstance(entries, list)}
    index = (ROOT / "docs/README.md").read_text("utf-8")
    assert list(sections) == re.findall(r"^## (.+)", index, re.MULTILINE)
    assert max(len(entries) for entries in sections.values()) <= 12
    shown = [page for entries in sections.values() for entry in entries for page in entry.values()]
    assert len(shown) == len(set(shown))
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages - {"docs/README.md"} <= set(shown)
    others = re.findall(r"^  /(\S+)$", text, re.MULTILINE)
    assert not [name for name in others if name.startswith(("docs", "skills"))], "each page of docs is in the menu"
    named = [found[3] for found in NAME_OF_API.finditer(API.read_text("utf-8"))]
    assert sorted(named) == sorted(set(shardwise_package.__all__) - {"Config"}), (
        "docs/configuration.md has Config's keys"
    )


GENERATED = ("docs/api.md", "docs/configuration.md", "docs/model-keys.md")
"""Pages that the code writes, which are as long as it has names."""
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("skills/*/SKILL.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_has_at_most_300_lines_and_says_what_to_read_next(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.relative_to(ROOT).as_posix() not in GENERATED:
        assert len(text.splitlines()) <= 300, "divide the page by topics"
    *_, last = text.rstrip().split("\n\n")
    assert last.startswith("Next: "), "the last paragraph must be 'Next: [page](page.md), …'"
    links = re.findall(r"\]\(([^)#]+)", last)
    assert links, "the next step must be a link"
    assert all((page.parent / link).exists() for link in links), f"one of {links} leads nowhere"


def test_the_readme_is_short_and_names_families_and_targets_that_exist() -> None:
    (named,) = re.findall(r"^\| recipes \| (.*), published or tiny \|$", README, re.MULTILINE)
    families = {load_config(name).model.family.replace("_", "-") for name in recipe_names()}
    assert {word.lower() for word in re.split(r", | and ", named)} == families
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):(?!=)", makefile, re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)\b", README + CONTRIBUTING, re.MULTILINE))
    assert {"train", "test"} <= named
    assert named <= targets
    assert len(README.split()) <= 800


@pytest.mark.parametrize("page", sorted(ROOT.glob("skills/*/SKILL.md")), ids=lambda path: path.parent.name)
def test_a_skill_is_short_and_says_when_it_is_for(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    header = yaml.safe_load(text.split("---\n")[1])
    assert header["name"] == f"shardwise-{page.parent.name}"
    assert header["description"].endswith(".")
    assert "```sh\n" in text, "its commands must stand in blocks, which tests run"


def test_the_site_has_an_index_for_programs_and_its_markdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "PAGES", tmp_path / "pages")
    site.main()
    index = (tmp_path / "pages/llms.txt").read_text(encoding="utf-8")
    assert index.startswith("# shardwise\n\n> Pretrain transformer language models")
    site.on_post_build({"site_dir": str(tmp_path / "site")})
    linked = re.findall(r"^- \[[^]]+\]\(([^)]+)\): \S", index, re.MULTILINE)
    assert len(linked) > 40
    for name in ("README.md", *linked):
        assert (tmp_path / "site" / name).is_file(), f"the site has no {name}"
    assert "skills/diagnose/SKILL.md" in linked
    assert not list((tmp_path / "site").rglob("*.svg"))
    api = (tmp_path / "pages/docs/api.md").read_text(encoding="utf-8")
    assert "\n::: shardwise.api.runs.train\n" in api
    assert "```" not in api, "the site has the text of mkdocstrings alone"


@pytest.mark.parametrize(
    ("urls", "links"),
    [
        ("", (None, None, None)),
        ("[project.urls]\nRepository = 'https://host.example/us/ours'", ("https://host.example/us/ours", "ours", None)),
        ("[project.urls]\nDocumentation = 'https://docs.example'", (None, None, "https://docs.example")),
    ],
)
def test_links_of_the_site_are_those_of_the_project(
    urls: str, links: tuple[str | None, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[project]\nname = 'shardwise'\n{urls}\n", encoding="utf-8")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    config = site.on_config({"site_name": "shardwise"})
    assert (config["repo_url"], config["repo_name"], config["site_url"]) == links


def test_commands_in_the_text_exist() -> None:
    """Those between backticks: there is help on the command, and it has the options."""
    named = set()
    for source in PAGES:
        prose = re.sub(r"^```.*?^```", "", source.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for code in re.findall(r"`(shardwise [a-z][^`]*)`", prose):
            words = re.split(r" [^a-z]", " ".join(code.split()))[0].split()
            commands = [found for length in (3, 2) if is_command(found := " ".join(words[:length]))]
            named.add(" ".join([*(commands[:1] or words), *re.findall(r" (--[a-z-]+)", code)]))
    assert len(named) > 15
    assert [each for each in sorted(named) if not is_command(each)] == []


def test_keys_in_the_text_exist() -> None:
    """The first column of a table of a tutorial and, in `ORIGINAL`, items up to a colon have the original's keys."""
    sections = "|".join({key.partition(".")[0] for key in config_fields()})
    groups = {key.rpartition(".")[0] for key in config_fields()}
    known = {*config_fields(), *groups, "model.config", "model.safetensors", "optimizer.pt"}
    unknown, count = [], 0
    for source in PAGES:
        name = source.relative_to(ROOT).as_posix()
        text = re.sub(r"^```\w+\n.*?^```", "", source.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        if name.startswith("docs/tutorials/"):
            text = re.sub(r"^\| .*? \|", "|", text, flags=re.MULTILINE)
            text = ORIGINAL.sub(lambda section: re.sub(r"^- .*?: ", "- ", section[0], flags=re.MULTILINE), text)
        named = set(re.findall(rf"`((?:{sections})\.[a-z_]+)\b(?!\()", text))
        count += len(named)
        unknown += [f"{name}: {key}" for key in sorted(named - known) if name not in OTHER_NAMES]
    assert count > 500
    assert unknown == []


def test_links_lead_somewhere() -> None:
    links = [
        (source, link, anchor)
        for source in PAGES
        for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", source.read_text(encoding="utf-8"))
    ]
    assert len(links) > 50
    missing = []
    for source, link, anchor in links:
        target = source.parent / link if link else source
        if not target.exists() or (anchor and anchor not in headings(target)):
            missing.append(f"{source.relative_to(ROOT)}: {link}#{anchor}")
    assert not missing


def test_release_files_have_the_version() -> None:
    version = shardwise_package.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == version
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})$", changelog, re.MULTILINE)
    assert "## [Unreleased]" in changelog
    assert not released or released[0][0] == version, f"the newest section of the changelog is {released[0]}"


def manifests() -> list[dict[str, object]]:
    (block,) = re.findall(r"^```yml\n(.*?)^```", CONTAINERS, re.MULTILINE | re.DOTALL)
    return [*yaml.safe_load_all(block)]


def test_the_manifest_fits_the_schema_of_kubernetes_and_names_data() -> None:
    versions = kubernetes_validate.latest_version(), "1.29.0"
    assert [manifest["kind"] for manifest in manifests()] == ["Service", "Job"]
    for manifest in manifests():
        for version in versions:
            kubernetes_validate.validate(manifest, version, strict=True)
    for text in (CONTAINERS, (ROOT / "docs/cluster.md").read_text(encoding="utf-8")):
        started = re.findall(r"shardwise train llama2-7b\b(?:[\s\\]+(\S+))?", text)
        assert len(started) > 1
        assert {word.partition("=")[0] for word in started} == {"data.dataset"}
    job: Any = manifests()[1]
    assert job["spec"]["template"]["spec"]["containers"][0]["args"][0] == "data.dataset=python"


def test_the_linter_finds_nothing_and_would_find_a_fault() -> None:
    done = subprocess.run([LINTER, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    wrong = DOCKERFILE.replace("WORKDIR /train", "RUN cd /train")
    assert subprocess.run([LINTER, "-"], input=wrong, text=True, capture_output=True, check=False).returncode == 1


def test_the_image_gets_each_file_that_it_copies_and_has_the_arguments_of_the_page() -> None:
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) == kept
    assert all((ROOT / name).exists() for name in copied)
    named = re.findall(r"^- `([A-Z]+)`: ", CONTAINERS, re.MULTILINE)
    assert named == re.findall(r"^ARG ([A-Z]+)=", DOCKERFILE, re.MULTILINE)
    assert len(CONTAINERS.split()) <= 700


FOLDER = ROOT / "docs/troubleshooting"
TROUBLESHOOTING = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
ENTRIES = {
    f"{page}#{name}": body
    for page, text in TROUBLESHOOTING.items()
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
    assert len(ENTRIES) == sum(text.count("\n### ") for text in TROUBLESHOOTING.values()), (
        "two entries have one address"
    )
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
    pages = [*TROUBLESHOOTING.values(), (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")]
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
