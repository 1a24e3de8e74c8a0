"""What a command of checkpoints is given as PATH or CHECKPOINT."""

from __future__ import annotations

import argparse

from shardwise.checkpoint_format.places import LATEST, Place, all_of, locate, newest_intact, reached

__all__ = ["Place", "add_path", "all_of", "locate", "newest_intact", "reached"]


def add_path(parser: argparse.ArgumentParser, name: str = "PATH") -> None:
    kinds = "a run's folder, or a folder of checkpoints"
    parser.add_argument(
        "path",
        metavar=name,
        nargs="?",
        default=LATEST,
        help=f"{'a checkpoint, ' if name == 'PATH' else ''}{kinds}; a path, or a URL such as s3://bucket/run "
        f"(default: {LATEST})",
    )
