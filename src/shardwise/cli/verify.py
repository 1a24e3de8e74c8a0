"""Prove on this machine that a recipe trains alike at every layout.

A miniature of the recipe's model takes a few steps on random tokens, in one process and at each layout of the ranks
that this machine has. The initial weights, the losses of each step and the gradients of the first step are compared. So
are the losses after a checkpoint of another layout was read: each layout reads that of the layout before it, and one
process reads that of the last layout.

The layouts are all combinations of parallel.tensor, parallel.sequence, parallel.pipeline, data parallelism and
optimizer.zero (0, 1 and the recipe's), with the recipe's other keys. --layouts chooses
others: each KEY=VALUE,VALUE limits a key to these values, and KEY=all allows all its values. Keys that are not named
keep the values above; `all` allows all values of all keys.

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
from typing import Any

from shardwise.base import hardware, units
from shardwise.base.errors import ConfigError, listing
from shardwise.cli import output
from shardwise.cli.arguments import add_json, add_overrides, add_recipe, count
from shardwise.config import BITWISE, Config, load_config, recipe_name
from shardwise.launch.environment import joined
from shardwise.launch.local import EndedError
from shardwise.verify import layouts, miniature, verification
from shardwise.verify.tolerance import Tolerance

_CPU_RANKS = 4


def configure(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_overrides(parser, "precision.mode=float32")
    parser.add_argument(
        "--layouts",
        metavar="KEY=VALUE",
        nargs="+",
        default=[],
        help=f"which layouts: `all`, or values of {listing(layouts.AXES, 'or')}",
    )
    parser.add_argument(
        "--devices",
        metavar="DEVICE",
        nargs="+",
        choices=("cpu", "accelerator"),
        help="cpu, accelerator or both (default: all that this machine has); one process on the first is the reference",
    )
    parser.add_argument(
        "--nproc",
        metavar="N",
        type=count,
        help=f"ranks of each layout (default: one per accelerator, and {_CPU_RANKS} on CPU)",
    )
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        default=4,
        help="steps of each training, half of them from a checkpoint; default: 4",
    )
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
    recipe = load_config(arguments.recipe, arguments.overrides)
    if recipe.model.is_own:
        from shardwise.models.user_model import check_user_model

        check_user_model(recipe)
    devices = _devices(arguments.devices, arguments.nproc)
    chosen = layouts.parse_layouts(arguments.layouts)
    config, cells, refused = _plan(recipe, devices, chosen, arguments.steps, bitwise=arguments.bits)
    folder = Path(tempfile.mkdtemp(prefix="shardwise-verify-"))
    is_named = False
    try:
        result = verification.verify(config, cells, folder)
        # The logs of ranks that failed lie in the folder, and the user is told their paths: then it stays.
        is_named = any(str(folder) in problem for outcome in result.broken for problem in outcome.problems)
    except EndedError as error:
        raise EndedError(str(error).replace("the run", "the verification")) from None
    finally:
        verification.clear_progress()
        if not is_named:
            shutil.rmtree(folder, ignore_errors=True)
    shown = Verified(recipe_name(arguments.recipe), recipe, config, result, refused)
    if arguments.json:
        output.json(shown.facts())
    else:
        shown.show()
    return int(bool(result.broken))


def _devices(named: Sequence[str] | None, nproc: int | None) -> dict[str, int]:
    """The number of ranks on each device: `cpu`, or the accelerators' kind."""
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
        cell for device, ranks in devices.items() for cell in layouts.candidates(recipe, device, ranks, chosen)
    ]
    # One process on an accelerator may be among the chosen layouts too, and is trained once.
    cells = list(dict.fromkeys([*alone, *chosen_cells]))
    if not chosen_cells:
        raise ConfigError(
            f"no layout of {listing(devices.values(), 'or')} ranks is chosen by --layouts: parallel.tensor × "
            "parallel.context × parallel.pipeline must divide the number of ranks (--nproc)"
        )
    has_accelerator = set(devices) != {"cpu"}
    config = miniature.miniature(recipe, cells, steps, has_accelerator=has_accelerator)
    kept_cells, reasons = miniature.existing(config, cells)
    if bitwise and kept_cells:
        # The grains are those of the layouts that the model can have.
        config = miniature.miniature(recipe, kept_cells, steps, has_accelerator=has_accelerator, bitwise=True)
        kept_cells, further_reasons = miniature.existing(config, kept_cells)
        reasons = [*reasons, *further_reasons]
    if not kept_cells:
        raise ConfigError(reasons)
    return config, sorted(kept_cells, key=lambda cell: [*devices].index(cell.device)), reasons


@dataclass(frozen=True)
class Verified:
    """A verification with the recipe that it verified.

    Attributes:
        name: the recipe's name.
        recipe: the recipe's configuration.
        config: the configuration of the miniature.
        result: the outcomes.
        refused: the reasons for which layouts were left out.
    """

    name: str
    recipe: Config
    config: Config
    result: verification.Verification
    refused: Sequence[str]

    def facts(self) -> dict[str, Any]:
        """The result as `--json` prints it."""
        return {
            "recipe": self.name,
            "miniature": self.config.recorded(),
            "tolerance": asdict(Tolerance.of(self.config)),
            "losses": list(self.result.losses),
            "left_out": list(self.refused),
            "layouts": [outcome.facts() for outcome in self.result.outcomes],
            "broken": len(self.result.broken),
        }

    def show(self) -> None:
        """Print what was trained, a table for each device, and the verdict."""
        output.table([*self._fields(), *(("left out", reason) for reason in self.refused)])
        # The last outcome is that of one process, which read the last layout's checkpoint.
        *outcomes, _ = self.result.outcomes
        for device, of_device in itertools.groupby(outcomes, key=lambda outcome: outcome.cell.device):
            output.line()
            output.line(f"{device}, the largest differences from one process:")
            _show_table(list(of_device))
        output.line()
        self._show_verdict(len(outcomes))

    def _fields(self) -> list[tuple[str, str]]:
        """The facts of the training and of the comparison."""
        config = self.config
        train = config.train
        losses = self.result.losses
        first = self.result.outcomes[-1].cell
        tolerance = Tolerance.of(config)
        middle = train.steps // 2
        matmul = config.precision.matmul
        products = "" if matmul is None else f", precision.matmul {matmul}"
        gradients = f"{_within(tolerance.gradients)} of its norm" if tolerance.gradients else "equal to the bit"
        fields = [
            ("model", f"{self.name} in miniature: {_sizes(config)}"),
            (
                "training",
                f"{units.counted(train.steps, 'step')} of {train.global_batch} samples of {train.sequence_length} "
                f"random tokens, {config.optimizer.name}, precision.mode {config.precision.mode}{products}",
            ),
            (
                "reference",
                f"one process on {first.device}: loss {losses[0]:.6f} at step 1, {losses[-1]:.6f} at step "
                f"{train.steps}",
            ),
            ("layouts", "TP, CP, PP, DP: degrees of parallelism; SP: sequence parallelism; Z1: ZeRO-1"),
            ("weights", "the initial ones: equal"),
            ("loss", f"of each step up to {middle}: {_within(tolerance.losses)}"),
            ("grad", f"gradients of step 1, of each tensor: {gradients}"),
            (
                "resumed",
                f"losses after step {middle}, from the checkpoint of the layout above: {_within(tolerance.losses)}",
            ),
        ]
        if config.model.is_own:
            text = f"{self.name}, as it is: shardwise does not know how to shrink {config.model.family}"
            fields[0] = ("model", text)
        if config.is_bit_equal:
            text = f"gradient norms, weights and optimizer state after steps {middle} and {train.steps}: equal"
            fields.append(("state", text))
        if not tolerance.is_of_float32:
            text = "rounds at other places in each layout: more is allowed than the 1e-05 of precision.mode=float32"
            fields.append((matmul or "bfloat16", text))
        if config.model.has_dropout:
            is_fast = self.recipe.train.dropout_mode == "fast"
            change = ": those of fast, the recipe's, depend on the layout" if is_fast else ""
            fields.append(("dropout", f"masks of train.dropout_mode invariant{change}"))
        return fields

    def _show_verdict(self, number: int) -> None:
        """Print why layouts are broken, and how many of the `number` layouts are."""
        broken = self.result.broken
        for outcome in broken:
            output.prose(f"{outcome.cell.name}:")
            for line in "\n".join(outcome.problems).splitlines():
                output.prose(f"  {line}")
            output.line()
        bound = Tolerance.of(self.config).gradients
        if self.config.model.is_own and any(
            outcome.cell.tensor == 1 and outcome.differences is not None and not outcome.differences.gradients <= bound
            for outcome in broken
        ):
            output.prose(
                "Data parallelism alone differs: forward must take ids and targets [sequence, batch], and return the "
                "sum of its targets' losses, not their mean."
            )
        if broken:
            output.line(f"BROKEN by {len(broken)} of {units.counted(number, 'layout')}")
        else:
            output.line(f"{'All ' if number > 1 else ''}{units.counted(number, 'layout')} trained like one process.")


def _within(tolerance: float) -> str:
    return f"within {tolerance:.1e}" if tolerance else "equal to the bit"


def _sizes(config: Config) -> str:
    model = config.shapes
    if model is None:
        return ""
    heads = units.counted(model.num_attention_heads, "head")
    if model.num_key_value_heads != model.num_attention_heads:
        heads += f" with {units.counted(model.num_key_value_heads, 'key/value head')}"
    tie = ", tied embedding" if model.tie_word_embeddings else ""
    blocks = f"{units.counted(model.num_hidden_layers, 'block')} of width {model.hidden_size}"
    return f"{model.family}, {blocks}, {heads}, vocabulary of {model.vocab_size}{tie}"


def _show_table(outcomes: Sequence[verification.CellOutcome]) -> None:
    """A row for each layout. Settings that all layouts share stand above; a mark is before those that are broken."""
    cells = [outcome.cell for outcome in outcomes]
    columns: dict[str, Sequence[str]] = {
        "": ["✗" if outcome.problems else "" for outcome in outcomes],
        "TP": [f"{cell.tensor}{' SP' if cell.sequence else ''}" for cell in cells],
        "CP": [str(cell.context) for cell in cells],
        "PP": [str(cell.pipeline) for cell in cells],
        "DP": [f"{cell.data}{f' Z{cell.zero}' if cell.zero else ''}" for cell in cells],
        "schedule": [cell.schedule or "-" for cell in cells],
        "recompute": [cell.recompute for cell in cells],
    }
    for head, unused in (("", ""), ("CP", "1")):
        if {*columns[head]} == {unused}:
            del columns[head]
    for head in ("schedule", "recompute"):
        shared = {*columns[head]} - {"-"}
        if len(shared) < 2 and len(outcomes) > 1:
            del columns[head]
            for value in shared:
                output.line(f"{head} {value}")
    numbers: dict[str, Sequence[str]] = {
        "weights": [_number(outcome, "weights") for outcome in outcomes],
        "loss": [_number(outcome, "losses") for outcome in outcomes],
        "grad": [_number(outcome, "gradients") for outcome in outcomes],
        "resumed": [_number(outcome, "resumed") for outcome in outcomes],
    }
    rows = list(zip(*columns.values(), *numbers.values(), strict=True))
    right = range(len(columns), len(columns) + len(numbers))
    output.table(rows, [*columns, *numbers], right=right)


def _number(outcome: verification.CellOutcome, field: str) -> str:
    if outcome.differences is None:
        return "failed"
    value: float = getattr(outcome.differences, field)
    return f"{value:.1e}" if value else "0"
