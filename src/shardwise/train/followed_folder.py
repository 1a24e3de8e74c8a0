"""The folder of a run, which may be renamed while the run trains.

All processes of a run write to the folder by its path. So a link of the old name is left where the folder was, which
leads all of them, on every machine, to where it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from shardwise.base.errors import RunError
from shardwise.base.files import reason_of


class FollowedFolder:
    """A run's folder, found again under any later name.

    Attributes:
        renamed_to: present path of the folder if it was renamed; else None.
        taken: present path of the folder, and a text for the user, once something else has its old name; else None.
    """

    def __init__(self, path: Path) -> None:
        self.renamed_to: Path | None = None
        self.taken: tuple[Path, str] | None = None
        self._path = path.absolute()
        # An open descriptor stays with the folder when its name changes.
        self._descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def follow(self) -> None:
        """Leave a link of the old name if the folder was renamed since the last call.

        Raises:
            RunError: it is not found, or something else has its name; for a name that is taken, once.
        """
        status = os.fstat(self._descriptor)
        try:
            if os.path.samestat(status, self._path.stat()):
                return
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:
            return  # a network disk may not answer for a moment
        new_path = next((path for path in self._candidates() if _is_at(status, path)), None)
        if new_path is None:
            raise RunError(
                f"the run's folder ({self._path}) was removed or moved to another disk while the run trained: start "
                "again with --run-dir and the folder that has its last checkpoint"
            )
        try:
            if self._path.is_symlink():
                self._path.unlink()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.symlink_to(new_path, target_is_directory=True)
        except OSError as error:
            text = (
                f"the run's folder ({self._path}) was renamed to {new_path} while the run trained, and a link of the "
                f"old name cannot be made ({reason_of(error)}): start again with --run-dir {new_path}"
            )
            self.taken = (new_path, text)
            self._path = new_path
            raise RunError(text) from None
        self.renamed_to = new_path

    def _candidates(self) -> Iterator[Path]:
        """Yield possible paths: by this machine's kernel, or next to the old path if another machine renamed it."""
        yield Path(f"/proc/self/fd/{self._descriptor}").readlink()
        if self._path.parent.is_dir():
            yield from self._path.parent.iterdir()


def _is_at(status: os.stat_result, path: Path) -> bool:
    """Return whether a path leads to a file, and not through a link."""
    try:
        return os.path.samestat(status, path.lstat())
    except OSError:
        return False
