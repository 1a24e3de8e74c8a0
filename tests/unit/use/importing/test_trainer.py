"""Progress that a Hugging Face Trainer saved."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwise.base.errors import ConfigError
from shardwise.checkpoint.storage.root import Root
from shardwise.config import OptimizerConfig
from shardwise.optim.learning_rate import learning_rate
from shardwise_use.importing.hugging_face import open_hugging_face
from shardwise_use.importing.hugging_face_trainer import _curve_points, with_trainer_progress
from shardwise_use.importing.imported_model import ImportedModel, write_imported_checkpoint
from tests.dist.checkpoints import make_trainer, run
from tests.dist.training import make_config
from tests.hugging_face import CASES, described, make
from tests.sweeps import few
from tests.unit.use.importing.checks import assert_equal, problems, states_of
from tests.unit.use.importing.trainer_files import save


def opened(folder: Path) -> ImportedModel:
    return with_trainer_progress(open_hugging_face(Root.of(folder)), folder)


@pytest.mark.parametrize("case", few(CASES, "llama", "bert", "qwen3_moe"))
def test_moments_are_those_of_their_weights(tmp_path: Path, case: str) -> None:
    """Of every family, the two groups of the Trainer and a single one."""
    for groups in (2, 1):
        folder = save(case, tmp_path / str(groups), groups)
        found, wanted = opened(folder), load_file(folder / "model.safetensors")
        states = states_of(found)
        trained = {name: weight for name, weight in wanted.items() if not name.endswith("e_score_correction_bias")}
        assert_equal(states["exp_avg"], trained)
        assert_equal(states["exp_avg_sq"], {name: weight**2 for name, weight in trained.items()})


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("good"), warmup_steps=2, gradient_accumulation_steps=2)


@pytest.fixture
def saved(good: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(good, tmp_path / "saved"))


SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "constant": {},
    "constant_with_warmup": {},
    "cosine": {},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "polynomial": {"lr_end": 1e-4},
    "warmup_stable_decay": {"num_decay_steps": 3, "decay_type": "1-sqrt", "min_lr_ratio": 0.2},
}


@pytest.mark.parametrize(("name", "warmup"), [*zip(SCHEDULES, (0, 0, 3, 3, 0.25, 0, 3), strict=True)])
def test_rates_are_the_trainers_at_each_step(name: str, warmup: float) -> None:
    from transformers import TrainingArguments, get_scheduler

    given = {"lr_scheduler_type": name, "warmup_steps": warmup, "lr_scheduler_kwargs": SCHEDULES[name]}
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=4e-3)
    steps = TrainingArguments("unused", **given).get_warmup_steps(12)
    scheduler = get_scheduler(name, optimizer, steps, 12, scheduler_specific_kwargs=SCHEDULES[name])
    points = _curve_points(given, 4e-3, 12)
    assert points is not None
    settings = OptimizerConfig.model_validate({"lr": 4e-3, "schedule": "points", "points": points})
    for step in range(1, 13):
        wanted = scheduler.get_last_lr()[0]
        assert learning_rate(settings, 12, step) == pytest.approx(wanted, rel=1e-12, abs=1e-18), f"step {step}"
        optimizer.step()
        scheduler.step()


def test_rates_that_points_cannot_tell_are_not_told() -> None:
    """Decays of several cycles, and a warmup that leaves less room than the decay takes: the Trainer cuts its begin."""
    for warmup, given in (
        (3, {"num_decay_steps": 6, "num_cycles": 1.0}),
        (10, {"num_decay_steps": 6}),
        (12, {"num_decay_steps": 1}),
    ):
        arguments = {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": warmup, "lr_scheduler_kwargs": given}
        assert _curve_points(arguments, 4e-3, 12) is None


def test_keys_and_place(good: Path) -> None:
    progress = opened(good).progress
    assert (progress.step, progress.samples, progress.tokens, progress.updates) == (3, 3 * 16, None, 3)
    wanted = {
        "train.steps": 9, "train.global_batch": 16, "optimizer.lr": 1e-3, "optimizer.betas": [0.9, 0.999],
        "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.0, "optimizer.max_norm": 1.0, "optimizer.schedule": "points",
    }  # fmt: skip
    assert {key: progress.keys[key] for key in wanted} == wanted


def test_an_optimizer_of_one_group_decays_all(tmp_path: Path) -> None:
    progress = opened(save("llama", tmp_path, groups=1)).progress
    assert (progress.keys["optimizer.weight_decay"], progress.keys["optimizer.no_decay"]) == (0.01, [])
    two = opened(save("llama", tmp_path / "two", weight_decay=0.1)).progress
    assert "optimizer.no_decay" not in two.keys


def test_a_schedule_without_counterpart_is_told(tmp_path: Path) -> None:
    folder = save("llama", tmp_path, lr_scheduler_type="inverse_sqrt", warmup_steps=2, bf16=True, max_grad_norm=0.0)
    found = opened(folder)
    assert "optimizer.schedule" not in found.progress.keys
    assert (found.progress.keys["precision.mode"], found.progress.keys["optimizer.max_norm"]) == ("mixed", None)
    (note,) = found.notes
    assert note.startswith("the schedule (inverse_sqrt) has no counterpart here: its next rate is 0.000")


def test_the_balance_loss_goes_on(tmp_path: Path) -> None:
    folder = save("qwen3_moe", tmp_path)
    assert "optimizer.router_pooled_loss" not in opened(folder).progress.keys
    config = json.loads((folder / "config.json").read_text())
    balanced = config | {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    (folder / "config.json").write_text(json.dumps(balanced))
    found = opened(folder)
    assert found.progress.keys["optimizer.router_pooled_loss"] == 0.02
    assert "the Trainer's loss contains the balance loss" in found.notes[0]


def test_what_is_missing_is_told(saved: Path) -> None:
    for rank in range(4):
        (saved / f"rng_state_{rank}.pth").touch()
    assert opened(saved).progress.samples == 4 * 3 * 16
    (saved / "training_args.bin").unlink()
    found = opened(saved)
    assert (found.progress.samples, found.progress.keys.get("train.global_batch")) == (None, None)
    assert "set optimizer.schedule, optimizer.max_norm and train.global_batch yourself" in found.notes[0]
    (saved / "optimizer.pt").unlink()
    found = opened(saved)
    assert found.progress is None
    assert "has no optimizer.pt, so the weights alone are imported" in found.notes[0]
    (saved / "trainer_state.json").unlink()
    assert opened(saved).notes == ()


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("name", ["optimizer.pt", "training_args.bin"])
def test_a_pickle_that_asks_for_more_is_refused(saved: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved)
    torch.save({"state": {}, "param_groups": [Evil()]}, saved / name)
    told = rf"{name} is refused: .*mkdir, by which opening it could run code; none was"
    with pytest.raises(ConfigError, match=told) as error:
        opened(saved)
    assert all(problem.endswith("import the weights alone by --weights-only") for problem in error.value.problems)
    assert not (saved / "executed").exists()


def test_damaged_and_foreign_files_are_refused(saved: Path, good: Path) -> None:
    file = saved / "optimizer.pt"
    content = file.read_bytes()
    held = torch.load(file, weights_only=True)

    def refused(message: str, value: Any = None) -> None:
        if value is not None:
            torch.save(value, file)
        (problem,) = problems(opened, saved)
        assert re.search(message, problem)
        file.write_bytes(content)

    file.write_bytes(content[: len(content) // 2])
    refused(r"optimizer.pt is truncated")
    none = r"optimizer.pt must be the state of an optimizer after a step, and is none: import"
    for value in ([], {"state": {}, "param_groups": []}, held | {"state": {0: 1}}, held | {"param_groups": [{}]}):
        refused(none, value)
    rows = {"step": 3, "exp_avg_sq_row": torch.ones(2), "exp_avg_sq_col": torch.ones(2)}
    adamw = r"must hold the state of AdamW \(exp_avg, exp_avg_sq and step\), and it holds "
    refused(rf"{adamw}exp_avg_sq_col, exp_avg_sq_row and step, of another", held | {"state": {0: rows}})
    decay, vectors = held["param_groups"]
    adam = [decay | {"decoupled_weight_decay": False, "weight_decay": 0.1}, vectors]
    refused(r"must be of AdamW, and is of Adam with weight decay in its gradients", held | {"param_groups": adam})
    state = {number: kept for number, kept in held["state"].items() if number != 1}
    query = r"model.layers.0.self_attn.q_proj.weight \[32, 32\] is \[\] there"
    refused(rf"it holds 20 of 21; {query}", held | {"state": state})
    refused(
        r"as a Trainer saves it: KeyError: 'betas'",
        held | {"param_groups": [{name: decay[name] for name in ("params", "weight_decay", "eps", "lr")}, vectors]},
    )
    (saved / "trainer_state.json").write_text('{"global_step": 12, "max_steps": 9}')
    refused(r"must have a global_step \(12\) from 1 to its max_steps \(9\)")
    (saved / "trainer_state.json").unlink()
    refused(r"trainer_state.json, which has the step of optimizer.pt, cannot be read")


def test_the_next_ten_losses_are_the_trainers(tmp_path: Path) -> None:
    """The same batches, in the order of a run here."""
    from transformers import Trainer, TrainingArguments

    before, after, batch = 6, 10, 8
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=before + after, save_steps=before, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, per_device_train_batch_size=batch // 2, gradient_accumulation_steps=2,
        learning_rate=5e-3, warmup_steps=4, lr_scheduler_type="cosine", weight_decay=0.1, adam_beta2=0.95,
        max_grad_norm=0.5, train_sampling_strategy="sequential", include_num_input_tokens_seen="all",
    )  # fmt: skip
    model = make("llama")
    model.config.save_pretrained(tmp_path / "model")
    sections: dict[str, dict[str, Any]] = {
        "model": described(tmp_path / "model").model_dump(),
        "train": {"global_batch": batch, "sequence_length": 16},
    }
    samples = make_trainer(make_config(**sections)).feed.batches.global_batch(0, batch * (before + after))
    tokens, targets = (torch.from_numpy(samples.inputs[name]).long() for name in ("ids_SB", "targets_SB"))
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.cat([tokens, targets[-1:]]).T.contiguous()]
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert min(entry["grad_norm"] for entry in history) > 0.5, "every step is clipped"
    found = opened(tmp_path / f"checkpoint-{before}")
    assert found.progress is not None
    assert (found.progress.step, found.progress.samples) == (before, before * batch)
    for key, value in found.progress.keys.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    sections["optimizer"] |= {"zero": 1, "warmup_steps": 0}
    written = write_imported_checkpoint(found, Root.of(tmp_path / "ours"), max_shard_bytes=20_000).folder
    losses = run(make_config(**sections), after, 0, str(written.local()), None).losses
    assert losses == pytest.approx([entry["loss"] for entry in history[before:]], rel=0, abs=1e-5)
