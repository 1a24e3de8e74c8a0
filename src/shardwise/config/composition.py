"""What composes with what: the choices of a training that reach into each other, and the pairs that are refused.

Any other combination trains as one process does; tests/dist/test_composition.py runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from shardwise.config.model import OwnConfig
from shardwise.config.sections import DropoutMode, Recompute, Schedule

if TYPE_CHECKING:
    from shardwise.config.root import Config

NONE = "none"
CHOICES: Mapping[str, tuple[str, ...]] = {
    "model": ("family", "own"),
    "schedule": (NONE, *get_args(Schedule)),
    "recompute": get_args(Recompute),
    "tying": ("untied", "tied"),
    "dropout": (NONE, *get_args(DropoutMode)),
}
"""Schedule `none`: no pipeline. Of an own model tying and dropout are its own: `untied` and `none`."""


@dataclass(frozen=True)
class Hole:
    """What does not go together: any of these choices with any of the others.

    Attributes:
        of: the choices by what they choose. must: which key must have another value, a format of `model` and
        `parallel`. reason: why.
    """

    of: Mapping[str, tuple[str, ...]]
    must: str
    reason: str

    def has(self, chosen: Mapping[str, str]) -> bool:
        """Whether a combination lies in it."""
        return all(chosen[key] in choices for key, choices in self.of.items())


HOLES = (
    Hole(
        of={"model": ("own",), "schedule": get_args(Schedule)},
        must="parallel.pipeline ({parallel.pipeline}) must be 1 with a model of your own (model.family {model.family})",
        reason="nothing is known of how to cut it into stages",
    ),
)


def chosen(config: Config) -> dict[str, str]:
    """The combination of a configuration."""
    model, train = config.model, config.train
    tied = not isinstance(model, OwnConfig) and model.tie_word_embeddings
    return {
        "model": "own" if isinstance(model, OwnConfig) else "family",
        "schedule": config.parallel.schedule if config.parallel.pipeline > 1 else NONE,
        "recompute": train.recompute,
        "tying": "tied" if tied else "untied",
        "dropout": train.dropout_mode if model.has_dropout else NONE,
    }


def composition_problems(config: Config) -> list[str]:
    """Every hole that a configuration falls into."""
    here = chosen(config)
    return [
        f"{hole.must.format(model=config.model, parallel=config.parallel)}: {hole.reason}"
        for hole in HOLES
        if hole.has(here)
    ]
