"""The work of a rank in some steps as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch.profiler import profile, record_function

from shardwise._torch_private import named_messages
from shardwise.pipeline.clock import message_name


class Trace:
    """Records the steps of `log.trace` with torch's profiler.

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
        profiler = profile()  # of all devices
        self._recording.callback(lambda: profiler.export_chrome_trace(str(self._path)))  # once the profiler has stopped
        self._recording.enter_context(profiler)
        if self._pipelined:
            self._recording.enter_context(named_messages(message_name))
