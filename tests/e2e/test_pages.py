"""Every command of every page runs: here, in one process and quickly; or in a test that the page or a table names.

Above a block that no test can run as it is, a page has a comment that readers do not see:

    <!-- cluster-only: tests/FILE.py::TEST -->    it needs other machines; the test starts the same in small
    <!-- network-only: tests/FILE.py::TEST -->    it needs the internet; the test has a server of its own

A `text` block below shows all that the commands print. Above one that shows some of their lines, or numbers that differ
from run to run, stands `<!-- excerpt -->`: its lines are printed in this order, numbers and spaces aside; `...` stands
for others, and `…` at the end of a line for the rest of it.
"""

import ast
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import shardwise
from scripts.tutorial_outputs import bash
from shardwise.data.reading.megatron_files import IndexedWriter
from shardwise.data.tokens.tokenizer import Tokenizer, train_tokenizer
from shardwise_plan.device_specs import parse_device
from tests.arch.source import ROOT
from tests.e2e.command import environment
from tests.e2e.page_commands import PREPARED, Reader, serve
from tests.unit.data import hdf5_shards

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("skills/*/SKILL.md")))
}
_TESTS = yaml.safe_load((ROOT / "tests/e2e/pages.yaml").read_text(encoding="utf-8"))
ELSEWHERE, PROGRAMS = (
    {(page, heading): test for page, tests in _TESTS[kind].items() for heading, test in tests.items()}
    for kind in ("commands", "programs")
)
HERE = {(page, heading) for page, heading in _TESTS["lines"]}
SHARDS = (
    ("bert_pretrain_wikicorpus_tokenized_hdf5_seqlen128", 128, 20),
    ("bert_pretrain_wikicorpus_tokenized_hdf5_seqlen512", 512, 80),
)
"""Folders of HDF5 shards, with the tokens and the masked tokens of their samples."""
HUB_IDS = ("EleutherAI/gpt-neox-20b", "gpt2", "meta-llama/Llama-2-7b-hf")
_BLOCK = re.compile(
    r"^## (?P<heading>.*)\n|"
    r"(?:^<!-- (?:cluster|network)-only: (?P<test>\S+) -->\n|^<!-- (?P<excerpt>excerpt) -->\n)?"
    r"^```(?P<language>\w+)\n(?P<code>[\s\S]*?)^```",
    re.MULTILINE,
)
ALL_FIVE = "docs/tutorials/all-five.md"
"""What the tutorials share."""
TUTORIALS = [page for page in PAGES if page.startswith("docs/tutorials/")]
LANGUAGES = ("python", "yaml", "diff", "json", "toml")
_PART = re.compile(r"^## (?P<heading>.*)\n|^```(?P<language>\w+)\n(?P<code>[\s\S]*?)^```", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """Commands of a page, and the text that the page shows below as what they print."""

    page: str
    heading: str
    code: str
    test: str | None
    shown: str | None
    excerpt: bool

    @property
    def runs_in(self) -> str | None:
        """The test that runs it, if it is another than this file's."""
        found = (ELSEWHERE.get((self.page, heading)) for heading in (self.heading, ""))
        return self.test or next(filter(None, found), None)


@cache
def blocks(page: str) -> list[Block]:
    """The page's commands in their order."""
    parts, found, heading = list(_BLOCK.finditer(PAGES[page])), [], ""
    for part, following in zip(parts, [*parts[1:], None], strict=False):
        heading = part["heading"] or heading
        if part["language"] in ("sh", "console", "bash", "shell"):
            shown = following["code"] if following and following["language"] == "text" else None
            excerpt = shown is not None and following["excerpt"] is not None
            found.append(Block(page, heading, part["code"], part["test"], shown, excerpt))
    return found


@cache
def small_tokenizer() -> Tokenizer:
    corpus = (ROOT / "src/shardwise/data/corpus/tiny.jsonl").read_text(encoding="utf-8")
    return train_tokenizer([json.loads(line)["text"] for line in corpus.splitlines()], 500, "text")


def equip(reader: Reader) -> None:
    """What a page expects a reader to have: texts, data, tokenizers, published weights, and the checkout's files."""
    at = reader.at
    corpus = (ROOT / "src/shardwise/data/corpus/tiny.jsonl").read_text(encoding="utf-8")
    (at / "corpus.jsonl").write_text(corpus, encoding="utf-8")
    texts = [json.loads(line)["text"] for line in corpus.splitlines()]
    (at / "story.txt").write_text("\n".join(texts), encoding="utf-8")
    (at / "own.txt").write_text("The ring of keys was lost in spring, and a song went with it.\n")
    for name in ("meta-llama/Llama-2-7b-hf", "gpt2", "gpt2-wiki"):
        small_tokenizer().save(at / name)
    for prefix in ("wiki_text_document", "books_text_document", "gpt2-wiki/my-gpt2_text_document"):
        with IndexedWriter(at / prefix, 300) as writer:
            for document in range(40):
                writer.add([*range(document, document + 200), 299])
    for name, length, predictions in SHARDS:
        (at / name).mkdir()
        shard = hdf5_shards.arrays(40, length=length, predictions=predictions)
        hdf5_shards.write(at / name / "wiki_training_0.hdf5", shard)
    for file in ("docs/tutorials/bert-mini.yaml", "examples"):
        (at / file).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / file).is_dir() else shutil.copyfile
        copy(ROOT / file, at / file)


def publish(reader: Reader, recipe: str, name: str) -> None:
    """Weights of a small model of the recipe as a Hugging Face folder, in place of published ones."""
    done = reader.shardwise(["train", recipe, "train.seed=9", "--run-dir", "published"])
    assert done.code == 0, done.err
    made = reader.at / "published/checkpoints/step-00000002"
    shutil.copytree(made, reader.at / name, ignore=shutil.ignore_patterns("optimizer", "manifest.json"))


def follow(page: str, at: Path) -> Iterator[tuple[Block, int, str, str]]:
    """Run the blocks of a page in their order; of each its exit code, standard output and standard error."""
    reader = Reader(at)
    equip(reader)
    for write in PREPARED.get(page, ()):
        write(at)
    published = {"EleutherAI/gpt-neox-20b": "gpt-neox-20b", "openai-community/gpt2": "gpt2", "my-model": "gpt2"}
    for name, recipe in published.items():
        if f"checkpoint.load={name}" in PAGES[page]:
            publish(reader, recipe, name)
    with serve(reader) as commands:
        path = f"{commands}{os.pathsep}{os.environ['PATH']}"
        for block in blocks(page):
            if block.runs_in is None:
                reader.whole = block.shown is not None
                code = block.code.replace('export PATH="$PWD/.venv/bin:$PATH"\n', "")
                done = bash(code, at, environment(HEAD="127.0.0.1", PATH=path))
                yield block, done.returncode, done.stdout, done.stderr


def shape(line: str) -> str:
    """A line without its numbers and spaces, and without units that depend on how fast the machine is."""
    timeless = re.sub(r"(?<=\d) ?(ms|s|min|h|k)\b", "", line)
    return re.sub(r"[-\d.,]+(e[-+]\d+)?", "#", timeless.replace(" ", ""))


def is_shown(line: str, printed: str) -> bool:
    """True if a line of a page, by its shape, is a printed one or, with `…` at its end, the beginning of one."""
    return line == printed or (line.endswith("…") and printed.startswith(line[:-1]))


def assert_shown(block: Block, out: str) -> None:
    """The page shows what the commands print, whole or as an excerpt."""
    if block.excerpt:
        printed = iter([shape(line) for line in out.splitlines()])
        lines = [line for line in (block.shown or "").splitlines() if line != "..."]
        missing = next((line for line in lines if not any(is_shown(shape(line), each) for each in printed)), None)
        assert missing is None, f"{block.page}: not printed in this order by\n{block.code}\n{missing}\n\n{out}"
    elif block.shown is not None:
        assert block.shown == out, f"{block.page} is not current: run `python -m scripts.tutorial_outputs`\n{out}"


def assert_healthy(block: Block, code: int, out: str, err: str) -> None:
    what = f"{block.page}:\n{block.code}\nexit code {code}\n{out}\n{err}"
    assert code == 0, what
    assert "Traceback" not in out + err, what
    assert "metrics.jsonl" not in block.code or '"loss": ' in out, f"{what}\nthese lines show no loss"
    assert_shown(block, out)


OFTEN = ("README.md",)
FOLLOWED = [
    pytest.param(page, marks=() if page in OFTEN else pytest.mark.slow)
    for page in PAGES
    if any(block.runs_in is None for block in blocks(page))
]


@pytest.mark.parametrize("page", FOLLOWED)
def test_every_command_runs(page: str, tmp_path: Path) -> None:
    for block, code, out, err in follow(page, tmp_path):
        assert_healthy(block, code, out, err)


@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_begins_small_and_trains_on_what_its_own_commands_fetch_or_make(page: str) -> None:
    """Or on what a run fetches from the hub by its id."""
    made = set(HUB_IDS)
    for block in blocks(page):
        code = block.code.replace("\\\n", "")
        for command in re.findall(r"^ *(?:torchrun .*)?shardwise train .*", code, re.MULTILINE):
            named = set(re.findall(r" data\.(?:path|tokenizer)=(\S+)", command))
            assert named <= made, f"no command makes {named - made}"
        for name in ("bert_pretrain_wikicorpus_tokenized_hdf5_seqlen", "gpt2-wiki"):
            if name in code and "data fetch" in code:
                made |= {f"{name}128", f"{name}512", name, f"{name}/my-gpt2_text_document"}
    text = PAGES[page]
    trained = re.findall(r"^ *shardwise train (\S+)", text, re.MULTILINE)
    assert trained[0].endswith("-tiny")
    introduction = text.partition("\n## ")[0]
    if page != ALL_FIVE:
        assert "(all-five.md)" in introduction
        return
    assert "Nothing has been run on Trainium so far" in " ".join(introduction.split())
    assert "(../devices.md#trainium)" in introduction
    for words in ("shardwise top", "submit --precompile", "shardwise jobs", "squeue", "neuron-top"):
        assert words in text, f"{page} does not say {words}"
    assert "train.dropout_mode=invariant" in text


_NAMED = {block.runs_in for page in PAGES for block in blocks(page) if block.runs_in}


@pytest.mark.parametrize("test", sorted({*_NAMED, *PROGRAMS.values()}))
def test_a_block_that_another_test_runs_names_that_test(test: str) -> None:
    file, _, name = test.partition("::")
    assert (ROOT / file).exists(), f"{file} is named above a block of commands, and is not there"
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}, (
        f"{file} has no {name}"
    )


def programs(page: str) -> Iterator[tuple[str, str, str]]:
    """Of each block that is no command: heading, language, text."""
    heading = ""
    for part in _PART.finditer(PAGES[page]):
        heading = part["heading"] or heading
        if part["language"] in LANGUAGES:
            yield heading, part["language"], part["code"]


def test_every_program_is_run_and_no_entry_is_out_of_date() -> None:
    known = {*ELSEWHERE, *PROGRAMS, *HERE}
    for page in PAGES:
        for heading, language, code in programs(page):
            named = (page, heading) in known or (page, "") in known
            assert named, f"{page}, '{heading}': no test runs this {language}; name the test in PROGRAMS:\n{code}"
    found = {(page, name) for page in PAGES for heading, _, _ in programs(page) for name in (heading, "")}
    assert {*PROGRAMS, *HERE} <= found
    headings = {(block.page, heading) for page in PAGES for block in blocks(page) for heading in (block.heading, "")}
    assert set(ELSEWHERE) <= headings


@pytest.mark.parametrize(("page", "heading"), sorted(HERE))
def test_lines_for_a_training_loop_run(page: str, heading: str) -> None:
    """One step with a model of a reader changes its parameters."""
    model = torch.nn.Linear(4, 4)
    before = model.weight.detach().clone()
    scope: dict[str, Any] = {name: getattr(shardwise, name) for name in shardwise.__all__}
    scope |= {"torch": torch, "model": model, "loss": model(torch.ones(2, 4)).square().sum()}
    scope["optimizer"] = shardwise.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    (code,) = (code for found, _, code in programs(page) if found == heading)
    exec(compile(code, page, "exec"), scope)
    if "backward" not in code:
        scope["loss"].backward()
        scope["optimizer"].step()
    assert not torch.equal(model.weight, before)


def test_an_own_device_of_the_page_is_read() -> None:
    (text,) = (code for heading, _, code in programs("docs/planner.md") if heading == "Devices")
    device = parse_device("own", text, "docs/planner.md")
    assert (device.name, device.per_node) == ("Our GPU", 8)


def test_the_readme_loads_a_checkpoint_as_its_page_does() -> None:
    """A test runs the block of docs/checkpoints.md; only the folder differs."""
    (short,) = (code for heading, _, code in programs("README.md") if heading == "Train")
    whole = next(code for _, language, code in programs("docs/checkpoints.md") if language == "python")
    assert set(lines(short)) <= set(lines(whole))


def lines(code: str) -> list[str]:
    return [line for line in code.splitlines() if not line.startswith("folder = ")]
