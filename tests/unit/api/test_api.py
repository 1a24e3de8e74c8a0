"""The Python API: recipes, a training in this process, its folder, and plans."""

import json
import re
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardwise
from shardwise.base.errors import ConfigError
from shardwise.launch import rank_process
from tests.dist import own_models
from tests.e2e.command import shardwise as command
from tests.rows import rows_of

ROWS = rows_of(__file__)


def failing(event: dict[str, Any]) -> None:
    if event["event"] == "step":
        raise ValueError("no room")


def test_recipes_are_sections_dotted_keys_or_mappings(tmp_path: Path, recipe: str) -> None:
    by_section = shardwise.load_recipe("llama2-tiny", train={"steps": 7, "seed": 3}, parallel={"tensor": 2})
    dotted = shardwise.load_recipe("llama2-tiny", **{"train.steps": 7, "train.seed": 3, "parallel.tensor": 2})
    assert by_section == dotted
    assert (by_section.train.steps, by_section.parallel.tensor) == (7, 2)
    assert by_section.train.global_batch == shardwise.load_recipe("llama2-tiny").train.global_batch
    config = shardwise.load_recipe(
        "llama2-tiny",
        data={"path": tmp_path / "corpus.jsonl"},
        optimizer={"betas": (0.9, 0.95), "lr": np.float32(0.5)},
        train={"steps": np.int64(9)},
        compile={"options": {"max_autotune": True}},
    )
    assert config.data.path == str(tmp_path / "corpus.jsonl")
    assert (config.optimizer.betas, config.optimizer.lr, config.train.steps) == ((0.9, 0.95), 0.5, 9)
    assert config.compile.options == {"max_autotune": True}
    values = shardwise.load_recipe(recipe).model_dump(mode="json")
    before = json.dumps(values)
    assert shardwise.load_recipe(values, train={"steps": 2}).train.steps == 2
    assert json.dumps(values) == before


@pytest.mark.parametrize("value", [torch.zeros(2), object(), {1: 2}], ids=["tensor", "object", "number as key"])
@pytest.mark.parametrize("key", ["train", "optimizer.lr", "hooks.loss"])
def test_any_other_value_is_a_problem_and_no_traceback(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key.partition(".")[0]):
        shardwise.load_recipe("llama2-tiny", **{key: value})


def test_a_training_in_this_process_and_its_folder(recipe: str) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    config = shardwise.load_recipe(recipe, checkpoint={"every": 2})
    run = shardwise.train(config, name="trial")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert run.path.name.startswith("trial-")
    assert [event["step"] for event in run.metrics()] == [1, 2, 3, 4]
    assert [event["step"] for event in run.metrics("eval")] == [0, 2, 4]
    assert run.config() == config
    results = run.results()
    assert results["final_loss"] == run.metrics()[-1]["loss"]
    assert [Path(path).name for path in run.checkpoints()] == ["step-00000004", "step-00000002"]
    environment = shardwise.Run("runs/latest").environment()
    assert environment["versions"]["torch"] == version("torch")
    done = shardwise.train(config, run_dir=run.path)  # a finished run is returned, and not trained again
    assert len(done.metrics("start")) == 1

    folder = shardwise.export_checkpoint(run.path, "exported", dtype="bfloat16")
    assert json.loads((Path(folder) / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with pytest.raises(ConfigError, match=r"dtype \('int8'\) must be float32, bfloat16, float16 or None"):
        shardwise.export_checkpoint(run.path, "other", dtype="int8")
    shardwise.export_checkpoint(run.path, "cut", max_shard_size=100_000)
    assert len(list(Path("cut").glob("*.safetensors"))) > 1
    wrong: list[Any] = [0, -5, True, 5e9, None, "much"]
    for size in wrong:
        with pytest.raises(ConfigError, match=rf"^max_shard_size \({size!r}\)|^max_shard_size \(much\)"):
            shardwise.export_checkpoint(run.path, "other", max_shard_size=size)


def test_a_model_of_the_program_itself(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "Mine", own_models.Plain, raising=False)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # as in a notebook
    values = shardwise.load_recipe(recipe, train={"steps": 2, "eval_every": 0}).model_dump(mode="json")
    config = shardwise.load_recipe({**values, "model": {"family": "__main__:Mine", "vocab_size": 301}})
    assert len(shardwise.train(config).metrics()) == 2


def test_a_failure_is_recorded_as_that_of_a_command(recipe: str) -> None:
    """The run goes on, and steps that were done again count once."""
    config = shardwise.load_recipe(recipe, train={"eval_every": 0}, log={"sample_tokens": 0})
    with pytest.raises(shardwise.RunError, match="no room"):
        shardwise.train(config, run_dir="runs/a", callbacks=[failing])
    record = json.loads(Path("runs/a/failure.json").read_text())
    assert "no room" in record["cause"]
    assert (record["rank"], record["step"], record["resume"]) == (0, 1, None)
    run = shardwise.train(config, run_dir="runs/a")
    assert [event["step"] for event in run.metrics()] == [1, 2, 3, 4]
    assert [event["reason"].partition(":")[0] for event in run.metrics("stop")] == ["failed", "finished"]


PROGRAM = """
import shardwise

def loss(logits_SBV, targets_SB):
    import torch
    return torch.nn.functional.cross_entropy(logits_SBV.flatten(0, 1), targets_SB.flatten(), reduction="sum")

events = []
config = shardwise.load_recipe("small.yaml", parallel={"tensor": 2, "sequence": True})
for name in ("first", "second"):
    run = shardwise.train(config, run_dir=name, loss=loss, callbacks=[events.append])
    print("loss", run.results()["final_loss"])
"""


def test_a_task_of_mpirun_is_a_rank(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each task would train by itself, and write to one folder."""
    monkeypatch.setattr(rank_process, "die_with_parent", lambda: None)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "SIZE": "2", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what the task sets is removed afterwards
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=r"the number of ranks \(2\) must be a multiple of .*4"):
        shardwise.train(shardwise.load_recipe(recipe, parallel={"tensor": 2, "pipeline": 2}))


@pytest.mark.slow
def test_a_program_under_torchrun_trains_as_one_process_does(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    program = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    done = command("program.py", at=tmp_path, program=program).succeeded()
    told = re.findall(r"^loss 5\.", done.out, re.MULTILINE)
    assert len(told) == 4, "a rank has no results, or what it prints after a training is not seen"
    wanted = [event["loss"] for event in shardwise.train(shardwise.load_recipe(recipe)).metrics()]
    for name in ("first", "second"):
        found = [event["loss"] for event in shardwise.Run(name).metrics()]
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("overrides", "arguments", "problem"), ROWS["wrong"])
def test_wrong_arguments_are_refused(
    recipe: str, overrides: dict[str, Any], arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        shardwise.train(**{"config": shardwise.load_recipe(recipe, **overrides), **arguments})
    assert not Path("runs").exists()


def test_a_plan_ranks_layouts_and_keeps_what_is_fixed() -> None:
    config = shardwise.load_recipe("llama2-7b")
    found = shardwise.plan(config, "h100:8", 2, best=3, fixed=["parallel.tensor"])
    assert 0 < len(found.plans) <= 3
    times = [plan.time.total for plan in found.plans]
    assert times == sorted(times)
    assert {plan.config.parallel.tensor for plan in found.plans} == {config.parallel.tensor}
