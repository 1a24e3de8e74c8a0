"""The work of a rank in some steps as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch.profiler import profile, record_function

from shardwise.config import Config
from shardwise.distributed.torch_private import named_messages
from shardwise.pipeline.clock import message_name
from shardwise.runs.folder import RunDirectory


def traced_steps(config: Config, before: int, done: int) -> range:
    """The steps of `log.profile` among those that a run does: after `before`, up to `done`."""
    steps = config.log.profile_steps or range(0)
    return range(max(steps.start, before + 1), min(steps.stop, done + 1))


def trace_text(config: Config, before: int, done: int, world: int, run: RunDirectory) -> str | None:
    """Where the trace of a run is, for the user; None where no step was traced."""
    steps = traced_steps(config, before, done)
    if not steps:
        return None
    first, *others = sorted(set(config.log.profile_ranks or range(world)))
    named = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
    rest = f" and so on for each of {len(others) + 1:,} ranks" if others else ""
    return f"trace of {named}: {run.trace(first)}{rest}; ui.perfetto.dev shows it"


class Trace:
    """Records the steps of `log.profile` with torch's profiler.

    Args:
        steps: those to record; None: none.
        path: of the file.
        pipelined: whether the model is cut into stages, whose messages are then named.
    """

    def __init__(self, steps: range | None, path: Path, *, pipelined: bool) -> None:
        self._steps, self._path, self._pipelined = steps or range(0), path, pipelined
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
        with record_function(f"step {step}"):
            yield
        if step == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """End the recording and write the file, unless that is done."""
        self._recording.close()

    def _begin(self) -> None:
        self._has_begun = True
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else each start and stop prints a line on standard error
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profiler = profile(acc_events=True)  # of all devices; torch 2.11 warns of several cycles otherwise
        self._recording.callback(lambda: profiler.export_chrome_trace(str(self._path)))  # once the profiler has stopped
        self._recording.enter_context(profiler)
        if self._pipelined:
            self._recording.enter_context(named_messages(message_name))
