"""`log.trace`: which steps are recorded, what a trace without a pipeline names, and what is refused."""

import io
import json
from pathlib import Path

import pytest

from shardwise.config import config_from
from shardwise.errors import ConfigError
from shardwise.mesh import Mesh
from shardwise.runlog import RunDirectory
from shardwise.train.build import build_trainer
from shardwise.train.report import Reporter
from tests.dist.training import make_config, make_data


@pytest.mark.parametrize(("trace", "steps"), [("2:4", {"step 2", "step 3"}), ("3:9", {"step 3", "step 4"})])
def test_a_run_without_a_pipeline(tmp_path: Path, trace: str, steps: set[str]) -> None:
    """The second ends with the run, before its last step."""
    config = make_config(train={"steps": 4}, log={"trace": trace, "drift_every": 0, "tensorboard": False})
    layout, mesh = config.check(1), Mesh(device="cpu")
    run = RunDirectory(tmp_path / "run")
    with Reporter(
        run,
        config,
        layout,
        0,
        device_name="cpu",
        precision=config.precision.resolved(False),
        parameters=1,
        memory=None,
        stream=io.StringIO(),
    ) as reporter:
        build_trainer(config, layout, mesh, make_data(), reporter).run()
    events = json.loads(run.trace(0).read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    assert {name for name in names if name.startswith("step ")} == steps
    micro_batches = range(layout.accumulation(config.train))
    wanted = {f"{kind}, micro-batch {number}" for kind in ("forward", "backward") for number in micro_batches}
    for name in (*wanted, "optimizer"):
        assert names.count(name) == 2, name


@pytest.mark.parametrize("trace", ["5", "5:", ":5", "0:3", "5:5", "6:5", "a:b", "1:2:3", "-1:2", ""])
def test_what_is_no_range_of_steps_is_refused(trace: str) -> None:
    values = make_config().model_dump(mode="json") | {"log": {"trace": trace}}
    with pytest.raises(ConfigError, match=r"^log\.trace \('.*'\) must be START:STOP with 1 ≤ START < STOP, such as"):
        config_from(values)


def test_a_trace_of_steps_that_never_come_is_refused() -> None:
    config = make_config(train={"steps": 20}, log={"trace": "21:23"})
    with pytest.raises(ConfigError, match=r"^log\.trace \(21:23\) must begin at one of train\.steps \(20\): set log\."):
        config.check(1)
