"""Write what the tutorials show of a command's output: each `text` block is what the `sh` block before it prints.

tests/e2e/test_pages.py fails when a page is not current.

    python -m scripts.tutorial_outputs
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.tutorial_common import PAGES

BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```\n", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"(^```sh\n(?P<command>(?:(?!^```).)*?)^```\n\n```text\n)(?:.*?)(^```\n)", re.MULTILINE | re.DOTALL)


def bash(command: str, at: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a block as a user's shell would, but stop at the first command that fails."""
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=at,
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )


def main() -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory() as folder:

        def filled(found: re.Match[str]) -> str:
            done = bash(found["command"], Path(folder), environment)
            if done.returncode:
                sys.exit(f"{found['command']}\n{done.stdout}{done.stderr}")
            return f"{found[1]}{done.stdout}{found[3]}"

        for page in sorted(PAGES.glob("*.md")):
            text = page.read_text(encoding="utf-8")
            page.write_text(SHOWN.sub(filled, text), encoding="utf-8")


if __name__ == "__main__":
    main()
