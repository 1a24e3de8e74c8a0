"""Compare two checkpoints or Hugging Face folders, tensor by tensor, whatever layouts wrote them.

Exit code 0: both hold the same tensors, to the bit; 1: they do not; 2: one of them cannot be read, or is damaged. The
configuration is compared too, and does not count: two layouts may hold the same model.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwise.cli import output, text
from shardwise.cli.checkpoint import places
from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.checkpoint_format.diff import Difference, TensorDifference
    from shardwise.storage.root import Root

_MOST = 20


def configure(parser: argparse.ArgumentParser) -> None:
    kinds = "a checkpoint, a run's folder (its newest intact one), or a folder with safetensors weights"
    parser.add_argument("a", metavar="A", help=f"{kinds}; a path or a URL")
    parser.add_argument("b", metavar="B", help="what to compare it with")
    parser.add_argument(
        "--all", action="store_true", help=f"list every tensor that differs, not only the first {_MOST}"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    from shardwise.checkpoint_format.diff import diff
    from shardwise.storage.root import StoreError

    try:
        a, b = (places.newest_intact(each, text.progress).root for each in (arguments.a, arguments.b))
        with text.bar("comparing", sum(a.files().values())) as progress:
            found = diff(a, b, progress)
    except StoreError as error:
        raise ConfigError(str(error)) from None  # exit code 1 would say that they differ
    if arguments.json:
        from shardwise.runlog import json_text

        output.line(json_text({"a": str(a), "b": str(b), "equal": found.equal, **asdict(found)}, indent=2))
    else:
        _tell(a, b, found, None if arguments.all else _MOST)
    return 0 if found.equal else 1


def _tell(a: Root, b: Root, found: Difference, most: int | None) -> None:
    text.rows([("A", str(a)), ("B", str(b))])
    text.line()
    keys = text.of(len(found.config), "key")
    text.line(f"configuration: {keys} with other values" if found.config else "configuration: equal")
    if found.config:
        text.table(["key", "A", "B"], [[key, _value(x), _value(y)] for key, x, y in found.config], indent=2)
    compared = [(each.state, each.name) for each in found.tensors]
    odd = [(state, name) for state, name, _, _ in found.shapes]
    for state in dict.fromkeys(state for state, _ in (*compared, *odd, *found.only_a, *found.only_b)):
        _tell_state(state, found, most)
    text.line()
    text.line("equal: the same tensors to the bit" if found.equal else "different")


def _tell_state(state: str, found: Difference, most: int | None) -> None:
    tensors = [each for each in found.tensors if each.state == state]
    changed = [each for each in tensors if not each.equal]
    lines = [f"{name} is {list(x)} in A and {list(y)} in B" for each, name, x, y in found.shapes if each == state]
    lines += [f"{name} is only in A" for each, name in found.only_a if each == state]
    lines += [f"{name} is only in B" for each, name in found.only_b if each == state]
    text.line(f"{state}: {len(tensors) - len(changed):,} of {text.of(len(tensors) + len(lines), 'tensor')} equal")
    for each in lines[:most]:
        text.line(f"  {each}")
    _tell_more(len(lines), most)
    if changed:
        body = [_row(each) for each in changed[:most]]
        text.table(["tensor", "shape", "dtype", "max |B − A|", "‖B − A‖ / ‖A‖"], body, right=(3, 4), indent=2)
        _tell_more(len(changed), most)


def _tell_more(number: int, most: int | None) -> None:
    if most is not None and number > most:
        text.line(f"  and {number - most:,} more: --all lists them")


def _row(each: TensorDifference) -> list[str]:
    a, b = each.dtypes
    values = ("" if value is None else f"{value:.3g}" for value in (each.largest, each.relative))
    return [each.name, str(list(each.shape)), a if a == b else f"{a} / {b}", *values]


def _value(value: Any) -> str:
    from shardwise.checkpoint_format.diff import ABSENT

    return ABSENT if value is ABSENT else json.dumps(value)
