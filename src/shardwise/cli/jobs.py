"""Submitted jobs: how they are doing, what one of them did, and its log.

`shardwise jobs` lists jobs of SLURM that wait or run, and those of the runs in this folder that have ended;
`jobs show ID` tells the starts of one and where its time went; `jobs log ID` prints its log.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from shardwise.base.errors import ConfigError, listing
from shardwise.cli import output
from shardwise.cli.following import follow
from shardwise.launch.restarts import AttemptEnding, history
from shardwise.launch.slurm import commands, jobs
from shardwise.launch.slurm.script import job_log
from shardwise.runs.folder import RUNS, RunDirectory
from shardwise.runs.lost_time import seconds_of

_HEAD = ("job", "state", "step", "s/step", "loss", "elapsed", "nodes", "run")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", metavar="show|log", nargs="?", choices=["show", "log"], help="of the job ID")
    parser.add_argument("id", metavar="ID", nargs="?", help="a job's number")
    parser.add_argument("--follow", action="store_true", help="go on printing the log, until the job ends")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(arguments: argparse.Namespace) -> int:
    commands.require()
    if (arguments.action is None) != (arguments.id is None):
        raise ConfigError(f"shardwise jobs {arguments.action} needs the number of a job: shardwise jobs lists them")
    found = jobs.states(RUNS)
    if arguments.action is None:
        _list(found, as_json=arguments.json)
        return 0
    named = [one for one in found if one.id == arguments.id]
    if not named:
        known = f"known are {listing((one.id for one in found), most=8)}" if found else "none is known here"
        raise ConfigError(f"there is no job {arguments.id} of shardwise: {known}; jobs that ended are found in {RUNS}/")
    if arguments.action == "show":
        _show(named[0])
    else:
        _log(named[0], is_followed=arguments.follow)
    return 0


def _list(found: list[jobs.JobState], *, as_json: bool) -> None:
    if as_json:
        output.json([{**asdict(one), "run": str(one.run)} for one in found])
    elif found:
        output.table([_row(one) for one in found], _HEAD, right=(2, 3, 4, 5, 6))
    else:
        output.line(f"no job waits or runs, and no run in {RUNS}/ was submitted")


def _row(one: jobs.JobState) -> tuple[str, ...]:
    return (
        one.id,
        _state(one),
        "" if one.step is None else f"{one.step:,}",
        "" if one.seconds is None else f"{one.seconds:.3g}",
        "" if one.loss is None else f"{one.loss:.4f}",
        "" if one.job is None else one.job.elapsed,
        "" if one.job is None else str(one.job.nodes),
        _near(one.run),
    )


def _state(one: jobs.JobState) -> str:
    """With SLURM's reason where it waits, and what it is where it does not train."""
    reason = f" ({one.reason})" if one.reason else ""
    return f"{one.state}{reason}{'' if one.kind == 'train' else f', {one.kind}'}"


def _near(run: Path) -> str:
    """A run's folder as seen from here."""
    here = Path.cwd().resolve()
    return str(run.relative_to(here) if run.is_relative_to(here) else run)


def _show(one: jobs.JobState) -> None:
    endings = [ending for ending in history(one.run) if ending.job == one.id]
    rows = [("job", one.id), ("state", _state(one)), ("run", str(one.run))]
    if one.job is not None:
        limit, nodes = f"{one.job.elapsed} of {one.job.limit}", one.job.node_list or f"{one.job.nodes} asked for"
        rows += [("partition", one.job.partition), ("elapsed", limit), ("nodes", nodes)]
        if one.job.starts and one.job.state == "PENDING":
            rows.append(("starts", f"{one.job.starts}, SLURM expects"))
    if one.step is not None and one.loss is not None:
        rows.append(("step", f"{one.step:,}, loss {one.loss:.4f}, {one.seconds or 0:.3g} s a step"))
    rows += [(f"start {number}", _told(ending)) for number, ending in enumerate(endings, 1)]
    began = endings[0].began if endings else 0.0
    resumed = [event for event in RunDirectory(one.run).events("resume") if seconds_of(event) >= began]
    loading = sum(event.get("load_seconds") or 0.0 for event in resumed)
    output.table([*rows, *jobs.goodput(endings, loading)])


def _told(ending: AttemptEnding) -> str:
    """One start, in a line."""
    trained = "no step" if ending.first_step is None else f"steps {ending.first_step + 1:,} to {ending.step:,}"
    why = f": {ending.text.partition(chr(10))[0]}" if ending.text else ""
    return f"{trained} in {ending.seconds:,.0f} s on {ending.nodes} nodes, {ending.how}{why}"


def _log(one: jobs.JobState, *, is_followed: bool) -> None:
    log = job_log(one.run, one.id) if one.kind == "train" else one.run / "logs" / f"compile-{one.id}.log"
    if is_followed and one.job is not None:
        follow(log, one.id, one.run)
    elif log.exists():
        output.raw(output.text(log.read_text(encoding="utf-8", errors="replace").removesuffix("\n")))
    else:
        output.line(f"job {one.id} has written no log yet: it is {_state(one)}")
