"""`Run.frame` and `Run.plot`: what a notebook shows of runs."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.base.errors import ConfigError
from tests.monitor_runs import Mesh, Start, loss_of, write_run
from tests.rows import rows_of
from tests.unit.watch.pages import by_batch

ROWS = rows_of(__file__)

MESH = Mesh(1, 2, 1, 1)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")


def test_a_frame_has_a_row_for_each_step_that_counts() -> None:
    pandas = pytest.importorskip("pandas")
    write_run(Path("one"), [Start(0, 25, None), Start(20, 30)], mesh=MESH, losses={29: math.nan, 30: math.inf})
    run = shardwise.Run("one")
    frame = run.frame()
    assert frame.index.name == "step"
    assert frame.index.tolist() == [*range(1, 31)]
    assert frame["loss"][:28].tolist() == [loss_of(step) for step in range(1, 29)]
    assert math.isnan(frame["loss"][29])
    assert frame["loss"][30] == math.inf
    assert frame["loss"].dtype == float
    assert frame["split_seconds.forward"][30] == 0.28
    assert frame["time"].dtype == pandas.DatetimeTZDtype(frame["time"].dt.unit, "UTC")
    assert not {"event", "split_seconds"} & {*frame.columns}
    assert run.frame("eval")["perplexity"].tolist() == [event["perplexity"] for event in run.metrics("eval")]
    assert [*run.frame("stop")["reason"]] == ["finished"]
    assert run.frame("start").index.tolist() == [0, 1], "a start has no step"
    assert run.frame("warning").empty
    with pytest.raises(ConfigError, match=r"event \('evals'\) must be start, .* did you mean eval\?"):
        run.frame("evals")


def test_a_plot_has_a_line_for_each_run() -> None:
    pyplot: Any = pytest.importorskip("matplotlib.pyplot")
    small, large = by_batch("small", 1, 40), by_batch("large", 2, 20)
    write_run(Path("deep/small"), [Start(0, 1)], mesh=MESH, losses={1: 7.0})
    axes = shardwise.Run(small).plot(large, shardwise.Run("deep/small"), x="tokens", log="xy")
    assert [line.get_label() for line in axes.lines] == ["small", "large", "deep/small"]
    assert axes.lines[1].get_xdata().tolist() == [2 * 8192 * step for step in range(1, 21)]
    assert axes.lines[1].get_ydata().tolist() == [loss_of(2 * step) for step in range(1, 21)]
    assert len({line.get_color() for line in axes.lines}) == 3
    assert axes.lines[2].get_marker() == ".", "of a single point a line shows nothing"
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("tokens", "Training loss")
    again = shardwise.Run(small).plot(metric="lr", smoothing=0.9, x="time", axes=pyplot.subplots()[1])
    raw, smooth = again.lines
    assert raw.get_ydata().tolist() == [3e-4] * 40
    assert smooth.get_ydata() == pytest.approx([3e-4] * 40)
    assert again.get_legend().get_texts()[0].get_text() == "small"
    assert shardwise.Run(large).plot(metric="lr", axes=again) is again
    assert len({line.get_color() for line in again.lines}) == 2, "a second call has another colour"
    pyplot.close("all")


@pytest.mark.parametrize(("others", "options", "problem"), ROWS["wrong"])
def test_a_wrong_choice_is_a_sentence(others: tuple[Any, ...], options: dict[str, Any], problem: str) -> None:
    write_run(Path("one"), [Start(0, 3)], mesh=MESH)
    Path("young").mkdir()
    Path("young/metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="^" + re.escape(problem)):
        shardwise.Run("one").plot(*others, **options)
