"""The record of a run's failure (`failure.json` in its folder), and the block of lines in which a user reads it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.base import files, terminal, units
from shardwise.base.redaction import redacted
from shardwise.runs.events import seconds_of
from shardwise.runs.folder import RunDirectory, json_text
from shardwise.runs.json_records import record_instance

HEADING = "FAILED "
_ADDRESS = r" \(`(shardwise explain [^()`]+)`\)"  # what `errors.see` appends to a message
_STEP = r"step ([\d,]+): (.*)"  # a message that names the step which failed


@dataclass(frozen=True)
class FailureRecord:
    """The recorded failure of a run."""

    time: str  # time of the failure, as events have it
    cause: str  # first line of the message of the rank that failed first
    details: str = ""  # further lines of it
    exit_code: int = 1  # exit code of the command
    rank: int | None = None  # rank at fault; None if no rank is
    log: str | None = None  # path of its log, relative to the run's folder; None without one
    step: int | None = None  # number of steps that were done; None if this start of the run had done none
    checkpoint: int = 0  # step of the newest checkpoint; 0 without one
    every: int | None = None  # `checkpoint.every` of the run; None if it is unknown
    every_minutes: float | None = None  # `checkpoint.every_minutes` of the run; None without one
    resume: str | None = None  # command that continues the run; None if it is unknown

    @property
    def heading(self) -> str:
        """First line of the block: where the run failed, and why."""
        where = "before the first step"
        if self.step is not None:
            where = f"at step {self.step:,}"
        elif self.checkpoint:
            where += f" after checkpoint {self.checkpoint:,}"
        cause = re.sub(_ADDRESS, "", self.cause)
        named = re.fullmatch(_STEP, cause, re.DOTALL)
        if named is not None:
            where = f"at step {named[1]}"
            cause = named[2]
        return f"{HEADING}{where}: {cause.rstrip('.')}."

    @property
    def sentence(self) -> str:
        """The place where the run failed, and the reason, without the word of `HEADING`."""
        return self.heading.removeprefix(HEADING)

    @property
    def lost_text(self) -> str | None:
        """Sentence on the steps that are lost; None if this start had done none."""
        if self.step is None:
            return None
        lost = self.step - self.checkpoint
        if not self.checkpoint:
            which = f"all {lost:,} steps are lost" if lost > 1 else "the only step is lost"
            if self.every is None:
                return which
            if self.every == 0 and self.every_minutes is not None:
                return f"{which}: checkpoint.every_minutes was {self.every_minutes:g}"
            return f"{which}: checkpoint.every was {self.every:,}"
        if lost <= 0:
            return f"no step is lost: checkpoint {self.checkpoint:,} is of the last one"
        return f"{units.counted(lost, 'step')} since checkpoint {self.checkpoint:,} {'is' if lost == 1 else 'are'} lost"

    def lines(self, run: Path) -> list[str]:
        """Return the block for the run in the folder `run`."""
        lines = [self.heading, *re.sub(_ADDRESS, "", self.details).splitlines()]
        if self.log is not None:
            lines.append(f"log: {run / self.log}")
        if self.lost_text is not None:
            lines.append(self.lost_text)
        if self.resume is not None:
            lines.append(f"{terminal.COMMAND}{self.resume}")
        addresses = dict.fromkeys(re.findall(_ADDRESS, f"{self.cause}\n{self.details}"))
        return [*lines, *(f"see: {address}" for address in addresses)]

    def write(self, run: RunDirectory) -> None:
        """Write the record to the run's folder, without secrets."""
        facts = {name: redacted(fact) if isinstance(fact, str) else fact for name, fact in asdict(self).items()}
        files.write_atomic(run.failure, json_text(facts, indent=2) + "\n")


def failure_of(facts: Mapping[str, Any], last_start: Mapping[str, Any]) -> FailureRecord | None:
    """Return the failure with which a run ended; None if there is none, it is damaged, or the run was started since.

    Args:
        facts: content of `failure.json`.
        last_start: last "start" event of the run; {} without one.
    """
    try:
        record = record_instance(FailureRecord, facts)
    except ValueError:
        return None
    time = seconds_of(asdict(record))
    return None if math.isnan(time) or time < seconds_of(last_start) else record
