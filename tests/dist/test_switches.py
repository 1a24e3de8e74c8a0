"""`train.switches`: each leaves every number and bit of a training as it is."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardwise.base.errors import ConfigError, RunError
from shardwise.distributed import devices
from shardwise.distributed.devices import captured_call
from shardwise.distributed.mesh import Group
from shardwise.optim.gradient_norms import ElementRun, ModelNorms
from shardwise.optim.master_update import Update
from shardwise.optim.zero import ZeroRedundancyOptimizer
from shardwise.verify.canonical_values import canonical_weights
from tests.dist import dense
from tests.dist.checkpoints import make_trainer
from tests.dist.test_zero import make_model
from tests.dist.training import cases, make_config
from tests.sweeps import few

CELLS = cases("switches")
STEPS = 3


@pytest.mark.parametrize(("world", "sections"), few(CELLS, CELLS[0]))
def test_an_update_in_the_backward_pass_has_the_same_bits(ranks: Any, world: int, sections: dict[str, Any]) -> None:
    for is_equal, updated in dense.run(ranks, world, both, sections, "update_in_backward"):
        assert is_equal
        assert updated > STEPS, "buckets were updated before the pass ended"


def test_switches_for_cuda_do_nothing_elsewhere() -> None:
    assert both({}, "cuda_graphs") == (True, 0)
    assert both({"precision": {"mode": "bfloat16"}}, "flash_attention_3") == (True, 0)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ((9, 0), r"needs torch 2\.11 and the module flash_attn_interface: No module named"),
        ((10, 0), r"train\.switches \(flash_attention_3\) must be left out on a GPU of compute capability 10\.0:"),
    ],
)
def test_no_flash_attention_3_is_told(found: tuple[int, int], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found)
    with pytest.raises(ConfigError, match=message):
        devices.use_flash_attention_3(torch.device("cuda"))


def test_a_loss_that_is_not_finite_is_told_with_the_weights_that_it_changed() -> None:
    config = make_config(optimizer={"max_norm": None}, train={"switches": ("update_in_backward",)})
    trainer = make_trainer(config)
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("nan"))
    with pytest.raises(RunError, match="weights are updated: go on from a checkpoint, without update_in_backward") as e:
        trainer.step()
    assert "must be finite; on rank 0, its loss is nan. Some weights" in str(e.value)
    assert str(e.value).endswith("(`shardwise explain loss-not-finite`)")


@pytest.mark.parametrize("log_every", [None, 2])
def test_weights_are_read_where_their_norm_is(log_every: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(make_config(optimizer={"max_norm": None}, train={"switches": ("update_in_backward",)}))
    trainer.log_every = log_every
    takes: list[Any] = []
    plain = ModelNorms.measure
    monkeypatch.setattr(ModelNorms, "measure", lambda norms, *takes_: takes.extend(takes_) or plain(norms, *takes_))
    records = [trainer.step() for _ in range(2)]
    assert takes.count(ElementRun.weights) == (2 if log_every is None else 1)
    assert [record.param_norm is None for record in records] == [log_every is not None, False]


@pytest.mark.parametrize(
    ("options", "wrong"), [({"max_norm": 1.0}, r"max_norm \(1\.0\)"), ({"stage": 2}, r"stage \(2\)")]
)
def test_an_optimizer_that_needs_all_gradients_refuses(options: dict[str, Any], wrong: str) -> None:
    model = make_model()
    given = {"lr": 1e-3, "max_norm": None, **options}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, model=model, **given)
    with pytest.raises(ConfigError, match=f"^{wrong} must be changed for .* which needs max_norm=None, stage 0 or 1"):
        optimizer.update_in_backward()


class Unlucky(torch.autograd.Function):
    """The memory runs out in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise torch.OutOfMemoryError


def make_own(options: dict[str, Any]) -> tuple[nn.Sequential, ZeroRedundancyOptimizer]:
    """A model in 16 buckets or so, as a loop of one's own has it."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])
    kept = {"optimizer_class": torch.optim.SGD, "lr": 0.1, "max_norm": None, "bucket_mib": 1e-4, **options}
    return model, ZeroRedundancyOptimizer(model.parameters(), model=model, **kept)


def passes(model: nn.Sequential, optimizer: ZeroRedundancyOptimizer, *, is_unlucky: bool = False) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(Group.world().rank))
    with optimizer.accumulate(last=True):
        y = model[0](x)
        model[1:](Unlucky.apply(y) if is_unlucky else y).square().sum().backward()


def train_own(is_ahead: bool, options: dict[str, Any]) -> tuple[float, list[torch.Tensor]]:
    model, optimizer = make_own(options)
    for _ in range(2):
        if is_ahead:
            optimizer.update_in_backward()
        passes(model, optimizer)
        norm = float(optimizer.gradient_norm())
        optimizer.step()
    return norm, [p.detach().clone() for p in model.parameters()]


def both_loops(options: dict[str, Any]) -> bool:
    (norm, weights), (other_norm, other_weights) = train_own(False, options), train_own(True, options)
    return norm == other_norm and all(map(torch.equal, weights, other_weights))


@pytest.mark.parametrize(
    "options", [{"optimizer_class": torch.optim.AdamW, "fused": True, "lr": 1e-2}, {"average": False}]
)
def test_loops_of_ones_own_over_ranks_have_the_same_bits(ranks: Any, options: dict[str, Any]) -> None:
    assert ranks(2).run(both_loops, options) == [True, True]


@pytest.mark.parametrize("is_unlucky", [False, True])
def test_a_dropped_step_is_an_error_and_the_next_one_is_whole(is_unlucky: bool) -> None:
    model, optimizer = make_own({})
    optimizer.update_in_backward()
    with pytest.raises(torch.OutOfMemoryError) if is_unlucky else nullcontext():
        passes(model, optimizer, is_unlucky=is_unlucky)
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) in place of step\(\) must be left out .* load a checkpoint"):
        optimizer.zero_grad()
    for p in model.parameters():
        assert not p.grad.any()
    before = [p.detach().clone() for p in model.parameters()]
    passes(model, optimizer)
    assert all(map(torch.equal, before, model.parameters())), "the switch ended with the dropped step"
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


def test_what_changes_gradients_after_an_update_is_an_error() -> None:
    model, optimizer = make_own({})
    optimizer.update_in_backward()
    passes(model, optimizer)
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(1\.0\) must be left out with update_in_backward\(\)"):
        optimizer.clip_grad_norm_(1.0)
    model, optimizer = make_own({})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    optimizer.update_in_backward()
    passes(model, optimizer)
    with pytest.raises(RuntimeError, match=r"a GradScaler must be left out with update_in_backward\(\)"):
        scaler.step(optimizer)


def train(sections: dict[str, Any], switches: tuple[str, ...]) -> tuple[list[Any], dict[str, Tensor], int]:
    """Numbers of each step, this rank's weights at the end, and the buckets that were updated in backward passes."""
    unclipped = {"optimizer": {"max_norm": None, **sections.get("optimizer", {})}}
    config = make_config(**{**sections, **unclipped, "train": {"switches": switches, **sections.get("train", {})}})
    trainer = make_trainer(config)
    ahead: list[int] = []
    plain = Update.ahead

    def counted(*arguments: Any) -> Any:
        ahead.append(1)
        return plain(*arguments)

    Update.ahead = counted  # type: ignore[method-assign]
    try:
        records = [trainer.step() for _ in range(STEPS)]
        trainer.optimizer.gathers.wait()
        numbers = [(r.loss, r.grad_norm, r.param_norm, r.lr) for r in records]
        weights = canonical_weights(trainer.model, optimizer=trainer.optimizer)
        return numbers, {name: tensor.cpu().clone() for name, tensor in weights.items()}, len(ahead)
    finally:
        Update.ahead = plain  # type: ignore[method-assign]


def both(sections: dict[str, Any], switch: str) -> tuple[bool, int]:
    """Whether a switch leaves every number and bit as it is, and the buckets that were updated in backward passes."""
    plain, other = train(sections, ()), train(sections, (switch,))
    is_equal = plain[0] == other[0] and all(torch.equal(plain[1][name], other[1][name]) for name in plain[1])
    return is_equal and plain[2] == 0, other[2]


class Recorded(TorchDispatchMode):
    """A CUDA graph in software: notes operations and the tensors that they return, and computes them again at once.

    What a capture adds to gradients is taken back, as a real one computes nothing. A number that the host reads is an
    error, as it is there.
    """

    gradients: tuple[Tensor, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default, "the host reads a number"
        out = function(*arguments, **(options or {}))
        # Views share the memory of what was computed: they are made once.
        if not function.is_view:
            self._calls.append((function, arguments, options or {}, out))
        return out

    def __enter__(self) -> Any:
        self._before = [gradient.clone() for gradient in self.gradients]
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        for gradient, before in zip(self.gradients, self._before, strict=True):
            gradient.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for function, arguments, options, kept in self._calls:
            for old, new in zip(tree_iter(kept), tree_iter(function(*arguments, **options)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.detach().copy_(new)


class _Stream:
    def wait_stream(self, _other: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def _captures(graph: Recorded, *, stream: _Stream, capture_error_mode: str) -> Recorded:
    assert capture_error_mode == "thread_local", "other threads, as NCCL's watchdog, may call CUDA meanwhile"
    return graph


def captured(sections: dict[str, Any]) -> tuple[bool, int]:
    """Whether steps of replayed passes have the numbers and bits of ordinary ones, and the number of replays."""
    results, replays = [], 0
    for is_captured in (False, True):
        trainer = make_trainer(make_config(**sections))
        if is_captured:
            Recorded.gradients = tuple(bucket.gradients for bucket in trainer.optimizer.buckets)
            cuda: Any = torch.cuda
            replaced = {"CUDAGraph": Recorded, "Stream": _Stream, "current_stream": _Stream, "stream": lambda s: s}
            replaced["graph"] = _captures
            before = {name: getattr(cuda, name) for name in replaced}
            for name, value in replaced.items():
                setattr(cuda, name, value)
        try:
            if is_captured:
                trainer.passes._captured = captured_call(torch.device("cuda"))
            records = [trainer.step() for _ in range(STEPS)]
        finally:
            if is_captured:
                for name, value in before.items():
                    setattr(cuda, name, value)
        numbers = [(r.loss, r.grad_norm, r.param_norm) for r in records]
        results.append((numbers, [p.detach().cpu() for p in trainer.model.parameters()]))
        if is_captured:
            replays = trainer.passes._captured._graph.replays  # type: ignore[union-attr]
    (numbers, weights), (other_numbers, other_weights) = results
    return numbers == other_numbers and all(map(torch.equal, weights, other_weights)), replays
