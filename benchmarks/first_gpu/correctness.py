"""Do the tests of devices pass on this one? Each file is an answer; one GPU is shared by all ranks of a test."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from first_gpu.session import Figures, Session

TITLE = "Tests"
NOTE = "Tests of the device with commands of their own, and tests of ranks, which share one GPU and talk by gloo."
COLUMNS = "tests passed failed skipped first_failure"
ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("tests/e2e/test_device.py",)
RANKS = (
    "tests/dist/test_precision.py",
    "tests/dist/test_cells.py",
    "tests/dist/test_experts.py",
    "tests/dist/test_bits.py",
    "tests/dist/test_families.py",
    "tests/dist/test_families.py",
)
"""What has run on no GPU yet comes first."""


def run(session: Session) -> None:
    kind = session.device.type
    files = [(file, kind) for file in COMMANDS]
    files += [(file, "shared" if kind == "cuda" else kind) for file in RANKS]
    for file, option in session.few(files, 1):
        session.measure({"tests": file}, lambda file=file, option=option: _tests(file, option, session.is_tiny))


def _tests(file: str, option: str, is_tiny: bool) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "--device", option]
        command += [f"--junitxml={report}", file, *(["-k", "resumes_on_the_accelerator"] if is_tiny else [])]
        # The device in software is found by the tests themselves.
        inherited = "" if option == "strict" else os.environ.get("PYTHONPATH", "")
        paths = os.pathsep.join([str(ROOT / "src"), inherited])
        environment = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if not report.exists():
            raise RuntimeError(
                (done.stderr or done.stdout).strip().rpartition("\n")[2] or f"exit code {done.returncode}"
            )
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    if suite.attrib["tests"] == "0":
        raise RuntimeError(f"no test ran: {done.stdout.strip().rpartition(chr(10))[2]}")
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    broken = next((case.attrib["name"] for case in suite.iter("testcase") if case.find("failure") is not None), None)
    return {
        "passed": counts["tests"] - failed - counts["skipped"],
        "failed": failed,
        "skipped": counts["skipped"],
        "first_failure": broken,
    }
