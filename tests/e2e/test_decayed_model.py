"""docs/decayed-model.md: all of its commands, with a small model, few steps and less code."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.arch.source import ROOT
from tests.e2e.command import metrics, miniature, shardwise, within
from tests.e2e.test_pages import assert_shown, blocks

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/decayed-model.md").read_text(encoding="utf-8")
SIZES = {"=60 ": "=2 ", "@180": "@4", "at: 180": "at: 4", "{dataset: python,": "{path: code,"}
"""Steps and data of the page, in small."""
KEYS = ("log.sample_tokens=0", "optimizer.warmup_steps=2", "train.steps=6", "train.eval_every=0")


def commands(folder: Path) -> list[list[str]]:
    text = "\n".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    for size, small in SIZES.items():
        assert size in text
        text = text.replace(size, small)
    text = text.replace("train llama-small", shlex.join(["train", str(miniature(folder)), *KEYS, "--nproc", "1"]))
    return [shlex.split(line)[1:] for line in text.replace("\\\n", "").splitlines() if line]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the page's commands were run, up to the two branches."""
    folder = tmp_path_factory.mktemp("decayed")
    (folder / "code").mkdir()
    (folder / "code/decoder.py").write_bytes((Path(json.__file__).parent / "decoder.py").read_bytes())
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (folder / "write.py").write_text(program, encoding="utf-8")
    assert shardwise("write.py", at=folder, program=(sys.executable,)).code == 0
    _, trunk, *branches = commands(folder)[:4]
    shardwise(*trunk, at=folder).succeeded()
    for branch in branches:
        shardwise(*branch, "--nproc", "1", at=folder).succeeded()
    return folder


def test_the_page_runs(place: Path) -> None:
    trunk = metrics(place / "runs/trunk", "step")
    for name, other in (("stories", "code"), ("code", "stories")):
        first, last = metrics(place / "runs" / name, "step")
        before = trunk[3]["sources"]
        assert last["sources"][other]["samples"] == before[other]["samples"]
        assert last["sources"][name]["samples"] == before[name]["samples"] + 2 * 8
        assert last["lr"] < first["lr"] < trunk[3]["lr"]
    scored = metrics(place / "runs/trunk", "eval_task")
    assert [(event["task"], event["step"]) for event in scored] == [
        (task, step) for step in (2, 4, 6) for task in ("endings", "lines")
    ]
    assert all(0 <= event["metrics"]["acc,none"] <= 1 for event in scored)
    ls, _, _, _, report, *evaluations = commands(place)
    shown = within(*ls, at=place).succeeded().out
    assert shown.count("trunk@4") == 2
    block = blocks("docs/decayed-model.md")[0]
    assert block.shown
    assert_shown(block, shown)
    within(*report, at=place).succeeded()
    for evaluation in evaluations:
        assert "endings" in within(*evaluation, at=place).succeeded().out
