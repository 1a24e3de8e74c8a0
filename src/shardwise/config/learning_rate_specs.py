"""One record for each schedule of learning rates of `optimizer.schedule`; a new one is a function and a record here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any

_MODULE = "shardwise.optim.learning_rate"


@dataclass(frozen=True)
class LearningRateSpec:
    """A schedule of learning rates."""

    name: str  # value of `optimizer.schedule`
    path: str  # its function, with the arguments and the result of `rate`, as package.module:name
    keys: tuple[str, ...] = ()  # keys of the section `optimizer` that schedules which do not list them refuse
    needs: Mapping[str, str] = field(default_factory=dict)  # of these, those that must be given, each with what to give
    excludes: tuple[str, ...] = ()  # other keys that must be left out
    reason: str = ""  # why, and what to do instead

    @cached_property
    def rate(self) -> Callable[[Any, int, int], float]:
        """The function of the section `optimizer`, the steps of the whole run, and a step from 1 → the step's rate."""
        module, _, name = self.path.partition(":")
        function: Callable[[Any, int, int], float] = getattr(import_module(module), name)
        return function


LEARNING_RATES = {
    spec.name: spec
    for spec in (
        LearningRateSpec("linear", f"{_MODULE}:decaying"),
        LearningRateSpec("cosine", f"{_MODULE}:decaying"),
        LearningRateSpec(
            "constant",
            f"{_MODULE}:constant",
            excludes=("constant_steps",),
            reason="it never decays to optimizer.min_lr: choose cosine or linear",
        ),
        LearningRateSpec(
            "wsd",
            f"{_MODULE}:warmup_stable_decay",
            keys=("decay_steps", "decay_shape"),
            needs={"decay_steps": "a tenth to a fifth of train.steps, or 0 for a trunk that other runs branch from"},
        ),
        LearningRateSpec(
            "points",
            f"{_MODULE}:by_points",
            keys=("points",),
            needs={"points": "such as [{at: 1, factor: 1}]"},
            excludes=("warmup_steps", "constant_steps", "min_lr"),
            reason="it has all rates: write them as points",
        ),
    )
}
"""The records by name, in the order in which messages list them."""
