"""What `shardwise data prepare` writes: data that runs read as they are. Nothing here imports torch."""

from shardwise.prepare.job import Job, prepare
from shardwise.prepare.outputs import Format, Outcome

__all__ = ["Format", "Job", "Outcome", "prepare"]
