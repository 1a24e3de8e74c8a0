"""Predicted gains of `train.switches`, as the pages have them."""

import importlib
import re
import sys

import pytest

from tests.arch.source import ROOT

PAGES = ("docs/performance.md", "benchmarks/results/switches.md")


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_the_predictions_of_the_planner(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    predicted = importlib.import_module("first_gpu.switches").published()
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = {name: float(gain) for name, gain in re.findall(r"^\| `(\w+)`.*?\| ([\d.]+)%", text, re.M)}
    assert rows == {name: round(100 * gain, 1) for name, gain in predicted.items() if name != "all"}
    assert "57.3%" in text
    if page == PAGES[1]:
        assert f"| all three | {100 * predicted['all']:.1f}%" in text
