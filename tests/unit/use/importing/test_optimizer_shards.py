"""The optimizer's state of neuronx-distributed and neuronx-nemo-megatron, as each of their layouts has it."""

import argparse
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.base.errors import ConfigError
from shardwise.config import OptimizerConfig
from shardwise.optim.learning_rate import learning_rate
from shardwise_use.cli import import_
from shardwise_use.importing.imported_model import ImportedModel, ImportedProgress
from shardwise_use.importing.nemo import open_nemo
from shardwise_use.importing.neuronx import open_neuronx
from tests.hugging_face import VOCABULARY, make, save
from tests.unit.use.importing import nemo_shards, neuronx_shards
from tests.unit.use.importing.checks import assert_equal, changed, problems, states_of

ARGUMENTS = {"train_batch_size": 8, "seq_len": 16, "max_steps": 20, "warmup_steps": 4, "min_lr": 1e-4}


def of_model(model: Any, power: int, scale: float = 0.5) -> dict[str, Tensor]:
    """Moments that tell of which weight they are."""
    named = {
        name.replace("lm_head", "embed_out") if model.config.model_type == "gpt_neox" else name: tensor
        for name, tensor in model.state_dict().items()
    }
    return {name: (scale * tensor.detach()) ** power for name, tensor in named.items()}


def assert_states(found: ImportedModel, **wanted: Mapping[str, Tensor]) -> None:
    """To the bit, for every weight of the model."""
    states = states_of(found)
    for state, tensors in wanted.items():
        assert_equal(states[state], {name: tensors[name] for name in states["model"]})


LLAMA = {"vocab_size": 64, "num_key_value_heads": 4}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tp, pp, zero": ("llama", LLAMA, {"tp": 2, "pp": 2, "style": "fused", "double": True}),
    "padded rows, xser": ("llama", LLAMA, {"tp": 2, "dp": 5, "xser": True}),
    "no zero": ("llama", LLAMA | {"tie_word_embeddings": True}, {"tp": 2, "pp": 2, "dp": None, "words": ()}),
    "first releases": ("neox", {"vocab_size": 64}, {"tp": 2, "old": True, "shape_info": False, "dp": 3}),
    "bert's script": ("bert", {}, {"tp": 2, "old": True, "dp": None, "vocabulary_cut": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_moments_of_neuronx_distributed(tmp_path: Path, case: str) -> None:
    kind, fields, options = CASES[case]
    model = save(kind, tmp_path / "saved", **fields)
    moments = (of_model(model, 1), of_model(model, 2))
    beside = {"global_step": 7, "scheduler": {"last_epoch": 7}} if options.get("old") else {}
    folder = neuronx_shards.write(model, tmp_path / "step_6", moments=moments, beside=beside, **options)
    found = open_neuronx(folder, tmp_path / "saved")
    assert_states(found, exp_avg=moments[0], exp_avg_sq=moments[1], model=of_model(model, 1, 1.0))
    assert (found.progress.step, found.progress.updates) == (7 if beside else 6, 6)
    keys = found.progress.keys
    wanted = {"optimizer.lr": 1e-3, "optimizer.weight_decay": 0.01, "optimizer.betas": [0.9, 0.95]}
    assert {key: keys[key] for key in wanted} == wanted
    exempt = {"no zero": [], "bert's script": ["*bias*"]}
    assert keys.get("optimizer.no_decay") == exempt.get(case)
    alone = open_neuronx(folder, tmp_path / "saved", weights_only=True)
    assert (alone.progress, alone.notes) == (None, [])


@pytest.mark.parametrize(
    ("case", "tp", "pp", "options"),
    [("gpt", 2, 2, {"xser": True}), ("llama", 2, 1, {"dp": 3}), ("gpt", 1, 1, {"dp": None})],
)
def test_moments_of_nemo(tmp_path: Path, case: str, tp: int, pp: int, options: dict[str, Any]) -> None:
    """GPT-2's embedding is tied and on both ends of the pipeline; Llama's queries are a tensor of their own."""
    model = save(case, tmp_path / "saved")
    config = nemo_shards.gpt_config(model) if case == "gpt" else nemo_shards.llama_config(model)
    config |= {"global_batch_size": 32, "data": {"seq_length": 24}}
    moments = (of_model(model, 1), of_model(model, 2))
    sources = []
    for values in moments:
        copy = make(case)
        copy.load_state_dict(values)
        sources.append(nemo_shards.Source(copy, config))
    last = {"name": "megatron_gpt--step=100-consumed_samples=3200.0-last.ckpt"} if pp == 2 else {}
    folder = nemo_shards.write(
        nemo_shards.Source(model, config), tmp_path / "nemo", tp=tp, pp=pp, moments=(sources[0], sources[1]),
        beside={"lr_schedulers": [cosine_state(100, constant=0)]}, lr=cosine(100, 0, first=1 / 41), **last, **options,
    )  # fmt: skip
    found = open_nemo(folder, VOCABULARY)
    assert_states(found, exp_avg=moments[0], exp_avg_sq=moments[1], model=of_model(model, 1, 1.0))
    done = found.progress
    assert (done.step, done.updates, done.samples, done.tokens) == (100, 6, 3200, 3200 * 24)
    assert (done.keys["train.global_batch"], done.keys["train.steps"]) == (32, 200)
    assert done.keys["optimizer.schedule"] == "points"
    assert "optimizer.no_decay" not in done.keys


def as_converted(folder: Path) -> None:
    """As the converter names files of DP 1."""
    for path in (folder / "optim").iterdir():
        path.rename(path.with_name(path.name.replace("dp_rank_00", "full")))


def test_masters_are_the_weights(tmp_path: Path) -> None:
    """avoid_saving_lower_precision_weights leaves out the files of the weights."""
    model = save("llama", tmp_path / "saved", **LLAMA)
    moments, masters = (of_model(model, 1), of_model(model, 2)), of_model(model, 1, 1.001)
    folder = neuronx_shards.write(
        model.bfloat16(), tmp_path / "step_6", tp=2, xser=True, moments=moments, masters=masters, double=True
    )
    for has_weights in (True, False):
        for tensor in folder.glob("model/*.tensors/*") if not has_weights else ():
            tensor.unlink()
        found = open_neuronx(folder, tmp_path / "saved")
        assert_states(found, exp_avg=moments[0], model=masters)
        assert found.progress.keys["precision.mode"] == "mixed"
    # The converter's form, with masters of rank 0 alone.
    full = neuronx_shards.write(model.float(), tmp_path / "full", tp=2, moments=moments, masters=masters, dp=1)
    as_converted(full)
    assert_states(open_neuronx(full, tmp_path / "saved"), exp_avg=moments[0])


def cosine_state(step: int, constant: int) -> dict[str, Any]:
    """The state of CosineAnnealing, of 200 steps."""
    return {
        "max_steps": 200, "warmup_steps": 40, "constant_steps": constant, "decay_steps": 160 - constant, "min_lr": 1e-4,
        "base_lrs": [1e-3, 1e-3], "last_epoch": step, "_step_count": step + 1, "_last_lr": [0.0, 0.0],
    }  # fmt: skip


def cosine(step: int, constant: int, *, first: float) -> float:
    """Its rate after so many steps: nemo/core/optim/lr_scheduler.py, examples/training/llama/lr.py."""
    if step <= 40:
        return 1e-3 * (first + (1 - first) * step / 40)
    if step > 200 - constant:
        return 1e-4
    return 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * (step - 40) / (160 - constant)))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("parts")
    model = save("llama", folder, **LLAMA)
    return model, folder, (of_model(model, 1), of_model(model, 2))


def settings_of(done: ImportedProgress) -> OptimizerConfig:
    keys = {key.removeprefix("optimizer."): value for key, value in done.keys.items() if key.startswith("optimizer.")}
    return OptimizerConfig.model_validate(keys)


def opened(parts: Any, folder: Path, **options: Any) -> ImportedModel:
    model, saved, moments = parts
    return open_neuronx(neuronx_shards.write(model, folder, moments=moments, tp=2, **options), saved)


@pytest.mark.parametrize(("step", "constant", "first"), [(10, 0, 1 / 41), (120, 20, 1 / 41), (10, 20, 0.0)])
def test_cosine_goes_on(parts: Any, tmp_path: Path, step: int, constant: int, first: float) -> None:
    beside = {"user_content": {"total_steps": step, "cli_args": {**ARGUMENTS, "train_batch_size": 8}}}
    beside["scheduler"] = cosine_state(step, constant)
    done = opened(parts, tmp_path / "step", beside=beside, lr=cosine(step, constant, first=first)).progress
    assert (done.step, done.samples, done.tokens) == (step, step * 16, step * 16 * 16)
    assert (done.keys["train.global_batch"], done.keys["train.sequence_length"]) == (16, 16)
    settings = settings_of(done)
    for later in range(step, 205):
        ours = learning_rate(settings, 200, later + 1)
        assert ours == pytest.approx(cosine(later, constant, first=first), rel=1e-9), later


def test_the_converters_files_do_not_tell_the_batch(parts: Any, tmp_path: Path) -> None:
    """They have what 4 data-parallel ranks had, as files of DP 1 that keep base_state."""
    beside = {"user_content": {"total_steps": 10, "cli_args": ARGUMENTS}, "scheduler": cosine_state(10, 20)}
    shards = opened(parts, tmp_path / "shards", beside=beside, dp=4).progress
    folder = tmp_path / "full"
    opened(parts, folder, beside=beside, dp=1)
    as_converted(folder)
    full = open_neuronx(folder, parts[1]).progress
    assert (shards.keys["train.global_batch"], shards.samples, shards.tokens) == (32, 320, 5120)
    assert (full.keys.get("train.global_batch"), full.samples, full.tokens) == (None, None, None)
    assert full.keys["train.sequence_length"] == 16
    arguments = argparse.Namespace(weights_only=False, samples=None, tokens=None)
    with pytest.raises(ConfigError, match=r"does not say how many samples its 10 steps took: give --samples N"):
        import_._completed(full, arguments)


def test_linear_goes_on(parts: Any, tmp_path: Path) -> None:
    import transformers

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=1e-3)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 4, 20)
    for _ in range(6):
        optimizer.step()
        scheduler.step()
    content = {"global_step": 6, "epoch": 0, "cli_args": {"batch_size": 2, "grad_accum_usteps": 3, **ARGUMENTS}}
    del content["cli_args"]["train_batch_size"]
    beside = {"scheduler": scheduler.state_dict(), "user_content": content}
    rate = optimizer.param_groups[0]["lr"]
    found = opened(parts, tmp_path / "step", beside=beside, lr=rate)
    assert found.progress.samples == 6 * 2 * 3 * 2
    settings = settings_of(found.progress)
    for later in range(6, 20):
        ours = learning_rate(settings, 20, later + 1)
        assert ours == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9), later
        optimizer.step()
        scheduler.step()
    # The older scripts do not save their arguments.
    untold = opened(parts, tmp_path / "untold", beside={"scheduler": scheduler.state_dict()}, lr=rate)
    assert "optimizer.schedule" not in untold.progress.keys
    assert untold.notes[0].startswith("the schedule (its points are not saved) has no counterpart here: its next rate")
    assert untold.notes[1].startswith("clipping is not saved there: give optimizer.max_norm")


Change = Callable[[dict[str, Any]], object]


def first(change: Change) -> Change:
    return lambda saved: change(saved["base_state"][0])


def of_other_shape(saved: dict[str, Any]) -> None:
    saved["shape_info"] = {number: [1, 2, 3] for number in saved["shape_info"]}


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (1, first(lambda state: state.update(exp_avg=state["exp_avg"][1:])),
         r"exp_avg of model.embed_tokens.weight \(\[15, 32\]\) must be \[16, "),
        (1, lambda saved: [each.pop("step") for each in saved["base_state"].values()],
         r"must hold the state of AdamW \(exp_avg, exp_avg_sq and step\), and it holds exp_avg and exp_avg_sq, of"),
        (1, lambda saved: saved["base_state"].pop(3),
         r"step must have the state of AdamW for each weight on each rank: KeyError: 3"),
        (0, lambda saved: saved["param_groups"][1]["params"].pop(),
         r"must hold the state of the 21 parameters of its rank, in one group or .* groups of 16 and 4: it is of"),
        (0, lambda saved: saved["param_groups"][0].update(correct_bias=False),
         r"must be of AdamW, .* correction of its bias"),
        (0, first(lambda state: state.update(step=5)), r"as many updates each, and have \[5, 6\]"),
        (0, lambda saved: saved["param_groups"][0].pop("betas"), r"must tell of its training as its program does"),
        (0, of_other_shape, r"must be \[1, 2, 3\], of"),
    ],
)  # fmt: skip
def test_foreign_states_are_refused(parts: Any, tmp_path: Path, rank: int, change: Change, message: str) -> None:
    opened(parts, tmp_path / "step")
    changed(tmp_path / f"step/optim/dp_rank_0{rank}_tp_rank_0{rank}_pp_rank_00.pt", change)
    (problem,) = problems(open_neuronx, tmp_path / "step", parts[1])
    assert re.search(message, problem)
    assert "--weights-only" in problem


def test_a_rank_of_nemo_that_is_missing_is_told(tmp_path: Path) -> None:
    model = save("gpt", tmp_path / "saved")
    source = nemo_shards.Source(model, nemo_shards.gpt_config(model))
    folder = nemo_shards.write(source, tmp_path / "nemo", tp=2, pp=2, moments=(source, source))
    (file,) = (folder / "tp_rank_01_pp_rank_001/optim/dp_rank_000").iterdir()
    torch.save([], file)
    with pytest.raises(ConfigError, match=r"nemo lacks the optimizer's state of DP 0 TP 1 PP 1: copy it, or import"):
        open_nemo(folder, VOCABULARY)
    for rank in folder.glob("*/optim"):
        shutil.rmtree(rank)
    found = open_nemo(folder, VOCABULARY)
    assert found.progress is None
    assert found.notes[0].endswith("nemo has no state of AdamW: weights alone are imported")
