"""The tutorials' job lines give the layouts of the originals: on their nodes of 32 ranks, and on trn2's of 64."""

import re
from pathlib import Path

import pytest

from shardwise.cli import main
from tests.arch.source import ROOT

# Nodes, ranks of a node, TP, PP and DP of the originals' scripts, and the same on trn2. BERT and GPT2-XL fill a node.
LAYOUTS = {
    "bert-large": [(1, 32, 8, 1, 4), (1, 64, 8, 1, 8)],
    "gpt-neox-20b": [(4, 32, 32, 1, 4), (2, 64, 32, 1, 4)],
    "gpt3-3d": [(4, 32, 8, 4, 4), (2, 64, 8, 4, 4), (8, 32, 32, 8, 1), (4, 64, 32, 8, 1)],
    "llama2-7b": [(4, 32, 8, 1, 16), (2, 64, 8, 1, 16)],
    "zero1-gpt2-xl": [(1, 32, 1, 1, 32), (1, 64, 1, 1, 64)],
}
RECIPES = {
    "bert-large": {"bert-large"},
    "gpt-neox-20b": {"gpt-neox-20b"},
    "gpt3-3d": {"gpt3-23b", "gpt3-175b"},
    "llama2-7b": {"llama2-7b"},
    "zero1-gpt2-xl": {"gpt2-xl"},
}
"""The recipes of a tutorial whose jobs the table of all five lists."""
JOB = re.compile(r"^\| (\d+) × (\d+) \| ([^|]+) \| ([\d.]+ [\w ]+) \| `shardwise (submit [^`]+)` \|$", re.MULTILINE)
DEVICES = {"32": "trn1:32", "64": "trn2:64"}


def degrees(text: str) -> tuple[int, ...]:
    """TP, PP and DP that a text names; 1 for those that it does not."""
    found = {axis: int(degree) for axis, degree in re.findall(r"\b(TP|PP|DP) (\d+)", text)}
    return tuple(found.get(axis, 1) for axis in ("TP", "PP", "DP"))


@pytest.mark.parametrize("page", LAYOUTS)
def test_a_job_has_the_layout_of_the_original(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    table = JOB.findall((ROOT / "docs/tutorials/all-five.md").read_text(encoding="utf-8"))
    jobs = [job for job in table if job[-1].startswith(tuple(f"submit {recipe} " for recipe in RECIPES[page]))]
    assert set().union(*RECIPES.values()) == {command.split()[1] for *_, command in table}
    assert [(int(nodes), int(ranks), *degrees(layout)) for nodes, ranks, layout, *_ in jobs] == LAYOUTS[page]
    for nodes, ranks, layout, seconds, command in jobs:
        assert main([*command.split(), "data.path=text.txt", "--device", DEVICES[ranks], "--dry-run"]) == 0
        told = capsys.readouterr().out
        assert ("TorchNeuron's copy" in told) == ("refused so far" in layout) == (degrees(layout)[1] > 1), command
        shown = told.partition("\n\n")[0].splitlines()
        rows = dict(line.split(maxsplit=1) for line in shown if not line.startswith(" "))
        assert rows["step"].partition(" predicted")[0] == seconds, command
        assert re.fullmatch(rf"{nodes} nodes? × {ranks} ranks", rows["nodes"]), command
        assert degrees(rows["layout"]) == degrees(layout), command
