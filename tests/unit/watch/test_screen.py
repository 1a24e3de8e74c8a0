"""The screen of `shardwise top`: what it looks like, its keys, and runs and terminals that are not as it wants."""

import asyncio
import functools
import inspect
import math
import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from shardwise.base.errors import ConfigError
from shardwise.runs.failure_record import FailureRecord
from shardwise.runs.folder import RunDirectory
from shardwise_watch.cli import top
from shardwise_watch.screen import drawing, panels, views
from shardwise_watch.screen.app import Panel, TopScreen
from shardwise_watch.screen.frame import Frame, FrameReader, ShownRuns
from tests.command_line import CommandLine
from tests.monitor_runs import FIRST, Mesh, Start, stamp, write_run
from tests.unit.watch.pages import set_written

STARTS = (Start(0, 80, "failed: RankLost: rank 3 on node-000 has ended"), Start(60, 400, None))
NOW = FIRST + 500
SCREENS = Path(__file__).with_name("screens")


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(
        tmp_path_factory.mktemp("runs") / "gpt3-tiny-1", STARTS, mesh=Mesh(pp=2, dp=4, tp=2, nodes=2), steps=1000,
        straggler=5, spike=200, compiles=True, checkpoint_every=50, eval_every=50,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, written: Path) -> Path:
    """A run with a restart, a spike and a straggler, whose ranks wrote at the same moment."""
    path = shutil.copytree(written, tmp_path / written.name, symlinks=True)
    for file in path.rglob("*"):
        set_written(file, NOW - 2)
    return path


def fixed(path: Path) -> TopScreen:
    """The screen of a run, read once, as if it ran at the moment NOW."""
    reader = FrameReader(path)

    def read(*asked: Any) -> Frame:
        return replace(reader.read(*asked), now=NOW, state="running", eta_seconds=600.0)

    return TopScreen(read, 0)


async def loaded(pilot: Pilot[None]) -> None:
    """Wait until all steps are read."""
    assert isinstance(pilot.app, TopScreen)
    while pilot.app.frame is None or not (pilot.app.frame.has_history or pilot.app.frame.problem):
        await pilot.pause(0.01)
    await pilot.pause()


def shown(app: TopScreen) -> str:
    """The text of the screen."""
    return "\n".join(panel.render().plain for panel in app.query(Panel) if panel.is_on_screen and panel.size)


def picture(app: TopScreen) -> str:
    """The screen as lines of text, without colours."""
    rows = [[" "] * app.size.width for _ in range(app.size.height)]
    for panel in app.query(Panel):
        if panel.is_on_screen and panel.size:
            place = panel.content_region
            for y, line in enumerate(panel.render().plain.split("\n"), place.y):
                rows[y][place.x : place.x + len(line)] = line
    return "".join("".join(row).rstrip() + "\n" for row in rows)


async def settled(pilot: Pilot[None]) -> TopScreen:
    """Wait until what was asked for is read and drawn."""
    await pilot.pause()
    while pilot.app._is_reading:
        await pilot.pause(0.01)
    await pilot.pause()
    return pilot.app


async def read(pilot: Pilot[None], *keys: str) -> str:
    """Press keys, wait until what they ask for was read, and return what is shown."""
    for key in keys:
        await pilot.press(key)
        await settled(pilot)
    return picture(pilot.app)


Body = Callable[..., Coroutine[Any, Any, None]]


def show(app: TopScreen, body: Body, size: tuple[int, int] = (80, 24)) -> None:
    """Have a screen, which `body` acts on by its pilot."""

    async def act() -> None:
        async with app.run_test(size=size) as pilot:
            await loaded(pilot)
            await body(pilot)

    asyncio.run(act())


def on_screen(test: Body) -> Callable[..., None]:
    """A test that acts on the screen of the fixture `run`: its first argument is the pilot, and `size` may be one."""
    _, *given = inspect.signature(test).parameters

    @functools.wraps(test)
    def in_terminal(**fixtures: Any) -> None:
        own = {name: fixtures[name] for name in given}
        show(fixed(fixtures["run"]), functools.partial(test, **own), own.get("size", (80, 24)))

    names = dict.fromkeys(["run", *given])
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    in_terminal.__signature__ = inspect.Signature(parameters)
    return in_terminal


@pytest.mark.parametrize(
    ("name", "key", "size"),
    [
        ("overview-80x24", "1", (80, 24)),
        pytest.param("overview-160x48", "1", (160, 48), marks=pytest.mark.slow),
        ("ranks-80x24", "2", (80, 24)),
        pytest.param("pipeline-80x24", "3", (80, 24), marks=pytest.mark.slow),
        pytest.param("nodes-80x24", "4", (80, 24), marks=pytest.mark.slow),
        pytest.param("events-80x24", "5", (80, 24), marks=pytest.mark.slow),
    ],
)
@on_screen
async def test_look(pilot: Pilot[None], name: str, key: str, size: tuple[int, int]) -> None:
    """As stored in `screens`; after a deliberate change run the test with WRITE_SCREENS=1 and look at what changed."""
    stored = SCREENS / f"{name}.txt"
    now = await read(pilot, key)
    assert all(len(line) <= size[0] for line in now.splitlines())
    if "WRITE_SCREENS" in os.environ:
        stored.write_text(now, encoding="utf-8")
    assert now == stored.read_text(encoding="utf-8")


def test_a_cell_shows_the_worst_of_its_ranks(run: Path) -> None:
    frame = FrameReader(run).read()
    many = replace(frame, ranks=[replace(view, rank=at, place={}) for at, view in enumerate([*frame.ranks] * 64)])
    strip = views.rank_strips(many, 80, 4)[1]
    assert strip.plain.count("█") == 50  # of 1,024 ranks every 16th is slow, and a cell stands for 20


@pytest.fixture
def others(run: Path) -> Path:
    """The folder of the run, with a worse run that wrote after it, one that cannot be read, and no run."""
    losses = dict.fromkeys(range(1, 601), 4.0)
    worse = write_run(run.parent / "worse", [Start(0, 600)], mesh=Mesh(1, 1, 1, 1), losses=losses)
    newer = write_run(run.parent / "newer-format", mesh=Mesh(1, 1, 1, 1))
    (newer / "run.json").write_text('{"format": 99}')
    (run.parent / "notes").mkdir()
    for file, ago in {**dict.fromkeys(worse.rglob("*"), 1), newer / "metrics.jsonl": 9}.items():
        set_written(file, NOW - ago)
    return run.parent


@pytest.mark.parametrize("size", [(100, 24)])
@on_screen
async def test_a_run_is_chosen_in_the_list(pilot: Pilot[None], run: Path, others: Path, size: tuple[int, int]) -> None:
    app = pilot.app
    names = [line.split()[:2] for line in (await read(pilot, "r")).splitlines()[4:7]]
    assert names == [["▸", "worse"], ["shown", "gpt3-tiny-1"], []], "the newest first, and none that is unreadable"
    assert "600/600  4.0000" in picture(app)
    assert " gpt3-tiny-1  ● running" in await read(pilot, "down", "down", "enter")
    assert " worse  ● running" in await read(pilot, "r", "up", "enter")
    while app.frame is None or not app.frame.has_history:
        await pilot.pause(0.01)
    await pilot.pause()
    assert "loss 4.0000" in picture(app)
    assert "1 of 600" not in picture(app)
    shutil.rmtree(others / "worse")
    assert "the run's folder /" in await read(pilot, "p", "p"), "it is gone; a long path is cut"
    back = await read(pilot, "r", "enter")
    assert " gpt3-tiny-1  ● running" in back, "a run that is gone leaves the list"


@on_screen
async def test_the_curves_of_another_run_stand_behind(pilot: Pilot[None], run: Path, others: Path) -> None:
    """Over the steps of the run in front; its own are drawn where the front has none."""
    app = pilot.app
    reader = FrameReader(run, others / "worse")
    assert reader.read(20, choice=ShownRuns(behind=reader.paths[1])).behind == {}, "the first frame comes at once"
    frame = reader.read(20, choice=ShownRuns(behind=reader.paths[1]))
    assert (frame.curves["loss"].span, frame.behind["loss"].span) == ((1, 400), (1, 400))
    assert [column.mean for column in frame.behind["loss"].known] == [4.0] * 20
    _, *lines = panels.curve(replace(frame, evaluation={}), 60, 12, "loss")
    dots = [[line.plain[span.start] for span in line.spans if span.style == drawing.BEHIND] for line in lines]
    behind = [row for row, cells in enumerate(dots) if {*cells} - {"\u2800"}]
    assert len(behind) == 1
    labels = {row: float(line.plain.split("┤")[0]) for row, line in enumerate(lines) if "┤" in line.plain}
    low, high = min(labels.values()), max(labels.values())
    assert abs(high - (high - low) * behind[0] / max(labels) - 4.0) < (high - low) / 8, "at its place on the scale"
    assert [column.step for column in frame.behind["loss"].known] == [*range(20, 401, 20)]
    assert "behind" in (await read(pilot, "r", "b")).splitlines()[4]
    assert "● running  behind: worse" in await read(pilot, "1")
    assert app.frame.behind
    await read(pilot, "z")
    assert app.frame.behind["loss"].span == app.frame.curves["loss"].span == (361, 400)
    assert "behind: " not in await read(pilot, "r", "b", "escape")
    await read(pilot, "r", "down", "b", "escape")
    assert app.frame.behind == {}, "no run is behind itself"


@pytest.fixture
def log(run: Path) -> Path:
    file = RunDirectory(run).log(0)
    file.parent.mkdir(exist_ok=True)
    lines = b"".join(b"line %d\n" % number for number in range(9000))
    file.write_bytes(lines + b"warning: \x1b[31m\xff odd\nnot whole")
    return file


@on_screen
async def test_the_end_of_the_log(pilot: Pilot[None], log: Path) -> None:
    shown = await read(pilot, "6")
    assert [line.strip() for line in shown.splitlines()[-3:-1]] == ["line 8999", "warning:  [31m� odd"]
    assert "not whole" not in shown
    assert (await read(pilot, "up", "up")).splitlines()[-2] == " line 8998"
    pilot.app.action_move(-1_000_000)
    assert picture(pilot.app).splitlines()[3].startswith(" line "), "its beginning is further up than is read"
    log.unlink()
    assert " line " not in await read(pilot, "p", "p")


@on_screen
async def test_a_silent_rank_is_named(pilot: Pilot[None], run: Path) -> None:
    set_written(run / "ranks" / "rank-0009.jsonl", NOW - 200)
    assert "× silent: 9" in await read(pilot, "p", "p")
    assert "▸   9  1  0  1 node-001" in await read(pilot, "2")


@on_screen
async def test_keys(pilot: Pilot[None], run: Path) -> None:
    assert "slowest rank 5 ×2.00 on node-000" in picture(pilot.app)
    for keys, texts in (
        ("tab", ["▸   5", "×2.00"]),
        ("down", ["▸   0"]),
        ("pageup", ["▸   5"]),
        ("right", ["14.0 GiB to 14.2 GiB"]),
        ("3", ["1f1b, 8 micro-batches: bubble 11.1%", "pp 1   8–15"]),
        ("4", ["compiled graphs 4  hits 1  misses 3", "8 × H100"]),
        ("5", ["checkpoint of step 400"]),
        ("up up question_mark", ["quit; the run goes on"]),
        ("escape", ["lost time"]),
        ("p", ["paused"]),
        ("p 1 z", ["last tenth"]),
        ("shift+tab tab", ["overview"]),
    ):
        view = await read(pilot, *keys.split())
        assert [text for text in texts if text not in view] == [], keys
    assert "checkpoint of step 400" not in await read(pilot, "5", "up", "up")
    await pilot.press("q")
    await pilot.pause()
    assert not pilot.app.is_running


@on_screen
async def test_zoom_while_paused(pilot: Pilot[None], run: Path) -> None:
    """The curves follow at once, and nothing that was written since is read."""
    app = pilot.app
    await read(pilot, "p")
    metrics = run / "metrics.jsonl"
    last = [line for line in metrics.read_text().splitlines() if line.startswith('{"event": "step"')][-1]
    with metrics.open("a") as file:
        file.write(last.replace('"step": 400', '"step": 900') + "\n")
    for begin, span in ((361, "last tenth"), (397, "last hundredth"), (1, "all steps")):
        assert span in await read(pilot, "z")
        assert app.frame.curves["loss"].span == (begin, 400), span
    await read(pilot, "p")
    assert app.frame.step == 900


@pytest.mark.parametrize("size", [(79, 24), (80, 19)])
@on_screen
async def test_a_terminal_that_is_too_small(pilot: Pilot[None], size: tuple[int, int]) -> None:
    told = " ".join(shown(pilot.app).split())
    assert told.startswith(f"the terminal ({size[0]} × {size[1]}) must have at least 80 × 20")
    await pilot.resize_terminal(80, 20)
    await pilot.pause()
    assert "overview" in shown(pilot.app)


@on_screen
async def test_a_folder_that_vanishes_and_returns(pilot: Pilot[None], run: Path) -> None:
    away = run.with_name("away")

    async def read_again() -> str:
        pilot.app._refresh_frame()
        return picture(await settled(pilot))

    run.rename(away)
    told = await read_again()
    assert f"the run's folder {run}"[:70] in told
    assert "loss" in told
    away.rename(run)
    assert "is gone" not in await read_again()
    shutil.rmtree(run / "ranks")
    (run / "metrics.jsonl").write_text('{"event": "start", "layout": 3}\n{"event": "step", "step": 1, "spl')
    for key in "12345":
        await pilot.press(key)
        await read_again()


def test_once(run: Path) -> None:
    code = (
        "import sys; from shardwise.cli import main; code = main(['top', sys.argv[1], '--once']); "
        "assert not {'textual', 'torch'} & set(sys.modules); sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code, run], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert rows["state"].startswith("killed, heard ")
    assert rows["step"] == "400 of 1,000, 1.0 s a step"
    assert rows["slowest"] == "rank 5 (node-000, pp 0 dp 2 tp 1): 2.00 times the work of the best"
    assert rows["ranks"] == "16 on 2 nodes, memory 14.0 GiB to 14.2 GiB"
    assert "1 restart" in rows["goodput"]
    assert "lost steps 19.6 s" in rows["lost"]
    assert rows["evaluation"] == "loss 2.3000, perplexity 9.974 at step 400"


@pytest.fixture
def failed(run: Path) -> Path:
    """The run, after its rank 5 was killed."""
    failure = FailureRecord(
        time=stamp(NOW),
        cause="rank 5 was killed (SIGKILL; usually out of memory)",
        rank=5,
        step=400,
        checkpoint=350,
        resume="shardwise train gpt3-tiny parallel.tensor=2 parallel.pipeline=2 --nproc 16 --run-dir runs/gpt3-tiny-1",
    )
    failure.write(RunDirectory(run))
    return run


def test_a_failure_is_told_with_the_command_that_resumes(failed: Path, cli: CommandLine) -> None:
    app = TopScreen(FrameReader(failed).read, 0)

    async def body(_: Pilot[None]) -> None:
        words = " ".join(picture(app).split())
        told = "FAILED at step 400: rank 5 was killed (SIGKILL; usually out of memory). 50 steps since checkpoint"
        assert told in words
        assert "parallel.pipeline=2 --nproc 16 --run-dir runs/gpt3-tiny-1" in words
        assert "lost time" in words

    show(app, body)
    *_, heading, lost, resume = cli("top", failed, "--once").out.splitlines()
    assert heading == "FAILED at step 400: rank 5 was killed (SIGKILL; usually out of memory)."
    assert lost == "50 steps since checkpoint 350 are lost"
    assert resume.startswith("resume: shardwise train gpt3-tiny ")


def test_no_screen(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for once, interval, told in ((False, 2.0, "must be a terminal"), (True, float("nan"), r"--interval \(nan\)")):
        with pytest.raises(ConfigError, match=told):
            top.run(Namespace(run=run, others=[], once=once, interval=interval))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    with pytest.raises(ConfigError, match=r"TERM \(dumb\) must be a terminal with a screen"):
        top.run(Namespace(run=run, others=[], once=False, interval=2.0))


def test_what_no_expert_recorded_is_a_dash() -> None:
    """A step without tokens for experts has NaN."""
    event = {"expert_load_max": "nan", "expert_idle": math.nan, "expert_entropy": 0.5}
    assert drawing.further_rows(event) == [("experts", "largest load –, – idle, entropy 0.500")]
