"""Compare the lines of each room of the source with `BUDGET`, as `make lint` does; `--lower` takes unused lines back.

A room is a folder of `src/shardwise`, or a package beside it. A change that needs more lines than its room has raises
the number in `BUDGET` by hand, and its commit names what left the source for it (CONTRIBUTING.md, "What gets in").
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = ROOT / "BUDGET"
SOURCE = ROOT / "src"
_ROW = re.compile(r"^([\w.]+) +([\d,]+)$", re.MULTILINE)


def lines_by_room(source: Path = SOURCE) -> Counter[str]:
    """The lines of all Python files by room; `shardwise` has the files that are in no folder of it."""
    found: Counter[str] = Counter()
    for path in sorted(source.rglob("*.py")):
        package, *folders = path.relative_to(source).parts[:-1]
        room = folders[0] if package == "shardwise" and folders else package
        found[room] += len(path.read_text(encoding="utf-8").splitlines())
    return found


def limits(text: str) -> dict[str, int]:
    """The rows of a budget."""
    return {room: int(number.replace(",", "")) for room, number in _ROW.findall(text)}


def problems(found: Counter[str], allowed: dict[str, int]) -> list[str]:
    """A sentence for each room that has more lines than the budget, or none in it."""
    texts = []
    for room, lines in sorted(found.items()):
        if room not in allowed:
            texts.append(f"{room} ({lines:,} lines) must have a row in BUDGET")
        elif lines > allowed[room]:
            texts.append(
                f"{room} ({lines:,} lines) must have at most {allowed[room]:,} lines: take {lines - allowed[room]:,} "
                "out, or raise its row in BUDGET and name in the commit what left for it"
            )
    texts += [
        f"{room} of BUDGET is no room of the source: remove its row" for room in sorted(set(allowed) - set(found))
    ]
    return texts


def lowered(text: str, found: Counter[str]) -> str:
    """The budget without lines that no room uses."""

    def row(match: re.Match[str]) -> str:
        room, number = match.groups()
        return f"{room:<16}{min(int(number.replace(',', '')), found[room]):>7,}"

    return _ROW.sub(row, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="write the lines that the rooms have into BUDGET")
    options = parser.parse_args(arguments)
    found = lines_by_room()
    text = BUDGET.read_text(encoding="utf-8")
    texts = problems(found, limits(text))
    for line in texts:
        print(f"BUDGET: {line}", file=sys.stderr)
    if options.lower and not texts:
        BUDGET.write_text(lowered(text, found), encoding="utf-8")
    return 1 if texts else 0


if __name__ == "__main__":
    sys.exit(main())
