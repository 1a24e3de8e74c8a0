"""`shardwise compare`: which curves it reads, what it says of two, and its exit codes."""

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from shardwise.runs.failure_record import FailureRecord
from shardwise.runs.folder import RunDirectory
from shardwise_watch import curve_points
from shardwise_watch.curves import read_curve_file
from shardwise_watch.run import RunView
from tests.command_line import CommandLine
from tests.monitor_runs import FIRST, Mesh, Start, loss_of, stamp, write_run
from tests.unit.watch.pages import DATA_PARALLEL, by_batch, events_of, write_events

LOSSES = {1: 4.0, 2: 3.0, 3: 2.0}
EVENTS = [{"event": "start"}, *({"event": "step", "step": step, "loss": loss} for step, loss in LOSSES.items())]


def lines(*values: Any) -> str:
    return "".join(f"{json.dumps(value)}\n" for value in values)


def run(name: str, *events: Any, end: str = "") -> Path:
    folder = Path(name)
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(lines(*events) + end)
    return folder


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the run of these losses, another one that has just begun, and a curve of later steps."""
    monkeypatch.chdir(tmp_path)
    run("run", *EVENTS)
    run("young")
    Path("later.txt").write_text("5 1\n6 1\n")


def scalars(folder: str, tags: dict[str, dict[int, float]]) -> None:
    writer = EventFileWriter(folder)
    for tag, curve in tags.items():
        for step, value in curve.items():
            writer.add_event(Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)])))
    writer.close()


TABLES = yaml.safe_load(Path(__file__).with_name("compare.yaml").read_text(encoding="utf-8"))
FORMS = TABLES["forms"]
REFUSED = TABLES["refused"]


@pytest.mark.parametrize("name", FORMS)
def test_each_form_of_a_curve(name: str) -> None:
    Path(name).write_text(FORMS[name], newline="")
    assert read_curve_file(Path(name)) == LOSSES


def test_curves_of_resumed_runs_and_of_tensorboard() -> None:
    first = [{"event": "step", "step": step, "loss": 9.0} for step in (1, 2, 3, 4)]
    folder = run("resumed", *first, {"event": "resume", "step": 1}, *EVENTS)
    assert read_curve_file(folder) == read_curve_file(folder / "metrics.jsonl") == LOSSES
    assert read_curve_file(run("again", *first, *EVENTS)) == LOSSES, "it began again without a checkpoint"
    for step, loss in LOSSES.items():  # as a run that was started three times
        scalars("events", {"lr": {step: 0.5}, "step loss": {step: loss}, "validation": {step: 8.0}})
    assert read_curve_file(Path("events")) == LOSSES
    assert read_curve_file(sorted(Path("events").iterdir())[0]) == {1: 4.0}
    assert read_curve_file(Path("events"), "Validation") == dict.fromkeys(LOSSES, 8.0)


def test_no_curve_is_refused(cli: CommandLine) -> None:
    for name, content, problem in (
        ("none", None, "there is no none: name a run's folder or a file with a loss curve"),
        ("young", None, "young must hold a loss curve, and it has no values"),
        ("a.tfevents.1", struct.pack("<QI", 7, 1) + b"damaged", "a.tfevents.1 must hold a loss curve"),
        ("a.jsonl", '{"step": 1}\n{"step": 2}\n', "lm loss or value, and it has step: for B, --loss says another name"),
        ("nan.txt", "1.0\nnan\n", "nan.txt: the loss of step 2 (nan) must be a finite number"),
        ("half.txt", "1 4\n2.5 3\n", "half.txt: the step of row 2 (2.5) must be a whole number"),
        ("torn.csv", "step,loss\n1,2\n2\n", "torn.csv: row 2 (1 value) must have 2 values, as its first row has"),
        ("four.json", "[[1, 2, 3, 4]]", "four.json: entry 1 ([1, 2, 3, 4]) must be a loss, [step, loss]"),
        ("torn.jsonl", '{"loss": 1}\n{"loss"\n', 'JSON in each line: line 2 ({"loss") is cut short or is none ('),
        ("binary", b"\x89PNG\xff\xfe", "binary must be text or JSON with numbers"),
        ("sly.txt", "\x1b[2J" + "a" * 99 + "\n1\n", f"and it has \\x1b[2j{'a' * 36}: for B"),
        ("nested.json", "[" * 100_000, "nested.json must be JSON, or have JSON in each line: line 1"),
        ("later.txt", None, "A and B must have steps in common: run has 3 steps, 1 to 3; later.txt has 2"),
    ):
        if content is not None:
            Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
        assert problem in cli.sentence("compare", "run", name)


def test_the_largest_difference_and_the_verdict_are_told(cli: CommandLine) -> None:
    for golden, options, code, largest, result in (
        ("4\n3\n2\n", [], 0, "0 at step 1: loss 4 in A, 4 in B", "within the tolerance (0.01)"),
        ("4\n2.98\n2\n", [], 0, "0.00671 at step 2: loss 3 in A, 2.98 in B", "within the tolerance (0.01)"),
        ("4\n3.2\n2.5\n7\n", [], 1, "0.2 at step 3: loss 2 in A, 2.5 in B", "at 2 steps, first at step 2"),
        ("4\n3\n-2\n", ["--tolerance", "2"], 0, "2 at step 3: loss 2 in A, -2 in B", "within the tolerance (2)"),
        ("4\n3\n0\n", [], 1, "inf at step 3: loss 2 in A, 0 in B", "at 1 step, first at step 3"),
        ("4\n3\n2.1\n", ["--tolerance", "0"], 1, "0.0476 at step 3", "beyond the tolerance (0) at 1 step"),
        ("0 4\n1 3\n2 2\n", ["--shift", "1"], 0, "0 at step 1", "within"),
        ("step mine\n1 4\n3 2.01", ["--loss", "mine"], 0, "0.00498 at step 3: loss 2 in A, 2.01 in B", "within"),
    ):
        Path("golden.txt").write_text(golden)
        rows = cli.rows("compare", "run", "golden.txt", *options, code=code)
        assert rows["A"] == "run: 3 steps, 1 to 3"
        assert largest in rows["largest"]
        assert result in rows["result"]


ULP = 4 * (1 + 2**-52)
"""The next number after 4."""
HASH = {"event": "state_hash", "step": 2, "hash": "0" * 16, "tensors": {"model": "0" * 8}, "names": {"model": ["w"]}}
NO_HASH = {"event": "state_hash", "step": [], "hash": 1, "tensors": ["0"], "names": {"model": "w"}}
"""What another program may leave: each field has another type than a run writes."""
OTHER_HASH = HASH | {"hash": "1" * 16, "tensors": {"model": "1" * 8}}


def steps(first_loss: float = 4.0, last_norm: float = 1.5) -> list[dict[str, Any]]:
    values = [(first_loss, 1.0), (3.0, 1.25), (2.0, last_norm)]
    return [{"event": "step", "step": at, "loss": loss, "grad_norm": norm} for at, (loss, norm) in enumerate(values, 1)]


ALL = "equal to the bit at all 3 steps of both"
NO_HASHES = "not compared: {} no hashes; log.state_hash_every=N records them"


@pytest.mark.parametrize(
    ("a", "b", "first", "norms", "states"),
    [
        (
            [*steps(), NO_HASH, NO_HASH | {"step": 1}, HASH],
            [*steps(), NO_HASH | {"tensors": None, "step": 3}, HASH],
            None,
            ALL,
            "equal to the bit at all 1 step with hashes in both",
        ),
        (steps(), steps(ULP), 1, ALL, NO_HASHES.format("A and B have")),
        ([*steps(), HASH], steps(last_norm=1.5 * (1 + 2**-52)), 3, "differ first at step 3", NO_HASHES.format("B has")),
        ([*steps(), HASH], [*steps(), OTHER_HASH], 2, ALL, "differ first at step 2, in model/w"),
        ([*steps(), HASH], [*steps(), HASH | {"step": 3}], None, ALL, "not compared: no step has hashes in both"),
    ],
    ids=["equal", "loss", "norm", "state", "other steps"],
)
def test_bits_of_losses_norms_and_states(
    a: list[Any], b: list[Any], first: int | None, norms: str, states: str, cli: CommandLine
) -> None:
    run("a", *a)
    run("b", *b)
    code = int(first is not None)
    rows = cli.rows("compare", "a", "b", "--bits", code=code)
    assert (rows["norms"], rows["states"]) == (norms, states)
    equal = "equal to the bit: losses of 3 steps, gradient norms of 3, states of "
    assert rows["result"].startswith(f"not equal to the bit, first at step {first}" if first else equal)
    assert cli.facts("compare", "a", "b", "--bits", code=code)["within"] == (code == 0)
    cli("compare", "a", "b")  # without --bits only losses count, within the tolerance
    cli("compare", "a", "b/metrics.jsonl", "--bits", code=int(b[0]["loss"] != 4.0))  # files have losses alone


def test_common_steps_final_losses_and_keys_are_told(cli: CommandLine) -> None:
    Path("golden.csv").write_text("step,loss\n0,9\n2,3\n4,9\n")
    assert cli.facts("compare", "run", "golden.csv") == {
        "a": "run", "b": "golden.csv", "steps": 1, "largest": {"difference": 0.0, "step": 2, "a": 3.0, "b": 3.0},
        "tolerance": 0.01, "beyond": [], "within": True,
        "final": {"a": {"step": 3, "loss": 2.0}, "b": {"step": 4, "loss": 9.0}},
        "keys": None, "grows_from": None, "layouts": None, "failures": {"a": None, "b": None},
    }  # fmt: skip
    write_run(Path("a"), [Start(0, 12)], mesh=Mesh(2, 1, 1, 1), steps=20)
    write_run(Path("b"), [Start(0, 10)], mesh=Mesh(1, 1, 2, 1), steps=20)
    lines = cli("compare", "a", "b").out.splitlines()
    assert f"final    loss {loss_of(12):.8g} at step 12 in A, loss {loss_of(10):.8g} at step 10 in B" in lines
    assert lines[-2:] == ["keys     parallel.tensor: 1 in A, 2 in B", "         parallel.pipeline: 2 in A, 1 in B"]
    assert cli("compare", "a", "a").out.splitlines()[-1] == "keys     no key differs"
    FailureRecord(stamp(FIRST + 3600), "rank 1 was killed", step=10).write(RunDirectory("b"))
    facts = cli.facts("compare", "a", "b")
    assert facts["keys"] == [["parallel.tensor", 1, 2], ["parallel.pipeline", 2, 1]]
    assert facts["failures"] == {"a": None, "b": "at step 10: rank 1 was killed."}
    assert "\nfailed   B at step 10: rank 1 was killed.\n" in cli("compare", "a", "b").out


def grown(first: float, factor: float = 1.5, from_step: int = 1) -> dict[int, float]:
    """Losses of 20 steps that differ from `loss_of` from a step on, and by a factor more at each step after it."""
    return {step: loss_of(step) * (1 + first * factor ** (step - from_step)) for step in range(from_step, 21)}


@pytest.mark.parametrize(
    ("losses", "options", "grows_from"),
    [
        (grown(1e-7), ["--tolerance", "1e-4"], 13),
        (grown(2e-6, factor=2.0, from_step=11), ["--tolerance", "1e-4"], 14),
        (grown(1e-7), ["--bits"], None),
        (grown(0.02, factor=1.0, from_step=11), [], None),
        (grown(9e-6), [], None),
    ],
    ids=["grows", "grows after a change", "bits", "jump", "from the start"],
)
def test_a_difference_that_grows_from_rounding_is_told(
    losses: dict[int, float], options: list[str], grows_from: int | None, cli: CommandLine
) -> None:
    write_run(Path("a"), losses=losses, mesh=DATA_PARALLEL)
    write_run(Path("b"), mesh=DATA_PARALLEL)
    rows = cli.rows("compare", "a", "b", *options, code=1)
    if grows_from is None:
        assert "growth" not in rows
        return
    assert rows["growth"] == (
        f"steps 1 to {grows_from - 1} agree within 1e-05, and the difference grows from step {grows_from}: "
        "rounding that training amplifies looks like this; train.bitwise=true tells it from a fault "
        "(`shardwise explain difference-grows`)"
    )
    for run_name in "ab":
        config = Path(run_name, "config.yaml")
        config.write_text(config.read_text().replace("train: {", "train: {bitwise: true, "))
    again = cli.rows("compare", "a", "b", *options, code=1)
    assert "growth" not in again, "two bit-equal runs have no rounding"


def texts_of(plot: str) -> set[str]:
    return {*re.findall("<!-- (.*) -->", Path(plot).read_text())}


def test_a_plot_shows_both_curves_and_their_difference(cli: CommandLine) -> None:
    Path("golden.txt").write_text("4\n3.2\n2.5\n7\n")
    import matplotlib.image  # only where a plot is drawn

    for plot in ("plot.png", "plot.svg", "again.svg"):
        cli("compare", "run", "golden.txt", "--plot", plot, code=1)  # as without a plot
    assert matplotlib.image.imread("plot.png").shape[:2] == (900, 1200)
    shown = {"A: run", "B: golden.txt", "largest: 0.2 at step 3", "tolerance: 0.01", "training loss", "step"}
    assert shown <= texts_of("plot.svg")
    assert Path("plot.svg").read_text() == Path("again.svg").read_text(), "equal curves must give equal files"
    cli("compare", "run", "run", "--plot", "same.svg")  # there is no logarithm of no difference


def test_runs_align_by_tokens_and_by_time(cli: CommandLine) -> None:
    """Between the points of A its curve is a line; the other runs' points are compared with that."""
    by_batch("small", 1, 40)
    by_batch("large", 2, 20)
    by_batch("odd", 3, 20)
    cli("compare", "small", "large", code=1)
    rows = cli.rows("compare", "small", "large", "--x", "tokens", "--tolerance", "0")
    assert rows["both"] == "20 points, 16.4 k tokens to 328 k tokens"
    assert rows["largest"] == "0 at 16.4 k tokens: loss 4.8284271 in A, 4.8284271 in B"
    odd, small = cli.facts("compare", "large", "odd", "small", "--x", "tokens", code=1)["pairs"]
    # 3, 6, 9 … of 2, 4, 6 … units of tokens: every second one lies between two points.
    places = [3 * step for step in range(1, 14)]
    between = {at: (loss_of(at - 1) + loss_of(at + 1)) / 2 if at % 2 else loss_of(at) for at in places}
    found = {at: abs(between[at] - loss_of(at)) / loss_of(at) for at in places}
    assert odd["points"] == len(places)
    assert odd["largest"]["difference"] == pytest.approx(max(found.values()))
    assert odd["largest"]["tokens"] == 3 * 8192
    assert odd["last"] == {"difference": pytest.approx(loss_of(39) - between[39]), "tokens": 39 * 8192}
    assert (small["points"], small["final"]["b"]["tokens"]) == (39, 40 * 8192)
    # Steps take 1 s, and a checkpoint after each tenth 0.5 s; five steps were undone after the first start.
    write_run(Path("straight"), [Start(0, 60)], mesh=DATA_PARALLEL)
    write_run(Path("resumed"), [Start(0, 25, None), Start(20, 60)], mesh=DATA_PARALLEL)
    rows = cli.rows("compare", "straight", "resumed/metrics.jsonl", "--x", "time")
    assert rows["A"] == "straight: 60 points, 1.0 s to 1 min 02 s"
    assert rows["B"] == "resumed/metrics.jsonl: 60 points, 1.0 s to 1 min 02 s"
    series = RunView(Path("resumed"), all_steps=True).series
    waited = [0.5 * sum(at > saved for saved in (10, 30, 40, 50)) for at in range(1, 61)]
    assert series.elapsed.tolist() == pytest.approx([at + wait for at, wait in enumerate(waited, 1)])


def test_several_curves_have_a_row_each(cli: CommandLine) -> None:
    """A branch, a run that diverged, one of a single step, and a golden curve with gaps are each compared with A."""
    write_run(Path("a"), [Start(0, 40)], mesh=DATA_PARALLEL)
    branch = write_run(Path("branch"), [Start(0, 40)], mesh=Mesh(1, 1, 1, 1), losses={40: 2.0})
    write_events(branch, [event for event in events_of(branch) if event.get("step", 40) > 20])
    write_run(Path("odd"), [Start(0, 40)], mesh=DATA_PARALLEL, losses=dict.fromkeys(range(31, 41), math.nan))
    write_run(Path("one"), [Start(0, 1)], mesh=DATA_PARALLEL)
    Path("gaps.txt").write_text("1 6\n7 3.5118579\n40 2.6324555\n")
    FailureRecord(stamp(FIRST + 3600), "rank 1 was killed", step=40).write(RunDirectory("branch"))
    out = cli("compare", "a", "branch", "odd", "one", "gaps.txt", code=1).out
    told = [re.split(r"\s{2,}", line) for line in out.splitlines()]
    assert told[1:6] == [
        ["A: a", "40 steps, 1 to 40", "2.63246"],
        ["B: branch", "20 steps, 21 to 40", "2", "-0.6325 at step 40", "0.316 at step 40", "beyond at 1 step"],
        ["C: odd", "30 steps, 1 to 30", "2.7303", "+0 at step 30", "0 at step 1",
         "the loss is not finite at 10 steps, first at step 31"],
        ["D: one", "1 step, 1 to 1", "6", "+0 at step 1", "0 at step 1", "within"],
        ["E: gaps.txt", "3 steps, 1 to 40", "2.63246", "-3.203e-08 at step 40", "1.22e-08 at step 40", "within"],
    ]  # fmt: skip
    assert [text for (text,) in told[6:]] == [
        "B: no key differs from A", "C: no key differs from A", "D: train.steps: 40 in A, 1 in D",
        "B failed at step 40: rank 1 was killed.",
    ]  # fmt: skip
    found = cli.facts("compare", "a", "one", "gaps.txt")
    assert found["within"] is True
    assert [pair["b"] for pair in found["pairs"]] == ["one", "gaps.txt"]
    assert "odd      the loss is not finite at 10 steps, first at step 31" in cli("compare", "a", "odd", code=1).out


def test_smoothing_is_tensorboards_and_alike_for_other_distances() -> None:
    values = {float(at): loss_of(at) + at % 3 for at in range(1, 31)}
    last = debias = 0.0
    expected = []
    for value in values.values():
        last, debias = last * 0.8 + 0.2 * value, debias * 0.8 + 0.2
        expected.append(last / debias)
    found = curve_points.smoothed_curves({"a": values, "sparse": {at: values[at] for at in (10.0, 20.0, 30.0)}}, 0.8)
    assert [*found["a"].values()] == pytest.approx(expected)
    weights = [0.8**20, 0.8**10, 1.0]
    sparse = sum(weight * values[at] for weight, at in zip(weights, (10.0, 20.0, 30.0), strict=True)) / sum(weights)
    assert found["sparse"][30.0] == pytest.approx(sparse), "ten steps weigh like ten steps"
    assert curve_points.smoothed_curves({"a": values}, 0.0) == {"a": values}
    labels = [curve_points.curve_label(number) for number in (0, 25, 26, 701, 702)]
    assert labels == ["A", "Z", "AA", "ZZ", "AAA"]


def test_curves_are_drawn_in_the_terminal(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    by_batch("small", 1, 40)
    by_batch("large", 2, 20)
    write_run(Path("high"), [Start(0, 40)], mesh=DATA_PARALLEL, losses={at: 1 + loss_of(at) for at in range(1, 41)})
    out = cli("compare", "small", "large", "high", "--draw", "--x", "tokens", "--log", "xy", code=1).out
    drawn = out.partition(" training loss logarithmic x and y ")[2]
    losses, differences = drawn.split(" minus A logarithmic x ")
    ends = [[line[79 - 3 :].strip(" ⠀") for line in part.splitlines()[1:]] for part in (losses, differences)]
    assert [end for end in ends[0] if end.isupper()] == ["C", "AB"], "letters at the ends, the higher curve above"
    assert [end for end in ends[1] if end.isupper()] == ["C", "B"], "A has no difference from itself"
    assert "tokens 328 k" in drawn
    assert "\n B: large\n" in drawn
    assert all(len(line) <= 80 for line in drawn.splitlines())


@pytest.mark.parametrize("words", REFUSED)
def test_wrong_choices_are_a_sentence(words: str, cli: CommandLine) -> None:
    write_run(Path("whole"), [Start(0, 3)], mesh=DATA_PARALLEL)
    Path("golden.txt").write_text("4\n3\n2\n")
    assert REFUSED[words] in cli.sentence("compare", *words.split())
