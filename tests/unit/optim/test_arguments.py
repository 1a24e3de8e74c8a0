"""Arguments of other libraries' ZeroRedundancyOptimizer are refused with what replaces them."""

import inspect
from typing import Any

import pytest
import torch

from shardwise import LAMB, ZeroRedundancyOptimizer
from shardwise.config.other_names import ARGUMENTS
from tests.unit.optim.net import make

NAMES = set(inspect.signature(ZeroRedundancyOptimizer).parameters)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"sharding_groups": [[0]], "lazy_init": True, "maxnorm": 1.0, "lr": 0.1},
            "ZeroRedundancyOptimizer does not take sharding_groups (use group= or mesh=, the ranks that share the "
            "state), lazy_init (leave it out: state is made at the first step) or maxnorm (did you mean max_norm?)",
        ),
        ({"zzz": 1}, "does not take zzz; it takes params, optimizer_class, optimizer_dtype, grad_clipping, max_norm,"),
    ],
)
@pytest.mark.parametrize("wrapped", [torch.optim.AdamW, LAMB])
def test_unknown_options_are_refused_by_name(
    given: dict[str, Any], message: str, wrapped: type[torch.optim.Optimizer]
) -> None:
    with pytest.raises(TypeError) as raised:
        ZeroRedundancyOptimizer(make().parameters(), wrapped, **given)
    assert message in str(raised.value)


def test_options_of_the_wrapped_class_are_its_own() -> None:
    """Also where they have the name of a replaced one, or go through its `**options`."""

    class Own(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 0.1, *, clip_grad: float = 1.0, **options: Any) -> None:
            super().__init__(params, lr, **options)

    ZeroRedundancyOptimizer(make().parameters(), Own, clip_grad=2.0, momentum=0.9)


def test_what_replaces_an_argument_is_taken() -> None:
    assert not NAMES & set(ARGUMENTS["optimizer"])
    for argument in ARGUMENTS["optimizer"].values():
        words = [word for word in argument.advice.split() if not word.startswith("accumulate(")]
        assert {word.split("=")[0] for word in words if "=" in word} <= NAMES, argument.advice


def test_the_positional_arguments_of_torch_xla_are_taken() -> None:
    """In its order, with values that ask for nothing after max_norm; None is its default of optimizer_dtype."""
    optimizer = ZeroRedundancyOptimizer(
        make().bfloat16().parameters(), torch.optim.AdamW, None, True, 0.5, False, None, None, False, lr=0.1
    )
    assert optimizer.defaults["lr"] == 0.1
    assert (optimizer.grad_clipping, optimizer.max_norm) == (True, 0.5)
    assert {bucket.master.dtype for bucket in optimizer.buckets} == {torch.float32}
    own = ZeroRedundancyOptimizer(make().double().parameters(), torch.optim.AdamW, torch.float64, False)
    assert (own.grad_clipping, own.max_norm) == (False, 1.0)
    with pytest.raises(TypeError, match=r"does not take sharding_groups \(use group= .*\) or lazy_init \(leave it out"):
        ZeroRedundancyOptimizer(make().parameters(), LAMB, None, True, 1.0, True, [[0]], None, True)
    with pytest.raises(TypeError, match="takes no positional argument after pin_layout, sharding_groups"):
        ZeroRedundancyOptimizer(make().parameters(), LAMB, None, True, 1.0, True, None, None, False, 25)


@pytest.mark.parametrize("wrapped", [torch.optim.AdamW, LAMB])
def test_fault_02_keywords_whose_value_changes_nothing_are_accepted(wrapped: type[torch.optim.Optimizer]) -> None:
    """The call of the tutorial's own script, and the defaults of other libraries' classes."""
    given: dict[str, Any] = {"lr": 0.1, "grad_clipping": False, "max_norm": None}
    nothing = {"pin_layout": False, "sharding_groups": None, "grad_norm_groups": None, "lazy_init": False}
    defaults = {
        "bucket_cap_mb_all_gather": 0,
        "process_group": None,
        "parameters_as_bucket_view": False,
        "overlap_with_ddp": False,
    }
    optimizer = ZeroRedundancyOptimizer(make().parameters(), wrapped, **given, **nothing, **defaults)
    assert optimizer.defaults == wrapped(make().parameters(), lr=0.1).defaults
    with pytest.raises(TypeError, match="got pin_layout by position and by keyword: give each argument once"):
        ZeroRedundancyOptimizer(make().parameters(), wrapped, None, True, 1.0, True, pin_layout=False)


def test_fault_02_a_wrapped_class_keeps_its_options_of_these_names() -> None:
    class Pinned(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
            assert options.pop("pin_layout") is False
            super().__init__(params, lr, **options)

    ZeroRedundancyOptimizer(make().parameters(), Pinned, pin_layout=False)
    with pytest.raises(AssertionError):
        ZeroRedundancyOptimizer(make().parameters(), Pinned, pin_layout=True)
