"""The examples that no other test runs: a notebook, hooks, and ZeRO-1 beside Accelerate.

The notebook's cells are executed in their order in this process, as a kernel would, but without one: Jupyter's servers
are no dependency of the tests.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import shardwise
from tests.arch.source import ROOT
from tests.e2e.command import shardwise as run_command
from tests.e2e.test_pages import Block, assert_shown
from tests.e2e.test_pages import blocks as page_blocks

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.mark.slow
def test_the_command_of_the_page_on_hooks_trains(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (block,) = page_blocks("docs/hooks.md")
    _, *command = block.code.split()
    done = run_command(*command, "train.steps=8", "train.eval_every=4", at=tmp_path).succeeded()
    assert block.shown
    assert_shown(block, done.out)
    run = shardwise.Run("runs/hooks")
    losses = [event["loss"] for event in run.metrics("eval")]
    assert losses[-1] < 0.97 * losses[0]
    assert run.config().hooks.optimizer == "examples.own_hooks.hooks:Lion"


def test_accelerate_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")
    from examples.accelerate_zero1 import main

    main()
    (loss,) = re.findall(r"final loss ([\d.]+)", capsys.readouterr().out)
    assert float(loss) < 0.1


@pytest.mark.slow
def test_the_code_of_the_page_runs_in_its_order(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    shown = []
    program = r"^```python\n(.*?)^```\n(?:\n<!-- excerpt -->\n```text\n(.*?)^```)?"
    for code, text in re.findall(program, page, re.MULTILINE | re.DOTALL):
        exec(compile(code, "docs/python.md", "exec"), names)
        printed = capsys.readouterr().out
        shown += [text] if text else []
        assert_shown(Block("docs/python.md", "", code, None, text or None, bool(text)), printed)
    assert len(shown) == 2
    assert len(names["run"].metrics()) == 4
    assert names["done"] == 1
    assert Path(names["saved"]).is_dir()


def test_the_loop_with_layers_is_that_of_its_page() -> None:
    """`test_docs.py` runs it."""
    page = (ROOT / "docs/training-loop.md").read_text(encoding="utf-8")
    assert f"```python\n{(ROOT / 'examples' / 'layers.py').read_text(encoding='utf-8')}```" in page
