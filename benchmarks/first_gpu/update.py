"""What does each part of the optimizer's step take, for a billion parameters in one bucket?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from first_gpu.session import Figures, Session
from first_gpu.timing import timed
from shardwise.config.precision import Rounding
from shardwise.distributed import devices
from shardwise.distributed.mesh import Mesh
from shardwise.distributed.random_bits import INCREMENT_32, scramble_
from shardwise.distributed.torch_private import step_optimizer
from shardwise.optim.gradient_norms import ElementRun, ModelNorms
from shardwise.optim.master_update import scaled_gradient
from shardwise.optim.sharding import Ranks
from shardwise.optim.stochastic_rounding import round_into
from shardwise.optim.zero import ZeroRedundancyOptimizer

TITLE = "Parts of the optimizer's step"
NOTE = (
    "Milliseconds for 10⁹ parameters: bfloat16 weights, float32 gradients, masters and moments in one bucket. Bytes a "
    "parameter by arithmetic. Stochastic rounding is measured on a tenth of the parameters."
)
COLUMNS = "part ms_per_1e9 bytes gb_per_second peak_allocated watts"
_WIDTH = 4096
_KEY = 12345


def run(session: Session) -> None:
    _mixed_precision(session)
    session.release()
    _stochastic(session)
    session.release()
    _rounding(session)


def _mixed_precision(session: Session) -> None:
    elements = session.sizes.elements
    optimizer = _optimizer(session, elements, torch.float32, "nearest")
    bucket = optimizer.buckets[0]
    bucket.gradients.normal_(0.0, 1e-3)
    mesh = Mesh(device=session.device)
    norms = ModelNorms(optimizer.buckets, session.device, Ranks(mesh.replicas, mesh), torch.float32)
    factor = torch.ones((), device=session.device)

    def fused_adamw(divisor: Tensor | None = None) -> None:
        bucket.master.grad = bucket.gradient
        step_optimizer(optimizer.inner, divisor)
        bucket.master.grad = None

    # Zeroing comes last but one, so that the other parts have gradients that are no zeros.
    parts: dict[str, tuple[int, Callable[[], object]]] = {
        "fused AdamW": (28, fused_adamw),
        "fused AdamW that scales gradients": (32, partial(fused_adamw, factor)),
        "differs_from_masters: were parameters changed?": (12, bucket.differs_from_masters),
        "adopt_values: masters of changed parameters": (30, bucket.adopt_values),
        "norms of gradients and masters": (8, lambda: norms.measure(ElementRun.gradient, ElementRun.weights)),
        "norm of gradients": (4, lambda: norms.measure(ElementRun.gradient)),
        "scaling of gradients": (8, lambda: scaled_gradient(bucket, factor)),
        "copy of masters to weights": (6, bucket.start_gather),
        "zeroing of gradients": (4, bucket.zero_gradients),
        "whole step()": (46, optimizer.step),
    }
    optimizer.zero_grad()
    bucket.gradients.normal_(0.0, 1e-3)
    for part, (nbytes, call) in parts.items():
        session.measure(
            {"part": part, "bytes": nbytes}, lambda call=call, n=nbytes: _figures(session, call, n, elements)
        )


def _stochastic(session: Session) -> None:
    elements = session.sizes.elements // 10
    optimizer = _optimizer(session, elements, torch.bfloat16, "stochastic")
    labels = {"part": "whole step() in bfloat16, stochastic rounding", "bytes": 22}
    session.measure(labels, lambda: _figures(session, optimizer.step, 22, elements))


def _rounding(session: Session) -> None:
    """One rounding of as many float32 numbers, and the whole update by AdamW with three of them, in one function."""
    elements = session.sizes.elements // 10
    ramp = torch.arange(elements, dtype=torch.int32, device=session.device) * INCREMENT_32
    x = session.random(elements, dtype=torch.float32)
    state = [session.random(elements, std=std).abs_() for std in (0.02, 1e-3, 1e-6)]
    gradient = session.random(elements, std=1e-3)
    backend = "aot_eager" if session.is_tiny else "inductor"
    for program in ("eager", "compiled"):
        for name, nbytes, function, arguments in (
            ("rounding of float32 to bfloat16", 10, _rounded, (state[0], x, ramp)),
            ("AdamW and three roundings", 18, _rounded_adamw, (*state, gradient, ramp)),
        ):
            torch.compiler.reset()
            call = torch.compile(function, dynamic=False, backend=backend) if program == "compiled" else function
            session.measure(
                {"part": f"{name}, {program}", "bytes": nbytes},
                lambda call=call, arguments=arguments, n=nbytes: _figures(
                    session, lambda: call(*arguments), n, elements
                ),
            )


def _rounded(target: Tensor, x: Tensor, ramp: Tensor) -> None:
    words = scramble_(ramp + _KEY, _KEY)
    round_into(target, x.clone(), words & 0xFFFF)


def _rounded_adamw(weight: Tensor, first: Tensor, second: Tensor, gradient: Tensor, ramp: Tensor) -> None:
    """AdamW (lr 1e-5, betas 0.9 and 0.999, weight decay 0.01) without the correction of the bias."""
    g = gradient.float()
    new_first = first.float().lerp(g, 0.1)
    new_second = second.float().lerp(g * g, 0.001)
    new_weight = weight.float() * (1 - 1e-7) - 1e-5 * new_first / (new_second.sqrt() + 1e-6)
    words = scramble_(ramp + _KEY, _KEY)
    round_into(weight, new_weight, words & 0xFFFF)
    round_into(first, new_first, (words >> 16) & 0xFFFF, keeps_nan=False)
    round_into(second, new_second, scramble_(words, _KEY + 1) & 0xFFFF, keeps_nan=False)


def _optimizer(session: Session, elements: int, dtype: torch.dtype, rounding: Rounding) -> ZeroRedundancyOptimizer:
    """shardwise's optimizer over one bfloat16 matrix, as a training makes it."""
    width = min(_WIDTH, elements)
    weight = nn.Parameter(session.random(elements // width, width, std=0.02))
    optimizer = ZeroRedundancyOptimizer(
        [weight],
        torch.optim.AdamW,
        mesh=Mesh(device=session.device),
        optimizer_dtype=dtype,
        gradient_dtype=torch.float32 if dtype == torch.float32 else None,
        rounding=rounding,
        average=False,
        bucket_mib=2**20,
        lr=1e-5,
        fused=devices.has_fused_adamw(session.device),
    )
    optimizer.compares_values = False
    return optimizer


def _figures(session: Session, call: Callable[[], object], nbytes: int, elements: int) -> Figures:
    with torch.no_grad():
        found = timed(session, [call])
    per_billion = found["ms"] * 1e9 / elements
    return found | {"ms_per_1e9": per_billion, "gb_per_second": nbytes * 1e9 / per_billion / 1e6}
