"""`make test-device`: run the tests of devices on this machine's accelerator, and record a pass for docs/devices.md.

DEVICE=strict runs them on the strict device (tests/strict), DEVICE=neuron-like where it behaves as TorchNeuron's source
says, DEVICE=cpu on CPU ranks.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from scripts.write_docs import DEVICES, RESULTS, devices_page
from shardwise.base.errors import ConfigError
from shardwise.distributed import devices

ROOT = Path(__file__).resolve().parents[1]
TESTS_OF_RANKS = (
    "tests/dist/test_bits.py",
    "tests/dist/test_cells.py",
    "tests/dist/test_checkpoint.py::test_reshard",
    "tests/dist/test_checkpoint.py::test_resuming_a_layout_is_exact",
    "tests/dist/test_checkpoint.py::test_reshard_over_pipelines",
    "tests/dist/test_checkpoint.py::test_other_precision_and_bucket_size",
)
TESTS_OF_COMMANDS = ("tests/e2e/test_device.py",)
"""Those that train on the device. All others compare small parts of the code, on the CPU alone."""
NAMES = {"cpu": "CPU", "strict": "strict device", "neuron-like": "strict device, as TorchNeuron's source says"}
LARGEST_POOL = 4
"""Ranks of the largest tests: on a machine with fewer accelerators, all ranks share one (tests/shared_device)."""


def tested_device(asked: str) -> tuple[str, str]:
    """The type of the device to test, and what the table calls it.

    Raises:
        ConfigError: there is no such device, or torch cannot use it.
    """
    if asked in NAMES:
        return asked, NAMES[asked]
    device = devices.local_device()
    if device.type == "cpu" or asked not in ("", device.type):
        raise ConfigError(
            f"make test-device{asked and f' DEVICE={asked}'} must find {asked or 'an accelerator'} that torch "
            f"{torch.__version__} can use, and finds {device.type} alone: DEVICE=strict tests on the strict device, "
            "DEVICE=cpu on CPU ranks"
        )
    return device.type, f"{torch.accelerator.device_count()} × {devices.name(device)}"


def record(kind: str, name: str, counts: Mapping[str, int], commit: str) -> dict[str, Any]:
    """A row of the page's table."""
    return {
        "type": kind,
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "passed": counts["tests"] - counts["skipped"],
        **({"refused": counts["refused"]} if counts.get("refused") else {}),
        "skipped": counts["skipped"],
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit,
    }


def keep(row: dict[str, Any]) -> None:
    """Add the row to the results, in place of an older one of this device and torch, and renew the page."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    rows = [old for old in rows if (old["device"], old["torch"]) != (row["device"], row["torch"])]
    RESULTS.write_text(json.dumps([*rows, row], indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    DEVICES.write_text(devices_page(), encoding="utf-8")


def main(arguments: list[str]) -> int:
    try:
        kind, name = tested_device(os.environ.get("DEVICE", ""))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    git = ("git", "describe", "--always", "--dirty", "--exclude", "*")
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    runs = [(kind, (*TESTS_OF_RANKS, *TESTS_OF_COMMANDS))]
    if kind not in NAMES and torch.accelerator.device_count() < LARGEST_POOL:
        runs = [("shared", TESTS_OF_RANKS), (kind, TESTS_OF_COMMANDS)]
        name += ", shared by all ranks"
    counts: Counter[str] = Counter()
    for option, tests in runs:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            command = [sys.executable, "-m", "pytest", "--device", option, f"--junitxml={report}", *tests, *arguments]
            if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
                return code
            (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
        counts.update({count: int(suite.attrib[count]) for count in ("tests", "skipped")})
        counts["refused"] += len(suite.findall(".//property[@name='refused']"))
    row = record(kind, name, counts, commit)
    if arguments:
        print("not recorded: ARGS may have left tests out")
    elif row["passed"]:
        keep(row)
        print(f"recorded in {RESULTS.relative_to(ROOT)} and {DEVICES.relative_to(ROOT)}: please share them")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
