"""Training: from a configuration to a finished run directory."""

from shardwise.train.run import run

__all__ = ["run"]
