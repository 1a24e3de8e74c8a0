"""The layouts that a verification compares: every combination of the axes that is a layout of its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from shardwise.base.errors import ConfigError, divisors, listing, nearest_name
from shardwise.config import Config, Recompute, Schedule
from shardwise.config.schedules import SCHEDULES
from shardwise.config.yaml import parse_value

ALL = "all"
AXES: Mapping[str, tuple[Any, ...]] = {
    "parallel.tensor": (),
    "parallel.sequence": (False, True),
    "parallel.pipeline": (),
    "parallel.schedule": get_args(Schedule),
    "optimizer.zero": (0, 1),
    "train.recompute": get_args(Recompute),
}
"""The keys that a layout may set, with all their values; of a degree the divisors of the number of ranks."""


@dataclass(frozen=True)
class Cell:
    """One training.

    Attributes:
        device: `cpu`, or the kind of accelerator.
        ranks: of the job; the data-parallel degree is `ranks` / (`tensor` × `pipeline`).
        schedule: None without a pipeline. The others are the configuration keys of these names.
    """

    device: str = "cpu"
    ranks: int = 1
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    schedule: Schedule | None = None
    zero: int = 0
    recompute: Recompute = "none"

    @property
    def data(self) -> int:
        """The data-parallel degree."""
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline, if a rank has as few as its schedule can have."""
        return self.pipeline * (1 if self.schedule is None else SCHEDULES[self.schedule].stages_per_rank)

    @property
    def degrees(self) -> str:
        """Such as `TP 2 + SP × DP 2 (ZeRO-1)`; one process without any parallelism has no degrees."""
        cut = [f"TP {self.tensor}{' + SP' if self.sequence else ''}"] if self.tensor > 1 else []
        cut += [f"PP {self.pipeline}"] if self.pipeline > 1 else []
        cut += [f"DP {self.data}{' (ZeRO-1)' if self.zero else ''}"] if self.data > 1 else []
        return " × ".join(cut) or "one process"

    @property
    def name(self) -> str:
        """All that tells this cell from others."""
        said = [f"schedule {self.schedule}"] if self.schedule else []
        said += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        return ", ".join([self.degrees, *said, f"on {self.device}"])

    def facts(self) -> dict[str, Any]:
        """The fields and the data-parallel degree, for JSON."""
        return asdict(self) | {"data": self.data}


def parse_layouts(given: Sequence[str]) -> dict[str, list[Any] | None]:
    """The values of each key that `--layouts` names; None for `all` of them.

    Raises:
        ConfigError: a text is none of `all`, `key=value` and `key=value,value`; with every problem.
    """
    chosen: dict[str, list[Any] | None] = {}
    problems = []
    for text in given:
        key, equals, values = text.partition("=")
        if text == ALL:
            chosen = dict.fromkeys(AXES) | chosen  # what is named limits `all` before it and after it
        elif key not in AXES:
            near = next((name for name in AXES if name.endswith(f".{key}")), None) or nearest_name(key, AXES)
            hint = f"did you mean {near}?" if near else f"it chooses among {listing(AXES)}"
            problems.append(f"--layouts {text}: unknown key; {hint}")
        elif not equals or not values:
            problems.append(f"--layouts {text} must read {key}=VALUE, {key}=VALUE,VALUE or {key}={ALL}")
        elif values == ALL:
            chosen[key] = None
        else:
            found = [parse_value(value, f"--layouts {text}") for value in values.split(",")]
            problems += [problem for value in found for problem in _value_problems(key, value)]
            chosen[key] = found
    if problems:
        raise ConfigError(problems)
    return chosen


def _value_problems(key: str, value: Any) -> list[str]:
    valid = AXES[key]
    if not valid and (type(value) is not int or value < 1):
        return [f"--layouts {key} ({value}) must be a degree, such as 2"]
    if valid and not any(value == one and type(value) is type(one) for one in valid):
        shown = [str(one).lower() if isinstance(one, bool) else one for one in valid]
        return [f"--layouts {key} ({value}) must be {listing(shown, 'or')}"]
    return []


def candidates(config: Config, device: str, ranks: int, chosen: Mapping[str, list[Any] | None]) -> list[Cell]:
    """The layouts of exactly `ranks` ranks that are chosen, each once: a key without effect has its default.

    Schedule and recompute are the recipe's unless they are chosen.
    """
    values: dict[str, Sequence[Any]] = {key: valid or sorted(divisors(ranks)) for key, valid in AXES.items()}
    own = {"parallel.schedule": config.parallel.schedule, "train.recompute": config.train.recompute}
    values |= {key: [value] for key, value in own.items() if key not in chosen}
    values |= {key: named for key, named in chosen.items() if named is not None}
    found = []
    for tensor, sequence, pipeline, schedule, zero, recompute in itertools.product(*values.values()):
        data, rest = divmod(ranks, tensor * pipeline)
        if rest == 0:
            sequence, zero = sequence and tensor > 1, zero if data > 1 else 0
            found.append(
                Cell(device, ranks, tensor, sequence, pipeline, schedule if pipeline > 1 else None, zero, recompute)
            )
    return sorted(dict.fromkeys(found), key=lambda cell: (cell.tensor, cell.pipeline))  # of one mesh together


def common_batch(cells: Iterable[Cell]) -> int:
    """A global batch for all: two micro-batches for each stage that can be at work, on each data-parallel rank."""
    return math.lcm(4, *(2 * cell.pipeline * cell.data for cell in cells))
