"""Compare two checkpoints or Hugging Face folders, tensor by tensor, whatever layouts wrote them.

Exit code 0: both hold the same tensors, to the bit or within --tolerance; 1: they do not; 2: one of them cannot be
read, or is damaged. The configuration is compared too, but does not change the exit code: two layouts may hold the same
model.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from shardwise.base.errors import ConfigError
from shardwise.base.progress import progress
from shardwise.base.units import counted
from shardwise.checkpoint.storage.checkpoint_folders import weights_folder
from shardwise.cli import output
from shardwise.cli.help import add_json

if TYPE_CHECKING:
    from shardwise.checkpoint.format.diff import FolderDifference, TensorDifference

_MOST = 20


def configure(parser: argparse.ArgumentParser) -> None:
    kinds = "a checkpoint, a run's folder (its newest intact checkpoint), or a folder with safetensors weights"
    parser.add_argument("a", metavar="A", help=f"{kinds}; a path or a URL")
    parser.add_argument("b", metavar="B", help="what to compare it with")
    tolerance_help = "the greatest ‖B − A‖ / ‖A‖ of a tensor that is allowed, such as 1e-5; dtypes may differ"
    parser.add_argument("--tolerance", metavar="X", type=float, help=tolerance_help)
    parser.add_argument(
        "--all", action="store_true", help=f"list every tensor that differs, not only the first {_MOST}"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from shardwise.base.errors import StoreError
    from shardwise.checkpoint.format.diff import diff_folders

    tolerance: float | None = arguments.tolerance
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ConfigError(f"--tolerance ({tolerance}) must be a number from 0, such as 1e-5")
    try:
        a, b = (weights_folder(location, output.progress).root for location in (arguments.a, arguments.b))
        with progress("comparing", sum(a.files().values())) as advance:
            difference = diff_folders(a, b, advance)
    except StoreError as error:
        # As wrong input, whose exit code is 2: exit code 1 would say that the two differ.
        raise ConfigError(str(error)) from None
    is_within = difference.equal if tolerance is None else difference.within(tolerance)
    if arguments.json:
        verdict = {"equal": difference.equal, "tolerance": tolerance, "within": is_within}
        output.json({"a": str(a), "b": str(b), **verdict, **asdict(difference)})
        return int(not is_within)
    output.table([("A", str(a)), ("B", str(b))])
    output.line()
    _show(difference, None if arguments.all else _MOST)
    output.line()
    output.line(_verdict(difference, tolerance))
    return int(not is_within)


def _verdict(difference: FolderDifference, tolerance: float | None) -> str:
    if difference.equal:
        return "equal: the same tensors to the bit"
    if tolerance is None:
        return "different"
    if difference.within(tolerance):
        return f"within the tolerance ({tolerance:g})"
    return f"different: beyond the tolerance ({tolerance:g})"


def _show(difference: FolderDifference, most: int | None) -> None:
    from shardwise.checkpoint.format.diff import ABSENT

    keys = [
        [key, *(ABSENT if value is ABSENT else json.dumps(value) for value in values)]
        for key, *values in difference.config
    ]
    output.line(f"configuration: {counted(len(keys), 'key')} with other values" if keys else "configuration: equal")
    if keys:
        output.table(keys, ["key", "A", "B"], indent=2)
    unmatched = [(state, f"{name} is {list(a)} in A and {list(b)} in B") for state, name, a, b in difference.shapes]
    unmatched += [(state, f"{name} is only in A") for state, name in difference.only_a]
    unmatched += [(state, f"{name} is only in B") for state, name in difference.only_b]
    for state in dict.fromkeys([*(tensor.state for tensor in difference.tensors), *(state for state, _ in unmatched)]):
        tensors = [tensor for tensor in difference.tensors if tensor.state == state]
        _show_state(state, tensors, [line for line_state, line in unmatched if line_state == state], most)


def _show_state(state: str, tensors: list[TensorDifference], unmatched: list[str], most: int | None) -> None:
    changed = [tensor for tensor in tensors if not tensor.equal]
    total = counted(len(tensors) + len(unmatched), "tensor")
    output.line(f"{state}: {len(tensors) - len(changed):,} of {total} equal")
    for line in unmatched[:most]:
        output.line(f"  {line}")
    _show_rest(len(unmatched), most)
    if changed:
        head = ["tensor", "shape", "dtype", "max |B − A|", "‖B − A‖ / ‖A‖"]
        output.table([_row(tensor) for tensor in changed[:most]], head, right=(3, 4), indent=2)
        _show_rest(len(changed), most)


def _show_rest(number: int, most: int | None) -> None:
    if most is not None and number > most:
        output.line(f"  and {number - most:,} more: --all lists them")


def _row(tensor: TensorDifference) -> list[str]:
    a, b = tensor.dtypes
    values = ("" if value is None else f"{value:.3g}" for value in (tensor.largest, tensor.relative))
    return [tensor.name, str(list(tensor.shape)), a if a == b else f"{a} / {b}", *values]
