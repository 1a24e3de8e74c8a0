"""The processes of a job that a test started, and only those."""

import time
from collections.abc import Callable
from pathlib import Path


def alive(pid: int) -> bool:
    stat = _stat(pid)
    return stat is not None and stat[0] != "Z"


def descendants(pid: int) -> list[int]:
    """Children of a process that lives, and theirs."""
    parents = {int(path.name): _stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdecimal()}
    found, new = [], [pid]
    while new:
        new = [child for child, stat in parents.items() if stat is not None and int(stat[1]) in new]
        found += new
    return found


def ranks(pid: int) -> dict[int, int]:
    """Rank → process, of the job that the launcher `pid` started."""
    found = {}
    for child in descendants(pid):
        try:
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            name = Path(f"/proc/{child}/comm").read_text()
        except OSError:
            continue
        numbers = [int(variable[5:]) for variable in variables if variable.startswith(b"RANK=")]
        numbers += [int(name[5:])] if name.startswith("rank ") else []  # as `warm` calls it
        if numbers:
            found[numbers[0]] = child
    return found


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def _stat(pid: int) -> list[str] | None:
    """State, parent, …: the fields of /proc/PID/stat after the command's name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
