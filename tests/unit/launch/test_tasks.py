"""What tasks of srun and mpirun know of their job."""

import pytest

from shardwise.errors import ConfigError
from shardwise.launch import tasks
from shardwise.launch.environment import Rank, is_one_of_several_tasks, joined

SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x2),1",
    "SLURM_STEP_NODELIST": "gpu[3,7-9]",
}
MPIRUN = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(("RANK", "LOCAL_RANK", "SIZE"), "112", strict=True)}


@pytest.fixture(autouse=True)
def _known_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"gpu3": "10.0.0.3"}
    monkeypatch.setattr(tasks, "_node_address", addresses.get)
    monkeypatch.setattr(tasks, "_resolves", lambda name: name in addresses.values())


def test_a_task_of_srun_has_its_place_and_the_steps_first_host() -> None:
    variables = dict(SRUN)
    assert is_one_of_several_tasks(variables)
    tasks.adopt_task(variables)
    assert joined(variables) == Rank(rank=3, local_rank=0, world=5)
    assert (variables["LOCAL_WORLD_SIZE"], variables["MASTER_ADDR"]) == ("1", "10.0.0.3")
    assert not is_one_of_several_tasks(variables), "its children would join too"


def test_all_tasks_of_a_job_and_no_other_job_meet_at_a_port() -> None:
    def port(**changed: str) -> int:
        variables = {**SRUN, **changed}
        tasks.adopt_task(variables)
        return int(variables["MASTER_PORT"])

    assert port(SLURM_PROCID="0") == port()
    others = [port(SLURM_JOB_ID="8"), port(SLURM_STEP_ID="1"), port(SLURM_RESTART_COUNT="1")]
    assert len({port(), *others}) == 4
    assert all(15000 <= each < 32000 for each in (port(), *others))
    assert port(MASTER_PORT="77", MASTER_ADDR="there") == 77


def test_on_one_node_the_tasks_meet_on_the_loopback_interface() -> None:
    variables = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"}
    tasks.adopt_task(variables)
    assert variables["MASTER_ADDR"] == "127.0.0.1"


def test_a_host_that_cannot_be_known_is_refused_and_never_guessed() -> None:
    variables = {**SRUN, "SLURM_STEP_NODELIST": "cpu[1-4]"}
    with pytest.raises(ConfigError, match=r"MASTER_ADDR must be set .* its name \(cpu1\) does not resolve"):
        tasks.adopt_task(variables)
    assert joined(variables) == Rank(rank=3, local_rank=0, world=5), "all tasks would tell it at once"
    with pytest.raises(ConfigError, match="mpirun -x MASTER_ADDR="):
        tasks.adopt_task({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


def test_processes_of_mpirun_on_one_machine() -> None:
    variables = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "1234"}
    tasks.adopt_task(variables)
    assert joined(variables) == Rank(rank=1, local_rank=1, world=2)
    assert variables["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize("kept", [{"RANK": "0"}, {"WORLD_SIZE": "4"}, {"SLURM_STEP_NUM_TASKS": "1"}])
def test_who_is_placed_already_or_alone_stays_so(kept: dict[str, str]) -> None:
    variables = {**SRUN, **kept}
    tasks.adopt_task(variables)
    assert variables == {**SRUN, **kept}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("gpu[003,7-9],cpu4", "gpu003"),
        ("rack[1-2]node[04-08]-ib", "rack1node04-ib"),
        ("a,b[1-2]", "a"),
    ],
)
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert tasks.first_name(nodes) == first


def test_the_tasks_of_each_node() -> None:
    assert tasks.tasks_of_nodes("2(x3),1") == [2, 2, 2, 1]
