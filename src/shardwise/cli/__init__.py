"""The command `shardwise`. Each command is a module with `configure(parser)` and `run(arguments)`."""

from shardwise.cli.entry import main

__all__ = ["main"]
