"""What docs/data.md, docs/data-formats.md and docs/token-files.md show, run as a reader would run it."""

import re
import shlex
import sys
from pathlib import Path

from tests.arch.source import ROOT
from tests.e2e.command import Outcome, shardwise


def run_section(heading: str, at: Path) -> tuple[Outcome, list[Outcome]]:
    """The program of the section that begins with `heading`, then its commands, all of which succeed, in `at`.

    What is trained has two blocks, to save time.
    """
    pages = [
        (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("data.md", "data-formats.md", "token-files.md")
    ]
    section = "\n".join(pages).partition(f"\n## {heading}")[2].partition("\n## ")[0]
    (program,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    (commands,) = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    (at / "write.py").write_text(program, encoding="utf-8")
    written = shardwise("write.py", at=at, program=(sys.executable,))
    assert (written.code, written.err) == (0, ""), written.err
    done = []
    for line in commands.splitlines():
        small = ["model.num_hidden_layers=2"] if line.startswith("shardwise train ") else []
        done.append(shardwise(*shlex.split(line)[1:], *small, at=at))
        assert done[-1].code == 0, f"{line}\n{done[-1].err}"
    return written, done
