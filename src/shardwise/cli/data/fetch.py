"""Copy files from a URL to this machine, once.

URL is a file, a folder or a pattern in quotes ('s3://bucket/wiki_training_*.hdf5') at any place that fsspec reads:
http, https (one file at a time), s3, gs, a path. A file that is already there is not fetched again if its size, or its
SHA-256 by --sha256, is right. Any number of processes may fetch to one place at once: one process fetches, and the
others wait for it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from shardwise.base.errors import ConfigError
from shardwise.base.files import user_path
from shardwise.base.progress import progress
from shardwise.base.units import size
from shardwise.cli import output


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", metavar="URL", help="what to fetch: a URL or a path")
    add("dest", metavar="DEST", help="a file; or a folder, if it exists, ends with /, or several files are fetched")
    add("--sha256", metavar="HEX", help="the SHA-256 that the file must have")
    add("--force", action="store_true", help="replace another file")
    add("--anonymous", action="store_true", help="read a public bucket (s3, gs, az) without credentials")


def run(arguments: argparse.Namespace) -> int:
    from shardwise.cli.data.remote_files import RemoteFile, fetch_remote_file, find_remote_files

    sha256: str | None = arguments.sha256 and arguments.sha256.lower()
    if sha256 is not None and not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ConfigError(f"--sha256 ({arguments.sha256}) must be 64 hexadecimal digits")
    remotes: Sequence[RemoteFile] = find_remote_files(arguments.url, anonymous=arguments.anonymous)
    if sha256 is not None and len(remotes) > 1:
        raise ConfigError(f"--sha256 must be left out: {arguments.url} is {len(remotes):,} files, and it is of one")
    dest = user_path(arguments.dest)
    is_single_file = len(remotes) == 1 and "/" not in remotes[0].name
    is_folder = dest.is_dir() or arguments.dest.endswith("/") or not is_single_file
    # A server need not tell the size of a file.
    total = sum(remote.size or 0 for remote in remotes)
    with progress("fetching", total) as advance:
        for remote in remotes:
            target = dest / remote.name if is_folder else dest
            file = fetch_remote_file(
                remote, target, sha256, force=arguments.force, progress=advance, announce=output.progress
            )
            transferred = f"{size(file.size)} came" if file.is_new else "was there already"
            output.line(f"{file.path}: {size(file.size)}, SHA-256 {file.sha256}, {transferred}")
    return 0
