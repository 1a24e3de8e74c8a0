"""What docs/data-formats.md and docs/token-files.md show, run as a reader would run it."""

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from tests.arch.source import ROOT
from tests.e2e.command import Outcome, shardwise
from tests.e2e.test_pages import assert_shown, blocks

PAGES = ("docs/data-formats.md", "docs/token-files.md")


def run_section(heading: str, at: Path, write: Callable[[Path], None] | None = None) -> tuple[str, list[Outcome]]:
    """What the section's program printed, or `write` in its place, and its commands, all of which succeed, in `at`.

    The section is that which begins with `heading`. What is trained has two blocks, to save time. The page shows what
    the commands print.
    """
    found = [block for page in PAGES for block in blocks(page) if block.heading.startswith(heading)]
    (block,) = (block for block in found if block.test is None)
    if write is None:
        section = (ROOT / block.page).read_text(encoding="utf-8").partition(f"\n## {heading}")[2].partition("\n## ")[0]
        (program,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        (at / "write.py").write_text(program, encoding="utf-8")
        written = shardwise("write.py", at=at, program=(sys.executable,)).succeeded().out
    else:
        written = ""
        write(at)
    done = []
    for line in block.code.replace("\\\n", "").splitlines():
        small = ["model.num_hidden_layers=2"] if line.startswith("shardwise train ") else []
        done.append(shardwise(*shlex.split(line)[1:], *small, at=at))
        assert done[-1].code == 0, f"{line}\n{done[-1].err}"
    assert_shown(block, "".join(each.out for each in done))
    return written, done
