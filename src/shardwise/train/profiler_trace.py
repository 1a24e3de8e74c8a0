"""The work of a rank in some steps as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.profiler

from shardwise.config import LogConfig
from shardwise.distributed.mesh import Mesh
from shardwise.distributed.torch_private import named_messages
from shardwise.runs.folder import RunDirectory


def trace_text(settings: LogConfig, before: int, done: int, world: int, run: RunDirectory) -> str | None:
    """A line for the user with the path of the trace; None where the run, from `before` to `done`, traced no step."""
    steps = _traced_steps(settings, before, done)
    if not steps:
        return None
    ranks = sorted(set(settings.profile_ranks or range(world)))
    named = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
    suffix = f" and so on for each of {len(ranks):,} ranks" if len(ranks) > 1 else ""
    return f"trace of {named}: {run.trace(ranks[0])}{suffix}; ui.perfetto.dev shows it"


def no_trace_text(settings: LogConfig, before: int, end: int) -> str | None:
    """A line for the user where `log.profile` has no step of the run, which goes from `before` to `end`; else None."""
    if settings.profile_steps is None or _traced_steps(settings, before, end):
        return None
    taken = f"the steps {before + 1:,} to {end:,}" if end > before else "no step"
    return f"no trace: log.profile ({settings.profile}) has no step of this run, which takes {taken}"


def _traced_steps(settings: LogConfig, before: int, done: int) -> range:
    """The steps of `log.profile` that a run does: after step `before`, up to step `done`."""
    steps = settings.profile_steps or range(0)
    return range(max(steps.start, before + 1), min(steps.stop, done + 1))


class Trace:
    """Records the steps of `log.profile` with torch's profiler, on the ranks that `log.profile` names."""

    def __init__(self, settings: LogConfig, mesh: Mesh, run: RunDirectory) -> None:
        rank = mesh.world.rank
        is_traced = settings.profile_ranks is None or rank in settings.profile_ranks
        self._steps = settings.profile_steps if is_traced and settings.profile_steps is not None else range(0)
        self._path = run.trace(rank)
        self._pipelined = mesh.pp.size > 1
        self._recording = ExitStack()
        self._has_begun = False

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """A context for each step: the first step to record begins the recording, and the last one ends it."""
        if step not in self._steps:
            yield
            return
        if not self._has_begun:
            self._begin()
        with torch.profiler.record_function(f"step {step}"):
            yield
        if step == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """End the recording and write the file, unless that is done."""
        self._recording.close()

    def _begin(self) -> None:
        self._has_begun = True
        # At a lower level each start and stop prints a line on standard error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)  # torch would follow a link
        profiler = torch.profiler.profile(acc_events=True)  # torch 2.11 warns of several cycles otherwise
        # The stack runs this last: the trace can be written only once the profiler has stopped.
        self._recording.callback(lambda: profiler.export_chrome_trace(str(self._path)))
        self._recording.enter_context(profiler)
        if self._pipelined:
            from shardwise.pipeline.clock import stage_message_name

            self._recording.enter_context(named_messages(stage_message_name))
