"""A run's numbers for Prometheus, read from its folder at each scrape."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily

from shardwise.base.errors import ConfigError, see
from shardwise.base.files import reason_of
from shardwise.runs.events import number
from shardwise_watch.run import STATES, RunView
from shardwise_watch.run_snapshot import run_snapshot
from shardwise_watch.step_metrics import STEP_METRICS


class _Metric(NamedTuple):
    """A metric of Prometheus, named after `shardwise_`; `label` tells the keys of a field apart that is an object."""

    name: str
    field: str
    help: str
    label: str = ""


_METRICS = {
    "train": tuple(_Metric(f"train_{metric.name}", metric.name, metric.help) for metric in STEP_METRICS),
    "eval": (
        _Metric("eval_loss", "loss", "Loss of the last evaluation."),
        _Metric("eval_perplexity", "perplexity", "Perplexity of the last evaluation."),
        _Metric("eval_step", "step", "Step of the last evaluation."),
    ),
    "run": (
        _Metric("train_step", "step", "Steps that are done."),
        _Metric("train_steps", "steps", "Steps of the whole training."),
        _Metric("train_part_seconds", "split_seconds", "Seconds of each part of the last step, on rank 0.", "part"),
        _Metric("train_communication_bytes", "communication_bytes", "Bytes that rank 0 sent along each axis.", "axis"),
        _Metric("train_memory_bytes", "memory_bytes", "Memory of rank 0 by kind.", "kind"),
        _Metric("run_eta_seconds", "eta_seconds", "Seconds until the last step."),
        _Metric("run_goodput", "goodput", "The share of time in which steps were taken that count."),
        _Metric("run_seconds", "seconds", "Seconds from the first start of the run to its last sign."),
        _Metric("run_lost_seconds", "lost_seconds", "Seconds that were lost, by cause.", "cause"),
        _Metric("run_lost_steps", "lost_steps", "Steps that were done again."),
        _Metric("run_starts", "starts", "Starts of the run."),
        _Metric("run_warnings", "warnings", "Warnings of the run."),
        _Metric("run_heard_timestamp_seconds", "heard", "When the run last wrote to its folder."),
    ),
    "ranks": (
        _Metric("rank_step", "step", "The last step that the rank recorded."),
        _Metric("rank_step_seconds", "step_seconds", "Seconds of the rank's last step."),
        _Metric("rank_work_seconds", "work_seconds", "Seconds of the rank's own work: median of its last 20 steps."),
        _Metric("rank_relative_work", "relative", "Own work over that of the rank with the least."),
        _Metric("rank_memory_bytes", "memory_bytes", "Memory of the rank's device in use."),
        _Metric("rank_utilization", "utilization", "Utilization of the rank's device, from 0 to 1."),
        _Metric("rank_heard_timestamp_seconds", "heard", "When the rank last wrote to its file."),
    ),
    "nodes": (
        _Metric("node_cpu", "cpu", "Utilization of the machine's CPU, from 0 to 1."),
        _Metric("node_memory_bytes", "memory_bytes", "Memory of the machine in use."),
        _Metric("node_memory_total_bytes", "memory_total_bytes", "Memory of the machine."),
    ),
}
"""Metrics by the part of a snapshot that has their fields."""
_Source = tuple[Mapping[str, str], Mapping[str, Any]]
"""The labels and the fields of the run, or of one of its ranks or nodes."""


class RunCollector:
    """Collector of a run's metrics for a registry of `prometheus_client`."""

    def __init__(self, run: RunView) -> None:
        self._run = run
        # The server answers each scrape in a thread of its own, and `refresh` is not safe in two at once.
        self._refresh_lock = threading.Lock()

    def describe(self) -> list[GaugeMetricFamily]:
        """Name no metric: the registry would otherwise read the run, when it is registered, to learn the names."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        with self._refresh_lock:
            self._run.refresh()
            snapshot = run_snapshot(self._run)
        yield from _families(snapshot)


def serve(run: RunView, port: int, host: str) -> None:
    """Answer scrapes at http://`host`:`port`/metrics from now on, in threads that end with the process.

    ConfigError: the port cannot be listened at.
    """
    registry = CollectorRegistry()
    registry.register(RunCollector(run))
    try:
        start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"--prometheus ({port}) must be a port of {host} that is free and open to you: {reason_of(error)}; "
            "choose another, or let --host name an address of this machine"
            f"{see('runs#port-in-use')}"
        ) from None


def _families(run_snapshot: Mapping[str, Any]) -> Iterator[GaugeMetricFamily]:
    labels = {"run": run_snapshot["run"]}
    states = GaugeMetricFamily("shardwise_run_state", "1 for the state of the run.", labels=["run", "state"])
    for state in STATES:
        states.add_metric([run_snapshot["run"], state], float(state == run_snapshot["state"]))
    yield states
    ranks = run_snapshot["ranks"]
    sources: dict[str, list[_Source]] = {
        "train": [(labels, run_snapshot["train"])],
        "eval": [(labels, run_snapshot["eval"] or {})],
        "run": [(labels, run_snapshot)],
        "ranks": [(labels | {"rank": str(rank["rank"]), "host": rank["host"]}, rank) for rank in ranks],
        "nodes": [(labels | {"host": node["host"]}, node) for node in run_snapshot["nodes"]],
    }
    for part, metrics in _METRICS.items():
        for metric in metrics:
            yield from _gauge(metric, sources[part])


def _gauge(metric: _Metric, sources: Sequence[_Source]) -> Iterator[GaugeMetricFamily]:
    family: GaugeMetricFamily | None = None
    for labels, fields in sources:
        content = fields.get(metric.field)
        values = content.items() if isinstance(content, Mapping) else [("", content)]
        for key, value in values:
            if value is None:
                continue
            key_label = {metric.label: str(key)} if metric.label else {}
            if family is None:
                family = GaugeMetricFamily(f"shardwise_{metric.name}", metric.help, labels=[*labels, *key_label])
            family.add_metric([*labels.values(), *key_label.values()], _number(value))
    if family is not None:
        yield family


def _number(value: Any) -> float:
    """Convert a value of JSON; a time becomes seconds since the epoch, and the text "nan" NaN."""
    converted = number(value)
    if math.isnan(converted) and isinstance(value, str) and "T" in value:
        return datetime.fromisoformat(value).timestamp()
    return converted
