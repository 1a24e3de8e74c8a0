"""What a finished run leaves: every file and every field that others read (faults 7, 9 and 12 of the reference)."""

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardwise.config import check_layout, load_config
from shardwise.estimates.memory import expected_memory
from shardwise.models.parameter_counts import parameter_count
from shardwise.train.summary import _PROCESS_BYTES
from shardwise_watch.run import RunView
from shardwise_watch.run_snapshot import run_snapshot
from tests.e2e.command import CASES, UNDER_TORCHRUN, json_lines, metrics, miniature, shardwise
from tests.e2e.conftest import Trained

STEP_FIELDS = CASES["fields of a step"]
RECIPES = ["glm4-moe-tiny", "llama2-tiny", "mixtral-tiny", "olmoe-tiny", "qwen3-moe-tiny"]


def test_results_are_what_watchers_read(trained: Trained) -> None:
    """What `shardwise monitor` reads is what the training writes."""
    found = run_snapshot(RunView(trained.run, all_steps=False))
    assert (found["state"], found["step"], found["steps"], found["starts"]) == ("finished", 4, 4, 1)
    unknown = ["mfu", "bubble", "expert_load_max", "expert_idle", "expert_entropy", "loss_spike"]
    assert [name for name, value in found["train"].items() if value is None] == unknown
    assert all(found[name] for name in ("id", "split_seconds", "communication_bytes", "memory_bytes", "eval", "heard"))
    assert found["lost_seconds"]["start"] > 0
    assert 0 < found["goodput"] < 1
    assert [rank["place"] for rank in found["ranks"]] == [{"pp": 0, "dp": 0, "tp": tp} for tp in (0, 1)]
    for rank in found["ranks"]:
        assert [name for name, value in rank.items() if value is None] in ([], ["utilization"])
    [node] = found["nodes"]
    assert None not in node.values()
    results = json.loads((trained.run / "results.json").read_text())
    assert results["parameters"] == parameter_count(trained.config.model)
    assert results["layout"] == {"ranks": 2, "tensor": 2, "sequence": True, "pipeline": 1, "data": 1, "zero": 1}
    assert (results["steps"], results["samples"], results["tokens"]) == (4, 32, 1024)
    assert results["final_loss"] == metrics(trained.run, "step")[-1]["loss"]
    assert results["final_eval_loss"] == metrics(trained.run, "eval")[-1]["loss"]
    assert results["final_perplexity"] == math.exp(results["final_eval_loss"])
    assert results["time_to_train_seconds"] > 0
    for name in ("samples_per_second", "tokens_per_second"):
        assert results[name]["peak"] >= results[name]["average"] > 0
    assert results["tokens_per_second"]["average"] == 32 * results["samples_per_second"]["average"]
    assert (trained.at / results["weights"]).resolve() == trained.run / "checkpoints/step-00000004"
    memory = expected_memory(trained.config, check_layout(trained.config, 2))
    state = results["optimizer_bytes"]
    assert state["state"] + state["masters"] == memory.optimizer, "optimizer state is not what cost says"
    assert results["sample"]


def test_steps_events_ranks_and_the_environment_are_recorded(trained: Trained) -> None:
    steps = metrics(trained.run, "step")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert list(step) == STEP_FIELDS
        assert step["mfu"] is None, "a CPU has no published peak: its utilisation is unknown, not invented"
        assert step["tokens"] == 8 * 32 * step["step"]
        assert step["samples"] == 8 * step["step"]
        assert step["step_seconds"] > 0
        assert step["peak_memory_bytes"] > 1 << 20
    losses = [step["loss"] for step in steps]
    assert losses == [struct.unpack("f", struct.pack("f", loss))[0] for loss in losses], "losses are float32, exactly"
    assert all(loss != round(loss, 6) for loss in losses), "losses are rounded"
    assert losses[-1] < losses[0]
    events = [event["event"] for event in metrics(trained.run)]
    assert events == ["start", "eval", "step", "step", "eval", "step", "step", "eval", "checkpoint", "stop"]
    (start,), (stop,) = metrics(trained.run, "start"), metrics(trained.run, "stop")
    assert start["parameters"] == parameter_count(trained.config.model)
    memory = expected_memory(trained.config, check_layout(trained.config, 2))
    assert start["memory_expected_bytes"] == dict(memory.rows())
    assert (stop["step"], stop["reason"]) == (4, "finished")
    evaluations = metrics(trained.run, "eval")
    assert [one["step"] for one in evaluations] == [0, 2, 4], "evaluated before, on the way and at the end"
    for one in evaluations:
        assert one["perplexity"] == math.exp(one["loss"])
    assert evaluations[0]["loss"] > evaluations[2]["loss"]
    for rank in (0, 1):
        lines = json_lines(trained.run / f"ranks/rank-000{rank}.jsonl")
        start, *steps = lines
        assert (start["event"], start["rank"], start["local_rank"]) == ("start", rank, rank)
        assert [line["step"] for line in steps] == [1, 2, 3, 4]
        own = {"step", "time", "step_seconds", "input_seconds", "peak_memory_bytes", "memory_in_use_bytes"}
        own |= {"split_seconds", "work_seconds", *(("host_cpu", "host_memory_bytes") if rank == 0 else ())}
        assert all(set(line) == own for line in steps)
    text = (trained.run / "environment.json").read_text()
    for secret in ("hf_do_not_tell", "me:word"):
        assert secret not in text, "a secret of the environment was written to environment.json"
    environment = json.loads(text)
    assert "HF_TOKEN" not in environment["variables"]
    assert environment["variables"]["NCCL_LOGIN"] == "http://(redacted)@proxy"
    assert set(environment) == {
        "started", "time_zone", "command", "directory", "host", "platform", "python", "versions", "git", "cpus",
        "devices", "variables",
    }  # fmt: skip
    assert "parallel.tensor=2" in environment["command"]
    assert environment["directory"] == str(trained.at)
    assert environment["devices"] == ["cpu"]
    assert {"shardwise", "torch", "numpy"} <= set(environment["versions"])


def test_every_file_of_the_contract_is_there(trained: Trained) -> None:
    found = {path.relative_to(trained.run).as_posix() for path in trained.run.rglob("*") if path.is_file()}
    event_files = {name for name in found if name.startswith("tensorboard/events.out.tfevents.")}
    assert len(event_files) == 1, f"one TensorBoard file, not {sorted(event_files)}"
    weights = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    weights |= {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    optimizer = {"manifest.json", *(f"optimizer/rank-0000{rank}.safetensors" for rank in (0, 1))}
    assert found - event_files == {
        *(".lock", "config.yaml", "environment.json", "run.json", "checkpoints/run.json"),
        *("metrics.jsonl", "results.json"),
        *(f"ranks/rank-000{rank}.jsonl" for rank in (0, 1)),
        *(f"logs/rank-000{rank}.log" for rank in (0, 1)),
        *(f"checkpoints/step-00000004/{name}" for name in weights | optimizer),
    }
    assert load_config(str(trained.run / "config.yaml"), []) == trained.config
    events = EventAccumulator(str(trained.run / "tensorboard")).Reload()
    for tag, name in (("train/loss", "loss"), ("train/grad_norm", "grad_norm"), ("train/lr", "lr")):
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        wanted = [(step["step"], pytest.approx(step[name], rel=1e-6)) for step in metrics(trained.run, "step")]
        assert found == wanted, f"TensorBoard's {tag} differs from metrics.jsonl"
    assert [event.step for event in events.Scalars("eval/perplexity")] == [0, 2, 4]
    out = trained.outcome.out
    assert "\x1b" not in out, "control codes in a file are noise"
    assert "warn" not in out.lower(), "a healthy run warns of nothing"
    assert "\r" not in out, "a progress line redrawn in a file is noise"
    summary = {line.split()[0]: line for line in out.splitlines()[:8]}
    assert "TP 2 + SP × PP 1 × DP 1 = 2 ranks, ZeRO-1" in summary["layout"], "the DP degree must be printed"
    assert "2 micro batch × 4 accumulation × 1 DP = 8 global batch" in summary["batch"]
    assert " per rank, plus " in summary["memory"]
    assert sum(line.startswith("step ") for line in out.splitlines()) == 4
    sample, chat = out.splitlines()[-2:]
    assert sample.startswith("sample: ")
    assert chat == f"chat: shardwise chat runs/{trained.run.name}"
    for ending in ("evaluation perplexity ", f"run: runs/{trained.run.name}", "weights: runs/"):
        assert ending in out
    assert (trained.run / "logs/rank-0000.log").read_text() == trained.outcome.out
    assert (trained.run / "logs/rank-0001.log").read_text() == "", "a healthy rank has nothing to say"


@pytest.mark.slow
def test_the_same_layout_trains_the_same_bits(trained: Trained, tmp_path: Path) -> None:
    """Inside torchrun, as a cluster's script starts it, and ended early: the schedule stays that of train.steps."""
    keys = ("parallel.tensor=2", "parallel.sequence=true", "train.stop_after=3", "precision.mode=float32")
    again = shardwise("train", miniature(tmp_path), *keys, at=tmp_path, program=UNDER_TORCHRUN)
    assert again.code == 0, again.err
    # The ranks that do not make the folder make none of their own.
    (run,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    exact = ("loss", "lr", "grad_norm", "param_norm", "samples")
    found, wanted = ([[s[name] for name in exact] for s in metrics(path, "step")] for path in (run, trained.run))
    assert found == wanted[:3]
    (stop,) = metrics(run, "stop")
    assert (stop["step"], stop["reason"]) == (3, "stop_after")
    assert [one["step"] for one in metrics(run, "eval")] == [0, 2, 3]
    assert (run / "checkpoints/step-00000003/model.safetensors").exists()
    assert "this run stops at 3" in again.out
    assert again.out.count("sample: ") == 1, "rank 1 must not print what rank 0 prints"
    results = json.loads((run / "results.json").read_text())
    assert results["steps"] == 3
    assert (tmp_path / "runs/latest").resolve() == run


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_process_has_the_memory_that_the_dry_run_says(recipe: str, tmp_path: Path) -> None:
    """Experts multiply another number of rows in each step, for which a library could keep a kernel each time."""
    command = [sys.executable, "-m", "shardwise", "train", recipe, "--nproc", "1", "--run-dir", str(tmp_path / "run")]
    subprocess.run([*command, "train.steps=20"], check=True, capture_output=True, cwd=tmp_path)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    peak = max(line["peak_memory_bytes"] for line in lines if line["event"] == "step")
    config = load_config(recipe)
    memory = expected_memory(config, check_layout(config, 1))
    assert peak == pytest.approx(memory.total + _PROCESS_BYTES, rel=0.15)
