import pytest

from shardwise.cluster import slurm
from shardwise.cluster.slurm import allocation, gpus_of, own_words
from shardwise.errors import ConfigError


@pytest.mark.parametrize(
    ("resources", "gpus"),
    [
        ("gpu:8", 8),
        ("gpu:h100:8", 8),
        ("gpu", 1),
        ("gpu:h100:4(S:0-1),gpu:a100:2", 6),
        ("shard:8,gpu:2(IDX:0,1)", 2),
        ("(null)", 0),
        ("nic:2", 0),
    ],
)
def test_gpus_of_a_machine(resources: str, gpus: int) -> None:
    assert gpus_of(resources) == gpus


def test_an_error_is_told_in_slurms_words_in_one_line() -> None:
    said = "sbatch: error: invalid partition specified: none\nsbatch: error: Batch job submission failed: Invalid qos\n"
    assert own_words(said) == "invalid partition specified: none; Batch job submission failed: Invalid qos"
    assert own_words("") == "it gives no reason"


def test_jobs_are_read_with_commas_and_bars_in_their_comments() -> None:
    line = "7|PENDING|Resources|2||0:00|1-00:00:00|gpu|N/A|2026-11-23T16:00:00|shardwise:/runs/a|b, c"
    job = slurm._job(line)
    assert (job.id, job.state, job.reason, job.nodes, job.starts) == ("7", "PENDING", "Resources", 2, "")
    assert job.run == "/runs/a|b, c"
    assert slurm._job(line.replace("shardwise:", "my ")).run is None


def test_an_allocation_is_read_from_the_environment() -> None:
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[2-4]"}
    here = allocation({**variables, "SLURM_RESTART_COUNT": "2", "SLURM_JOB_END_TIME": "1000"})
    assert (here.job, here.requeues, here.nodes, here.first, here.ends) == ("7", 2, 3, "n2", 1000.0)
    assert allocation(variables).requeues == 0
    with pytest.raises(ConfigError, match="SLURM_JOB_ID must be set"):
        allocation({})
