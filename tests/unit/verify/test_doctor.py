"""`shardwise doctor`: what each check says of a machine that is well, and of one that is not."""

import json
import socket
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest

from shardwise.base.errors import RunError
from shardwise.cli import main
from shardwise.verify import collective_check as ranks
from shardwise.verify import machine_checks
from shardwise.verify.machine_checks import Check, check_software

REQUIRES = ["torch>=2.11", "numpy>=1.26", 'h5py>=3.11; extra == "hdf5"', 'pytest; extra == "dev"']
REQUIRES += ['protobuf>=4.25; extra == "pieces"', 'sentencepiece>=0.2; extra == "pieces"']
VERSIONS = {"torch": "2.13.0+cpu", "numpy": "2.4.6", "h5py": "3.16.0"}


def versions(**changed: str | None) -> dict[tuple[str, str], str]:
    """The checks of software by name and status, where these versions are installed."""
    installed = {name: version for name, version in {**VERSIONS, **changed}.items() if version is not None}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    return {
        (check.name, check.status): f"{check.found} {check.mend}"
        for check in check_software(lambda _: REQUIRES, version)
    }


def test_software_and_a_collective_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    found = versions()
    assert {status for _, status in found} == {"ok"}
    assert "torch 2.13.0+cpu" in found["torch", "ok"]
    assert "numpy 2.4.6" in found["packages", "ok"]
    assert "h5py 3.16.0" in found["[hdf5]", "ok"]
    assert not any(name == "[dev]" for name, _ in found)
    found = versions(torch="2.4.0", numpy=None, h5py="3.1.0")
    assert found["torch", "wrong"].startswith("torch (2.4.0) must be >=2.11 install a torch")
    assert found["packages", "wrong"] == "numpy (not installed) must be >=1.26 pip install 'numpy>=1.26'"
    assert found["[hdf5]", "warning"] == "h5py (3.1.0) must be >=3.11 pip install 'h5py>=3.11'"
    assert "pip install 'shardwise[hdf5]'" in versions(h5py=None)["[hdf5]", "ok"]

    def launch(command: list[str], _nproc: int, folder: Path) -> None:
        raise RunError(f"rank 1 failed: RuntimeError: connection refused\ntraceback: {folder}/logs/rank-0001.log")

    monkeypatch.setattr("shardwise.verify.rank_calls.launch", launch)
    found = ranks.check_collective()
    assert found.status == "wrong"
    assert found.found.startswith("rank 1 failed: RuntimeError: connection refused\ntraceback: ")
    assert "name the interface by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, or let the firewall" in found.mend


@pytest.mark.parametrize(
    ("value", "cpus", "limit", "status", "text"),
    [
        (None, 8, None, "ok", "8 CPUs; the ranks share them"),
        ("4", 8, None, "ok", "OMP_NUM_THREADS 4"),
        ("4", 8, 2.0, "warning", "OMP_NUM_THREADS (4) must be at most the CPUs (2)"),
        (None, 8, 2.0, "warning", "8 CPUs, limited to 2 by cgroup: each rank would start a thread on every CPU"),
        ("many", 8, None, "warning", "OMP_NUM_THREADS ('many') must be a whole number above 0"),
    ],
)
def test_threads(value: str | None, cpus: int, limit: float | None, status: str, text: str) -> None:
    found = machine_checks._check_threads({} if value is None else {"OMP_NUM_THREADS": value}, cpus, limit)
    assert (found.status, text in found.found) == (status, True), found
    assert bool(found.mend) == (status != "ok")


def test_places_launchers_and_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = machine_checks._check_folder("run folder", tmp_path / "runs" / "new")
    assert found.status == "ok"
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(machine_checks, "free_bytes", lambda _: 2**20)
    (found,) = machine_checks._check_folder("run folder", tmp_path)
    assert (found.status, found.mend.startswith("make room")) == ("warning", True)
    (tmp_path / "file").touch()
    (found,) = machine_checks._check_folder("cache", tmp_path / "file")
    assert (found.status, found.found) == ("wrong", f"{tmp_path / 'file'} cannot be written: Not a directory")
    assert found.mend.endswith("SHARDWISE_CACHE")
    assert machine_checks._check_launcher({}).status == "ok"
    assert machine_checks._check_launcher({"WORLD_SIZE": "2"}).status == "wrong"
    whole = {f"OMPI_COMM_WORLD_{name}": number for name, number in zip(("RANK", "SIZE"), "02", strict=True)}
    assert machine_checks._check_launcher(whole).status == "wrong"
    whole |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert "several tasks of srun or mpirun" in machine_checks._check_launcher(whole).found
    assert machine_checks._check_memory(2**20).status == "warning"
    for number, state in ((1, "4: ACTIVE"), (2, "1: DOWN")):
        port = tmp_path / "infiniband/mlx5_0" / "ports" / str(number)
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")

    def lost(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", lost)
    found = list(
        machine_checks._check_network(
            {"NCCL_SOCKET_IFNAME": "nowhere0", "GLOO_SOCKET_IFNAME": "^docker"}, tmp_path / "infiniband"
        )
    )
    texts = {check.status: check.found for check in found if check.name == "network"}
    assert texts["wrong"] == "NCCL_SOCKET_IFNAME (nowhere0) must name an interface that is up"
    assert "leads nowhere: Name or service not known" in texts["warning"]
    assert {check.found: check.status for check in found if check.name == "RDMA"} == {
        "mlx5_0 port 1 is active": "ok",
        "mlx5_0 port 2 (1: DOWN) must be active": "warning",
    }


@pytest.mark.slow
def test_two_ranks_sum_a_tensor() -> None:
    with ranks.prepared_check():
        found = ranks.check_collective()
    assert found.status == "ok", found
    assert found.found.startswith("2 ranks on ")


@pytest.fixture
def some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where one thing is wrong, with secrets."""
    monkeypatch.chdir(tmp_path)
    secrets = {"NCCL_API_KEY": "hidden-key", "HF_ENDPOINT": "https://user:hidden-password@hub.example"}
    for name, value in {"HOME": str(tmp_path), "NCCL_DEBUG": "INFO", **secrets}.items():
        monkeypatch.setenv(name, value)
    found = f"{tmp_path}/cache of https://u:hidden-word@host cannot be written"
    bad = Check("cache", "wrong", found, "make it writable")
    monkeypatch.setattr(machine_checks, "check_software", lambda: iter([Check("torch", "ok", "2.13.0")]))
    monkeypatch.setattr(machine_checks, "check_machine", lambda _: iter([bad]))
    monkeypatch.setattr(ranks, "prepared_check", nullcontext)
    monkeypatch.setattr(ranks, "check_collective", lambda: Check("collective", "ok", "2 ranks"))


@pytest.mark.usefixtures("some")
def test_what_is_printed_says_how_to_mend_and_has_no_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "WRONG    cache       ~/cache of https://(redacted)@host cannot be written\n" in out
    assert "→ make it writable" in out
    assert "NCCL_DEBUG=INFO" in out
    assert "2 ok, 0 warning, 1 wrong" in out
    assert "hidden" not in out
    assert str(Path.home()) not in out
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["counts"] == {"ok": 2, "warning": 0, "wrong": 1}
    assert told["variables"]["NCCL_DEBUG"] == "INFO"
