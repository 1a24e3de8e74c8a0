"""`shardwise monitor`: its JSON, its metrics for Prometheus, its end, and what it refuses."""

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from shardwise.runs.folder import RunDirectory
from shardwise_watch.lost_time import CAUSES
from shardwise_watch.prometheus import RunCollector
from shardwise_watch.run import RunView
from tests.command_line import CommandLine
from tests.monitor_runs import FIRST, GIB, Mesh, Start, write_run

COMMAND = (sys.executable, "-m", "shardwise", "monitor")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/one"), [Start(0, 27, "failed: x"), Start(20, 35, None)], steps=70, straggler=3, spike=25)
    RunDirectory("runs/one").mark_latest()


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_once_tells_every_field_that_the_page_names(cli: CommandLine) -> None:
    text = cli("monitor", "--once").out
    found = json.loads(text)
    assert text.count("\n") == 1
    assert {name: found[name] for name in ("schema", "run", "state", "step", "steps")} == {
        "schema": 1, "run": "one", "state": "killed", "step": 35, "steps": 70,
    }  # fmt: skip
    assert (found["starts"], found["lost_steps"], found["warnings"]) == (2, 7, 2)
    assert found["straggler"] == {"rank": 3, "relative": 2.0, "own": 2.0}
    assert (found["train"]["loss"], found["eval"]["step"]) == (found["loss"], 30)
    assert [rank["relative"] for rank in found["ranks"]] == [1, 1, 1, 2, 1, 1, 1, 1]
    assert [node["ranks"] for node in found["nodes"]] == [4, 4]
    # And the fields are those of schema 1: to rename or to remove one, or to change its meaning, asks for schema 2.
    found = json.loads(cli("monitor", "--once").out)
    page = (Path(__file__).parents[3] / "docs/watching.md").read_text(encoding="utf-8")
    fields = {*found, *found["train"], *found["ranks"][0], *found["nodes"][0], *found["lost_seconds"]}
    assert [name for name in sorted(fields) if f"`{name}`" not in page] == []


def test_objects_and_metrics_come_until_a_signal(cli: CommandLine) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        with started("--interval", "0.02") as process:
            first, second = (json.loads(process.stdout.readline()) for _ in range(2))
            assert first["time"] < second["time"]
            process.send_signal(number)
            process.stdout.read()
            assert (process.wait(20), process.stderr.read()) == (0, "")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with started("--prometheus", str(port)) as process:
        assert process.stderr.readline() == f"serving one at http://127.0.0.1:{port}/metrics\n"
        for step in (35, 36):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
                assert f'shardwise_train_step{{run="one"}} {step}.0\n' in answer.read().decode()
            write_run(Path("runs/one"), [Start(0, 36)], mesh=Mesh(1, 1, 1, 1))
        said = cli.refused("monitor", "--prometheus", port)
        assert f"--prometheus ({port}) must be a port of 127.0.0.1 that is free and open to you" in said
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout.read() == process.stderr.read() == ""


def test_what_is_refused(cli: CommandLine) -> None:
    for arguments, said in (
        (["none"], "RUN (none) must be the folder of a run, it is not there: `shardwise ls` lists those of runs/"),
        (["--interval", "inf"], "--interval (inf) must be"),
        (["--prometheus", "70000"], "--prometheus (70000) must be a port from 1 to 65,535, such as 9400"),
        (["--prometheus", "9400", "--once"], "leave one of them out"),
        (["--prometheus", "9400", "--host", "name.invalid"], "must be a port of name.invalid that is free"),
    ):
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            assert said in cli.sentence("monitor", *arguments)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@pytest.mark.parametrize("command", [["monitor", "--once"], ["report", "--json"], ["ls", "--json"]], ids=" ".join)
def test_fault_23_json_has_escapes_for_what_a_terminal_obeys(command: list[str], cli: CommandLine) -> None:
    text = "a\x9b31m\x1b[2J\u2028\u202e\x7f🙂é"
    metrics = RunDirectory("runs/one").metrics
    with metrics.open("a", encoding="utf-8") as file:
        for event in ({"event": "warning", "text": text}, {"event": "stop", "reason": text}):
            file.write(json.dumps(event, ensure_ascii=False) + "\n")
    out = cli(*command).out
    assert out.isascii()
    assert out.replace("\n", "").isprintable()
    told = json.loads(out)
    assert text in str(told) or text in json.dumps(told, ensure_ascii=False).replace("\\u001b", "\x1b")


DOCS = Path(__file__).parents[3] / "docs"


def scraped(registry: CollectorRegistry) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The samples by the names of their metrics, as Prometheus reads them."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {family.name: [(sample.labels, sample.value) for sample in family.samples] for family in families}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    starts = [Start(0, 27, "failed: x"), Start(20, 35, None)]
    return write_run(tmp_path / "one", starts, steps=70, straggler=3, experts=True)


def registry_of(path: Path) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(RunCollector(RunView(path, all_steps=False)))
    return registry


def test_metrics_are_those_of_the_page_and_the_dashboard(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = scraped(registry_of(path))
    one = {"run": "one"}
    assert found["shardwise_train_step"] == [(one, 35.0)]
    assert found["shardwise_eval_step"] == [(one, 30.0)]
    assert {labels["state"]: value for labels, value in found["shardwise_run_state"]}["killed"] == 1.0
    assert sum(value for _, value in found["shardwise_run_state"]) == 1.0
    assert [labels["cause"] for labels, _ in found["shardwise_run_lost_seconds"]] == list(CAUSES)
    assert found["shardwise_train_expert_load_max"] == [(one, 2.5)]
    assert found["shardwise_train_memory_bytes"][0] == (one | {"kind": "parameters"}, 2 * GIB)
    assert found["shardwise_rank_relative_work"][3] == (one | {"rank": "3", "host": "node-000"}, 2.0)
    assert len(found["shardwise_rank_memory_bytes"]) == 8
    assert found["shardwise_node_cpu"][1] == (one | {"host": "node-001"}, 0.35)
    assert found["shardwise_run_heard_timestamp_seconds"][0][1] > FIRST
    assert "shardwise_run_eta_seconds" not in found, "what is unknown is left out: the run does not run"
    monkeypatch.setattr("shardwise_watch.run.RunLock.is_held", lambda _: True)  # so that it has an ETA
    exported = scraped(registry_of(path))
    page = (DOCS / "watching.md").read_text(encoding="utf-8")
    assert set(exported) == set(re.findall(r"`(shardwise_\w+)`", page))
    dashboard = json.loads((DOCS / "grafana/shardwise.json").read_text(encoding="utf-8"))
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(targets) > 20
    for target in targets:
        [name] = re.findall(r"shardwise_\w+", target["expr"])
        assert name in exported, target["expr"]
        used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) | {"run"}
        assert used <= set(exported[name][0][0]), f"{target['legendFormat']} of {name}"
    variables = json.dumps(dashboard["templating"])
    assert set(re.findall(r"shardwise_\w+", variables)) <= set(exported)
