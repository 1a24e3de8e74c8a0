from dataclasses import replace
from pathlib import Path

from shardwise_jobs.restarts import AttemptEnding, _history_file, decide, history, record

CRASH = AttemptEnding(
    how="failed", job="7", requeues=0, nodes=2, began=100.0, seconds=60.0, until_joined=1.0, until_training=10.0,
    after_last_step=2.0, first_step=0, step=5, checkpoint=0, rank=3, exit_code=1,
    text="rank 3 was killed (SIGKILL; usually out of memory)\nrank 1 waited for x of micro-batch 3",
)  # fmt: skip


def crash(step: int, checkpoint: int = 0, text: str = CRASH.text, rank: int = 3) -> AttemptEnding:
    return replace(CRASH, step=step, checkpoint=checkpoint, text=text, rank=rank)


def test_a_crash_is_counted_until_a_newer_state() -> None:
    assert decide([crash(5)], 2).why == "restart 1 of 2 (launch.max_restarts)"
    assert decide([crash(5), crash(6)], 2).starts_again
    refused = decide([crash(5), crash(6), crash(7)], 2)
    assert not refused.starts_again
    assert refused.why.endswith("3 restarts without a checkpoint exceed launch.max_restarts (2)")
    assert decide([crash(5), crash(6), crash(17, checkpoint=10)], 2).why.startswith("restart 1 of 2")
    assert not decide([crash(5)], 0).starts_again
    continued = [replace(crash(step), first_step=step - 2) for step in (5, 7, 9)]
    assert decide(continued, 1).why == "restart 1 of 1 (launch.max_restarts)"
    starts_again = decide([replace(ending, first_step=3) for ending in continued], 1)
    assert starts_again.why.endswith("3 restarts since the state of step 3 was kept exceed launch.max_restarts (1)")


def test_what_slurm_ends_is_not_counted() -> None:
    for how in ("preempted", "ended by SLURM"):
        assert decide([replace(CRASH, how=how)] * 50, 0).starts_again, how
    for how in ("time limit", "lost node"):
        assert decide([replace(CRASH, how=how)], 1).starts_again, how
        assert not decide([replace(CRASH, how=how)] * 2, 1).starts_again, f"{how} is counted: it may come for ever"


def test_what_another_start_would_meet_again_is_not_started() -> None:
    for ending, why in (
        (replace(CRASH, exit_code=2, text="data.path (x) must be there"), "its input must be corrected first"),
        (crash(5, text="step 6: the loss (nan) and the gradient norm (1) must be finite"), "the same loss"),
    ):
        decision = decide([ending], 100)
        assert not decision.starts_again
        assert why in decision.why


def test_the_same_failure_twice_at_the_same_step_ends_the_job() -> None:
    other_process = CRASH.text.replace("b.log", "c.log").replace("rank 1", "rank 0")
    assert not decide([crash(5), crash(5, text=other_process)], 100).starts_again
    for other in (crash(6), crash(5, rank=2), crash(5, text="rank 3 failed: RuntimeError: no such kernel")):
        assert decide([crash(5), other], 100).starts_again, other
    between = replace(CRASH, how="preempted", text="", rank=None)
    assert not decide([crash(5), between, crash(5)], 100).starts_again, "a preemption between the two does not matter"


def test_the_history_outlives_a_line_that_was_cut_short(tmp_path: Path) -> None:
    assert history(tmp_path) == []
    record(tmp_path, crash(5))
    with _history_file(tmp_path).open("a") as file:
        file.write('{"how": "fai\n')
    record(tmp_path, crash(6))
    assert history(tmp_path) == [crash(5), crash(6)]
