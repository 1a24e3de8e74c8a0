"""Megatron-LM's torch_dist checkpoints become the model that they were, with the progress that they tell."""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import ConfigError
from shardwise_use.importing.imported_model import ImportedModel, ImportedProgress
from shardwise_use.importing.megatron import open_megatron
from shardwise_use.importing.megatron_dist import _points
from tests.command_line import CommandLine
from tests.hugging_face import VOCABULARY, save
from tests.unit.use.importing import megatron_shards
from tests.unit.use.importing.checks import assert_equal, assert_same_model, changed, problems, states_of
from tests.unit.use.importing.megatron_shards import Source, gpt_args, llama_args, write_dist

EXPERTS: dict[str, Any] = {
    "num_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [0.01, 0.02], "moe_z_loss_coeff": 0.03, "moe_input_jitter_eps": 0.1,
    "rotary_base": 1000000,
}  # fmt: skip


def source(folder: Path, case: str, layers: int = 2, **args: Any) -> tuple[Any, Source]:
    count = {"n_layer" if case.startswith("gpt") else "num_hidden_layers": layers}
    model = save(case, folder / "saved", **count)
    args = (EXPERTS if case == "mixtral" else {}) | args
    return model, Source(model, (gpt_args if case.startswith("gpt") else llama_args)(model, **args))


def dist(folder: Path, case: str, *form: str, layers: int = 2, **args: Any) -> Path:
    """A checkpoint in the `torch_dist` format, of a model with these arguments."""
    return write_dist(source(folder, case, layers, **args)[1], folder / "megatron", *form)


def progress_of(opened: ImportedModel) -> ImportedProgress:
    assert opened.progress is not None, opened.notes
    return opened.progress


def assert_moments(opened: ImportedModel) -> None:
    assert progress_of(opened).updates == 98
    found = states_of(opened)
    assert found.keys() == {"model", "exp_avg", "exp_avg_sq"}
    for state in ("exp_avg", "exp_avg_sq"):
        moment = megatron_shards.MOMENTS[state]
        assert_equal(found[state], {name: moment(weight) for name, weight in found["model"].items()})


@pytest.mark.parametrize(
    ("case", "style", "numbered"),
    [("gpt", "core", True), ("gpt-untied", "te", False), ("llama-tied", "core", False), ("mixtral", "te", True)],
)
def test_tensors_by_name(tmp_path: Path, case: str, style: str, numbered: bool) -> None:
    model, made = source(tmp_path, case)
    opened = open_megatron(write_dist(made, tmp_path / "megatron", style=style, numbered=numbered), VOCABULARY)
    assert_moments(opened)
    assert_same_model(replace(opened, progress=None), model, tmp_path)


@pytest.mark.parametrize(
    ("case", "style", "tp", "pp", "virtual", "sizes"),
    [
        ("llama", "te", 2, 1, 1, (3, 7)),
        ("gpt", "te", 2, 2, 1, (1,)),
        ("llama-tied", "core", 2, 2, 2, (2,)),
        ("mixtral", "core", 2, 2, 1, ()),
    ],
)
def test_buffers_of_the_distributed_optimizer(
    tmp_path: Path, case: str, style: str, tp: int, pp: int, virtual: int, sizes: tuple[int, ...]
) -> None:
    _, made = source(tmp_path, case, layers=4)
    folder = write_dist(made, tmp_path / "megatron", "buffers", style=style, tp=tp, pp=pp, virtual=virtual, sizes=sizes)
    opened = open_megatron(folder, VOCABULARY)
    assert_moments(opened)
    assert opened.layout == {"tensor": tp, "pipeline": pp}


def test_the_rates_clipping_and_counts_are_carried_over(tmp_path: Path) -> None:
    opened = open_megatron(dist(tmp_path, "llama"))
    progress = progress_of(opened)
    assert (progress.step, progress.samples, progress.tokens) == (100, 800, 800 * 16)
    assert progress.keys == {
        "train.steps": 200, "train.global_batch": 8, "train.sequence_length": 16, "optimizer.lr": 1e-3,
        "optimizer.weight_decay": 0.1, "optimizer.betas": [0.9, 0.95], "optimizer.eps": 1e-8, "optimizer.max_norm": 1.0,
        "optimizer.schedule": "points",
        "optimizer.points": [
            {"at": 1, "factor": 1.0, "shape": "linear"}, {"at": 201, "factor": 0.0, "shape": "linear"},
        ],
    }  # fmt: skip
    # The padding of the vocabulary is counted by Megatron's loss.
    assert any("rows of padding" in note for note in opened.notes)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"lr_decay_style": "inverse-square-root"}, "the schedule (inverse-square-root) has no counterpart"),
        ({"rampup_batch_size": [2, 2, 100]}, "its next rate is 0.0005; set optimizer.schedule yourself"),
        ({"start_weight_decay": 0.0}, "weight decay changes there"),
        ({"optimizer": "sgd"}, "the weights alone are imported, without step and optimizer: its optimizer (sgd"),
    ],
)
def test_what_has_no_counterpart_is_told(tmp_path: Path, changes: dict[str, Any], note: str) -> None:
    _, made = source(tmp_path, "llama", **changes)
    scheduler = {"max_lr": 1e-3, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 1600}
    scheduler["lr_decay_style"] = {**megatron_shards.TRAINING, **changes}["lr_decay_style"]
    opened = open_megatron(write_dist(made, tmp_path / "megatron", common={"opt_param_scheduler": scheduler}))
    assert any(note in each for each in opened.notes), opened.notes


def test_a_decay_that_begins_in_its_midst_has_no_points() -> None:
    """Megatron Core 0.16.1: with 16 of 20 steps of warmup and a decay of 5, the rate falls from 1 to 0.64 at once."""
    scheduler = {"max_lr": 1e-3, "min_lr": 1e-4, "lr_warmup_steps": 64, "lr_decay_steps": 80, "lr_decay_style": "WSD"}
    keys = {"lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": 4}
    of = {decay: _points(scheduler, keys | {"lr_wsd_decay_iters": decay}, 4) for decay in (4, 5)}
    assert [point["at"] for point in of[4]] == [1, 17, 21]
    assert of[5] == []


def test_buffers_in_another_order_are_left_out_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which parameter is where is not written: masters that are not the weights show that it is another order."""
    monkeypatch.setitem(megatron_shards.ORDERS, "core", ("post", "proj", "qkv", "input", "fc1", "fc2"))
    opened = open_megatron(dist(tmp_path, "llama", "buffers"))
    assert opened.progress is None
    assert "--dist-ckpt-optim-fully-reshardable" in opened.notes[-1]


@pytest.mark.parametrize(
    ("kinds", "rates", "total"),
    [
        (["aux_loss", "global_aux_loss"], [0.01, 0.02], 0.03),
        ("aux_loss", [0.01], 0.01),
        (["none"], [0.01], None),
        (["aux_loss", "seq_aux_loss"], [0.01], "moe_aux_loss_coeff ([0.01]) must have one value for each of"),
    ],
)
def test_balance_losses_add_where_they_mean_one_key(kinds: Any, rates: Any, total: Any, tmp_path: Path) -> None:
    args = {"moe_router_load_balancing_type": kinds, "moe_aux_loss_coeff": rates}
    folder = dist(tmp_path, "mixtral", layers=1, **args)
    if isinstance(total, str):
        with pytest.raises(ConfigError, match=re.escape(total)):
            open_megatron(folder)
        return
    opened = open_megatron(folder)
    assert progress_of(opened).keys.get("optimizer.router_batch_loss") == total
    assert any("of each micro-batch there" in note for note in opened.notes) == (total is not None)


def test_experts_and_the_balance_of_their_loads(tmp_path: Path) -> None:
    opened = open_megatron(dist(tmp_path, "mixtral"))
    keys = {"router_batch_loss": 0.01, "router_sequence_loss": 0.02, "router_z_loss": 0.03}
    assert {key: progress_of(opened).keys.get(f"optimizer.{key}") for key in keys} == keys
    assert {"aux_loss is of each micro-batch there, and of the global batch here",
            "moe_input_jitter_eps (0.1) has no counterpart here"} <= {*opened.notes}  # fmt: skip
    model, made = source(tmp_path / "torch", "mixtral")
    opened = open_megatron(megatron_shards.write(made, tmp_path / "torch/megatron", "core", tp=2), VOCABULARY)
    assert_same_model(opened, model, tmp_path / "torch")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"moe_router_pre_softmax": True}, "its argument moe_router_pre_softmax (True) must be False for a Mixtral"),
        ({"moe_router_enable_expert_bias": True}, "its argument moe_router_enable_expert_bias (True) must be unset"),
        ({"add_bias_linear": True}, "its argument biases (True) must be False for a model with experts"),
    ],
)
def test_routers_that_no_family_here_has(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    (problem,) = problems(open_megatron, dist(tmp_path, "mixtral", **changes))
    assert text in problem


def test_the_command_writes_a_run_that_goes_on(tmp_path: Path, cli: CommandLine) -> None:
    _, made = source(tmp_path, "llama")
    folder = write_dist(made, tmp_path / "megatron", "buffers", tp=2)
    out = cli("checkpoint", "import", folder, tmp_path / "run", "--from", "megatron").out
    assert "from TP 2 × PP 1" in out
    assert "after step 100, 800 samples and 12,800 tokens, with the optimizer's exp_avg and exp_avg_sq" in out
    assert (tmp_path / "run" / "checkpoints" / "step-00000100").is_dir()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dist(tmp_path_factory.mktemp("written"), "llama")


def _change_common(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: changed(folder / "common.pt", change)


def _described(**fields: Any) -> Callable[[Path], object]:
    def apply(folder: Path) -> object:
        path = folder / "metadata.json"
        return path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return apply


def _plan_of_code(folder: Path) -> None:
    listed = pickle.loads((folder / ".metadata").read_bytes())
    listed.all_local_plans = [Path.cwd]
    (folder / ".metadata").write_bytes(pickle.dumps(listed))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_described(sharded_backend="zarr"), "its format (zarr, version 1) must be torch_dist, version 1"),
        (lambda folder: (folder / "metadata.json").unlink(), "as with fsdp_dtensor and torch_dcp: save it again"),
        (lambda folder: (folder / "common.pt").unlink(), "must have a common.pt beside its tensors"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "must have the files of all ranks"),
        (_change_common(lambda held: held.pop("args")), "AutoBridge.export_ckpt makes a Hugging Face folder"),
        (_change_common(lambda held: held.update(checkpoint_version=2.0)), "its checkpoint_version (2.0) must be 3.0"),
        (_change_common(lambda held: held.update(extra=Path.cwd)), "plain values its pickle names"),
        (_change_common(lambda held: setattr(held["args"], "multi_latent_attention", True)), "must be unset: it makes"),
        (_change_common(lambda held: setattr(held["args"], "swiglu", False)), "no other models are imported"),
        (_plan_of_code, "by which opening it could run code; none was run"),
    ],
)  # fmt: skip
def test_what_a_folder_must_have(
    damage: Callable[[Path], object], text: str, written: Path, tmp_path: Path, cli: CommandLine
) -> None:
    folder = tmp_path / "megatron"
    shutil.copytree(written, folder)
    damage(folder / "iter_0000100")
    (problem,) = problems(open_megatron, folder)
    assert text in problem
    told = cli.refused("checkpoint", "import", folder, tmp_path / "run", "--from", "megatron")
    assert len(told.strip().splitlines()) == 1
