"""`shardwise train`: what it checks, how many ranks it starts, and what a dry run tells."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from shardwise.base import units
from shardwise.base.errors import DataError
from shardwise.cli import main
from shardwise.config import check_layout, config_from, dump_yaml, load_config, parse_yaml, recipe_text
from shardwise.config.hugging_face import to_hugging_face
from shardwise.data.tokens.tokenizer import train_tokenizer
from shardwise.estimates.communication import step_transfers, wire_bytes
from shardwise.estimates.memory import checkpoint_bytes, expected_memory
from shardwise.launch.stop_requests import request, requested
from shardwise.models.parameter_counts import parameter_count
from shardwise.runs.folder import RunDirectory, RunLock
from tests.arch.source import config_fields


@pytest.fixture(autouse=True)
def _on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwise.cli.train.accelerators", lambda: ("cpu", 0))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int, Path]]:
    """The launches asked for, none of which happens."""
    launches: list[tuple[list[str], int, Path]] = []

    def launch(command: Sequence[str], nproc: int, run_path: Path) -> None:
        launches.append((list(command), nproc, run_path))

    monkeypatch.setattr("shardwise.launch.local.launch", launch)
    monkeypatch.setattr("shardwise.cli.run_preparation.prepare", lambda config, announce: None)
    return launches


def test_dry_run_tells_all_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["parallel.tensor=2", "parallel.sequence=true", "train.stop_after=5"]
    assert main(["train", "llama2-tiny", *overrides, "--nproc", "4", "--dry-run"]) == 0
    text = capsys.readouterr().out
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
    assert config_from(parse_yaml(text, "dry run")) == config
    assert not list(tmp_path.iterdir())


def test_a_dry_run_shows_every_key_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "llama2-tiny", "--dry-run", "--full"]) == 0
    text = capsys.readouterr().out
    assert parse_yaml(text, "dry run") == load_config("llama2-tiny").recorded()
    assert main(["train", "llama2-tiny", "--full"]) == 2
    assert "--full must go with --dry-run" in capsys.readouterr().err


def test_a_dry_run_refuses_a_folder_that_a_run_could_not_make(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    run = tmp_path / "file/run"
    assert main(["train", "llama2-tiny", "--dry-run", "--run-dir", str(run)]) == 2
    assert f"{run} cannot be made: Not a directory; start in a folder that can be" in capsys.readouterr().err
    run = tmp_path / "new/run"
    assert main(["train", "llama2-tiny", "--dry-run", "--run-dir", str(run)]) == 0
    assert not run.parent.exists()


def test_a_dry_run_tells_of_products_in_fp8_and_of_devices_without_them(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "llama2-tiny", "precision.matmul=fp8", "precision.mode=null", "--dry-run"]
    assert main(command) == 0
    shown = "parameters bfloat16, products of blocks fp8, gradients float32, reduction float32, optimizer float32"
    assert shown in " ".join(capsys.readouterr().out.replace("#", "").split())
    assert main([*command, "--device", "a100:1"]) == 2
    assert (
        "precision.matmul (fp8) must be left out on NVIDIA A100 80GB SXM, whose device file has no fp8_tflops"
        in capsys.readouterr().err
    )


def test_a_dry_run_for_trainium_warns_of_a_pipeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text("base: trn2\n", encoding="utf-8")
    for device in ("trn1", "trn3", f"{tmp_path}/ours.yaml", "h100"):
        assert main(["train", "llama2-tiny", "parallel.pipeline=2", "--dry-run", "--device", f"{device}:2"]) == 0
        told = "\n# warning        parallel.pipeline (2) is refused by TorchNeuron" in capsys.readouterr().out
        assert told == (device != "h100")


def test_a_dry_run_shows_its_numbers_and_refuses_data_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    """On a laptop the numbers are of use, though the data are on the cluster."""
    wrong = ["data.path=corpus.jsonl", "data.tokenizer=tokenizer.json"]
    assert main(["train", "llama2-tiny", *wrong, "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert "\n# memory " in captured.out
    assert captured.err.startswith("shardwise: 2 errors\n- data.path (corpus.jsonl) does not exist in ")
    Path("corpus.jsonl").write_text('{"text": "some text"}\n')
    assert main(["train", "llama2-tiny", wrong[0], "model.vocab_size=257", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "\n# data           corpus.jsonl: 1 file, 22 B, read as JSON lines, prepared when the run starts" in out
    assert "\n# tokenizer      byte-level BPE of 257 tokens if the text yields as many, trained on the data" in out
    assert (
        "\n# warning        train.steps (20) read 10,240 tokens, and the data have at most 22: each is read at least "
        "465 times, and a text that is repeated more than four times teaches little (arXiv:2305.16264): lower " in out
    )
    shown = parse_yaml(out, "dry run")["data"]
    assert shown["path"] == "corpus.jsonl"
    assert "dataset" not in shown


def test_a_dry_run_looks_at_evaluation_sets_task_files_and_trackers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = "evaluation.sets={small: {dataset: tiny}, own: {path: /nope.txt}}"
    tasks = ["evaluation.tasks=[places]", "evaluation.tasks_every=5", "evaluation.tasks_path=/nope"]
    trackers = "log.trackers=[trackio]"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "trackio" else find_spec(name))
    assert main(["train", "llama2-tiny", "--dry-run", "train.eval_every=5", sets, *tasks, trackers]) == 2
    captured = capsys.readouterr()
    assert "# set, small     tiny: 1 file," in captured.out
    assert "evaluation.sets.own.path (/nope.txt) does not exist" in captured.err
    assert "log.trackers (trackio) needs the package trackio: pip install" in captured.err
    pytest.importorskip("lm_eval")
    assert "evaluation.tasks_path (/nope) must be a folder of task files (.yaml), and it is none" in captured.err


def test_fault_07_a_dry_run_says_what_changes_beside_loaded_weights(capsys: pytest.CaptureFixture[str]) -> None:
    train_tokenizer(["some text " * 9], 258, "text").save(Path("weights"))
    Path("weights/model.safetensors").touch()
    fields = to_hugging_face(load_config("llama2-tiny").model)
    Path("weights/config.json").write_text(json.dumps(fields))
    given = ["train", "llama2-tiny", "--dry-run", "model.config=weights", "checkpoint.load=weights"]
    yarn = "model.rope_scaling={rope_type: yarn, factor: 4}"
    assert main([*given, "model.rope_theta=5e6", yarn, "train.sequence_length=256"]) == 0
    shown = capsys.readouterr().out
    assert (
        "\n#   changed      model.rope_theta (5000000.0) replaces that of weights/config.json (10000.0), "
        "with the same weights\n" in shown
    )
    assert "\n# tokenizer      " in shown
    assert "/weights: 258 tokens, of model.vocab_size (512)\n" in shown
    train_tokenizer(["another " * 9], 258, "text").save(Path("other"))
    assert main([*given, "data.tokenizer=other"]) == 0
    assert "\n# warning        data.tokenizer gives other ids than" in capsys.readouterr().out
    assert "\n#   changed      model.rope_scaling ({'rope_type': 'yarn', 'factor': 4, 'original_max_" in shown
    assert main([*given, "model.rms_norm_eps=1e-3"]) == 0
    assert "\n#   changed      model.rms_norm_eps (0.001) replaces that of weights/" in capsys.readouterr().out
    assert main([*given, "model.intermediate_size=128"]) == 2
    text = capsys.readouterr().err
    assert "model.intermediate_size (128) must be that of weights/config.json (176); model.config=weights takes" in text


def test_a_dry_run_refuses_weights_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But those of the run that a shipped recipe follows may be still to come."""

    def dry(load: str, code: int, recipe: str = "llama2-tiny") -> str:
        given = [f"checkpoint.load={load}"] if load else []
        assert main(["train", recipe, "--dry-run", *given]) == code
        captured = capsys.readouterr()
        assert "\n# memory " in captured.out
        return captured.err if code else captured.out

    assert dry("/nope", 2).count("checkpoint.load (/nope) must be a folder with weights: there is none") == 1
    Path("empty").mkdir()
    assert "checkpoint.load (empty) must hold model.safetensors: it is empty" in dry("empty", 2)
    Path("empty/model.safetensors").touch()
    assert "checkpoint.load (empty) must hold the model's tokenizer" in dry("empty", 2)
    train_tokenizer(["some text " * 9], 258, "text").save(Path("empty"))
    assert "\n# weights        empty\n" in dry("empty", 0)
    awaited = "runs/bert-large/checkpoints/step-00028125"
    assert f"\n# weights        {awaited}: not there yet; the run that" in dry("", 0, "bert-large-phase2")
    assert "memory://none/run must be a folder with weights" in dry("memory://none/run", 2)
    monkeypatch.setattr("shardwise.checkpoint.storage.checkpoint_folders.find", lambda wanted: "hub")
    monkeypatch.setattr("shardwise.base.hub.find", lambda wanted: "hub")
    shown = dry("owner/name", 0)
    assert "\n# weights        owner/name: on the hub, fetched when the run starts\n" in shown
    assert "\n# tokenizer      owner/name: on the hub, fetched when the run starts\n" in shown
    Path("mine.yaml").write_text(recipe_text("bert-large-phase2"))
    assert f"checkpoint.load ({awaited}) must be a folder with weights" in dry("", 2, "mine.yaml")


@pytest.mark.parametrize(
    ("machine", "overrides", "expected"),
    [
        (("cpu", 0), [], 2),
        (("cpu", 0), ["parallel.tensor=4"], 4),
        (("nvidia", 8), [], 8),
        (("nvidia", 7), ["train.global_batch=48"], 6),
        (("cpu", 0), ["parallel.pipeline=2"], 4),
    ],
)
def test_default_number_of_ranks(
    machine: tuple[str, int],
    overrides: list[str],
    expected: int,
    started: list[tuple[list[str], int, Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardwise.cli.train.accelerators", lambda: machine)
    assert main(["train", "quickstart", "train.micro_batch=1", *overrides]) == 0
    ((command, nproc, run_path),) = started
    assert nproc == expected
    assert command[:6] == [sys.executable, "-P", "-m", "shardwise", "train", "quickstart"]
    assert command[-3:] == ["--nproc", str(expected), f"--run-dir={run_path}"]
    assert run_path.parent == Path("runs")
    assert run_path.name.startswith("quickstart-")


@pytest.mark.parametrize(
    ("machine", "arguments", "text"),
    [
        (
            ("cpu", 0),
            ["--nproc", "3"],
            "the number of ranks (3) must be a multiple of parallel.tensor (2): nearest 2 or 4",
        ),
        (("nvidia", 1), [], "parallel.tensor (2) must be at most the number of accelerators (1)"),
        (
            ("nvidia", 2),
            ["--nproc", "4", "train.micro_batch=1"],
            "--nproc (4) must be at most the number of accelerators",
        ),
        (
            ("cpu", 0),
            ["--run-dir", "old"],
            "--run-dir (old) holds a run whose config.yaml cannot be read (it holds no configuration): put a copy",
        ),
        (("cpu", 0), ["--nodes", "2"], "--nodes must go with --device: the nodes of a run are those of its launcher"),
    ],
)
def test_mistakes_start_nothing(
    machine: tuple[str, int],
    arguments: list[str],
    text: str,
    started: list[tuple[list[str], int, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("shardwise.cli.train.accelerators", lambda: machine)
    Path("old").mkdir()
    Path("old/config.yaml").touch()
    assert main(["train", "quickstart", *arguments]) == 2
    assert capsys.readouterr().err.count(text) == 1
    assert not started
    assert not Path("runs").exists()


def stored(folder: str, recipe: str, *overrides: str, steps: int | None = None) -> Path:
    """A folder that holds a run of a recipe, which has ended after `steps` if they are given."""
    run = RunDirectory(folder).create()
    run.write_config(dump_yaml(load_config(recipe, overrides).model_dump(mode="json")))
    if steps is not None:
        run.write_results({"steps": steps})
    return run.path


def test_a_run_goes_on_in_its_folder(started: list[tuple[list[str], int, Path]]) -> None:
    run = stored("old", "quickstart", steps=240)
    request(run, "an earlier signal")
    assert main(["train", "quickstart", "train.steps=480", "--run-dir", "old"]) == 0
    ((command, _, run_path),) = started
    assert (run_path, command[6]) == (run, "train.steps=480")
    assert requested(run) is None, "a request to the earlier run must not stop this one"


def test_a_run_goes_on_without_its_recipe(
    started: list[tuple[list[str], int, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    stored("old", "quickstart", "optimizer.lr=1e-2", steps=240)
    assert main(["train", "--run-dir", "old", "train.steps=480"]) == 0
    ((command, _, run_path),) = started
    assert (run_path, command[5:7]) == (Path("old"), ["old/config.yaml", "train.steps=480"])
    for arguments, text in {
        ("--run-dir", "new"): "--run-dir (new) must hold a run if RECIPE is left out, and it holds no config.yaml",
        ("train.steps=480",): "missing RECIPE, e.g. `shardwise train llama2-tiny` (list: `shardwise recipes`)",
        ("./old",): "the recipe file ./old is a run's folder: `shardwise train --run-dir ./old` continues the run",
    }.items():
        assert main(["train", *arguments]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "host", "overrides", "expected"),
    [
        (8, platform.node(), [], 8),
        (8, "another machine", [], 2),
        (4, platform.node(), ["parallel.pipeline=4"], 8),
        (None, platform.node(), [], 2),
    ],
)
def test_a_run_goes_on_with_its_ranks_where_it_ran(
    ranks: int | None,
    host: str,
    overrides: list[str],
    expected: int,
    started: list[tuple[list[str], int, Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardwise.cli.train.accelerators", lambda: ("cpu", 0))
    run = RunDirectory(stored("old", "quickstart", "train.micro_batch=1", "model.num_hidden_layers=4", steps=240))
    run.metrics.write_text(json.dumps({"event": "start", "ranks": ranks}) + "\n")
    run.rank_metrics(0).parent.mkdir(exist_ok=True)
    for rank, name in enumerate([platform.node()] * ((ranks or 1) - 1) + [host]):
        run.rank_metrics(rank).write_text(json.dumps({"event": "start", "host": name}) + "\n")
    assert main(["train", "--run-dir", "old", "train.steps=480", *overrides]) == 0
    ((_, nproc, _),) = started
    assert nproc == expected


def test_a_run_keeps_the_batch_that_it_began_with(capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe's rule counts the ranks of a new run; on other ranks, the run goes on with its number.

    Another rule, or a rule in place of a number, is what its user asks for; how an older run began is not known.
    """
    rule = "train.global_batch=8 per 2 ranks"
    run = stored("old", "llama2-tiny", rule)
    stored("plain", "llama2-tiny", "train.global_batch=8")
    written = (run / "config.yaml").read_text()
    (RunDirectory("older").create().path / "config.yaml").write_text(
        written.replace("  batch_rule: 8 per 2 ranks\n", "")
    )
    cases = [
        (rule, "old", 8),
        (rule, "older", 8),
        (rule, "plain", 16),
        (rule, "new", 16),
        ("train.global_batch=64 per 2 ranks", "old", 128),
        ("train.global_batch=32", "old", 32),
    ]
    for key, folder, batch in cases:
        arguments = ["llama2-tiny", key, "train.micro_batch=1", "--nproc", "4", "--dry-run", "--run-dir", folder]
        assert main(["train", *arguments]) == 0
        out = capsys.readouterr().out
        assert f"  global_batch: {batch}\n" in out, (key, folder)
        assert f"× 4 DP = {batch} global batch" in out


def dry_rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The rows of a dry run of the run in `old`, down to the layout."""
    assert main(["train", "llama2-tiny", *arguments, "--dry-run", "--run-dir", "old"]) == 0
    rows = [line[2:] for line in capsys.readouterr().out.splitlines() if line.startswith("# ")]
    return rows[1 : next(number for number, row in enumerate(rows) if row.startswith("layout"))]


def test_a_dry_run_tells_where_a_run_goes_on_and_what_changes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert dry_rows(capsys) == [], "there is no run yet"
    run = stored("old", "llama2-tiny", "parallel.tensor=2", "parallel.sequence=true")
    assert dry_rows(capsys, "parallel.tensor=2", "parallel.sequence=true") == [
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
    assert dry_rows(capsys, "train.steps=40", "parallel.sequence=true", "--nproc", "2") == [
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
        assert main(["train", "llama2-tiny", wrong, "--dry-run", "--run-dir", "old"]) == 2
        assert problem in capsys.readouterr().err
    RunDirectory("old").write_results({"steps": 20})
    assert dry_rows(capsys) == ["continues      old: finished, 20 of 20 steps; raise train.steps"]


@pytest.mark.parametrize("machine", [("cpu", 0), ("nvidia", 1)])
def test_a_finished_run_says_so(
    machine: tuple[str, int],
    started: list[tuple[list[str], int, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("shardwise.cli.train.accelerators", lambda: machine)
    run = stored("old", "llama2-tiny", steps=20)
    assert main(["train", "llama2-tiny", "--run-dir", "old"]) == 0
    out, err = capsys.readouterr()
    assert out == (
        f"the run in {run} is finished: 20 of 20 steps, results in {run}/results.json; to continue it, "
        "raise train.steps\n"
    )
    assert not err
    assert not started


def test_a_named_step_is_gone_back_to_from_the_end(started: list[tuple[list[str], int, Path]]) -> None:
    stored("old", "quickstart", steps=240)
    assert main(["train", "quickstart", "checkpoint.resume=80", "--run-dir", "old"]) == 0
    assert len(started) == 1


def test_a_second_run_in_a_folder_is_refused_and_touches_nothing(
    started: list[tuple[list[str], int, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored("old", "quickstart")
    with RunLock(run):
        request(run, "SIGTERM")
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        assert main(["train", "quickstart", "--run-dir", "old"]) == 2
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    err = capsys.readouterr().err
    assert err.startswith(f"shardwise: --run-dir (old) is in use by another run (process {os.getpid()} on ")
    assert not started


def test_a_run_without_data_or_with_another_model_is_refused(
    started: list[tuple[list[str], int, Path]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", "llama2-7b"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("shardwise: llama2-7b must name its data by data.path, data.blend or data.dataset ")
    assert err.endswith("  For a trial:          data.dataset=python\n")
    stored("old", "quickstart", steps=240)
    assert main(["train", "quickstart", "train.seed=7", "data.dataset=tiny", "--run-dir", "old"]) == 2
    err = capsys.readouterr().err
    assert "  train.seed (7) must be 1234\n  data.dataset (tiny) must be stories\n" in err
    assert not started
    assert not (tmp_path / "runs").exists()
    assert main(["train", "llama2-7b", "data.dataset=python"]) == 0
    assert len(started) == 1


def test_bad_data_starts_nothing(
    started: list[tuple[list[str], int, Path]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(config: Any, announce: Any) -> None:
        raise DataError("data.path (x) is empty")

    monkeypatch.setattr("shardwise.cli.run_preparation.prepare", prepare)
    assert main(["train", "quickstart"]) == 2
    assert capsys.readouterr().err == "shardwise: data.path (x) is empty\n"
    assert not started
    assert not Path("runs").exists()


def test_nproc_contradicts_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "quickstart", "--nproc", "4"]) == 2
    assert "--nproc (4) must be left out inside a job: its world size is 2" in capsys.readouterr().err


def _plausible(field: FieldInfo) -> list[object]:
    """Values of the types that a key takes: its examples, choices, and a word, a number, a folder."""
    values = list(field.examples or [])
    of_type: dict[object, list[object]] = {bool: [True], int: [2], float: [0.5], str: ["word"], Path: ["folder"]}
    for kind in (field.annotation, *get_args(field.annotation)):
        values += get_args(kind)[:1] if get_origin(kind) is Literal else of_type.get(kind, [])
    return values


@pytest.mark.slow
def test_fault_21_a_dry_run_takes_each_key(capsys: pytest.CaptureFixture[str]) -> None:
    """Or refuses its value in a sentence; what it prints is a recipe of the same configuration."""
    accepted = {}
    for key, field in config_fields().items():
        for value in [] if key.startswith("model.") else _plausible(field):
            override = f"{key}={value if isinstance(value, str) else json.dumps(value)}"
            code = main(["train", "llama2-tiny", "data.dataset=python", override, "--dry-run"])
            out, err = capsys.readouterr()
            assert code in (0, 2), override
            assert code == 0 or err.startswith("shardwise: "), override
            if code == 0:
                accepted[key] = config_from(parse_yaml(out, "dry run"))
                assert accepted[key] == load_config("llama2-tiny", ["data.dataset=python", override]), override
    assert {"compile.cache_dir", "compile.options", "launch.environment", "launch.sbatch"} <= accepted.keys()


def test_a_run_goes_on_by_the_name_latest_in_its_own_folder() -> None:
    small = ["data.dataset=tiny", "train.global_batch=2", "train.micro_batch=1"]
    assert main(["train", "llama2-tiny", "--run-dir", "runs/first", *small, "train.stop_after=1"]) == 0
    assert main(["train", "--run-dir", "runs/latest", "train.stop_after=2"]) == 0
    assert Path("runs/latest").readlink() == Path("first")
    assert [path.name for path in sorted(Path("runs").iterdir())] == ["first", "latest"]
