"""Prove on this machine that a recipe trains alike at every layout.

A miniature of the recipe's model takes a few steps on random tokens, in one process and at each layout of the ranks
that this machine has. The initial weights, the losses of each step and the gradients of the first step are compared. So
are the losses after a checkpoint of another layout was read: each layout reads that of the layout before it, and one
process reads that of the last layout.

The layouts are all combinations of parallel.tensor, parallel.sequence, parallel.pipeline, data parallelism,
parallel.expert of a model with experts, and optimizer.zero (0, 1 and the recipe's), with the recipe's other keys.
--layouts chooses others: each KEY=VALUE,VALUE limits a key to these values, and KEY=all allows all its values. Keys
that are not named keep the values above; `all` allows all values of all keys.

Exit code 0: every layout trains alike; 1: a layout differs or fails; 2: the input is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base import hardware, units
from shardwise.base.errors import ConfigError, EndedError, listing
from shardwise.base.progress import progress
from shardwise.base.registered import imported
from shardwise.cli import output
from shardwise.cli.help import add_json, add_overrides, add_recipe, count
from shardwise.cli.train import load_recipe
from shardwise.config import BITWISE, Config, ModelConfig, recipe_name
from shardwise.launch.environment import joined
from shardwise.launch.local import agent_ahead
from shardwise.verify import layouts, miniature
from shardwise.verify.tolerance import Tolerance

if TYPE_CHECKING:
    from shardwise.verify import verification

_CPU_RANKS = 4
_NUMBERS = {"weights": "weights", "loss": "losses", "grad": "gradients", "resumed": "resumed"}
"""Column → field of the differences."""
_CHOICES = "choices"
_IMPORTS = ("shardwise.verify.cell_training", "shardwise.pipeline.schedule")


def configure(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_overrides(parser, "precision.mode=float32")
    layouts_help = f"which layouts: `all`, or values of {listing(layouts.AXES, 'or')}"
    parser.add_argument("--layouts", metavar="KEY=VALUE", nargs="+", default=[], help=layouts_help)
    devices_help = (
        "cpu, accelerator or both (default: all that this machine has); one process on the first is the reference"
    )
    parser.add_argument("--devices", metavar="DEVICE", nargs="+", choices=("cpu", "accelerator"), help=devices_help)
    nproc_help = f"ranks of each layout (default: one per accelerator, and {_CPU_RANKS} on CPU)"
    parser.add_argument("--nproc", metavar="N", type=count, help=nproc_help)
    steps_help = "steps of each training, half of them from a checkpoint; default: 4"
    parser.add_argument("--steps", metavar="N", type=int, default=4, help=steps_help)
    parser.add_argument(
        "--bits",
        action="store_true",
        help=f"train with {BITWISE}: losses, gradient norms, weights and optimizer state must be equal to the last bit",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    if joined() is not None:
        raise ConfigError("verify starts ranks of its own for each layout: call it outside of torchrun")
    if arguments.steps < 2:
        raise ConfigError(f"--steps ({arguments.steps}) must be at least 2: one before the checkpoint, one after it")
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if recipe.model.is_own:
        from shardwise.models.user_model import check_user_model

        check_user_model(recipe)
    devices = _devices(arguments.devices, arguments.nproc)
    chosen = layouts.parse_layouts(arguments.layouts)
    config, cells, refused = _plan(recipe, devices, chosen, arguments.steps, bitwise=arguments.bits)
    folder = Path(tempfile.mkdtemp(prefix="shardwise-verify-"))
    is_named = False

    def layouts_done() -> int:
        return max((int(path.name.partition("-")[2]) for path in folder.glob("layout-*")), default=0)

    try:
        with agent_ahead(cells[-1].ranks, _IMPORTS), progress("verifying", len(cells), "layout", done=layouts_done):
            # Only now, so that this process imports torch while the agent does.
            verification = imported("shardwise.verify.verification")
            result = verification.verify(config, cells, folder)
        # The logs of ranks that failed lie in the folder, and the user is told their paths: then it stays.
        is_named = any(str(folder) in problem for outcome in result.broken for problem in outcome.problems)
    except EndedError as error:
        raise EndedError(str(error).replace("the run", "the verification")) from None
    finally:
        if not is_named:
            shutil.rmtree(folder, ignore_errors=True)
    shown = _Verified(recipe_name(arguments.recipe), config, result, refused)
    if arguments.json:
        output.json(shown.facts())
    else:
        shown.show()
    return int(bool(result.broken))


def _devices(named: Sequence[str] | None, nproc: int | None) -> dict[str, int]:
    kind, count = hardware.accelerators()
    if named is not None and "accelerator" in named and not count:
        raise ConfigError("--devices accelerator: there is none on this machine that torch can use; leave it out")
    # By default every device of this machine takes part: the contract holds across devices too.
    kinds = named if named is not None else ("cpu", "accelerator") if count else ("cpu",)
    if nproc is not None and "accelerator" in kinds and nproc > count:
        raise ConfigError(
            f"--nproc ({nproc}) must be at most the number of accelerators ({count}): lower it, or add --devices cpu"
        )
    ranks = {"cpu": nproc or _CPU_RANKS, "accelerator": nproc or count}
    return {kind if device == "accelerator" else device: ranks[device] for device in kinds}


def _plan(
    recipe: Config, devices: dict[str, int], chosen: dict[str, list[Any] | None], steps: int, *, bitwise: bool
) -> tuple[Config, list[layouts.Cell], list[str]]:
    """The miniature, the layouts at which it can be trained, and why it cannot be at others.

    One process on an accelerator is compared too, where the reference is one process on the CPU.
    """
    first = next(iter(devices))
    alone = [layouts.Cell(device) for device in devices if device != first]
    chosen_cells = [
        cell for device, ranks in devices.items() for cell in layouts.layouts_to_verify(recipe, device, ranks, chosen)
    ]
    # One process on an accelerator may be among the chosen layouts too, and is trained once.
    cells = list(dict.fromkeys([*alone, *chosen_cells]))
    if not chosen_cells:
        raise ConfigError(
            f"no layout of {listing(devices.values(), 'or')} ranks is chosen by --layouts: {layouts.RULE}"
        )
    has_accelerator = set(devices) != {"cpu"}
    config = miniature.miniature(recipe, cells, steps, has_accelerator=has_accelerator)
    kept_cells, reasons = miniature.trainable_cells(config, cells)
    if bitwise and kept_cells:
        # The grains are those of the layouts that the model can have.
        config = miniature.miniature(recipe, kept_cells, steps, has_accelerator=has_accelerator, bitwise=True)
        kept_cells, further_reasons = miniature.trainable_cells(config, kept_cells)
        reasons = [*reasons, *further_reasons]
    if not kept_cells:
        raise ConfigError(reasons)
    return config, sorted(kept_cells, key=lambda cell: [*devices].index(cell.device)), reasons


@dataclass(frozen=True)
class _Verified:
    name: str
    config: Config
    result: verification.Verification
    refused: Sequence[str]

    def facts(self) -> dict[str, Any]:
        return {
            "recipe": self.name,
            "miniature": self.config.recorded(),
            "tolerance": asdict(Tolerance.of(self.config)),
            "losses": list(self.result.losses),
            "choices": self.result.choices,
            "left_out": list(self.refused),
            "layouts": [outcome.facts() for outcome in self.result.outcomes],
            "broken": len(self.result.broken),
        }

    def show(self) -> None:
        """Print what was trained, a table for each device, and the verdict."""
        outcomes = self.result.layout_outcomes
        output.table(
            [*self._fields(self.result.outcomes[-1].cell.device), *(("left out", reason) for reason in self.refused)]
        )
        for device, of_device in itertools.groupby(outcomes, key=lambda outcome: outcome.cell.device):
            output.line()
            _show_table(device, list(of_device), counts_choices=bool(self.result.choices))
        output.line()
        for outcome in self.result.broken:
            output.prose(f"{outcome.cell.name}:")
            for line in "\n".join(outcome.problems).splitlines():
                output.prose(f"  {line}")
            output.line()
        if self._data_parallelism_differs:
            output.prose(
                "Data parallelism alone differs: forward must take ids and targets [sequence, batch], and return the "
                "sum of its targets' losses, not their mean."
            )
        layouts_text = units.counted(len(outcomes), "layout")
        if broken := len(self.result.broken):
            output.line(f"BROKEN by {broken} of {layouts_text}")
        else:
            every = "All " if len(outcomes) > 1 else ""
            output.line(f"{every}{layouts_text} trained like one process{self.result.replayed_text()}.")

    @property
    def _data_parallelism_differs(self) -> bool:
        """True if a model of the user's own is broken by data parallelism, which asks nothing of its layers."""
        bound = Tolerance.of(self.config).gradients
        return self.config.model.is_own and any(
            outcome.cell.tensor == 1 and outcome.differences is not None and not outcome.differences.gradients <= bound
            for outcome in self.result.broken
        )

    def _fields(self, device: str) -> list[tuple[str, str]]:
        train = self.config.train
        losses = self.result.losses
        tolerance = Tolerance.of(self.config)
        precision = self.config.precision
        products = "" if precision.matmul is None else f", precision.matmul {precision.matmul}"
        dropout = ", dropout_mode invariant" if self.config.model.has_dropout else ""
        middle = train.steps // 2
        grad = f"{_within(tolerance.gradients)} of its norm" if tolerance.gradients else "equal"
        bounds = [
            "initial weights equal",
            f"the loss of each step up to {middle}, and resumed after it, {_within(tolerance.losses)}",
            f"the gradient of each tensor in step 1 {grad}",
        ]
        if self.config.is_bit_equal:
            bounds.append(f"gradient norms, weights and optimizer state after steps {middle} and {train.steps} equal")
        return [
            ("model", f"{self.name} in miniature: {_sizes(self.config.model)}"),
            (
                "training",
                f"{units.counted(train.steps, 'step')} of {train.global_batch} samples of {train.sequence_length} "
                f"random tokens, {self.config.optimizer.name}, precision.mode {precision.mode}{products}{dropout}",
            ),
            ("reference", f"one process on {device}: loss {losses[0]:.6f} at step 1, {losses[-1]:.6f} at the last"),
            ("bounds", "; ".join(bounds)),
            *self.result.choice_rows(),
        ]


def _within(tolerance: float) -> str:
    return f"within {tolerance:.1e}" if tolerance else "equal to the bit"


def _sizes(model: ModelConfig) -> str:
    if model.is_own:
        return f"as it is, since how to shrink {model.family} is not known"
    heads = units.counted(model.num_attention_heads, "head")
    if model.num_key_value_heads != model.num_attention_heads:
        heads += f" with {units.counted(model.num_key_value_heads, 'key/value head')}"
    tie = ", tied embedding" if model.tie_word_embeddings else ""
    blocks = f"{units.counted(model.num_hidden_layers, 'block')} of width {model.hidden_size}"
    return f"{model.family}, {blocks}, {heads}, vocabulary of {model.vocab_size}{tie}"


def _show_table(device: str, outcomes: Sequence[verification.CellOutcome], *, counts_choices: bool) -> None:
    """A row for each layout. Settings that all layouts share stand above; a mark is before those that are broken."""
    rows = layouts.table_rows([outcome.cell for outcome in outcomes])
    columns = [*_NUMBERS, *([_CHOICES] if counts_choices else [])]
    shared = {head: value for head, value in rows[0].items() if all(row[head] == value for row in rows)}
    heads = [head for head in rows[0] if head not in shared]
    output.line(f"{device}, the largest differences from one process:")
    output.line(", ".join(f"{head} {value}" for head, value in shared.items()))
    table = [
        ["✗" if outcome.problems else "", *(row[head] for head in heads), *_values(outcome, columns)]
        for outcome, row in zip(outcomes, rows, strict=True)
    ]
    output.table(table, ["", *heads, *columns], right=range(len(heads) + 1, len(heads) + 1 + len(columns)))


def _values(outcome: verification.CellOutcome, columns: Sequence[str]) -> list[str]:
    differences = outcome.differences
    if differences is None:
        return ["failed"] * len(columns)
    values: list[float] = [getattr(differences, field) for field in _NUMBERS.values()]
    texts = [f"{value:.1e}" if value else "0" for value in values]
    return [*texts, str(differences.choices.differing)][: len(columns)]
