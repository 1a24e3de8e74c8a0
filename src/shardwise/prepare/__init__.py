"""Text becomes data that runs read as they are, and data are looked at. Nothing here imports torch."""

from shardwise.prepare.job import Job, Outcome, prepare
from shardwise.prepare.outputs import Format

__all__ = ["Format", "Job", "Outcome", "prepare"]
