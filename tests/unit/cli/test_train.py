"""`shardwise train`: what it checks, how many ranks it starts, and what a dry run tells."""

import json
import os
import platform
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from shardwise.base import units
from shardwise.base.errors import ConfigError, LaunchError
from shardwise.base.yaml_and_json import dump_yaml, parse_yaml
from shardwise.config import check_layout, config_from_sections, load_config, recipe_text
from shardwise.config.hugging_face import to_hugging_face
from shardwise.data.tokens.tokenizer import train_tokenizer
from shardwise.estimates.communication import step_transfers, wire_bytes
from shardwise.estimates.memory import checkpoint_bytes, expected_memory
from shardwise.launch.stop_requests import request, requested
from shardwise.models.parameter_counts import parameter_count
from shardwise.runs.folder import RunDirectory, RunLock
from tests.command_line import CommandLine, Said

CPU = ("cpu", 0)


@pytest.fixture
def machine() -> tuple[str, int]:
    """The kind of this machine's accelerators, and how many there are."""
    return CPU


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, machine: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwise.cli.train.accelerators", lambda: machine)


class Launch(NamedTuple):
    command: list[str]
    nproc: int
    run: Path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches asked for, none of which happens."""
    launches: list[Launch] = []
    monkeypatch.setattr("shardwise.launch.local.launch", lambda *launch: launches.append(Launch(*launch)))
    monkeypatch.setattr("shardwise.cli.run_preparation.prepare_data", lambda config, announce: None)
    return launches


def dry(cli: CommandLine, *words: object, recipe: str = "llama2-tiny", code: int = 0) -> Said:
    return cli("train", recipe, "--dry-run", *words, code=code)


def test_dry_run_tells_all_and_starts_nothing(tmp_path: Path, cli: CommandLine) -> None:
    overrides = ["parallel.tensor=2", "parallel.sequence=true", "train.stop_after=5"]
    text = dry(cli, *overrides, "--nproc", "4").out
    config = load_config("llama2-tiny", overrides)
    layout = check_layout(config, 4)
    memory = expected_memory(config, layout)
    rows = {line[2:16].rstrip(): line[17:] for line in text.splitlines() if line.startswith("# ")}
    assert rows["layout"] == "TP 2 + SP × PP 1 × DP 2 = 4 ranks, ZeRO-1"
    assert rows["device"] == "cpu (this machine); use --device h100:8 to size for GPUs"
    assert rows["batch"] == "2 micro batch × 2 accumulation × 2 DP = 8 global batch"
    assert rows["steps"] == "20; this run stops after 5"
    assert rows["tokens"] == "512 per step, 10,240 in all"
    assert rows["parameters"].startswith(f"468 k ({parameter_count(config.model):,}), ")
    assert rows["memory"].startswith(units.size(memory.total))
    assert rows["  optimizer"] == units.size(memory.optimizer)
    assert rows["disk"].startswith(f"{units.size(checkpoint_bytes(config))} for each checkpoint, at most 4 at once")
    assert rows["communication"].startswith(units.size(sum(wire_bytes(step_transfers(config, layout)).values())))
    assert config_from_sections(parse_yaml(text, "dry run")) == config
    assert not list(tmp_path.iterdir())
    text = dry(cli, "--full").out
    assert parse_yaml(text, "dry run") == load_config("llama2-tiny").recorded()
    assert "--full must go with --dry-run" in cli.refused("train", "llama2-tiny", "--full")
    (tmp_path / "file").touch()
    run = tmp_path / "file/run"
    said = dry(cli, "--run-dir", run, code=2).err
    assert f"{run} cannot be made: Not a directory; start in a folder that can be" in said
    dry(cli, "--run-dir", tmp_path / "new/run")
    assert not (tmp_path / "new").exists()


def test_a_dry_run_tells_what_devices_lack(cli: CommandLine, tmp_path: Path) -> None:
    keys = ("precision.matmul=fp8", "precision.mode=null")
    shown = "parameters bfloat16, products of blocks fp8, gradients float32, reduction float32, optimizer float32"
    assert shown in " ".join(dry(cli, *keys).out.replace("#", "").split())
    refused = "precision.matmul (fp8) must be left out on NVIDIA A100 80GB SXM, whose device file has no fp8_tflops"
    assert refused in dry(cli, *keys, "--device", "a100:1", code=2).err
    (tmp_path / "ours.yaml").write_text("base: trn2\n", encoding="utf-8")
    for device in ("trn1", "trn3", f"{tmp_path}/ours.yaml", "h100"):
        said = dry(cli, "parallel.pipeline=2", "--device", f"{device}:2").out
        told = "\n# warning        parallel.pipeline (2) is refused by TorchNeuron" in said
        assert told == (device != "h100")


def test_a_dry_run_shows_its_numbers_and_refuses_data_that_cannot_be_read(cli: CommandLine) -> None:
    """On a laptop the numbers are of use, though the data are on the cluster."""
    wrong = ["data.path=corpus.jsonl", "data.tokenizer=tokenizer.json"]
    out, err = dry(cli, *wrong, code=2)
    assert "\n# memory " in out
    assert err.startswith("shardwise: 2 errors\n- data.path (corpus.jsonl) does not exist in ")
    Path("corpus.jsonl").write_text('{"text": "some text"}\n')
    out = dry(cli, wrong[0], "model.vocab_size=257").out
    assert "\n# data           corpus.jsonl: 1 file, 22 B, read as JSON lines, prepared when the run starts" in out
    assert "\n# tokenizer      byte-level BPE of 257 tokens if the text yields as many, trained on the data" in out
    assert (
        "\n# warning        train.steps (20) read 10,240 tokens, and the data have at most 22: each is read at least "
        "465 times, and a text that is repeated more than four times teaches little (arXiv:2305.16264): lower " in out
    )
    shown = parse_yaml(out, "dry run")["data"]
    assert shown["path"] == "corpus.jsonl"
    assert "dataset" not in shown


def test_a_dry_run_looks_at_sets_task_files_and_trackers(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = "evaluation.sets={small: {dataset: tiny}, own: {path: /nope.txt}}"
    tasks = ["evaluation.tasks=[places]", "evaluation.tasks_every=5", "evaluation.tasks_path=/nope"]
    trackers = "log.trackers=[trackio]"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "trackio" else find_spec(name))
    out, err = dry(cli, "train.eval_every=5", sets, *tasks, trackers, code=2)
    assert "# set, small     tiny: 1 file," in out
    assert "evaluation.sets.own.path (/nope.txt) does not exist" in err
    assert "log.trackers (trackio) needs the package trackio: pip install" in err
    pytest.importorskip("lm_eval")
    assert "evaluation.tasks_path (/nope) must be a folder of task files (.yaml), and it is none" in err


def test_fault_07_a_dry_run_says_what_changes_beside_loaded_weights(cli: CommandLine) -> None:
    train_tokenizer(["some text " * 9], 258, "text").save(Path("weights"))
    Path("weights/model.safetensors").touch()
    Path("weights/config.json").write_text(json.dumps(to_hugging_face(load_config("llama2-tiny").model)))
    train_tokenizer(["another " * 9], 258, "text").save(Path("other"))

    def shown(*keys: str, code: int = 0) -> str:
        said = dry(cli, "model.config=weights", "checkpoint.load=weights", *keys, code=code)
        return said.err or said.out

    yarn = "model.rope_scaling={rope_type: yarn, factor: 4}"
    text = shown("model.rope_theta=5e6", yarn, "train.sequence_length=256")
    theta = "model.rope_theta (5000000.0) replaces that of weights/config.json (10000.0), with the same weights"
    assert f"\n#   changed      {theta}\n" in text
    assert "\n#   changed      model.rope_scaling ({'rope_type': 'yarn', 'factor': 4, 'original_max_" in text
    assert re.search(r"\n# tokenizer      .*/weights: 258 tokens, of model\.vocab_size \(512\)\n", text)
    assert "\n# warning        data.tokenizer gives other ids than" in shown("data.tokenizer=other")
    changed = "\n#   changed      model.rms_norm_eps (0.001) replaces that of weights/"
    assert changed in shown("model.rms_norm_eps=1e-3")
    wrong = "model.intermediate_size (128) must be that of weights/config.json (176); model.config=weights takes"
    assert wrong in shown("model.intermediate_size=128", code=2)


def test_a_dry_run_refuses_weights_that_are_not_there(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    """But those of the run that a shipped recipe follows may be still to come."""

    def loaded(load: str, code: int, recipe: str = "llama2-tiny") -> str:
        out, err = dry(cli, *([f"checkpoint.load={load}"] if load else []), recipe=recipe, code=code)
        assert "\n# memory " in out
        return err if code else out

    assert loaded("/nope", 2).count("checkpoint.load (/nope) must be a folder with weights: there is none") == 1
    Path("empty").mkdir()
    assert "checkpoint.load (empty) must hold model.safetensors: it is empty" in loaded("empty", 2)
    Path("empty/model.safetensors").touch()
    assert "checkpoint.load (empty) must hold the model's tokenizer" in loaded("empty", 2)
    train_tokenizer(["some text " * 9], 258, "text").save(Path("empty"))
    assert "\n# weights        empty\n" in loaded("empty", 0)
    awaited = "runs/bert-large/checkpoints/step-00028125"
    assert f"\n# weights        {awaited}: not there yet; the run that" in loaded("", 0, "bert-large-phase2")
    assert "memory://none/run must be a folder with weights" in loaded("memory://none/run", 2)
    monkeypatch.setattr("shardwise.checkpoint.storage.checkpoint_folders.find_on_hub", lambda wanted: "hub")
    monkeypatch.setattr("shardwise.base.hub.find_on_hub", lambda wanted: "hub")
    shown = loaded("owner/name", 0)
    assert "\n# weights        owner/name: on the hub, fetched when the run starts\n" in shown
    assert "\n# tokenizer      owner/name: on the hub, fetched when the run starts\n" in shown
    Path("mine.yaml").write_text(recipe_text("bert-large-phase2"))
    assert f"checkpoint.load ({awaited}) must be a folder with weights" in loaded("", 2, "mine.yaml")


@pytest.mark.parametrize(
    ("machine", "overrides", "expected"),
    [(CPU, [], 2), (("nvidia", 7), ["train.global_batch=48"], 6), (CPU, ["parallel.pipeline=2"], 4)],
)
def test_default_number_of_ranks(overrides: list[str], expected: int, started: list[Launch], cli: CommandLine) -> None:
    cli("train", "quickstart", "train.micro_batch=1", *overrides)
    (launch,) = started
    assert launch.nproc == expected
    assert launch.command[:6] == [sys.executable, "-P", "-m", "shardwise", "train", "quickstart"]
    assert launch.command[-3:] == ["--nproc", str(expected), f"--run-dir={launch.run}"]
    assert str(launch.run).startswith("runs/quickstart-")


@pytest.mark.parametrize(
    ("machine", "arguments", "text"),
    [
        (CPU, ["--nproc", "3"], "the number of ranks (3) must be a multiple of parallel.tensor (2): nearest 2 or 4"),
        (("nvidia", 1), [], "parallel.tensor (2) must be at most the number of accelerators (1)"),
        (("nvidia", 2), ["--nproc", "4", "train.micro_batch=1"], "--nproc (4) must be at most the number of acceler"),
        (
            CPU,
            ["--run-dir", "old"],
            "--run-dir (old) holds a run whose config.yaml cannot be read (it holds no configuration): put a copy",
        ),
        (CPU, ["--nodes", "2"], "--nodes must go with --device: the nodes of a run are those of its launcher"),
    ],
)
def test_mistakes_start_nothing(arguments: list[str], text: str, started: list[Launch], cli: CommandLine) -> None:
    Path("old").mkdir()
    Path("old/config.yaml").touch()
    assert cli.refused("train", "quickstart", *arguments).count(text) == 1
    assert not started
    assert not Path("runs").exists()


def stored(folder: str, recipe: str, *overrides: str, steps: int | None = None) -> Path:
    """A folder that holds a run of a recipe, which has ended after `steps` if they are given."""
    run = RunDirectory(folder).create()
    run.write_config(dump_yaml(load_config(recipe, overrides).model_dump(mode="json")))
    if steps is not None:
        run.write_results({"steps": steps})
    return run.path


def test_a_run_goes_on_without_its_recipe(started: list[Launch], cli: CommandLine) -> None:
    run = stored("old", "quickstart", "optimizer.lr=1e-2", steps=240)
    request(run, "an earlier signal")
    cli("train", "--run-dir", "old", "train.steps=480")
    (launch,) = started
    assert requested(run) is None, "a request to the earlier run must not stop this one"
    assert (launch.run, launch.command[5:7]) == (Path("old"), ["old/config.yaml", "train.steps=480"])
    for arguments, text in {
        ("--run-dir", "new"): "--run-dir (new) must hold a run if RECIPE is left out, and it holds no config.yaml",
        ("train.steps=480",): "missing RECIPE, e.g. `shardwise train llama2-tiny` (list: `shardwise recipes`)",
        ("./old",): "the recipe file ./old is a run's folder: `shardwise train --run-dir ./old` continues the run",
    }.items():
        assert text in cli.refused("train", *arguments)


@pytest.mark.parametrize(
    ("ranks", "host", "overrides", "expected"),
    [(8, platform.node(), [], 8), (8, "another machine", [], 2), (4, platform.node(), ["parallel.pipeline=4"], 8)],
)
def test_a_run_goes_on_with_its_ranks_where_it_ran(
    ranks: int, host: str, overrides: list[str], expected: int, started: list[Launch], cli: CommandLine
) -> None:
    run = RunDirectory(stored("old", "quickstart", "train.micro_batch=1", "model.num_hidden_layers=4", steps=240))
    run.metrics.write_text(json.dumps({"event": "start", "ranks": ranks}) + "\n")
    run.rank_metrics(0).parent.mkdir(exist_ok=True)
    for rank, name in enumerate([platform.node()] * (ranks - 1) + [host]):
        run.rank_metrics(rank).write_text(json.dumps({"event": "start", "host": name}) + "\n")
    cli("train", "--run-dir", "old", "train.steps=480", *overrides)
    assert [launch.nproc for launch in started] == [expected]


def test_a_run_keeps_the_batch_that_it_began_with(cli: CommandLine) -> None:
    """A recipe's rule counts the ranks of a new run; on other ranks, the run goes on with its number.

    Another rule, or a rule in place of a number, is what its user asks for; how an older run began is not known.
    """
    rule = "train.global_batch=8 per 2 ranks"
    run = stored("old", "llama2-tiny", rule)
    stored("plain", "llama2-tiny", "train.global_batch=8")
    written = (run / "config.yaml").read_text()
    older = RunDirectory("older").create().path
    (older / "config.yaml").write_text(written.replace("  batch_rule: 8 per 2 ranks\n", ""))
    batches = {"old": 8, "older": 8, "plain": 16, "new": 16}
    others = [("train.global_batch=64 per 2 ranks", "old", 128), ("train.global_batch=32", "old", 32)]
    for key, folder, batch in [*((rule, folder, batch) for folder, batch in batches.items()), *others]:
        out = dry(cli, key, "train.micro_batch=1", "--nproc", "4", "--run-dir", folder).out
        assert f"  global_batch: {batch}\n" in out, (key, folder)
        assert f"× 4 DP = {batch} global batch" in out


def dry_rows(cli: CommandLine, *arguments: str) -> list[str]:
    """The rows of a dry run of the run in `old`, down to the layout."""
    text = dry(cli, *arguments, "--run-dir", "old").out
    rows = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    return rows[1 : next(number for number, row in enumerate(rows) if row.startswith("layout"))]


def test_a_dry_run_tells_where_a_run_goes_on_and_what_changes(cli: CommandLine, tmp_path: Path) -> None:
    assert dry_rows(cli) == [], "there is no run yet"
    run = stored("old", "llama2-tiny", "parallel.tensor=2", "parallel.sequence=true")
    assert dry_rows(cli, "parallel.tensor=2", "parallel.sequence=true") == [
        "continues      old from its first step, as it has no checkpoint",
        "  changed      no key",
    ]
    layout = {"tensor": 2, "sequence": True, "pipeline": 1, "data": 1}
    (run / "metrics.jsonl").write_text(json.dumps({"event": "start", "layout": layout, "steps_before": 0}) + "\n")
    for step in (10, 20):
        checkpoint = run / f"checkpoints/step-{step:08d}"
        checkpoint.mkdir(parents=True)
        # The save of step 20 was killed.
        (checkpoint / ("manifest.json" if step == 10 else "config.json")).touch()
    before = sorted(tmp_path.rglob("*"))
    assert dry_rows(cli, "train.steps=40", "parallel.sequence=true", "--nproc", "2") == [
        "continues      old after step 10, from old/checkpoints/step-00000010",
        "  layout       TP 2 + SP → DP 2",
        "  changed      parallel.tensor 2 → 1",
        "  changed      train.steps 20 → 40",
        "  schedule     the cosine schedule ends at step 40 in place of 20, so that step 11 has 8.74e-04 in place of "
        "5.41e-04",
    ]
    assert sorted(tmp_path.rglob("*")) == before
    for wrong, problem in {
        "checkpoint.resume=15": "checkpoint.resume (15) must be the step of an intact checkpoint",
        "model.hidden_size=128": "model.hidden_size",
    }.items():
        assert problem in dry(cli, wrong, "--run-dir", "old", code=2).err
    RunDirectory("old").write_results({"steps": 20})
    assert dry_rows(cli) == ["continues      old: finished, 20 of 20 steps; raise train.steps"]


@pytest.mark.parametrize("machine", [("nvidia", 1)])
def test_a_finished_run_says_so(started: list[Launch], cli: CommandLine) -> None:
    stored("old", "llama2-tiny", steps=20)
    told = "the run in old is finished: 20 of 20 steps, results in old/results.json; to continue it, raise train.steps"
    assert cli("train", "llama2-tiny", "--run-dir", "old") == (f"{told}\n", "")
    assert not started


def test_a_second_run_in_a_folder_is_refused_and_touches_nothing(started: list[Launch], cli: CommandLine) -> None:
    run = stored("old", "quickstart")
    with RunLock(run):
        request(run, "SIGTERM")
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        err = cli.refused("train", "quickstart", "--run-dir", "old")
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert err.startswith(f"shardwise: --run-dir (old) is in use by another run (process {os.getpid()} on ")
    assert not started


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("has_former", [True, False])
def test_a_refused_start_leaves_nothing(has_former: bool, monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    """But a folder that was there before, and a run that has taken a step, stay."""
    if has_former:
        RunDirectory("runs/former").create().mark_latest()
    events = ""

    def refused(_command: list[str], _nproc: int, run_path: Path) -> None:
        RunDirectory(run_path).mark_latest()
        if events:
            RunDirectory(run_path).metrics.write_text(events)
        raise LaunchError("the model is wrong", ConfigError.exit_code)

    monkeypatch.setattr("shardwise.launch.local.launch", refused)
    start = ("train", "llama2-tiny", "--nproc", "2")
    assert "the model is wrong" in cli.refused(*start)
    assert sorted(path.name for path in Path("runs").iterdir()) == (["former", "latest"] if has_former else [])
    if has_former:
        assert Path("runs/latest").readlink() == Path("former")
    RunDirectory("runs/mine").create()
    cli.refused(*start, "--run-dir", "runs/mine")
    events = '{"event": "step", "step": 1}\n'
    cli.refused(*start, "--run-dir", "runs/long")
    assert all(Path("runs", name).is_dir() for name in ("mine", "long"))


def test_no_data_or_another_model_is_refused(started: list[Launch], cli: CommandLine, tmp_path: Path) -> None:
    err = cli.refused("train", "llama2-7b")
    assert err.startswith("shardwise: llama2-7b must name its data by data.path, data.blend or data.dataset ")
    assert err.endswith("  For a trial:          data.dataset=python\n")
    stored("old", "quickstart", steps=240)
    err = cli.refused("train", "quickstart", "train.seed=7", "data.dataset=tiny", "--run-dir", "old")
    assert "  train.seed (7) must be 1234\n  data.dataset (tiny) must be stories\n" in err
    assert not started
    assert not (tmp_path / "runs").exists()
    cli("train", "llama2-7b", "data.dataset=python")
    assert len(started) == 1


def test_nproc_contradicts_torchrun(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    said = cli.refused("train", "quickstart", "--nproc", "4")
    assert "--nproc (4) must be left out inside a job: its world size is 2" in said


def test_a_run_goes_on_by_the_name_latest_in_its_own_folder(cli: CommandLine) -> None:
    stored("runs/first", "llama2-tiny", "data.dataset=tiny", "train.global_batch=2", "train.micro_batch=1")
    RunDirectory("runs/first").mark_latest()
    cli("train", "--run-dir", "runs/latest", "train.stop_after=1")
    assert Path("runs/latest").readlink() == Path("first")
    assert [path.name for path in sorted(Path("runs").iterdir())] == ["first", "latest"]
