"""Predicted gains of `train.switches`, as the pages have them."""

import importlib
import re
import sys

import pytest

from tests.arch.source import ROOT

PAGES = ("docs/performance.md", "benchmarks/results/switches.md")


@pytest.fixture(scope="module")
def predicted() -> dict[str, float]:
    """By name of a switch, and of all together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        gains = importlib.import_module("first_gpu.switches").published()
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]
    return gains


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_the_predictions_of_the_planner(page: str, predicted: dict[str, float]) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = {name: float(gain) for name, gain in re.findall(r"^\| `(\w+)`.*?\| ([\d.]+)%", text, re.M)}
    assert rows == {name: round(100 * gain, 1) for name, gain in predicted.items() if name != "all"}
    assert "57.3%" in text
    if page == PAGES[1]:
        assert f"| all three | {100 * predicted['all']:.1f}%" in text
