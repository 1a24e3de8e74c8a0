"""The Python API: checkpoints of a loop of one's own, and what is refused of the arguments."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.base.errors import ConfigError, RunError
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.storage.root import Root
from shardwise.models.build import build_model

Parts = tuple[nn.Sequential, shardwise.ZeroRedundancyOptimizer]


def parts(seed: int = 0, optimizer_class: Any = torch.optim.AdamW, **options: Any) -> Parts:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    return model, shardwise.ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **{"lr": 0.1} | options)


def step(model: nn.Module, optimizer: shardwise.ZeroRedundancyOptimizer) -> float:
    loss = model(torch.ones(3, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def steps(trained: Parts, count: int = 3) -> list[float]:
    return [step(*trained) for _ in range(count)]


def assert_goes_on(folder: Path, made: Callable[[], Parts]) -> None:
    """Three steps behind a checkpoint of three have the losses of six without one."""
    saved, loaded = made(), made()
    steps(saved)
    shardwise.save_checkpoint(folder, *saved, step=3)
    assert shardwise.load_checkpoint(folder, *loaded) == 3
    assert loaded[1].steps == 3
    assert steps(loaded) == steps(saved)


def test_a_loop_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    trained = parts()
    steps(trained)
    saved = shardwise.save_checkpoint(tmp_path / "saved", *trained, step=3)
    assert Path(saved).name == "step-00000003"
    wanted = steps(trained)
    other = parts(1)
    assert shardwise.load_checkpoint(tmp_path / "saved", *other) == 3
    assert steps(other) == wanted
    weights, _ = parts(2)
    assert shardwise.load_checkpoint(saved, weights) == 3
    assert weights(torch.ones(3, 4)).square().mean().item() == wanted[0]
    told = r"must have a config\.json: its loop saved none; save it by .*save_checkpoint with config="
    with pytest.raises(ConfigError, match=told):
        shardwise.export_checkpoint(saved, tmp_path / "exported")


def test_another_model_is_refused_with_every_mismatch(tmp_path: Path) -> None:
    saved = shardwise.save_checkpoint(tmp_path, *parts(), step=1)
    other = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 1))
    with pytest.raises(ConfigError, match=r"folder \(.*0\.weight") as caught:
        shardwise.load_checkpoint(saved, other)
    assert "1.weight" in str(caught.value)
    with pytest.raises(ConfigError, match="there is nothing of that name"):
        shardwise.load_checkpoint(tmp_path / "nothing", other)


def test_a_model_with_persistent_buffers_is_refused(tmp_path: Path) -> None:
    """They are not in a checkpoint, and would silently be those of a new model."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    optimizer = shardwise.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    held = r"1\.running_mean, 1\.running_var and 1\.num_batches_tracked"
    named = rf"the model must have no persistent buffers, but has {held}: .*persistent=False"
    with pytest.raises(ConfigError, match=named):
        shardwise.save_checkpoint(tmp_path / "saved", model, optimizer, step=1)
    assert not (tmp_path / "saved").exists()
    for name, buffer in list(model[1].named_buffers()):
        model[1].register_buffer(name, buffer, persistent=False)
    shardwise.save_checkpoint(tmp_path / "saved", model, optimizer, step=1)
    other = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    with pytest.raises(ConfigError, match=named):
        shardwise.load_checkpoint(tmp_path / "saved", other)


def test_an_optimizer_of_another_kind_or_model_is_refused(tmp_path: Path) -> None:
    model, optimizer = parts(0)
    saved = shardwise.save_checkpoint(tmp_path / "saved", model, optimizer, step=1)
    head = shardwise.ZeroRedundancyOptimizer(model[1].parameters(), torch.optim.AdamW, lr=0.1)
    wrap = r"must be a shardwise\.ZeroRedundancyOptimizer, which wraps a class"
    hold = "the optimizer must hold the model's parameters: it"
    wrong: list[tuple[Any, str]] = [
        (torch.optim.AdamW(model.parameters()), rf"optimizer \(AdamW\) {wrap}"),
        (parts(0)[1], f"{hold} lacks 0.weight, .* and it holds 4 parameters that the model lacks"),
        (head, f"{hold} lacks 0.weight and 0.bias"),
    ]
    for given, text in wrong:
        with pytest.raises(ConfigError, match=text):
            shardwise.load_checkpoint(saved, model, given)
    for given, text in [*wrong, (None, rf"optimizer \(None\) {wrap}")]:
        with pytest.raises(ConfigError, match=text):
            shardwise.save_checkpoint(tmp_path / "other", model, given, step=1)
    with pytest.raises(ConfigError, match=f"{hold} holds 2 parameters that the model lacks"):
        shardwise.load_checkpoint(saved, model[0], optimizer)
    assert not (tmp_path / "other").exists()


def test_a_save_that_fails_names_arguments_and_no_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as small:
        small.setattr("shardwise.checkpoint.format.manifest.MAX_MANIFEST_VALUES", 10)
        told = "could not be read again: of its manifest it must have at most 10 values, and"
        with pytest.raises(RunError, match=told):
            shardwise.save_checkpoint(tmp_path, *parts(), step=1)
    assert not (tmp_path / "step-00000001").exists()
    with monkeypatch.context() as full:
        full.setattr(Root, "free_bytes", lambda _: 0)
        with pytest.raises(RunError, match=r"step 1 could not be saved: .* are free: make room \(`shardwise explain "):
            shardwise.save_checkpoint(tmp_path, *parts(), step=1)
    monkeypatch.setattr("shardwise.checkpoint.save._SEEN_WITHIN_SECONDS", 0.0)  # as if another machine had written
    told = r"which all machines share, or to a URL: give it as folder \(`shardwise explain "
    with pytest.raises(RunError, match=told):
        shardwise.save_checkpoint(tmp_path, *parts(), step=1)


KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "lamb": (shardwise.LAMB, {}),
}
SAME_STATE = {("lamb", "adamw"), ("adamw", "lamb"), *((kind, kind) for kind in KINDS)}


@pytest.mark.parametrize("saved", ["adamw", "momentum"])
def test_the_state_of_another_optimizer_is_refused(saved: str, tmp_path: Path) -> None:
    """Else it would be dropped, or be missing in the next step."""

    def made(kind: str) -> Parts:
        optimizer_class, options = KINDS[kind]
        return parts(0, optimizer_class, **options)

    trained = made(saved)
    step(*trained)
    shardwise.save_checkpoint(tmp_path, *trained, step=1)
    for kind in KINDS:
        other, its_optimizer = made(kind)
        before = [p.detach().clone() for p in other.parameters()]
        if (saved, kind) in SAME_STATE:
            shardwise.load_checkpoint(tmp_path, other, its_optimizer)
            step(other, its_optimizer)
            continue
        with pytest.raises(ConfigError, match=r"^the optimizer \(\w+\), which keeps .*, must keep what .* holds \("):
            shardwise.load_checkpoint(tmp_path, other, its_optimizer)
        assert all(map(torch.equal, before, other.parameters()))


def named(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_parameter(name, nn.Parameter(torch.zeros(3).to(dtype), requires_grad=False))
    return model


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (shardwise.RMSNorm(4, name="norm", group=shardwise.Group()) for _ in range(2))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (named("a\nb"), r"^'a\\nb': a parameter's name must have printable characters only and not be __metadata__"),
        (nn.ModuleDict({"a\u202eb": nn.Linear(2, 2)}), r"'a\\u202eb\.bias': a parameter's name must have printable"),
        (Twice(), r"^several parameters have the name norm\.weight: give their layers other names$"),
        (named("whole", torch.int8), r"^the dtype of whole \(int8\) must be float64, float32, float16 or bfloat16"),
    ],
    ids=["control", "invisible", "twice", "dtype"],
)
def test_fault_22_what_could_not_be_read_again_is_not_saved(model: nn.Module, text: str, tmp_path: Path) -> None:
    optimizer = shardwise.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD)
    with pytest.raises(ConfigError, match=text):
        shardwise.save_checkpoint(tmp_path / "saved", model, optimizer, step=1)
    assert not (tmp_path / "saved").exists()


def test_fault_22_what_classes_keep_in_their_state_and_beside_it(tmp_path: Path) -> None:
    """NAdam and ASGD keep numbers beside the count of steps; SGD keeps nothing at all."""
    for name, options in {"NAdam": {"lr": 2e-3}, "ASGD": {"t0": 2.0}, "SGD": {}}.items():
        assert_goes_on(tmp_path / name, partial(parts, 0, getattr(torch.optim, name), **options))
    model, optimizer = parts(0, Counting, momentum=0.9)
    step(model, optimizer)
    shardwise.save_checkpoint(tmp_path, model, optimizer, step=1)
    shardwise.load_checkpoint(tmp_path, model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.inner.count == 1  # type: ignore[attr-defined]
    trained = parts(0, Remembering, momentum=0.9)
    step(*trained)
    told = (
        r"the state of Remembering must be tensors of the parameters' shapes and numbers, which a checkpoint holds, "
        r"but has history \(list\) and recent \(shape \[3\]\): keep it elsewhere"
    )
    with pytest.raises(ConfigError, match=told):
        shardwise.save_checkpoint(tmp_path / "saved", *trained, step=1)
    assert not (tmp_path / "saved").exists()


class Patient(torch.optim.SGD):
    """Keeps numbers of other kinds: a whole number, and one that is not finite."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"], state["best"] = state.get("count", 0) + 1, float("inf")
                state["mean"] = state.get("mean", torch.zeros(1, dtype=torch.float64)) + 0.1


def test_fault_22_numbers_are_those_of_each_parameter_group(tmp_path: Path) -> None:
    """A group that was added later has done fewer steps, and a number keeps its type."""

    def made(*, adds: bool = True) -> Parts:
        model, _ = parts()
        taken = model[0] if adds else model
        optimizer = shardwise.ZeroRedundancyOptimizer(taken.parameters(), Patient, lr=0.1, momentum=0.9)
        return model, optimizer

    def add(model: nn.Sequential, optimizer: shardwise.ZeroRedundancyOptimizer) -> None:
        optimizer.add_param_group({"params": list(model[1].parameters())})

    trained, other = made(), made()
    step(*trained)
    add(*trained)
    step(*trained)
    saved = shardwise.save_checkpoint(tmp_path, *trained, step=2)
    numbers = Manifest.read(Root.of(saved)).optimizer["numbers"]  # type: ignore[index]
    assert numbers["best"] == "inf"
    assert numbers["count"] == {"0.weight": 2.0, "0.bias": 2.0, "1.weight": 1.0, "1.bias": 1.0}
    add(*other)
    shardwise.load_checkpoint(tmp_path, *other)
    first, late = (other[1].inner.state[bucket.master] for bucket in other[1].buckets)
    assert (first["count"], first["best"], late["count"]) == (2, float("inf"), 1)
    assert type(first["count"]) is int
    assert torch.equal(first["mean"], torch.full((1,), 0.2, dtype=torch.float64))
    told = "must be in parameter groups of their own, as they were when they were saved"
    with pytest.raises(ConfigError, match=told):
        shardwise.load_checkpoint(tmp_path, *made(adds=False))


GROUPS = [
    (torch.optim.SGD, {"momentum": 0.9}, None),
    (torch.optim.RMSprop, {"centered": True}, None),
    (torch.optim.AdamW, {}, torch.bfloat16),
]


@pytest.mark.parametrize(("optimizer_class", "options", "dtype"), GROUPS)
def test_fault_22_groups_of_other_options_or_dtypes_go_on(
    optimizer_class: Any, options: dict[str, Any], dtype: torch.dtype | None, tmp_path: Path
) -> None:
    """One group keeps momentum, or has masters, and the other does not."""

    def made(chosen: dict[str, Any] = options) -> Parts:
        model, _ = parts()
        if dtype is not None:
            model[1].register_forward_pre_hook(lambda _, args: args[0].to(dtype))
            model[1].to(dtype)
        groups = [{"params": list(model[0].parameters()), **chosen}, {"params": list(model[1].parameters())}]
        return model, shardwise.ZeroRedundancyOptimizer(groups, optimizer_class, lr=0.01)

    assert_goes_on(tmp_path, made)
    if options:
        with pytest.raises(ConfigError, match=r"must keep what .* holds \(.*: make it of the class and with"):
            shardwise.load_checkpoint(tmp_path, *made({}))


class Counting(torch.optim.SGD):
    """Counts its steps outside of its state."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.count += 1


class Remembering(torch.optim.SGD):
    """Keeps a list and a vector beside what SGD keeps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p] |= {"history": [1], "recent": torch.zeros(3), "fresh": True, "none": None}


def test_fault_22_equal_names_of_states_do_not_make_two_classes_one(tmp_path: Path) -> None:
    """RAdam's state has the names of Adam's, and a child or parent of a class may go on with its state."""
    for saved, loaded in ((torch.optim.AdamW, torch.optim.RAdam), (torch.optim.SGD, Counting)):
        trained, (other, its_optimizer) = parts(0, saved), parts(0, loaded)
        step(*trained)
        folder = shardwise.save_checkpoint(tmp_path / saved.__name__, *trained, step=1)
        if loaded is Counting:
            assert shardwise.load_checkpoint(folder, other, its_optimizer) == 1
            its_optimizer.load_state_dict(trained[1].state_dict())
            continue
        with pytest.raises(ConfigError, match=r"^the optimizer \(RAdam\).*, of AdamW\): make it"):
            shardwise.load_checkpoint(folder, other, its_optimizer)
        with pytest.raises(ValueError, match=r", of AdamW\) must be what RAdam keeps"):
            its_optimizer.load_state_dict(trained[1].state_dict())


def test_fault_22_a_configuration_of_another_model_is_refused(tmp_path: Path) -> None:
    config = shardwise.load_recipe("llama2-tiny", model={"num_hidden_layers": 1})
    model = build_model(config, shardwise.Group(), sequence_parallel=False)
    optimizer = shardwise.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD)
    saved = shardwise.save_checkpoint(tmp_path / "saved", model, optimizer, step=1, config=config)
    shardwise.export_checkpoint(saved, tmp_path / "exported")
    other = shardwise.load_recipe("llama2-tiny", model={"num_hidden_layers": 1, "vocab_size": 300})
    deeper = shardwise.load_recipe("llama2-tiny", model={"num_hidden_layers": 2})
    for given, text in (
        (other, r"config \(llama\): shape of model\.embed_tokens\.weight \[300, 64\] must be \[512, 64\]"),
        (deeper, r"config \(llama\) has model\.layers\.1\.self_attn\.q_proj\.weight \[64, 64\], which the model lacks"),
        (deeper, "; give the configuration of the model that is saved, or none$"),
    ):
        with pytest.raises(ConfigError, match=text):
            shardwise.save_checkpoint(tmp_path / "other", model, optimizer, step=1, config=given)
    assert not (tmp_path / "other").exists()
