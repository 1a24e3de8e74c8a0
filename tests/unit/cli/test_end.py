"""The end of a process that is a command: as Python's own, but torch's modules are not taken apart."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys, threading, time, types
from shardwise.cli import main

class Kept:
    def __del__(self):
        print("taken apart")

def work():
    time.sleep(0.1)
    print("thread")

if sys.argv.pop(1) == "torch":
    sys.modules["torch"] = types.ModuleType("torch")
sys.modules["kept"] = Kept()
atexit.register(print, "handler")
threading.Thread(target=work).start()
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("command", "code", "torch", "last"), [("--version", 0, "torch", []), ("no-command", 2, "none", ["taken apart"])]
)
def test_threads_and_handlers_end_before_the_process(command: str, code: int, torch: str, last: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, torch, command], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-2 - len(last) :] == ["thread", "handler", *last]
