"""A run's numbers for Prometheus, read from its folder at each scrape."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily

from shardwise.base.errors import ConfigError, see
from shardwise.base.files import reason_of
from shardwise.runs.json_lines import NUMBERS
from shardwise.runs.lost_time import number
from shardwise.runs.run import STATES, Run
from shardwise.runs.summary import snapshot


@dataclass(frozen=True)
class Metric:
    """A metric, and where its value is in the snapshot of a run.

    Attributes:
        name: after `shardwise_`.
        field: of the snapshot, or of each of its ranks or nodes.
        label: of the keys of a field that is an object.
    """

    name: str
    field: str
    help: str
    label: str = ""


_TRAIN = {
    "loss": "Loss of the last step.",
    "lr": "Learning rate.",
    "grad_norm": "Norm of the gradient, before it is clipped.",
    "param_norm": "Norm of the parameters.",
    "tokens": "Tokens that have been consumed.",
    "samples": "Samples that have been consumed.",
    "tokens_per_second": "Tokens a second, over the last steps.",
    "samples_per_second": "Samples a second, over the last steps.",
    "tokens_per_second_per_device": "Tokens a second on each device.",
    "peak_tokens_per_second": "The most tokens a second so far.",
    "mfu": "Model FLOPs utilization, from 0 to 1.",
    "step_seconds": "Seconds of the last step.",
    "peak_memory_bytes": "The most memory of rank 0 so far.",
    "bubble": "The share of the step in which pipeline ranks waited for others.",
    "loss_spike": "Standard deviations of the loss above the mean of the last steps.",
}
_RUN = (
    Metric("train_step", "step", "Steps that are done."),
    Metric("train_steps", "steps", "Steps of the whole training."),
    Metric("train_part_seconds", "split_seconds", "Seconds of each part of the last step, on rank 0.", "part"),
    Metric("train_communication_bytes", "communication_bytes", "Bytes that rank 0 sent along each axis.", "axis"),
    Metric("train_memory_bytes", "memory_bytes", "Memory of rank 0 by kind.", "kind"),
    Metric("run_eta_seconds", "eta_seconds", "Seconds until the last step."),
    Metric("run_goodput", "goodput", "The share of time in which steps were taken that count."),
    Metric("run_seconds", "seconds", "Seconds from the first start of the run to its last sign."),
    Metric("run_lost_seconds", "lost_seconds", "Seconds that were lost, by cause.", "cause"),
    Metric("run_lost_steps", "lost_steps", "Steps that were done again."),
    Metric("run_starts", "starts", "Starts of the run."),
    Metric("run_warnings", "warnings", "Warnings of the run."),
    Metric("run_heard_timestamp_seconds", "heard", "When the run last wrote to its folder."),
)
_RANK = (
    Metric("rank_step", "step", "The last step that the rank recorded."),
    Metric("rank_step_seconds", "step_seconds", "Seconds of the rank's last step."),
    Metric("rank_work_seconds", "work_seconds", "Seconds of the rank's own work in its last step."),
    Metric("rank_relative_work", "relative", "Own work over that of the rank with the least."),
    Metric("rank_memory_bytes", "memory_bytes", "Memory of the rank's device in use."),
    Metric("rank_utilization", "utilization", "Utilization of the rank's device, from 0 to 1."),
    Metric("rank_heard_timestamp_seconds", "heard", "When the rank last wrote to its file."),
)
_NODE = (
    Metric("node_cpu", "cpu", "Utilization of the machine's CPU, from 0 to 1."),
    Metric("node_memory_bytes", "memory_bytes", "Memory of the machine in use."),
    Metric("node_memory_total_bytes", "memory_total_bytes", "Memory of the machine."),
)


class RunCollector:
    """Collects a run's metrics for a registry of `prometheus_client`. Several scrapes at once take turns."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._turn = threading.Lock()

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing: the registry would otherwise read the run to learn the names."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        with self._turn:
            self._run.refresh()
            found = snapshot(self._run)
        yield from _families(found)


def serve(run: Run, port: int, host: str) -> None:
    """Answer scrapes at http://`host`:`port`/metrics from now on, in threads that end with the process.

    Raises:
        ConfigError: nothing can listen there.
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


def _families(found: Mapping[str, Any]) -> Iterator[GaugeMetricFamily]:
    run = {"run": found["run"]}
    state = GaugeMetricFamily("shardwise_run_state", "1 for the state of the run.", labels=["run", "state"])
    for one in STATES:
        state.add_metric([found["run"], one], float(one == found["state"]))
    yield state
    for name in NUMBERS:
        yield from _gauge(Metric(f"train_{name}", name, _TRAIN[name]), [(run, found["train"])])
    evaluation = [(run, found["eval"] or {})]
    for name, text in {"loss": "Loss", "perplexity": "Perplexity", "step": "Step"}.items():
        yield from _gauge(Metric(f"eval_{name}", name, f"{text} of the last evaluation."), evaluation)
    for metric in _RUN:
        yield from _gauge(metric, [(run, found)])
    ranks = [(run | {"rank": str(view["rank"]), "host": view["host"]}, view) for view in found["ranks"]]
    for metric in _RANK:
        yield from _gauge(metric, ranks)
    nodes = [(run | {"host": view["host"]}, view) for view in found["nodes"]]
    for metric in _NODE:
        yield from _gauge(metric, nodes)


def _gauge(metric: Metric, sources: list[tuple[dict[str, str], Mapping[str, Any]]]) -> Iterator[GaugeMetricFamily]:
    """A metric with a sample of each source that has it; nothing where none has."""
    family: GaugeMetricFamily | None = None
    for labels, fields in sources:
        value = fields.get(metric.field)
        values = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, one in values:
            if one is None:
                continue
            more = {metric.label: str(key)} if metric.label else {}
            if family is None:
                family = GaugeMetricFamily(f"shardwise_{metric.name}", metric.help, labels=[*labels, *more])
            family.add_metric([*labels.values(), *more.values()], _value(one))
    if family is not None:
        yield family


def _value(value: Any) -> float:
    """A number; a time as seconds since the epoch. NaN says what "nan" does."""
    found = number(value)
    if math.isnan(found) and isinstance(value, str) and "T" in value:
        return datetime.fromisoformat(value).timestamp()
    return found
