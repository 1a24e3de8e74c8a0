"""Prove on this machine that a recipe trains alike at every layout.

The recipe's model in miniature takes a few steps on random tokens in one process and at each layout of the ranks that
this machine has. Compared are initial weights, the losses of each step, the gradients of the first one, and the losses
after the checkpoint of another layout was read: each layout reads that of the one before it, and one process the last.

The layouts are all combinations of parallel.tensor, parallel.sequence, parallel.pipeline, data parallelism and
optimizer.zero, with the recipe's parallel.schedule and train.recompute. --layouts chooses others: each KEY=VALUE,VALUE
limits a key to these values, KEY=all allows all, and keys that are not named stay as said; `all` allows everything.

Exit code 0: every layout keeps the contract; 1: one breaks it or fails; 2: the input is wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.cli import output
from shardwise.cli.verified import Verified
from shardwise.config import Config, OwnConfig, load_config, recipe_name
from shardwise.errors import ConfigError, listing
from shardwise.hardware import accelerators
from shardwise.launch.environment import joined
from shardwise.verify.cells import AXES, Cell, candidates, parse_layouts
from shardwise.verify.job import CLEAR_LINE
from shardwise.verify.miniature import existing, miniature

_CPU_RANKS = 4


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a shipped recipe's name, or a YAML file")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="replaces a key of the recipe, such as precision.mode=float32"
    )
    parser.add_argument(
        "--layouts",
        metavar="KEY=VALUE",
        nargs="+",
        default=[],
        help=f"which layouts: `all`, or values of {listing(AXES, 'or')}",
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
        type=int,
        help=f"ranks of each layout (default: one per accelerator, and {_CPU_RANKS} on CPU)",
    )
    parser.add_argument(
        "--steps", metavar="N", type=int, default=4, help="of each training, half of them from a checkpoint; default: 4"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if joined() is not None:
        raise ConfigError("verify starts ranks of its own for each layout: call it outside of torchrun")
    if arguments.steps < 2:
        raise ConfigError(f"--steps ({arguments.steps}) must be at least 2: one before the checkpoint, one after it")
    recipe = load_config(arguments.recipe, arguments.overrides)
    if isinstance(recipe.model, OwnConfig):
        from shardwise.models import check_own

        check_own(recipe)
    devices = _devices(arguments.devices, arguments.nproc)
    config, cells, refused = _plan(recipe, devices, parse_layouts(arguments.layouts), arguments.steps)
    from shardwise.launch.local import EndedError
    from shardwise.verify.run import verify

    folder = Path(tempfile.mkdtemp(prefix="shardwise-verify-"))
    is_named = False
    try:
        found = verify(config, cells, folder)
        is_named = any(str(folder) in problem for outcome in found.broken for problem in outcome.problems)
    except EndedError as error:
        raise EndedError(str(error).replace("the run", "the verification")) from None
    finally:
        if sys.stderr.isatty():
            sys.stderr.write(CLEAR_LINE)
        if not is_named:
            shutil.rmtree(folder, ignore_errors=True)
    shown = Verified(recipe_name(arguments.recipe), recipe, config, found, refused)
    if arguments.json:
        output.json(shown.facts())
    else:
        shown.show()
    return int(bool(found.broken))


def _devices(named: Sequence[str] | None, nproc: int | None) -> dict[str, int]:
    """The number of ranks on each device: `cpu`, or the accelerators' kind."""
    kind, count = accelerators()
    if named is not None and "accelerator" in named and not count:
        raise ConfigError("--devices accelerator: there is none on this machine that torch can use; leave it out")
    if nproc is not None and nproc < 1:
        raise ConfigError(f"--nproc ({nproc}) must be at least 1")
    wanted = named if named is not None else ("cpu", "accelerator") if count else ("cpu",)
    if nproc is not None and "accelerator" in wanted and nproc > count:
        raise ConfigError(
            f"--nproc ({nproc}) must be at most the number of accelerators ({count}): lower it, or add --devices cpu"
        )
    ranks = {"cpu": nproc or _CPU_RANKS, "accelerator": nproc or count}
    return {kind if device == "accelerator" else device: ranks[device] for device in wanted}


def _plan(
    recipe: Config, devices: dict[str, int], chosen: dict[str, list[Any] | None], steps: int
) -> tuple[Config, list[Cell], list[str]]:
    """The miniature, the layouts at which it can be trained, and why it cannot be at others.

    One process on an accelerator is compared too, where the reference is one process on the CPU.

    Raises:
        ConfigError: there is none.
    """
    first = next(iter(devices))
    alone = [Cell(device) for device in devices if device != first]
    wanted = [cell for device, ranks in devices.items() for cell in candidates(recipe, device, ranks, chosen)]
    cells = list(dict.fromkeys([*alone, *wanted]))
    if not wanted:
        raise ConfigError(
            f"no layout of {listing(devices.values(), 'or')} ranks is chosen by --layouts: parallel.tensor × "
            "parallel.pipeline must divide the number of ranks (--nproc)"
        )
    config = miniature(recipe, cells, steps, has_accelerator=set(devices) != {"cpu"})
    found, reasons = existing(config, cells)
    if not found:
        raise ConfigError(reasons)
    return config, sorted(found, key=lambda cell: [*devices].index(cell.device)), reasons
