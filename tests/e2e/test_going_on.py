"""A run that goes on after its newest checkpoints were damaged, with another batch, and past some data."""

import copy
import json
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.verify import verify_checkpoint
from shardwise.checkpoint.storage.checkpoint_folders import list_checkpoints
from shardwise.checkpoint.storage.root import Root
from shardwise.data.samples.order import SampleOrder
from shardwise_watch.run import RunView
from tests.e2e.command import Outcome, metrics, miniature, shardwise, within
from tests.hugging_face import make
from tests.sweeps import few
from tests.unit.use.importing import nemo_shards, neuronx_shards, trainer_files

QUIET = ("train.eval_every=0", "log.tensorboard=false", "log.sample_tokens=0", "train.steps=8", "--run-dir", "run")
BY_TIME = ("checkpoint.every_minutes=1.0e-06", "checkpoint.buffer_mib=0.01", "checkpoint.keep=2")
UNREAD = """\
import os, sys
reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(reader)
sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
from shardwise.cli import main
sys.exit(main())
"""
"""The command where the reader of its standard output has gone, as after `| head`."""
SMALLER = ("train.global_batch=4", "checkpoint.keep=1", "checkpoint.every=2")
KEYS = ("log.tensorboard=false", "log.sample_tokens=0", "train.eval_every=0", "parallel.tensor=2", "train.seed=0")
HOOK = "def rows(config, part):\n    return ROWS if part == 'train' else None\n\n\nROWS = "


@dataclass(frozen=True)
class Gone:
    run: Path
    begun: list[str]
    then: list[str]
    outcome: Outcome


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture(scope="module")
def gone(tmp_path_factory: pytest.TempPathFactory) -> Gone:
    at = tmp_path_factory.mktemp("going-on")
    command = ("train", miniature(at), *QUIET)
    shardwise(*command, *BY_TIME, "train.stop_after=4", at=at).succeeded()
    root = Root.of(at / "run/checkpoints")
    begun = root.names()
    damage(at / "run/checkpoints/step-00000004/optimizer/rank-00000.safetensors")
    outcome = shardwise(*command, *SMALLER, "train.stop_after=3", at=at).succeeded()
    then = root.names()
    damage(at / "run/checkpoints/step-00000006/config.json")
    back = ("checkpoint.resume=6", "train.skip_batches=3", "checkpoint.keep=2")
    unread = at / "unread.py"
    unread.write_text(UNREAD)
    shardwise(*command, *SMALLER, *back, at=at, program=(sys.executable, str(unread))).succeeded()
    return Gone(at / "run", begun, then, outcome)


def test_a_run_goes_on_past_damage_and_past_some_data_with_another_batch(gone: Gone) -> None:
    """Each step is older than a checkpoint may be."""
    assert [event["step"] for event in metrics(gone.run, "checkpoint")][:4] == [1, 2, 3, 4]
    assert gone.begun == ["run.json", "step-00000003", "step-00000004"], "checkpoint.keep is 2"
    assert gone.then == ["run.json", "step-00000004.damaged", "step-00000006"], "checkpoint.keep is 1"
    assert [event["step"] for event in metrics(gone.run, "resume")] == [3, 6]
    warning, *_ = metrics(gone.run, "warning")
    assert warning["text"].startswith("the checkpoint of step 4 was left out: ")
    assert "rank-00000.safetensors is damaged: bytes " in warning["text"]
    assert warning["text"] in gone.outcome.out.replace("\n", " ")
    assert [event["step"] for event in metrics(gone.run, "step")] == [1, 2, 3, 4, 4, 5, 6, 7, 8]
    # As it was: no step is undone, and the batches that are left out from there on are not left out of it.
    warning = metrics(gone.run, "warning")[1]
    assert warning["text"].startswith("the checkpoint of step 6 is damaged, but all that its training needs is intact")
    assert "config.json is damaged: bytes " in warning["text"]
    assert [event["step"] for event in metrics(gone.run, "checkpoint")][-3:] == [6, 6, 8]
    _, mended = list_checkpoints(Root.of(gone.run / "checkpoints"))
    assert verify_checkpoint(mended.folder).sound
    manifest = Manifest.read(mended.folder)
    assert (manifest.step, manifest.samples, manifest.position) == (6, 36, 36)
    assert "went_back" not in manifest.schedule
    # Also in the first line after a resume; the loss of the first step 4, which was undone, is not among them.
    losses = [event["loss"] for event in metrics(gone.run, "step")]
    del losses[3]
    log = (gone.run / "logs/rank-0000.log").read_text()
    lines = re.findall(r"^step +(\d)/\d  .*  (\d+)-step mean ([\d.]+)  ", log, re.MULTILINE)
    told = {step: (steps, mean) for step, steps, mean in lines}
    assert told == {str(step): (str(step), f"{fmean(losses[:step]):.4f}") for step in range(1, 9)}
    assert RunView(gone.run, all_steps=False).state == "finished"
    assert metrics(gone.run, "stop")[-1]["reason"] == "finished"
    log = (gone.run / "logs/rank-0000.log").read_text()
    assert [line for line in log.splitlines() if line.startswith("step 8/8")]
    assert log.endswith(f"weights: {gone.run.name}/checkpoints/step-00000008\n"), log
    # 3 steps of 8 samples, 3 steps of 4, 3 batches of 4 left out, 2 steps of 4.
    assert [event["samples"] for event in metrics(gone.run, "step")][-5:] == [28, 32, 36, 40, 44]
    newest, _ = list_checkpoints(Root.of(gone.run / "checkpoints"))
    last = Manifest.read(newest.folder)
    assert (last.step, last.samples, last.position, last.tokens) == (8, 44, 56, 44 * 32)
    first, second = (event["changes"] for event in metrics(gone.run, "resume"))
    assert "train.global_batch 8 → 4" in first
    assert "train.skip_batches 0 → 3" in second


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the Trainer saved after 3 of 9 steps."""
    folder = tmp_path_factory.mktemp("elsewhere")
    trainer_files.save("llama", folder)
    (folder / "rows.py").write_text(f"{HOOK}{[[*range(16)]] * 40}\n")
    return folder


def test_what_is_told_of_an_import(at: Path) -> None:
    def imported(*words: str) -> Outcome:
        return within("checkpoint", "import", "checkpoint-3", *words, at=at)

    told = imported("run").succeeded().out
    assert "after step 3, 24 samples and tokens not known, counted from 0, with the optimizer's exp_avg and" in told
    (command,) = re.findall(r"^go on: shardwise (.*)$", told, re.MULTILINE)
    words = shlex.split(command.replace("data.path=DATA", "hooks.data=rows:rows").replace("=N", "=15"))
    place = r"continues +run after step 3, from run/checkpoints/step-00000003"
    assert re.search(place, within(*words, "--dry-run", at=at).succeeded().out)
    shutil.copytree(at / "run", at / "held")
    (at / "held/config.yaml").touch()
    assert "DEST (held) must hold no run yet" in imported("held").failed(2)
    facts = json.loads(imported("asked", "--json").succeeded().out)
    assert (facts["step"], facts["samples"], facts["tokens"]) == (3, 24, None)
    assert facts["states"] == ["exp_avg", "exp_avg_sq"]
    assert f"go on: {facts['command']}".replace("asked", "run") in told
    assert "start from it: shardwise train RECIPE checkpoint.load=" in imported("weights", "--weights-only").out
    assert (at / "weights/step-00000000/manifest.json").is_file()
    refused = imported("others", "--weights-only", "--samples", "3").failed(2)
    assert "--samples and --tokens must be left out: of SOURCE the weights alone are imported" in refused
    told = imported("other", "--samples", "0", "--tokens", "7").succeeded().out
    assert "after step 3, 0 samples and 7 tokens, with" in told
    (at / "checkpoint-3/training_args.bin").unlink()
    assert "give --samples N, after which" in imported("third").failed(2)
    assert not (at / "third").exists()


def trained(model: Any, ordered: list[list[int]]) -> tuple[Any, tuple[Any, Any], dict[str, Any], list[float]]:
    """The model after 4 of 8 steps, its moments by name, the scheduler's state with the next rate, and 4 losses."""
    named = dict(model.named_parameters())
    free = [name for name, parameter in named.items() if parameter.dim() == 1]
    groups = [
        {"params": [each for name, each in named.items() if (name in free) == is_free], "weight_decay": decay}
        for is_free, decay in ((False, 0.01), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-3, betas=(0.9, 0.95))
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 2, 8)
    losses = []
    for step in range(8):
        if step == 4:
            state = optimizer.state_dict()
            numbers = dict(enumerate([*(n for n in named if n not in free), *free]))
            moments = [{numbers[i]: each[kind].clone() for i, each in state["state"].items()}
                       for kind in ("exp_avg", "exp_avg_sq")]  # fmt: skip
            saved = copy.deepcopy(model)
            told = {"scheduler": scheduler.state_dict(), "rate": optimizer.param_groups[0]["lr"]}
        ids = torch.tensor(ordered[4 * step : 4 * step + 4])
        loss = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return saved, (moments[0], moments[1]), told, losses[4:]


@pytest.mark.parametrize("program", few(["neuronx-distributed", "neuronx-nemo-megatron"], "neuronx-distributed"))
def test_a_run_at_its_end_of_life_goes_on(tmp_path: Path, program: str) -> None:
    """TP 2 × PP 2 × DP 2 with ZeRO-1 there; the losses are those of the same training that goes on by torch alone."""
    rows = [[(number * (number + column) + column**2) % 61 for column in range(16)] for number in range(40)]
    (tmp_path / "rows.py").write_text(f"{HOOK}{rows}\n")
    ordered = [rows[number] for number in SampleOrder(len(rows), 0).indices(0, 32)]
    words = ["--from", program]
    options: dict[str, Any] = {"eps": 1e-8, "initial_lr": 5e-3, "tp": 2, "pp": 2, "step": 4}
    if program == "neuronx-distributed":
        model = make("llama", vocab_size=64)
        model.save_pretrained(tmp_path / "model")
        model, moments, told, losses = trained(model, ordered)
        arguments = {"train_batch_size": 2, "seq_len": 15, "max_steps": 8, "warmup_steps": 2}
        beside = {"scheduler": told["scheduler"], "user_content": {"total_steps": 4, "cli_args": arguments}}
        options |= {"style": "grouped-fused", "xser": True, "lr": told["rate"]}
        neuronx_shards.write(model, tmp_path / "there", moments=moments, beside=beside, **options)
        words += ["--config", "model"]
    else:
        model, moments, told, losses = trained(make("gpt"), ordered)
        dropout = dict.fromkeys(("hidden_dropout", "attention_dropout", "ffn_dropout"), 0.0)
        config = nemo_shards.gpt_config(model, **dropout, global_batch_size=4, data={"seq_length": 15})
        config["optim"] = {"sched": {"name": "LinearWarmup", "warmup_steps": 2, "max_steps": 8}}
        sources = [nemo_shards.Source(copy.deepcopy(model), config) for _ in range(3)]
        for source, tensors in zip(sources[1:], moments, strict=True):
            source.weights |= tensors | {"lm_head.weight": tensors["transformer.wte.weight"]}
        beside = {"lr_schedulers": [told["scheduler"]], "global_step": 4}
        name = "megatron_gpt--step=4-consumed_samples=16.0.ckpt"
        options |= {"lr": told["rate"], "name": name, "beside": beside}
        nemo_shards.write(sources[0], tmp_path / "there", moments=(sources[1], sources[2]), **options)
        words += ["--vocab-size", "61"]
    outcome = within("checkpoint", "import", "there", "run", *words, at=tmp_path)
    said = outcome.out
    assert (outcome.code, outcome.err.count("note: ")) == (0, 1)
    assert "note: clipping is not saved there: give optimizer.max_norm (1.0" in outcome.err
    assert "after step 4, 16 samples and 240 tokens, with the optimizer's exp_avg and exp_avg_sq" in said
    (command,) = re.findall(r"^go on: shardwise (.*)$", said, re.MULTILINE)
    shardwise(*shlex.split(command.replace("data.path=DATA", "hooks.data=rows:rows")), *KEYS, at=tmp_path).succeeded()
    steps = metrics(tmp_path / "run", "step")
    assert [(step["step"], step["samples"], step["tokens"]) for step in steps] == [
        (step, 4 * step, 60 * step) for step in range(5, 9)
    ]
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=0, abs=1e-5)
    branched = within("branch", "run@4", "train.steps=9", "--prepare", "--run-dir", "branch", at=tmp_path).succeeded()
    assert "branch: a branch of run at step 4" in branched.out
