"""Text becomes data that runs read as they are, and data are looked at. Nothing here imports torch."""

from shardwise.prepare.job import Format, Job, Outcome, prepare

__all__ = ["Format", "Job", "Outcome", "prepare"]
