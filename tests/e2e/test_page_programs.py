"""Every block of a page that is no command (Python, YAML, a change of a file) runs, here or in a test that is named."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shardwise
from shardwise_plan.device_specs import parse_device
from tests.e2e import test_pages
from tests.e2e.test_pages import ELSEWHERE, PAGES

LANGUAGES = ("python", "yaml", "diff", "json", "toml")
PROGRAMS = {
    ("README.md", "Train"): "tests/e2e/test_page_programs.py::test_the_readme_loads_a_checkpoint_as_its_page_does",
    ("docs/cluster.md", "Submit to SLURM"): "tests/unit/config/test_schema.py::test_recipes_of_the_pages_fit",
    (
        "docs/configuration.md",
        "optimizer: the update rule, its schedule and its sharding",
    ): "tests/unit/optim/test_learning_rate.py::test_wsd_and_points_are_any_curve",
    (
        "docs/experts.md",
        "Balance",
    ): "tests/dist/test_balance.py::test_transformers_has_the_same_loss_with_its_balance_term",
    ("docs/data.md", "Mixtures and stages"): "tests/unit/config/test_mixture.py::test_the_mixture_of_the_page_is_read",
    ("docs/data-formats.md", "Megatron's .bin and .idx"): "tests/e2e/page_data.py::megatrons_files",
    ("docs/planner.md", "Devices"): "tests/e2e/test_page_programs.py::test_an_own_device_of_the_page_is_read",
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
    test_pages.test_a_block_that_another_test_runs_names_that_test(test)


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
