"""The supervisor of a job: makes attempts on its machines until the training has ended, or cannot.

It runs on the job's first node, where `srun` starts the launchers of all nodes. Where a rank or a launcher dies and the
machines live, the next attempt begins at once in the same allocation. A time limit is warned of by SIGUSR1: the run
saves, and SLURM queues the job again. Where a machine is lost, SLURM ends the job and queues it again by itself; where
it has not noticed yet, and the launchers cannot start, it is asked to. The job's script starts a supervisor that was
killed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from shardwise.base.errors import ConfigError, LaunchError, RunError, StoppedError, see
from shardwise.base.files import reason_of, write_atomic
from shardwise.config.launch import LaunchConfig
from shardwise.launch import notices, stop_requests
from shardwise.launch.external_launchers import first_node_address
from shardwise.launch.failed_run import failure_text
from shardwise.launch.first_failure import Failure
from shardwise.launch.node import BEAT_SECONDS, LauncherFacts
from shardwise.launch.stop_requests import signal_name
from shardwise.runs.events import first_step, last_recorded_step, newest_checkpoint
from shardwise_jobs import slurm_commands
from shardwise_jobs.attempt import AttemptOutcome, AttemptWatch
from shardwise_jobs.restarts import AttemptEnding, Decision, How, decide, history, record

_PAUSE_SECONDS = 1.0  # pause before the next attempt: the cause of the failure may last for a moment
_LEAVE_SECONDS = 30.0
"""Seconds before the time limit in which a run that has not saved is ended: it loses steps, but is queued again."""
_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
_WARNING = signal_name(signal.SIGUSR1)  # signal before the time limit, or before a preemption
_SRUN = ("srun", "--ntasks-per-node=1", "--whole", "--kill-on-bad-exit=0", "--wait=0")
"""One launcher on each node, with all processors of the allocation there.

This process ends the launchers, and not srun: it waits for the reports of the others when one has failed.
"""


@dataclass(eq=False)
class Supervisor:
    """The supervisor of one start of a job by SLURM."""

    launch: LaunchConfig  # section of the run's configuration
    run_path: Path  # the run's folder, which is locked by this process
    allocation: slurm_commands.Allocation
    nodes: int  # number of nodes of the allocation that are used
    ranks_per_node: int  # number of ranks on each of them
    command: Sequence[str]
    say: Callable[[str], None]  # function that prints a line for the user
    killed_by: int | None = None  # signal that killed this job's supervisor before this one, if any

    def __post_init__(self) -> None:
        self._asked: str | None = None
        self._is_queued = False
        self._watch: AttemptWatch | None = None
        # Endings of this job alone: a user who submits a run again may have mended the cause of the former end.
        self._endings = [ending for ending in history(self.run_path) if ending.job == self.allocation.job]

    def run(self) -> None:
        """Make attempts until the training has ended, or cannot.

        Raises:
            StoppedError: the run stopped with a checkpoint, or is queued again.
            LaunchError: the run failed, and is not started again; the text says why.
        """
        former_handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        try:
            asyncio.run(self._run())
            notices.send("end", self.run_path, "finished", 0)
        except StoppedError as error:
            if not self._is_queued:
                notices.send("end", self.run_path, str(error), error.exit_code)
            raise
        finally:
            for number, handler in former_handlers.items():
                signal.signal(number, handler)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()

        def hear(number: int, _frame: FrameType | None) -> None:
            # The loop is closed once the job has ended.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._ask, signal_name(number))

        # The loop's own handlers would end with it by the signals' default, which is to kill this process.
        for received in _SIGNALS:
            signal.signal(received, hear)
        logs = self.run_path / "logs"
        address = "127.0.0.1" if self.nodes == 1 else first_node_address(self.allocation.first)
        self._record_lost_start()
        goes_on = self._record_killed_supervisor()
        while goes_on:
            began = time.time()
            # Processes that are left of an earlier attempt have another id.
            number = sum(ending.requeues == self.allocation.requeues for ending in self._endings)
            self._watch = AttemptWatch(
                address,
                self.nodes,
                self.ranks_per_node,
                logs,
                id=f"{self.allocation.job}.{self.allocation.requeues}.{number}",
                silence=self.launch.timeout,
                heard=self._ask,
            )
            outcome = await self._watch.run(self._program)
            ending = self._ending_of(outcome, began)
            # Recorded before the decision: the decision may have SLURM requeue the job, which kills this process.
            self._record(ending, {logs / f"launcher-{name}.log": text for name, text in outcome.logs.items()})
            goes_on = self._goes_on(ending, outcome)
            if goes_on:
                await asyncio.sleep(_PAUSE_SECONDS)
            # A signal came during the pause.
            if goes_on and self._asked is not None:
                self._leave(f"the job was stopped by {self._asked}; {_saved(ending)}", ending)

    def _record(self, ending: AttemptEnding, logs: Mapping[Path, str] | None = None) -> None:
        """Note an ending, also where the disk is full: it must not end the job."""
        self._endings.append(ending)
        try:
            record(self.run_path, ending)
            for path, text in (logs or {}).items():
                write_atomic(path, text.encode(errors="surrogateescape"))
        except OSError as error:
            self.say(f"the end of this start cannot be recorded: {self.run_path}: {reason_of(error)}")

    def _program(self, _attempt: LauncherFacts) -> list[str]:
        nodes = str(self.nodes)
        # A launcher that was bound to some processors would bind all ranks of its node to them.
        unbound = [] if slurm_commands.binds_nothing() else ["--cpu-bind=none"]
        # If fewer nodes are used, the first must be among them: all launchers connect to this process there.
        first = ["--relative=0"] if self.nodes < self.allocation.nodes else []
        return [*_SRUN, *unbound, *first, f"--nodes={nodes}", f"--ntasks={nodes}", *self.command]

    def _ask(self, by: str) -> None:
        """Stop: with a checkpoint where steps are taken, else at once.

        Further requests are ignored: SLURM sends one signal to this process and to all launchers. So is a warning to a
        run that the user has stopped: it must not be queued again.
        """
        is_stopped_by_user = by == _WARNING and (self.run_path / stop_requests.STOP_FILE).exists()
        if self._asked is not None or is_stopped_by_user:
            return
        self._asked = by
        try:
            stop_requests.request(self.run_path, by)
            self.say(f"{by}: {stop_requests.NOTICE.partition(' (')[0]}")
        except OSError as error:
            self.say(f"{by}: the run cannot be asked to stop: {self.run_path}: {reason_of(error)}")
        loop = asyncio.get_running_loop()
        ends = self.allocation.ends
        # Two beats later: heartbeats are late, and the first step may have been taken just now.
        loop.call_later(2 * BEAT_SECONDS, self._end_unless_training, by)
        if by == _WARNING and ends is not None:
            left = ends - time.time()
            # Of a warning that comes late, four fifths of the time are left for the checkpoint.
            loop.call_later(max(left - _LEAVE_SECONDS, 0.8 * left), self._end_unsaved)

    def _end_unless_training(self, by: str) -> None:
        if self._watch is not None and not self._watch.is_training:
            self._watch.end("it did not train yet")

    def _end_unsaved(self) -> None:
        """End an attempt that the time limit would end: SLURM would not queue the job again."""
        if self._watch is not None:
            warning = f"launch.warning_seconds={self.launch.warning_seconds}"
            self._watch.end(
                f"the run did not save in time before the time limit ({warning}){see('jobs#did-not-save-in-time')}"
            )

    def _ending(self, how: How, **facts: Any) -> AttemptEnding:
        allocation = self.allocation
        known = {"began": time.time(), "requeues": allocation.requeues, "step": 0} | facts
        known["step"] = max(known["step"], last_recorded_step(self.run_path))
        checkpoint = newest_checkpoint(self.run_path)
        return AttemptEnding(how, allocation.job, nodes=self.nodes, checkpoint=checkpoint, **known)

    def _ending_of(self, outcome: AttemptOutcome, began: float) -> AttemptEnding:
        failure = outcome.failure
        return self._ending(
            self._how(outcome),
            began=began,
            seconds=time.time() - began,
            until_joined=outcome.until_joined,
            until_training=outcome.until_training,
            after_last_step=outcome.after_last_step,
            first_step=None if outcome.until_training is None else first_step(self.run_path),
            step=outcome.step,
            **({} if failure is None else {"rank": failure.rank, "text": failure.text, "exit_code": failure.exit_code}),
        )

    def _how(self, outcome: AttemptOutcome) -> How:
        if outcome.failure is None and outcome.stopped is None:
            return "finished"
        if self._asked == _WARNING:
            ends = self.allocation.ends
            warning = self.launch.warning_seconds
            # SLURM's signals may be a minute early, and preemptions send the same one.
            is_near = ends is not None and ends - time.time() < warning + 120
            return "time limit" if is_near else "preempted"
        if self._asked is not None:
            return "ended by SLURM"
        if outcome.stopped is not None:
            return "stopped"
        return "lost node" if outcome.lost else "failed"

    def _goes_on(self, ending: AttemptEnding, outcome: AttemptOutcome) -> bool:
        """Return True if another attempt is to be made in this allocation; raises if the job ends without success."""
        if ending.how == "finished":
            return False
        if ending.how == "stopped":
            raise StoppedError(outcome.stopped or "")
        if self._asked is not None:
            cause = f" ({outcome.failure.text})" if outcome.failure is not None else ""
            text = f"the job was stopped by {self._asked}{cause}; {_saved(ending)}"
            self._leave(outcome.stopped or text, ending)
        return self._starts_again(ending)

    def _starts_again(self, ending: AttemptEnding) -> bool:
        """After a failure, return True if another attempt is to be made in this allocation; raises if none is."""
        decision = decide(self._endings, self.launch.max_restarts)
        if not decision.starts_again:
            code = ending.exit_code or RunError.exit_code
            raise LaunchError(f"{self._failure_text(ending, code)}\n{decision.why}", code)
        text = f"{ending.text}; {_saved(ending)}"
        if ending.how == "failed" and ending.until_joined is None and self._watch is not None:
            # No launcher joined: a machine may be gone, which SLURM has not noticed yet.
            self._requeue(text, decision)
        self.say(f"{text}\n{decision.why}, in the same allocation")
        notices.send("restart", self.run_path, f"{text}; {decision.why}", ending.exit_code, step=ending.step)
        return True

    def _failure_text(self, ending: AttemptEnding, code: int) -> str:
        """Record the failure with which the job ends; returns the text for the user."""
        script = self.run_path / "job.sh"
        resume = shlex.join(["sbatch", str(script)]) if script.exists() else None
        steps = 0 if ending.first_step is None else ending.step
        # The beginning of a start that no supervisor saw the end of is unknown.
        began = ending.began if ending.seconds else 0.0
        return failure_text(Failure(ending.rank or 0, ending.text, code), self.run_path, began, resume, steps)

    def _leave(self, text: str, ending: AttemptEnding) -> NoReturn:
        """End this start of the job; SLURM starts it again where it was the cluster that ended it."""
        if self._asked == _WARNING:
            decision = decide(self._endings, self.launch.max_restarts)
            if not decision.starts_again:
                raise StoppedError(f"{text}\n{decision.why}")
            self._requeue(text, decision)
        raise StoppedError(text)

    def _requeue(self, text: str, decision: Decision) -> NoReturn:
        """Have SLURM queue the job again, which may kill this process."""
        notices.send("restart", self.run_path, f"{text}; {decision.why}", StoppedError.exit_code)
        problem = slurm_commands.requeue(self.allocation.job)
        self._is_queued = problem is None
        notices.wait()
        result = "SLURM queues the job again" if problem is None else f"SLURM does not queue it again: {problem}"
        raise StoppedError(f"{text}\n{result} ({decision.why})")

    def _record_lost_start(self) -> None:
        """Record the start before this one if it left no record: it lost a machine, or was killed."""
        requeues = self.allocation.requeues
        if requeues == 0 or requeues - 1 in [ending.requeues for ending in self._endings]:
            return
        text = "a machine was lost, or the job was preempted without a warning"
        lost = self._ending("ended by SLURM", requeues=requeues - 1, text=text)
        self._record(lost)
        self.say(f"SLURM has started the job again: {lost.text}; {_saved(lost)}")
        notices.send("restart", self.run_path, f"{text}; {_saved(lost)}")

    def _record_killed_supervisor(self) -> bool:
        """Return True if an attempt is to be made, also after a supervisor that was killed; raises after too many."""
        if self.killed_by is None:
            return True
        text = f"the supervisor of the job was killed by {signal_name(self.killed_by)}"
        killed = self._ending("failed", text=text, exit_code=RunError.exit_code)
        self._record(killed)
        return self._starts_again(killed)


def _saved(ending: AttemptEnding) -> str:
    if not ending.checkpoint:
        return "no checkpoint was saved"
    return f"its newest checkpoint is of step {ending.checkpoint:,}"


def usable_nodes(present: int, ranks_per_node: int, refusal: Callable[[int], str | None]) -> int:
    """Return the largest number of the present machines that the layout can fill.

    Args:
        refusal: function that returns the reason why so many ranks cannot train, or None.

    Raises:
        ConfigError: no number of machines can be filled.
    """
    for nodes in range(present, 0, -1):
        if refusal(nodes * ranks_per_node) is None:
            return nodes
    raise ConfigError(refusal(present * ranks_per_node) or "")
