"""Look at checkpoints, verify them, compare them, export and import them, and remove old ones."""

from __future__ import annotations

import argparse

from shardwise.checkpoint.storage.checkpoint_folders import LATEST

ACTIONS = {
    "inspect": "show what a checkpoint holds, or list a run's checkpoints",
    "verify": "read a checkpoint whole: checksums, completeness, values that are not finite",
    "export": "write a checkpoint as a plain Hugging Face folder",
    "import": "make a checkpoint of Hugging Face weights, or of shards of Megatron-LM, neuronx-distributed or "
    "neuronx-nemo-megatron",
    "prune": "remove old checkpoints of a run",
    "diff": "compare two checkpoints or Hugging Face folders, tensor by tensor",
}


def add_path(parser: argparse.ArgumentParser, name: str = "PATH") -> None:
    """Add the argument for a checkpoint (of PATH alone) or a place of checkpoints."""
    kinds = "a run's folder, or a folder of checkpoints"
    path_help = (
        f"{'a checkpoint, ' if name == 'PATH' else ''}{kinds}; a path, or a URL such as s3://bucket/run "
        f"(default: {LATEST})"
    )
    parser.add_argument("path", metavar=name, nargs="?", default=LATEST, help=path_help)
