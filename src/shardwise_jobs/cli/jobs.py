"""List submitted jobs, show what a job did, or print its log.

`shardwise jobs` lists SLURM jobs that wait or run, and jobs of the runs in this folder that have ended. `jobs show ID`
shows the starts of a job and where its time went; `jobs log ID` prints its log.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from dataclasses import asdict
from pathlib import Path

from shardwise.base.errors import ConfigError, RunError, listing
from shardwise.cli import output
from shardwise.runs.events import recorded_ending, seconds_of
from shardwise.runs.folder import RUNS, RunDirectory
from shardwise_jobs import jobs, slurm_commands
from shardwise_jobs.restarts import AttemptEnding, history
from shardwise_jobs.script import job_log
from shardwise_watch.run import open_run

_HEAD = ("job", "state", "step", "s/step", "loss", "elapsed", "nodes", "run")


def configure(parser: argparse.ArgumentParser) -> None:
    action_help = "show the starts of job ID, or print its log"
    parser.add_argument("action", metavar="show|log", nargs="?", choices=["show", "log"], help=action_help)
    parser.add_argument("id", metavar="ID", nargs="?", help="a job's number")
    parser.add_argument("--follow", action="store_true", help="continue to print the log until the job ends")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(arguments: argparse.Namespace) -> int:
    slurm_commands.require()
    if (arguments.action is None) != (arguments.id is None):
        raise ConfigError(f"shardwise jobs {arguments.action} needs the number of a job: shardwise jobs lists them")
    states = jobs.job_states(RUNS)
    if arguments.action is None:
        _list(states, as_json=arguments.json)
        return 0
    named = [state for state in states if state.id == arguments.id]
    if not named:
        known = f"known are {listing((state.id for state in states), most=8)}" if states else "none is known here"
        raise ConfigError(f"there is no job {arguments.id} of shardwise: {known}; jobs that ended are found in {RUNS}/")
    if arguments.action == "show":
        _show(named[0])
    else:
        _log(named[0], is_followed=arguments.follow)
    return 0


def _list(states: list[jobs.JobState], *, as_json: bool) -> None:
    if as_json:
        output.json([{**asdict(state), "run": str(state.run)} for state in states])
    elif states:
        output.table([_row(state) for state in states], _HEAD, right=(2, 3, 4, 5, 6))
    else:
        output.line(f"no job waits or runs, and no run in {RUNS}/ was submitted")


def _row(state: jobs.JobState) -> tuple[str, ...]:
    current = Path.cwd().resolve()
    return (
        state.id,
        state.text,
        "" if state.step is None else f"{state.step:,}",
        "" if state.seconds is None else f"{state.seconds:.3g}",
        "" if state.loss is None else f"{state.loss:.4f}",
        "" if state.job is None else state.job.elapsed,
        "" if state.job is None else str(state.job.nodes),
        str(state.run.relative_to(current) if state.run.is_relative_to(current) else state.run),
    )


def _show(state: jobs.JobState) -> None:
    all_endings = history(state.run)
    endings = [ending for ending in all_endings if ending.job == state.id]
    rows = [("job", state.id), ("state", state.text), ("run", str(state.run))]
    if state.job is not None:
        limit = f"{state.job.elapsed} of {state.job.limit}"
        nodes = state.job.node_list or f"{state.job.nodes} asked for"
        rows += [("partition", state.job.partition), ("elapsed", limit), ("nodes", nodes)]
        if state.job.starts and state.job.state == "PENDING":
            rows.append(("starts", f"{state.job.starts}, SLURM expects"))
    if state.step is not None and state.loss is not None:
        rows.append(("step", f"{state.step:,}, loss {state.loss:.4f}, {state.seconds or 0:.3g} s a step"))
    rows += [(f"start {number}", _told(ending)) for number, ending in enumerate(endings, 1)]
    began = endings[0].began if endings else 0.0
    # The next job of the run has failures and loads of its own.
    later_jobs = (ending.began for ending in all_endings if ending.began > began and ending.job != state.id)
    ended = min(later_jobs, default=float("inf"))
    resumed = [event for event in RunDirectory(state.run).events("resume") if began <= seconds_of(event) < ended]
    loading = sum(event.get("load_seconds") or 0.0 for event in resumed)
    output.table([*rows, *jobs.submitted_job_goodput(endings, loading)])
    failure = open_run(state.run, all_steps=False).failure if RunDirectory(state.run).holds_run else None
    # A failure of another job of the run is told by the record of that job's starts.
    if failure is not None and began <= seconds_of(asdict(failure)) < ended:
        for line in failure.lines(state.run):
            output.line(line)


def _told(ending: AttemptEnding) -> str:
    trained = "no step" if ending.first_step is None else f"steps {ending.first_step + 1:,} to {ending.step:,}"
    why = f": {ending.text.partition(chr(10))[0]}" if ending.text else ""
    return f"{trained} in {ending.seconds:,.0f} s on {ending.nodes} nodes, {ending.how}{why}"


def _log(state: jobs.JobState, *, is_followed: bool) -> None:
    log = job_log(state.run, state.id) if state.kind == "train" else state.run / "logs" / f"compile-{state.id}.log"
    if is_followed and state.job is not None:
        follow(log, state.id, state.run)
    elif log.exists():
        output.raw(output.text(log.read_text(encoding="utf-8", errors="replace").removesuffix("\n")))
    else:
        output.line(f"job {state.id} has written no log yet: it is {state.text}")


_POLL_SECONDS = 0.5
_ASK_SLURM_SECONDS = 5.0


def follow(log: Path, job: str, run_path: Path) -> None:
    """Print what a job's log has and gets. While the job waits, print why."""
    with contextlib.suppress(KeyboardInterrupt):
        _follow(log, job, run_path)
        return
    advice = f"follow it by `shardwise jobs log {job} --follow`, end it by `shardwise stop {run_path}`"
    output.progress(f"job {job} goes on: {advice}")


def _follow(log: Path, job: str, run_path: Path) -> None:
    position = 0
    said = ""
    asked = 0.0
    present = True
    while True:
        if log.exists():
            with log.open("rb") as file:
                file.seek(position)
                new = file.read()
                position = file.tell()
            if sys.stdout.isatty():
                sys.stdout.write(output.text(new.decode(errors="replace")))
            else:
                sys.stdout.buffer.write(new)
            sys.stdout.flush()
        # The log was read once more after the job had left the queue: its last lines may have come in between.
        if not present:
            break
        if time.monotonic() - asked > _ASK_SLURM_SECONDS:
            asked = time.monotonic()
            try:
                queued = slurm_commands.jobs(user=False, ids=[job])
                present = bool(queued)
                waits = f"job {job} waits: {queued[0].reason}" if queued and queued[0].reason else ""
            except RunError as error:
                # A controller that restarts does not answer for a while; the job goes on.
                waits = str(error)
            if waits and waits != said:
                output.progress(waits)
            said = waits
        time.sleep(_POLL_SECONDS if present else 0)
    output.line(f"job {job} has ended{recorded_ending(run_path)}")
