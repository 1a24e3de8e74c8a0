"""Stochastic rounding in one process: against its definition, written once more in numpy."""

import copy
import hashlib
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from shardwise import LAMB, ZeroRedundancyOptimizer
from shardwise.distributed import devices as device
from shardwise.distributed.placement import named_pieces
from shardwise.optim import bucket_layout, stochastic_rounding
from tests.unit.optim.net import PLAIN, assert_equal, batch, make, sharded, train

SEED = 5
STOCHASTIC: dict[str, Any] = PLAIN | {
    "optimizer_dtype": torch.bfloat16, "rounding": "stochastic", "rounding_seed": SEED,
}  # fmt: skip
Words: TypeAlias = npt.NDArray[np.uint32]


def lowbias32(x: Words, key: int) -> Words:
    """Wellons 2018, with a key between the rounds."""
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D) ^ np.uint32(key % 2**32)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


def hashed(*parts: object) -> int:
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def expected_bits(name: str, step: int, count: int, elements: int) -> list[Words]:
    key, increment = hashed(SEED, step, name), 0x9E3779B9
    words = np.array([(key + i * increment) % 2**32 for i in range(elements)], dtype=np.uint32)
    lanes = []
    for number in range(count):
        if number % 2 == 0:
            words = lowbias32(words, hashed(SEED, step, number))
        lanes.append(words >> np.uint32(16 * (number % 2)) & np.uint32(0xFFFF))
    return lanes


def expected(x: Tensor, bits: Words) -> Tensor:
    upper = (x.contiguous().view(-1).numpy().view(np.uint32) + bits) >> np.uint32(16)
    return torch.from_numpy(upper.astype(np.uint16).view(np.int16)).view(torch.bfloat16).view(x.shape)


def rounded(x: Tensor, bits: Tensor, *, keeps_nan: bool = True) -> Tensor:
    found = torch.empty_like(x, dtype=torch.bfloat16)
    stochastic_rounding.round_into(found, x.clone(), bits, keeps_nan=keeps_nan)
    return found


@pytest.mark.parametrize("keeps_nan", [False, True])
def test_the_mean_of_many_roundings_is_the_number(keeps_nan: bool) -> None:
    """With probability (x - a) / (b - a) upwards: 2^16 roundings with each of the possible bits are exactly that."""
    bits = torch.arange(2**16, dtype=torch.int32)
    for x in (1.0 + 2.0**-12, -3.000001, 1e-30, 6.0e-39):
        found = rounded(torch.full((2**16,), x), bits, keeps_nan=keeps_nan)
        assert len(found.unique()) == 2, f"{x} is rounded to {found.unique()}"
        assert float(found.double().mean()) == float(torch.tensor(x)), f"the mean of {x}'s roundings"


def test_nan_stays_and_the_largest_numbers_may_become_infinite() -> None:
    payloads = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, 0x7F7FFFFF], dtype=torch.int32)
    found = rounded(payloads.view(torch.float32), torch.full((4,), 2**16 - 1, dtype=torch.int32))
    assert found[:3].isnan().all()
    assert found[3] == float("inf")


CLASSES = [
    ("AdamW", {"lr": 1e-3, "weight_decay": 0.1, "foreach": True}),
    ("AdamW", {"lr": 1e-3, "amsgrad": True, "fused": False}),
    ("SGD", {"lr": 1e-2}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    ("RMSprop", {"lr": 1e-3, "centered": True, "momentum": 0.9}),
    ("NAdam", {"lr": 1e-3}),
    ("LAMB", {"lr": 1e-2}),
]


def class_of(name: str) -> type[torch.optim.Optimizer]:
    return LAMB if name == "LAMB" else getattr(torch.optim, name)  # type: ignore[no-any-return]


def reference(
    name: str, options: dict[str, Any], model: nn.Module, gradient_dtype: torch.dtype, *, rounds_weights: bool = True
) -> None:
    """Four steps of the class itself on float32 copies, whose weights and state are rounded by the definition."""
    trained = [p for p in model.parameters() if p.requires_grad and p.numel()]
    for p in trained:
        p.grad_dtype = gradient_dtype
    copies = [nn.Parameter(p.detach().float()) for p in trained]
    optimizer = class_of(name)(copies, **options)
    names = named_pieces([{"params": list(model.parameters())}], 0)
    for step in range(1, 5):
        model.zero_grad()
        model(batch(step)).backward()  # type: ignore[operator]
        for p, wide in zip(trained, copies, strict=True):
            wide.grad = torch.zeros_like(wide) if p.grad is None else p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for p, wide in zip(trained, copies, strict=True):
                state = optimizer.state[wide]
                rows = [key for key, value in sorted(state.items()) if isinstance(value, Tensor) and value.dim()]
                rows = rows if p.dim() else [key for key in sorted(state) if key not in ("step", "mu_product")]
                rows = [key for key in rows if state[key] is not None]
                values = [wide] * rounds_weights + [state[key] for key in rows]
                bits = expected_bits(names[p][0].name, step, len(values), p.numel())
                for value, lane in zip(values, bits, strict=True):
                    value.copy_(expected(value, lane))
                p.copy_(wide)


WAYS = [(1e-5, 2**17, torch.bfloat16), (1000.0, 7, torch.float32)]
"""Sizes of buckets, what is updated at once, and the gradients' dtype."""


@pytest.mark.parametrize(
    ("name", "options", "bucket_mib", "chunk", "gradient_dtype"),
    [(*one, *WAYS[number % 2]) for number, one in enumerate(CLASSES)],
    ids=str,
)
def test_each_class_computes_in_float32_and_rounds_by_the_definition(
    name: str, options: dict[str, Any], bucket_mib: float, chunk: int, gradient_dtype: torch.dtype, monkeypatch: Any
) -> None:
    """Whatever the buckets, whatever is updated at once and whatever the gradients' dtype."""
    monkeypatch.setattr(bucket_layout, "ROUNDING_CHUNK_ELEMENTS_CPU", chunk)
    wanted, found = make().bfloat16(), make().bfloat16()
    reference(name, options, wanted, gradient_dtype)
    wrapping = STOCHASTIC | {"bucket_mib": bucket_mib, "gradient_dtype": gradient_dtype}
    optimizer = sharded(found, class_of(name), **wrapping, **options)
    train(found, optimizer, 4, 1)
    assert_equal(found, wanted)
    state = [value for values in optimizer.inner.state.values() for value in values.values()]
    dtypes = {value.dtype for value in state if isinstance(value, Tensor) and value.dim()}
    assert dtypes <= {torch.bfloat16}, "state takes 2 bytes an element"
    assert optimizer.state_bytes()["masters"] == 0, "the parameters are their own masters"


@pytest.mark.parametrize(
    ("name", "options", "bucket_mib", "chunk"), [(*CLASSES[0], 1e-5, 2**17), (*CLASSES[1], 1000.0, 7)], ids=str
)
def test_state_beside_float32_masters_is_rounded_by_the_definition(
    name: str, options: dict[str, Any], bucket_mib: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a resume."""
    monkeypatch.setattr(bucket_layout, "ROUNDING_CHUNK_ELEMENTS_CPU", chunk)
    wanted, found, resumed = (make() for _ in range(3))
    reference(name, options, wanted, torch.float32, rounds_weights=False)
    wrapping = PLAIN | {"bucket_mib": bucket_mib, "state_dtype": torch.bfloat16, "rounding_seed": SEED}
    first, second = (sharded(model, class_of(name), **wrapping, **options) for model in (found, resumed))
    train(found, first, 2, 1)
    resumed.load_state_dict(found.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for model, optimizer in ((found, first), (resumed, second)):
        train(model, optimizer, 2, 3)
        assert_equal(model, wanted)
        elements = sum(bucket.master.numel() for bucket in optimizer.buckets)
        states = 3 if options.get("amsgrad") else 2
        assert optimizer.state_bytes() | {"padding": 0} == {"state": 2 * states * elements, "masters": 0, "padding": 0}


@pytest.mark.parametrize(
    ("name", "options"), [("AdamW", {"amsgrad": True}), pytest.param("LAMB", {}, marks=pytest.mark.slow)]
)
def test_compiled_rounding_has_equal_bits(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    models = [make().bfloat16() for _ in range(2)]
    # As the compiler captures it; code for a CPU takes long to compile.
    captured = torch.compile(stochastic_rounding.rounded, fullgraph=True, dynamic=True, backend="aot_eager")
    for model, compiles in zip(models, (False, True), strict=True):
        monkeypatch.setattr(device, "compiles_kernels", lambda _, compiles=compiles: compiles)
        monkeypatch.setattr(stochastic_rounding, "_compiled_rounded", lambda: captured)
        optimizer = sharded(model, class_of(name), lr=1e-2, **options, **STOCHASTIC)
        train(model, optimizer, 3)
    assert_equal(*models)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning")  # by torch itself
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_compilers_code_has_the_bits_of_the_eager_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    for elements in (5000, 33):
        values = [torch.randn(elements, generator=generator) for _ in range(3)]
        values[0][:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.3e38])
        words = torch.randint(-(2**31), 2**31, (elements,), dtype=torch.int32, generator=generator)
        keys = [torch.full((), key, dtype=torch.int32) for key in (7, -9)]
        wanted = stochastic_rounding.rounded(values, words, keys)
        for a, b in zip(stochastic_rounding._compiled_rounded()(values, words, keys), wanted, strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_small_updates_are_not_lost() -> None:
    """Updates of 2^-10 to weights of 1, whose neighbours are 2^-8 and 2^-7 away: the nearest is always 1."""
    moved = {}
    for way in ("nearest", "stochastic"):
        weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=2.0**-10, **(STOCHASTIC | {"rounding": way}))
        for _ in range(256):
            weight.sum().backward()
            optimizer.step()
        moved[way] = float(weight.detach().float().mean())
    assert moved["nearest"] == 1.0
    assert moved["stochastic"] == pytest.approx(0.75, abs=0.01), "256 steps of 2^-10"
    # A step moves it by a thousandth of itself, less than half the distance of bfloat16 numbers.
    means = {}
    for state_dtype in (None, torch.bfloat16):
        weight = nn.Parameter(torch.ones(4096))
        optimizer = ZeroRedundancyOptimizer([weight], torch.optim.AdamW, state_dtype=state_dtype, **PLAIN)
        for _ in range(100):
            weight.sum().backward()
            optimizer.step()
        (state,) = optimizer.inner.state.values()
        means[state_dtype] = float(state["exp_avg_sq"].float().mean())
    assert means[None] == pytest.approx(1 - 0.999**100, rel=1e-3)
    assert means[torch.bfloat16] == pytest.approx(means[None], rel=2e-3)


@pytest.mark.parametrize(
    ("dtype", "options", "said"),
    [
        (torch.float32, {"rounding": "stochastic"}, r"optimizer_dtype \(torch.float32\) must be torch.bfloat16"),
        (torch.float64, STOCHASTIC, r"no parameter may be torch.float64"),
        (torch.float32, {"rounding": "up"}, r"rounding \('up'\) must be 'nearest' or 'stochastic'"),
        (torch.float32, {"state_dtype": torch.float16}, r"state_dtype \(torch.float16\) must be torch.bfloat16"),
        (torch.float64, {"state_dtype": torch.bfloat16}, r"must be left out with parameters of torch.float64"),
    ],
)
def test_what_cannot_be_rounded_is_refused(dtype: torch.dtype, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sharded(make().to(dtype), torch.optim.SGD, **(PLAIN | options))


class Harmonic(torch.optim.Optimizer):
    """SGD whose learning rate falls with the steps, which it counts in its parameter group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0, "sum": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            group["sum"].add_(1.0 / group["steps"])
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] / group["steps"])


def test_what_a_class_keeps_in_its_group_counts_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_layout, "ROUNDING_CHUNK_ELEMENTS_CPU", 8)
    weights = [nn.Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = ZeroRedundancyOptimizer(weights, Harmonic, lr=0.5, bucket_mib=1e-5, **STOCHASTIC)
    assert len(optimizer.buckets) == 2
    for _ in range(3):
        (sum(weight.sum() for weight in weights) * 0.25).backward()
        optimizer.step()
    group = optimizer.param_groups[0]
    assert group["steps"] == 3
    assert float(group["sum"]) == pytest.approx(1 + 1 / 2 + 1 / 3)
    for weight in weights:
        assert float(weight.detach().float().mean()) == pytest.approx(1 - 0.125 * (1 + 1 / 2 + 1 / 3), abs=2e-3)


def test_a_state_of_before_rounding_loads() -> None:
    """It has no "steps": they are those of the wrapped class."""
    model = make()
    optimizer = sharded(model)
    train(model, optimizer, 3)
    older = optimizer.state_dict()
    del older["steps"]
    fresh = sharded(make())
    fresh.load_state_dict(older)
    assert fresh.steps == 3


def test_a_device_without_float64_sums_norms_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "widest_dtype", lambda device: torch.float32)
    monkeypatch.setattr(Tensor, "double", lambda self: pytest.fail("float64 was used"))
    model = make().bfloat16()
    train(model, sharded(model, LAMB, max_norm=1.0, **(STOCHASTIC | {"grad_clipping": True})), 1)
    assert all(p.isfinite().all() for p in model.parameters())
