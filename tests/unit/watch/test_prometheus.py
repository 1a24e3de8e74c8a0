"""The metrics for Prometheus: read at each scrape, named on the page, and used by the dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from shardwise_watch.lost_time import CAUSES
from shardwise_watch.prometheus import RunCollector
from shardwise_watch.run import RunView
from tests.monitor_runs import FIRST, GIB, Start, write_run

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


def test_the_values(path: Path) -> None:
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


def test_the_page_and_the_dashboard_name_the_metrics(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
