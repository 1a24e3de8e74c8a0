"""What `shardwise data prepare` writes: data that runs read as they are. Nothing here imports torch."""

from shardwise.prepare.outputs import Format, Outcome
from shardwise.prepare.text import TextJob, convert_text

__all__ = ["Format", "Outcome", "TextJob", "convert_text"]
