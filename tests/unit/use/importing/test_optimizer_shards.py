"""The optimizer's state of neuronx-distributed and neuronx-nemo-megatron, as each of their layouts has it."""

from __future__ import annotations

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
from shardwise_use.importing.hugging_face import ForeignModel, ForeignProgress
from shardwise_use.importing.nemo import open_nemo
from shardwise_use.importing.neuronx import open_neuronx
from tests.hugging_face import VOCABULARY, make, save
from tests.unit.use.importing import nemo_shards, neuronx_shards

ARGUMENTS = {"train_batch_size": 8, "seq_len": 16, "max_steps": 20, "warmup_steps": 4, "min_lr": 1e-4}


def of_model(model: Any, power: int, scale: float = 0.5) -> dict[str, Tensor]:
    """Moments that tell of which weight they are."""
    named = {
        name.replace("lm_head", "embed_out") if model.config.model_type == "gpt_neox" else name: tensor
        for name, tensor in model.state_dict().items()
    }
    return {name: (scale * tensor.detach()) ** power for name, tensor in named.items()}


def read(found: ForeignModel, state: str) -> dict[str, Tensor]:
    tensors = found.weights if state == "model" else found.progress.states  # type: ignore[union-attr]
    return {
        tensor.name: torch.frombuffer(bytearray(b"".join(tensor.read())), dtype=torch.float32).view(tensor.shape)
        for tensor in tensors
        if tensor.state == state
    }


def assert_states(found: ForeignModel, wanted: Mapping[str, Mapping[str, Tensor]]) -> None:
    """To the bit, for every weight of the model."""
    for state, tensors in wanted.items():
        have = read(found, state)
        assert have.keys() == {weight.name for weight in found.weights}
        assert not [name for name, tensor in have.items() if not torch.equal(tensor, tensors[name])], state


LLAMA = {"vocab_size": 64, "num_key_value_heads": 4}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tp, pp, zero": ("llama", LLAMA, {"tp": 2, "pp": 2, "style": "fused", "double": True}),
    "padded rows, xser": ("llama", LLAMA, {"tp": 2, "dp": 5, "xser": True}),
    "copies of heads": (
        "llama",
        LLAMA | {"num_key_value_heads": 2},
        {"tp": 4, "style": "grouped-fused", "copies": 2, "adjacent": True, "xser": True},
    ),
    "no zero": ("llama", LLAMA | {"tie_word_embeddings": True}, {"tp": 2, "pp": 2, "dp": None, "words": ()}),
    "first releases": ("neox", {"vocab_size": 64}, {"tp": 2, "old": True, "shape_info": False, "dp": 3}),
    "other names": ("neox-tied", {"vocab_size": 64}, {"tp": 2, "words": ("bias",)}),
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
    assert found.progress is not None
    assert_states(found, {"exp_avg": moments[0], "exp_avg_sq": moments[1], "model": of_model(model, 1, 1.0)})
    assert (found.progress.step, found.progress.updates) == (7 if beside else 6, 6)
    keys = found.progress.keys
    wanted = {"optimizer.lr": 1e-3, "optimizer.weight_decay": 0.01, "optimizer.betas": [0.9, 0.95]}
    assert {key: keys[key] for key in wanted} == wanted
    exempt = {"no zero": [], "bert's script": ["*bias*"], "other names": ["*bias*"]}
    assert keys.get("optimizer.no_decay") == exempt.get(case)
    alone = open_neuronx(folder, tmp_path / "saved", weights_only=True)
    assert (alone.progress, alone.notes) == (None, [])


@pytest.mark.parametrize("case", ["gpt", "llama"])
@pytest.mark.parametrize(("tp", "pp", "options"), [(2, 2, {"xser": True}), (2, 1, {"dp": 3}), (1, 1, {"dp": None})])
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
    assert found.progress is not None
    assert_states(found, {"exp_avg": moments[0], "exp_avg_sq": moments[1], "model": of_model(model, 1, 1.0)})
    done = found.progress
    assert (done.step, done.updates, done.samples, done.tokens) == (100, 6, 3200, 3200 * 24)
    assert (done.keys["train.global_batch"], done.keys["train.steps"]) == (32, 200)
    assert done.keys["optimizer.schedule"] == "points"
    assert "optimizer.no_decay" not in done.keys


@pytest.mark.parametrize("saved", [True, False])
def test_masters_are_the_weights(tmp_path: Path, saved: bool) -> None:
    """avoid_saving_lower_precision_weights leaves out the files of the weights."""
    model = save("llama", tmp_path / "saved", **LLAMA)
    moments, masters = (of_model(model, 1), of_model(model, 2)), of_model(model, 1, 1.001)
    folder = neuronx_shards.write(
        model.bfloat16(), tmp_path / "step_6", tp=2, xser=True, moments=moments, masters=masters, double=True
    )
    for tensor in folder.glob("model/*.tensors/*") if not saved else ():
        tensor.unlink()
    found = open_neuronx(folder, tmp_path / "saved")
    assert_states(found, {"exp_avg": moments[0], "model": masters})
    assert found.progress.keys["precision.mode"] == "mixed"  # type: ignore[union-attr]
    full = folder.with_name("full")
    if saved:  # the converter's form, with masters of rank 0 alone
        neuronx_shards.write(model.float(), full, tp=2, moments=moments, masters=masters, dp=1)
        for path in (full / "optim").iterdir():
            path.rename(path.with_name(path.name.replace("dp_rank_00", "full")))
        assert_states(open_neuronx(full, tmp_path / "saved"), {"exp_avg": moments[0]})


# ---- rates


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


def opened(parts: Any, folder: Path, **options: Any) -> ForeignModel:
    model, saved, moments = parts
    return open_neuronx(neuronx_shards.write(model, folder, moments=moments, tp=2, **options), saved)


@pytest.mark.parametrize("step", [10, 120])
@pytest.mark.parametrize(("constant", "first"), [(0, 1 / 41), (20, 1 / 41), (20, 0.0)])
def test_cosine_goes_on(parts: Any, tmp_path: Path, step: int, constant: int, first: float) -> None:
    beside = {"user_content": {"total_steps": step, "cli_args": {**ARGUMENTS, "train_batch_size": 8}}}
    beside["scheduler"] = cosine_state(step, constant)
    done = opened(parts, tmp_path / "step", beside=beside, lr=cosine(step, constant, first=first)).progress
    assert done is not None
    assert (done.step, done.samples, done.tokens) == (step, step * 16, step * 16 * 16)
    assert (done.keys["train.global_batch"], done.keys["train.sequence_length"]) == (16, 16)
    keys = {key.partition(".")[2]: done.keys[key] for key in done.keys if key.startswith("optimizer.")}
    settings = OptimizerConfig.model_validate(keys)
    for later in range(step, 205):
        ours = learning_rate(settings, 200, later + 1)
        assert ours == pytest.approx(cosine(later, constant, first=first), rel=1e-9), later


def test_the_converters_files_do_not_tell_the_batch(parts: Any, tmp_path: Path) -> None:
    """They have what 4 data-parallel ranks had, as files of DP 1 that keep base_state."""
    beside = {"user_content": {"total_steps": 10, "cli_args": ARGUMENTS}, "scheduler": cosine_state(10, 20)}
    shards = opened(parts, tmp_path / "shards", beside=beside, dp=4).progress
    folder = tmp_path / "full"
    opened(parts, folder, beside=beside, dp=1)
    for path in (folder / "optim").iterdir():
        path.rename(path.with_name(path.name.replace("dp_rank_00", "full")))
    full = open_neuronx(folder, parts[1]).progress
    assert shards is not None
    assert full is not None
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
    del content["cli_args"]["train_batch_size"]  # type: ignore[attr-defined]
    beside = {"scheduler": scheduler.state_dict(), "user_content": content}
    rate = optimizer.param_groups[0]["lr"]
    found = opened(parts, tmp_path / "step", beside=beside, lr=rate)
    assert found.progress is not None
    assert found.progress.samples == 6 * 2 * 3 * 2
    settings = {key.partition(".")[2]: value for key, value in found.progress.keys.items() if "optimizer." in key}
    for later in range(6, 20):
        ours = learning_rate(OptimizerConfig.model_validate(settings), 20, later + 1)
        assert ours == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9), later
        optimizer.step()
        scheduler.step()
    # The older scripts do not save their arguments.
    untold = opened(parts, tmp_path / "untold", beside={"scheduler": scheduler.state_dict()}, lr=rate)
    assert "optimizer.schedule" not in untold.progress.keys  # type: ignore[union-attr]
    assert untold.notes[0].startswith("the schedule (its points are not saved) has no counterpart here: its next rate")
    assert untold.notes[1].startswith("clipping is not saved there: give optimizer.max_norm")


def test_lightnings_content_is_read(parts: Any, tmp_path: Path) -> None:
    """neuronx-distributed-training has the rates in its user content, and no arguments."""
    content = {"global_step": 90, "lr_schedulers": [cosine_state(90, 0)], "loops": {"reduce_fx": torch.mean}}
    done = opened(parts, tmp_path / "step", beside={"user_content": content}, lr=cosine(90, 0, first=0.0)).progress
    assert done is not None
    assert (done.step, done.samples, done.keys["train.steps"]) == (90, None, 200)
    assert done.keys["optimizer.schedule"] == "points"


# ---- what is refused


def test_incomplete_and_foreign_states_are_refused(parts: Any, tmp_path: Path) -> None:
    folder = tmp_path / "step"
    opened(parts, folder)
    file = folder / "optim/dp_rank_01_tp_rank_01_pp_rank_00.pt"
    content = file.read_bytes()
    held = torch.load(file, weights_only=False)

    def refused(message: str, change: Callable[[dict[str, Any]], object] | None = None) -> None:
        if change is not None:
            state = torch.load(file, weights_only=False)
            change(state)
            torch.save(state, file)
        with pytest.raises(ConfigError, match=message) as caught:
            open_neuronx(folder, parts[1])
        assert len(caught.value.problems) == 1
        assert "--weights-only" in caught.value.problems[0]
        file.write_bytes(content)

    def of_first(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
        return lambda state: change(state["base_state"][0])

    file.unlink()
    refused(r"step lacks the optimizer's state of DP 1 TP 1 PP 0: copy it, or")
    rows = tuple(held["base_state"][0]["exp_avg"].shape)
    shorter = rf"exp_avg of model.embed_tokens.weight \(\[{rows[0] - 1}, {rows[1]}\]\) must be \[{rows[0]}, "
    refused(shorter, of_first(lambda state: state.update(exp_avg=state["exp_avg"][1:])))
    refused(r"exp_avg of .* \(no numbers\) must be", of_first(lambda state: state.update(exp_avg="a")))
    lamb = r"must hold the state of AdamW \(exp_avg, exp_avg_sq and step\), and it holds exp_avg and exp_avg_sq, of"
    refused(lamb, lambda state: [each.pop("step") for each in state["base_state"].values()])
    refused(r"must be the state of an optimizer after a step, and is none", lambda state: state.pop("param_groups"))
    refused(
        r"step must have the state of AdamW for each weight on each rank: KeyError: 3",
        lambda state: state["base_state"].pop(3),
    )
    first = folder / "optim/dp_rank_00_tp_rank_00_pp_rank_00.pt"
    whole = first.read_bytes()

    def of_rank_0(message: str, change: Callable[[dict[str, Any]], object]) -> None:
        state = torch.load(first, weights_only=False)
        change(state)
        torch.save(state, first)
        refused(message)
        first.write_bytes(whole)

    groups = r"must hold the state of the 21 parameters of its rank, in one group or .* groups of 16 and 4: it is of"
    of_rank_0(groups, lambda state: state["param_groups"][1]["params"].pop())
    of_rank_0(
        r"must be of AdamW, .* correction of its bias",
        lambda state: state["param_groups"][0].update(correct_bias=False),
    )
    of_rank_0(r"as many updates each, and have \[5, 6\]", lambda state: state["base_state"][0].update(step=5))
    of_rank_0(r"for each weight on each rank: TypeError", lambda state: state.update(shape_info={0: 3}))
    of_rank_0(r"must tell of its training as its program does", lambda state: state["param_groups"][0].pop("betas"))
    shapes = {number: [1, 2, 3] for number in held["shape_info"]}
    of_rank_0(r"must be \[1, 2, 3\], of", lambda state: state.update(shape_info=shapes))


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"warmup_steps": -1}, "ZeroDivisionError"),
        ({"max_steps": math.inf}, "OverflowError"),
        ({"total_steps": math.inf}, "OverflowError"),
        ({"train_batch_size": math.inf}, "OverflowError"),
        ({"initial_lr": 0.0}, "ZeroDivisionError"),
    ],
)
def test_numbers_that_cannot_be_are_told(parts: Any, tmp_path: Path, told: dict[str, Any], reason: str) -> None:
    content = {"total_steps": told.get("total_steps", 10), "cli_args": ARGUMENTS | told}
    beside = {"user_content": content, "scheduler": cosine_state(10, 20) | told}
    rate = {"initial_lr": told["initial_lr"]} if "initial_lr" in told else {}
    with pytest.raises(ConfigError, match=rf"must tell of its training as its program does: {reason}") as caught:
        opened(parts, tmp_path / "step", beside=beside, **rate)
    assert len(caught.value.problems) == 1


def test_numbers_saved_as_text_are_not_repeated(parts: Any, tmp_path: Path) -> None:
    batches: list[dict[str, Any]] = [{"train_batch_size": "8"}, {"batch_size": "4", "grad_accum_usteps": 2}]
    for number, batch in enumerate(batches):
        content = {"total_steps": 10, "cli_args": {"seq_len": "16", "max_steps": 200, **batch}}
        done = opened(parts, tmp_path / str(number), beside={"user_content": content}).progress
        assert done is not None
        assert (done.samples, done.tokens) == (160, 2560)
        assert (done.keys["train.global_batch"], done.keys["train.sequence_length"]) == (16, 16)


def test_without_the_optimizers_folder_the_weights_alone_are_imported(parts: Any, tmp_path: Path) -> None:
    model, saved, _ = parts
    found = open_neuronx(neuronx_shards.write(model, tmp_path / "step"), saved)
    assert found.progress is None
    assert re.search(r"step has no state of AdamW: weights alone are imported", found.notes[0])


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


def test_weights_alone_have_no_progress() -> None:
    """Of every format, also of those that are opened with their progress."""
    given = argparse.Namespace(weights_only=True, samples=None, tokens=None)
    assert import_._completed(ForeignProgress(3, ()), given) is None
