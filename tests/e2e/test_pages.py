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
ELSEWHERE = {
    ("docs/checkpoints.md", ""): "tests/e2e/test_checkpoints_page.py::followed",
    ("docs/outputs.md", ""): "tests/e2e/test_outputs_page.py::test_the_commands_print_what_the_page_shows",
    ("docs/bitwise.md", ""): "tests/e2e/test_audit.py::test_the_page_runs",
    ("docs/branches.md", ""): "tests/e2e/test_branch.py::test_the_page_runs",
    ("docs/evaluate-and-generate.md", "Tasks"): (
        "tests/e2e/test_evaluation_in_training.py::test_the_page_on_tasks_runs"
    ),
    ("docs/fine-tuning.md", ""): "tests/e2e/test_outputs_page.py::test_the_page_runs",
    ("docs/decayed-model.md", ""): "tests/e2e/test_decayed_model.py::place",
    ("docs/own-model.md", ""): "tests/e2e/test_own_model.py::followed",
    ("docs/own-model.md", "Verify"): "tests/e2e/test_own_model.py::test_verify_compares_both_models",
    ("docs/own-model-options.md", ""): "tests/e2e/test_own_model.py::test_verify_compares_both_models",
    ("docs/hooks.md", ""): "tests/unit/api/test_examples.py::test_the_command_of_the_page_on_hooks_trains",
    ("docs/compile.md", ""): "tests/e2e/test_compile.py::test_the_page_runs",
    ("docs/verify.md", ""): "tests/e2e/test_verify.py::test_the_page_runs",
    ("docs/data.md", "Preparing data"): "tests/e2e/test_data_command.py::test_what_the_documentation_shows",
    ("docs/data.md", "Looking at data"): "tests/e2e/test_data_command.py::test_what_the_documentation_shows",
    ("docs/planner.md", "This machine, and a run that was"): (
        "tests/unit/plan/test_plan_here.py::test_the_corrected_device_explains_the_run"
    ),
    ("docs/notices.md", ""): "tests/e2e/test_notices.py::test_the_end_is_told_once_and_what_fails_is_a_warning",
    (
        "docs/environment.md",
        "",
    ): "tests/unit/verify/test_doctor.py::test_what_is_printed_says_how_to_mend_and_has_no_secrets",
    (
        "docs/containers.md",
        "",
    ): "tests/e2e/test_containers.py::test_pods_with_the_variables_of_the_manifest_train_together",
    ("docs/watching.md", "List devices and runs"): "tests/unit/watch/test_ls.py::test_the_page_shows_the_table",
    ("docs/watching.md", "Numbers for programs"): "tests/unit/watch/test_monitor.py::test_once",
    ("docs/watching.md", "Prometheus and Grafana"): "tests/unit/watch/test_monitor.py::test_prometheus_until_a_signal",
}
"""Page and heading ("": the whole page) of blocks that the named test runs, with what they need."""
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


ALL_FIVE = "docs/tutorials/all-five.md"
"""What the tutorials share."""
TUTORIALS = [page for page in PAGES if page.startswith("docs/tutorials/")]


@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_trains_on_what_its_own_commands_fetch_or_make(page: str) -> None:
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


@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_begins_small_and_says_what_was_never_tried(page: str) -> None:
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


@pytest.mark.parametrize("test", sorted({block.runs_in for page in PAGES for block in blocks(page) if block.runs_in}))
def test_a_block_that_another_test_runs_names_that_test(test: str) -> None:
    file, _, name = test.partition("::")
    assert (ROOT / file).exists(), f"{file} is named above a block of commands, and is not there"
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}, (
        f"{file} has no {name}"
    )


def test_no_name_of_a_section_is_out_of_date() -> None:
    headings = {(block.page, heading) for page in PAGES for block in blocks(page) for heading in (block.heading, "")}
    assert set(ELSEWHERE) <= headings


LANGUAGES = ("python", "yaml", "diff", "json", "toml")
PROGRAMS = {
    ("README.md", "Train"): "tests/e2e/test_pages.py::test_the_readme_loads_a_checkpoint_as_its_page_does",
    ("docs/cluster.md", "Submit to SLURM"): "tests/unit/config/test_schema.py::test_recipes_of_the_pages_fit",
    (
        "docs/configuration.md",
        "optimizer: the update rule, its schedule and its sharding",
    ): "tests/unit/optim/test_learning_rate.py::test_the_points_of_the_page_are_a_curve",
    (
        "docs/experts.md",
        "Balance",
    ): "tests/dist/test_balance.py::test_transformers_has_the_same_loss_with_its_balance_term",
    ("docs/data.md", "Mixtures and stages"): "tests/unit/config/test_mixture.py::test_the_mixture_of_the_page_is_read",
    ("docs/data-formats.md", "Megatron's .bin and .idx"): "tests/e2e/page_commands.py::megatrons_files",
    ("docs/planner.md", "Devices"): "tests/e2e/test_pages.py::test_an_own_device_of_the_page_is_read",
    ("docs/own-model-options.md", ""): "tests/e2e/test_own_model.py::followed",
    (
        "docs/porting.md",
        "torch_xla's ZeRO-1",
    ): "tests/unit/pages/test_porting_page.py::test_the_call_of_torch_xla_works",
    ("docs/python.md", ""): "tests/unit/api/test_examples.py::test_the_code_of_the_page_runs_in_its_order",
    ("docs/training-loop.md", ""): "tests/arch/test_docs.py::test_a_script_of_the_page_trains",
}
"""Page and heading ("": the whole page) of blocks that the named test runs, beside the table `ELSEWHERE`."""
HERE = {
    ("docs/communication.md", "Gradients, in your own loop"),
    ("docs/optimizers.md", "In your own training loop"),
    ("docs/precision.md", "bfloat16 without masters: stochastic rounding"),
    ("docs/tutorials/zero1-gpt2-xl.md", "In a training loop of your own"),
}
"""Lines for a training loop of the reader's own, each run by `test_lines_for_a_training_loop_run`."""
_PART = re.compile(r"^## (?P<heading>.*)\n|^```(?P<language>\w+)\n(?P<code>[\s\S]*?)^```", re.MULTILINE)


def programs(page: str) -> Iterator[tuple[str, str, str]]:
    """Of each block that is no command: heading, language, text."""
    heading = ""
    for part in _PART.finditer(PAGES[page]):
        heading = part["heading"] or heading
        if part["language"] in LANGUAGES:
            yield heading, part["language"], part["code"]


def test_every_program_is_run() -> None:
    known = {*ELSEWHERE, *PROGRAMS, *HERE}
    for page in PAGES:
        for heading, language, code in programs(page):
            named = (page, heading) in known or (page, "") in known
            assert named, f"{page}, '{heading}': no test runs this {language}; name the test in PROGRAMS:\n{code}"


def test_no_entry_is_out_of_date() -> None:
    found = {(page, name) for page in PAGES for heading, _, _ in programs(page) for name in (heading, "")}
    assert {*PROGRAMS, *HERE} <= found


@pytest.mark.parametrize("test", sorted(set(PROGRAMS.values())))
def test_a_named_test_exists(test: str) -> None:
    test_a_block_that_another_test_runs_names_that_test(test)


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
