"""The layouts that a verification compares: every combination of the axes that is a layout of its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from shardwise.base.errors import ConfigError, listing, nearest_name
from shardwise.base.mesh_axes import layout_text
from shardwise.base.yaml_and_json import parse_value
from shardwise.config import Config, Recompute, Schedule
from shardwise.config.base_section import divisors
from shardwise.config.pipeline_schedule_specs import SCHEDULES

ALL = "all"
AXES: Mapping[str, tuple[Any, ...]] = {
    "parallel.tensor": (),
    "parallel.sequence": (False, True),
    "parallel.context": (),
    "parallel.expert": (),
    "parallel.pipeline": (),
    "parallel.schedule": get_args(Schedule),
    "optimizer.zero": (0, 1, 2, 3),
    "train.recompute": get_args(Recompute),
}
"""Keys that a layout may set, with all their values; a degree has none here, as it divides the number of ranks."""

RULE = (
    "parallel.tensor × parallel.context × parallel.pipeline must divide the number of ranks (--nproc), and "
    "parallel.expert the data-parallel degree × parallel.context"
)
"""Words on the degrees that a layout can have."""


@dataclass(frozen=True)
class Cell:
    """A training of the verification: its device, layout and recompute.

    `tensor`, `sequence`, `context`, `expert`, `pipeline`, `zero` and `recompute` are the configuration keys of these
    names.
    """

    device: str = "cpu"  # `cpu`, or the kind of accelerator
    ranks: int = 1  # number of ranks; the data-parallel degree is `ranks` / (`tensor` × `context` × `pipeline`)
    tensor: int = 1
    sequence: bool = False
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    schedule: Schedule | None = None  # schedule of the pipeline; None without one
    zero: int = 0
    recompute: Recompute = "none"

    @property
    def parallel(self) -> dict[str, int]:
        """The degrees, and whether there is sequence parallelism, as keys of the section `parallel`."""
        return {name: getattr(self, name) for name in ("tensor", "sequence", "context", "expert", "pipeline")}

    @property
    def data(self) -> int:
        """The data-parallel degree."""
        return self.ranks // (self.tensor * self.context * self.pipeline)

    @property
    def stages(self) -> int:
        """The number of stages of the whole pipeline, if a rank has as few as its schedule can have."""
        return self.pipeline * (1 if self.schedule is None else SCHEDULES[self.schedule].stages_per_rank)

    @property
    def degrees(self) -> str:
        """The degrees as users read them, such as `TP 2 + SP × DP 2 (ZeRO-1)`, or `one process`."""
        text = layout_text(self.facts(), sequence=self.sequence, ones=False)
        sharding = f" (ZeRO-{self.zero})" if self.data * self.context > 1 and self.zero else ""
        return f"{text}{sharding}" or "one process"

    @property
    def name(self) -> str:
        """A text that tells this cell from others."""
        parts = [self.degrees]
        if self.schedule:
            parts.append(f"schedule {self.schedule}")
        if self.recompute != "none":
            parts.append(f"recompute {self.recompute}")
        return ", ".join([*parts, f"on {self.device}"])

    def facts(self) -> dict[str, Any]:
        """Return the fields and the data-parallel degree, for JSON."""
        return asdict(self) | {"data": self.data}


def table_rows(cells: Sequence[Cell]) -> list[dict[str, str]]:
    """Return the settings of each verified layout as users read them, by the heads of a table."""
    has_experts = any(cell.expert > 1 for cell in cells)
    return [
        {
            "TP": f"{cell.tensor}{' SP' if cell.sequence else ''}",
            "CP": str(cell.context),
            **({"EP": str(cell.expert)} if has_experts else {}),
            "PP": str(cell.pipeline),
            "DP": f"{cell.data}{f' Z{cell.zero}' if cell.zero else ''}",
            "schedule": cell.schedule or "-",
            "recompute": cell.recompute,
        }
        for cell in cells
    ]


def parse_layouts(given: Sequence[str]) -> dict[str, list[Any] | None]:
    """The layouts to verify by `--layouts`: the values of each key, None for `all`; ConfigError with every problem."""
    chosen: dict[str, list[Any] | None] = {}
    problems = []
    for text in given:
        key, equals, values = text.partition("=")
        if text == ALL:
            # A key that is named limits `all`, before it and after it.
            chosen = dict.fromkeys(AXES) | chosen
        elif key not in AXES:
            # People give the last word of a key alone, such as `tensor`.
            near = next((name for name in AXES if name.endswith(f".{key}")), None) or nearest_name(key, AXES)
            hint = f"did you mean {near}?" if near else f"it chooses among {listing(AXES)}"
            problems.append(f"--layouts {text}: unknown key; {hint}")
        elif not equals or not values:
            problems.append(f"--layouts {text} must read {key}=VALUE, {key}=VALUE,VALUE or {key}={ALL}")
        elif values == ALL:
            chosen[key] = None
        else:
            parsed = [parse_value(value, f"--layouts {text}") for value in values.split(",")]
            for value in parsed:
                problems += _value_problems(key, value)
            chosen[key] = parsed
    if problems:
        raise ConfigError(problems)
    return chosen


def _value_problems(key: str, value: Any) -> list[str]:
    valid = AXES[key]
    if not valid and (type(value) is not int or value < 1):
        return [f"--layouts {key} ({value}) must be a degree, such as 2"]
    # The types are compared, too: in Python `1 == True`.
    if valid and not any(value == valid_value and type(value) is type(valid_value) for valid_value in valid):
        shown = [str(valid_value).lower() if isinstance(valid_value, bool) else valid_value for valid_value in valid]
        return [f"--layouts {key} ({value}) must be {listing(shown, 'or')}"]
    return []


def layouts_to_verify(config: Config, device: str, ranks: int, chosen: Mapping[str, list[Any] | None]) -> list[Cell]:
    """Return the layouts of exactly `ranks` ranks to verify, each once: a key without effect has its default.

    Schedule, recompute and context parallelism are the recipe's unless they are chosen, and stages of ZeRO are 0, 1 and
    the recipe's. Experts, if there are some, are divided over any number of ranks.
    """
    values: dict[str, Sequence[Any]] = {key: valid or sorted(divisors(ranks)) for key, valid in AXES.items()}
    defaults: dict[str, Sequence[Any]] = {
        "parallel.context": [config.parallel.context],
        "parallel.schedule": [config.parallel.schedule],
        "train.recompute": get_args(Recompute) if config.train.recompute == "auto" else [config.recompute],
        "optimizer.zero": sorted({0, 1, config.optimizer.zero}),
    }
    values |= {key: default for key, default in defaults.items() if key not in chosen}
    values |= {key: named for key, named in chosen.items() if named is not None}
    is_dense = config.shapes is None or not config.shapes.is_sparse
    if is_dense and not chosen.get("parallel.expert"):
        values["parallel.expert"] = [1]
    cells = []
    for tensor, sequence, context, expert, pipeline, schedule, zero, recompute in itertools.product(*values.values()):
        data, remainder = divmod(ranks, tensor * context * pipeline)
        if remainder == 0 and data * context % expert == 0:
            sequence = sequence and tensor > 1
            zero = zero if data * context > 1 else 0
            schedule = schedule if pipeline > 1 else None
            cells.append(Cell(device, ranks, tensor, sequence, context, expert, pipeline, schedule, zero, recompute))
    # Cells of one mesh follow each other, as their ranks keep the mesh.
    return sorted(dict.fromkeys(cells), key=lambda cell: (cell.tensor, cell.context, cell.expert, cell.pipeline))


def common_batch(cells: Iterable[Cell]) -> int:
    """Return a global batch for all cells: two micro-batches for each stage at work, on each data-parallel rank."""
    return math.lcm(4, *(2 * cell.pipeline * cell.data for cell in cells))
