"""A real SLURM whose nodes are all this machine: its daemons on the loopback interface, without systemd or cgroups."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "srun")
_CONFIGURATION = Path(__file__).with_name("slurm.conf").read_text(encoding="utf-8")


def lacking() -> str | None:
    """Why SLURM cannot be started here; None: it can."""
    os.environ["PATH"] += ":/usr/sbin"  # where Debian has daemons, which a user's path may lack
    missing = [name for name in DAEMONS if shutil.which(name) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} (Debian: apt-get install slurm-wlm munge)"
    return None if os.getuid() == 0 else "its daemons need root"


@dataclass(frozen=True)
class Slurm:
    """A running cluster; `variables` is what its commands need.

    Attributes:
        nodes: the daemon of each node, by its name.
    """

    folder: Path
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def command(self, *arguments: str) -> str:
        """The output of one of SLURM's commands."""
        environment = {**os.environ, **self.variables}
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self.nodes[name] = _started(["slurmd", "-D", "-N", name], self)

    def fail_node(self, name: str) -> None:
        """Kill a node as a crash would: its daemon first, so that nobody reports how its processes ended."""
        self.nodes[name].kill()
        self.nodes[name].wait()
        steps, tasks = set[int](), list[int]()
        here = {f"SLURMD_NODENAME={name}".encode(), f"SLURM_CONF={self.folder}/slurm.conf".encode()}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if here <= {*(folder / "environ").read_bytes().split(b"\0")}:
                    tasks.append(int(folder.name))
                    parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                    if (Path("/proc") / str(parent) / "comm").read_text().strip() == "slurmstepd":
                        steps.add(parent)
        for process in (*steps, *tasks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@contextmanager
def running(folder: Path, nodes: int) -> Iterator[Slurm]:
    """A cluster of `nodes` nodes, whose daemons are this process's children and end with it or with the block."""
    cluster, first = Slurm(folder), _free_ports(nodes + 1)
    for name in ("state", *(f"spool.n{number + 1}" for number in range(nodes))):
        (folder / name).mkdir()
    folder.chmod(0o755)  # munge wants to know that nobody else can write to where its socket is
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(folder=folder, nodes=nodes, port=first, first=first + 1, last=first + nodes)
    )
    munged = ["munged", "--force", "--foreground", f"--key-file={key}", f"--socket={folder}/munge.sock"]
    munged += [f"--{what}-file={folder}/munge.{what}" for what in ("pid", "log", "seed")]
    daemons = list[subprocess.Popen[bytes]]()
    try:
        daemons += [_started(command, cluster) for command in (munged, ["slurmctld", "-D", "-i"])]
        for number in range(nodes):
            cluster.start_node(f"n{number + 1}")
        _await_nodes(cluster, nodes)
        yield cluster
    finally:
        for name in cluster.nodes:  # with jobs that a failed test has left
            cluster.fail_node(name)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _started(command: list[str], cluster: Slurm) -> subprocess.Popen[bytes]:
    environment, quiet = {**os.environ, **cluster.variables}, subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet, stdin=quiet)


def _await_nodes(cluster: Slurm, nodes: int) -> None:
    deadline, said = time.monotonic() + 60, ""
    while time.monotonic() < deadline:
        command = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
        environment = {**os.environ, **cluster.variables}
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
        if len(said.split()) == nodes:
            return
        time.sleep(0.2)
    logs = "\n".join(path.read_text()[-2000:] for path in cluster.folder.glob("*.log"))
    raise AssertionError(f"of {nodes} nodes these are idle: {said!r}\n{logs}")


def _free_ports(number: int) -> int:
    """The first of so many neighbouring ports that nobody listens on."""
    for first in range(16817, 32000, number):
        with_sockets = [socket.socket() for _ in range(number)]
        try:
            for offset, one in enumerate(with_sockets):
                one.bind(("127.0.0.1", first + offset))
        except OSError:
            continue
        finally:
            for one in with_sockets:
                one.close()
        return first
    raise AssertionError("no ports are free")
