from dataclasses import replace

from shardwise_jobs.jobs import goodput
from tests.unit.jobs.test_restarts import CRASH


def test_the_parts_of_a_job_are_its_whole_time() -> None:
    """40 steps of which 10 are lost, which is noticed after 5 s; a start that fails; 30 more steps."""
    first = replace(
        CRASH, seconds=55.0, until_joined=2.0, until_training=10.0, after_last_step=5.0, first_step=0, step=40
    )
    nothing = replace(CRASH, seconds=5.0, until_joined=None, until_training=None, after_last_step=5.0, first_step=None)
    last = replace(
        CRASH, how="finished", seconds=40.0, until_joined=1.0, until_training=10.0, after_last_step=0.2, first_step=30
    )
    told = dict(goodput([first, nothing, replace(last, step=60)], loading=3.0))
    assert told["goodput"] == "60.0 % of 100 s in 3 starts"
    assert told["  lost steps"].startswith("10 s: 10 steps")
    assert told["  detection"].startswith("5 s ")
    assert told["  restart"].startswith("8 s ")
    assert told["  load"].startswith("3.0 s ")
    assert told["  first step"].startswith("14 s ")


def test_a_job_without_a_start_has_none() -> None:
    assert goodput([]) == []
