"""`log.profile`: which steps are recorded, what a trace without a pipeline names, and what is refused."""

import io
import json
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise.config import check_layout, config_from_sections
from shardwise.distributed.mesh import Mesh
from shardwise.runs.folder import RunDirectory
from shardwise.train.build import build_trainer
from shardwise.train.observers import Observer, run_observers
from shardwise.train.profiler_trace import Trace
from shardwise.train.reporter import Reporter
from tests.dist.training import make_config, make_data


@pytest.mark.slow
@pytest.mark.parametrize(("trace", "steps"), [("2:4", {"step 2", "step 3"}), ("3:9", {"step 3", "step 4"})])
def test_runs_without_pipelines(tmp_path: Path, trace: str, steps: set[str], capfd: pytest.CaptureFixture[str]) -> None:
    """The second ends with the run, before its last step."""
    config = make_config(train={"steps": 4}, log={"profile": trace, "drift_every": 0, "tensorboard": False})
    layout, mesh = check_layout(config, 1), Mesh(device="cpu")
    run, stream = RunDirectory(tmp_path / "run"), io.StringIO()
    with Reporter(run, config, layout, 0, device_name="cpu", stream=stream) as reporter:
        trainer = build_trainer(config, mesh, make_data(), reporter)
        unsaved: Any = SimpleNamespace(flags=None, stopped_by=None)
        record = Observer(1, lambda record, _: reporter.step(record))
        with closing(Trace(config.log, mesh, run)) as recording:
            trainer.run(partial(run_observers, [record]), unsaved, recording.step)
    assert "profiler" not in capfd.readouterr().err, "torch's profiler tells of itself"
    first = trace.partition(":")[0]
    assert f"trace of steps {first} to {int(first) + 1}: {run.trace(0)}; ui.perfetto.dev" in stream.getvalue()
    events = json.loads(run.trace(0).read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    assert {name for name in names if name.startswith("step ")} == steps
    micro_batches = range(layout.accumulation(config.train))
    wanted = [f"{kind}, micro-batch {number}" for kind in ("forward", "backward") for number in micro_batches]
    for name in (*wanted, "optimizer"):
        assert names.count(name) == 2, name


@pytest.mark.parametrize("trace", ["5", "5:", "0:3", "5:5", "1:2:3", 5, [5]])
def test_what_is_no_range_of_steps_is_refused(trace: object) -> None:
    values = make_config().model_dump(mode="json") | {"log": {"profile": trace}}
    shown = repr(trace) if isinstance(trace, str) else str(trace).lower()
    with pytest.raises(ConfigError) as caught:
        config_from_sections(values)
    assert caught.value.problems == [
        f"log.profile ({shown}) must be START:STOP with 1 ≤ START < STOP, such as 10:12 for the steps 10 and 11"
    ]
