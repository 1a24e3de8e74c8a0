"""What tasks of srun and mpirun know of their job."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.base.errors import ConfigError
from shardwise.launch import external_launchers
from shardwise.launch.environment import Rank, joined, may_be_a_task
from shardwise.launch.first_failure import Failure
from tests.rows import rows_of

ROWS = rows_of(__file__)
SRUN, MPICH = ROWS["srun"], ROWS["mpich"]
MPIRUN = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(("RANK", "LOCAL_RANK", "SIZE"), "112", strict=True)}


@pytest.fixture(autouse=True)
def _known_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"gpu3": "10.0.0.3"}
    monkeypatch.setattr(external_launchers, "_node_address", addresses.get)
    monkeypatch.setattr(external_launchers, "_resolves", lambda name: name in addresses.values())


def adopted(**variables: str) -> dict[str, str]:
    """What a task adds to these variables, which are kept."""
    external_launchers.adopt_task(variables)
    return variables


def test_tasks_of_srun_have_their_places_and_ask_for_what_cannot_be_known() -> None:
    variables = dict(SRUN)
    assert may_be_a_task(variables)
    external_launchers.adopt_task(variables)
    assert joined(variables) == Rank(rank=3, local_rank=0, world=5)
    assert (variables["LOCAL_WORLD_SIZE"], variables["MASTER_ADDR"]) == ("1", "10.0.0.3")
    assert not may_be_a_task(variables), "its children would join too"
    variables = adopted(**{**SRUN, "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"})
    assert variables["MASTER_ADDR"] == "127.0.0.1"
    for nodes, first in [("n1", "n1"), ("rack[1-2]node[04-08]-ib", "rack1node04-ib"), ("a,b[1-2]", "a")]:
        assert external_launchers.first_name(nodes) == first

    def port(**changed: str) -> int:
        return int(adopted(**{**SRUN, **changed})["MASTER_PORT"])

    assert port(SLURM_PROCID="0") == port()
    others = [port(SLURM_JOB_ID="8"), port(SLURM_STEP_ID="1"), port(SLURM_RESTART_COUNT="1")]
    assert len({port(), *others}) == 4
    assert all(15000 <= each < 32000 for each in (port(), *others))
    assert port(MASTER_PORT="77", MASTER_ADDR="there") == 77
    variables = {**SRUN, "SLURM_STEP_NODELIST": "cpu[1-4]"}
    with pytest.raises(ConfigError, match=r"MASTER_ADDR must be set .* its name \(cpu1\) does not resolve"):
        external_launchers.adopt_task(variables)
    assert joined(variables) == Rank(rank=3, local_rank=0, world=5), "all tasks would tell it at once"
    alone = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PMIX_NAMESPACE": "1234"}
    with pytest.raises(ConfigError, match=r"^MASTER_ADDR must be set .* mpirun -x MASTER_ADDR="):
        external_launchers.adopt_task(alone)
    variables = {name: value for name, value in MPICH.items() if name != "MASTER_PORT"}
    with pytest.raises(ConfigError, match=r"^MASTER_PORT must be set .* and a free port of it"):
        external_launchers.adopt_task(dict(variables))
    external_launchers.adopt_task({**variables, "I_MPI_HYDRA_UUID": "af3a"})
    del variables["MASTER_ADDR"]
    with pytest.raises(ConfigError, match=r"^MASTER_ADDR and MASTER_PORT must be set"):
        external_launchers.adopt_task(variables)
    # SLURM sorts the list of nodes; a file of hosts and the parts of a heterogeneous job have their own order.
    for cause in [{"SLURM_DISTRIBUTION": "arbitrary"}, {"SLURM_HET_SIZE": "2"}]:
        variables = {**SRUN, **cause}
        with pytest.raises(ConfigError, match=r"MASTER_ADDR must be set .* may be any of gpu\[3,7-9\]"):
            external_launchers.adopt_task(dict(variables))
        external_launchers.adopt_task({**variables, "MASTER_ADDR": "gpu9"})
        external_launchers.adopt_task({**variables, "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"})


def test_two_jobs_of_one_machine_have_ports_of_their_own_where_mpiexec_names_no_job() -> None:
    """The tasks of a job share mpiexec, whatever scripts stand between, and no number that it passes on."""
    code = (
        "from shardwise.launch.external_launchers import *; adopt_task(v := dict(os.environ)); print(v['MASTER_PORT'])"
    )
    mpiexec = ["sh", "-c", """for MPI_LOCALRANKID in 0 1; do
        export MPI_LOCALRANKID; PMI_RANK=$MPI_LOCALRANKID sh -c '"$@"; exit $?' - "$@"; done""", "-"]  # fmt: skip
    variables = {"PATH": os.environ["PATH"], "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    jobs = [
        subprocess.Popen([*mpiexec, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=variables)
        for _ in range(2)
    ]
    ports = [job.communicate()[0].split() for job in jobs]
    assert all(first == second for first, second in ports)
    assert ports[0] != ports[1]


@pytest.mark.parametrize("case", ROWS["joins"])
def test_fault_14_a_task_of_each_launcher_joins(case: str) -> None:
    variables, place = ROWS["joins"][case]
    assert joined(adopted(**variables)) == Rank(*place)


@pytest.mark.parametrize(("variables", "told"), ROWS["lacks"])
def test_fault_14_a_task_that_cannot_know_its_place_is_told_what_to_set(variables: dict[str, str], told: str) -> None:
    own = dict(variables)
    with pytest.raises(ConfigError) as caught:
        external_launchers.adopt_task(own)
    assert str(caught.value).startswith(told)
    assert "or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does" in str(caught.value)
    assert joined(own) is not None, "all tasks would tell it at once"
    external_launchers.end_step(Failure(0, "", 2), {**variables, "SLURM_JOB_ID": ""})


@pytest.mark.parametrize("case", ROWS["alone"])
def test_fault_14_a_process_that_is_alone_or_placed_already_stays_so(case: str) -> None:
    assert adopted(**ROWS["alone"][case]) == ROWS["alone"][case]


@pytest.mark.parametrize(("further", "ended"), [({}, 1), ({"TORCHELASTIC_RUN_ID": "7"}, 0)])
def test_fault_19_a_rank_does_not_end_all(further: dict[str, str], ended: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the launcher of a submitted job is killed before it can tell why the rank failed."""
    started: list[list[str]] = []
    monkeypatch.setattr(external_launchers.shutil, "which", lambda name: name)
    monkeypatch.setattr(external_launchers.subprocess, "Popen", lambda command, **_: started.append(command))
    external_launchers.end_step(Failure(0, "", 1), {**SRUN, **further})
    assert len(started) == ended


def test_a_task_of_mpich_asks_for_the_end_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mpiexec waits for them otherwise, and each of them tells the same wrong input."""
    monkeypatch.setattr(external_launchers, "_TIME_TO_TELL", 0.0)
    started, real = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *parts, **further: started.append(real(*parts, **further)))
    own, mpiexec = socket.socketpair()
    with own, mpiexec, Path(os.devnull).open("rb") as other:
        for variables in ({"PMI_RANK": "0"}, {"PMI_FD": str(own.fileno())}, {"PMI_RANK": "0", "PMI_FD": "99999"}):
            external_launchers.end_step(Failure(0, "", 1), variables)
        external_launchers.end_step(Failure(0, "", 1), {"PMI_RANK": "0", "PMI_FD": str(other.fileno())})
        external_launchers.end_step(Failure(0, "", 2), {"PMI_RANK": "0", "PMI_FD": str(own.fileno())})
        (request,) = started
        assert request.wait() == 0
        assert mpiexec.recv(64) == b"cmd=abort exitcode=2\n"
