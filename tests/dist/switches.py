"""What the tests of `train.switches` run on ranks of any device."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardwise.distributed.devices import CapturedCall
from shardwise.optim.master_update import Update
from shardwise.verify.canonical_values import canonical_weights
from tests.dist.checkpoints import make_trainer
from tests.dist.training import make_config

STEPS = 3


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
                trainer.passes._captured = CapturedCall()
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
