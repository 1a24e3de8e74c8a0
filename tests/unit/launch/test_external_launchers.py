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

SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2,1(x2),1", "SLURM_STEP_NODELIST": "gpu[3,7-9]",
}  # fmt: skip
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


def test_tasks_of_srun_have_their_places_hosts_and_ports() -> None:
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


def test_an_address_or_a_port_that_cannot_be_known_is_asked_for() -> None:
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


@pytest.mark.parametrize("cause", [{"SLURM_DISTRIBUTION": "arbitrary"}, {"SLURM_HET_SIZE": "2"}])
def test_where_rank_0_need_not_be_on_the_first_node_its_address_is_asked_for(cause: dict[str, str]) -> None:
    """SLURM sorts the list of nodes; a file of hosts and the parts of a heterogeneous job have their own order."""
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


MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "a"}
MPICH["MASTER_PORT"] = "15000"
JOB = {**dict(list(SRUN.items())[2:5]), "SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2,1(x2),1"}
JOB["SLURM_JOB_NODELIST"] = SRUN["SLURM_STEP_NODELIST"]


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (MPICH, (1, 1, 4)),
        ({**MPICH, **SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, (1, 1, 4)),
        ({"PMI_RANK": "3", "PMI_SIZE": "5", "PMIX_RANK": "3", **SRUN}, (3, 0, 5)),
        ({f"MV2_{name.removeprefix('OMPI_')}": value for name, value in MPIRUN.items()}
         | {"MV2_COMM_WORLD_LOCAL_SIZE": "2"}, (1, 1, 2)),
        (JOB, (3, 0, 5)),
    ],
    ids=["mpich", "mpich-inside-srun", "pmi-of-srun", "mvapich2", "srun-without-its-step"],
)  # fmt: skip
def test_fault_14_a_task_of_each_launcher_joins(variables: dict[str, str], place: tuple[int, int, int]) -> None:
    assert joined(adopted(**variables)) == Rank(*place)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "MPI_LOCALRANKID and MPI_LOCALNRANKS must be set beside PMI_RANK (1) and"),
        ({"PMIX_RANK": "1"}, "the number of ranks must be set beside PMIX_RANK (1)"),
        ({"SLURM_PROCID": "1"}, "SLURM_LOCALID, SLURM_NTASKS and SLURM_NODEID must be set beside SLURM_PROCID (1)"),
        ({**JOB, "ENVIRONMENT": "BATCH"}, "SLURM_STEP_NUM_TASKS must be set beside SLURM_PROCID (3)"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": ""}, "SLURM_STEP_NUM_TASKS ('') must be a whole number, as srun does"),
        (
            {**SRUN, "SLURM_PROCID": "5"},
            "the variables of srun must agree, and say that this is rank 5 of 5, and on its",
        ),
        (
            {**SRUN, "SLURM_NODEID": "4"},
            "SLURM_STEP_TASKS_PER_NODE (2,1(x2),1) must be 5 tasks in all (SLURM_STEP_NUM_TASKS), and some on node 4 "
            "(SLURM_NODEID), as srun sets it, or set RANK",
        ),
    ],
)
def test_fault_14_a_task_that_cannot_know_its_place_is_told_what_to_set(variables: dict[str, str], told: str) -> None:
    own = dict(variables)
    with pytest.raises(ConfigError) as caught:
        external_launchers.adopt_task(own)
    assert str(caught.value).startswith(told)
    assert "or set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does" in str(caught.value)
    assert joined(own) is not None, "all tasks would tell it at once"
    external_launchers.end_step(Failure(0, "", 2), {**variables, "SLURM_JOB_ID": ""})


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "ENVIRONMENT": "BATCH"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1", "PMIX_RANK": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
        {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"},
        *({**SRUN, **placed} for placed in ({"RANK": "0"}, {"WORLD_SIZE": "4"}, {"WORLD_SIZE": "1"})),
    ],
    ids=["script-of-a-job", "one-task", "mpiexec", "flux", "with-a-rank", "in-a-world", "world-of-one"],
)
def test_fault_14_a_process_that_is_alone_or_placed_already_stays_so(variables: dict[str, str]) -> None:
    assert adopted(**variables) == variables


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
