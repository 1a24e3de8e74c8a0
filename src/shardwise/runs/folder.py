"""A run's folder: its layout on disk, and how its files are written.

    runs/NAME/
        config.yaml          as resolved; config-0001.yaml is the first one of a run that was continued
        environment.json     versions, commit, command line, devices; environment-0001.json likewise
        run.json             the run's id, which its checkpoints have too, and the format of this folder (`FORMAT`)
        metrics.jsonl        one event a line
        experts.jsonl        loads of a sparse model's experts, a logged step a line (`StepDetail.lines`)
        ranks/rank-0000.jsonl
        traces/rank-0000.json of the steps of log.profile
        tensorboard/
        checkpoints/step-00000100/
        logs/rank-0000.log
        results.json         of a run that reached its end; results-0001.json is that before it was continued
        failure.json         why the last start of the run failed; without it none did, or its process was killed
        stop.json            a request to stop
        restarts.jsonl       how each start of a submitted job ended
        jobs.jsonl           the jobs that were submitted for it
        recipe.yaml, job.sh  what was submitted
        .lock                held by the one process that runs here
        branch.json          the run and the step that it began from, and what was changed, if it is a branch
    runs/latest -> NAME

Whole files are replaced atomically. JSON has no NaN or Infinity: a non-finite float is written as the string "nan",
"inf" or "-inf", which Python's `float()` reads back (null stays free to mean "unknown").

The folder may be renamed while the run trains. All processes of a run write to the folder by its path. So a link of the
old name is left where the folder was, which leads all of them, on every machine, to where it is.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import platform
import re
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from shardwise.base import files
from shardwise.base.errors import ConfigError, RunError, see
from shardwise.base.redaction import recorded_variables, redacted_arguments
from shardwise.base.units import size
from shardwise.base.yaml_and_json import count_of, read_mapping
from shardwise.runs.json_records import read_record, record_of_json

RUNS = Path("runs")
EVENTS = (
    "start", "resume", "step", "state_hash", "eval", "eval_set", "eval_task", "checkpoint", "compile", "warning",
    "stop",
)  # fmt: skip
FORMAT = 1
"""Format of a run's folder. It grows when a reader of the former format would misread the new one."""
_LOCK = ".lock"


def json_text(value: Any, *, indent: int | None = None, ascii: bool = False) -> str:
    """Write `value` as a run's files have it: valid JSON, non-finite floats as the strings "nan", "inf" and "-inf"."""
    text = json.dumps(_finite(value), indent=indent, allow_nan=False, ensure_ascii=ascii)
    # Half of a surrogate pair has no UTF-8. It becomes `?`, as in the files of `write_atomic`.
    return text.encode(errors="replace").decode()


def now() -> str:
    """Return the time as the run's files have it: UTC, ISO 8601, with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def read_config(run: RunDirectory) -> dict[str, Any]:
    """Return the configuration in a run's folder; ConfigError: it cannot be read."""
    try:
        return read_mapping(run.config)
    except OSError as error:
        problem = files.reason_of(error)
    except ConfigError as error:
        problem = "; ".join(error.problems)
    except ValueError as error:
        problem = str(error)
    raise ConfigError(f"{run.path} must be a run's folder: {run.config} cannot be read ({problem})")


def new_run_path(recipe: str, root: Path = RUNS, *, now: datetime | None = None) -> Path:
    """Reserve and return `root`/RECIPE-YYYYMMDD-HHMMSS, local time; runs of the same second get -2, -3, …

    `recipe` is a recipe's name or file. The folder is made here: two launches at once cannot take the same name.
    """
    stamp = (now or datetime.now().astimezone()).strftime("%Y%m%d-%H%M%S")
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", Path(recipe).name.removesuffix(".yaml").removesuffix(".yml"))
    with _making(root):
        root.mkdir(parents=True, exist_ok=True)
    for attempt in itertools.count(1):
        path = root / (f"{name}-{stamp}" if attempt == 1 else f"{name}-{stamp}-{attempt}")
        # `mkdir` itself says whether the name is free: of two launches at once one alone makes it.
        with _making(path), contextlib.suppress(FileExistsError):
            path.mkdir()
            break
    return path


def check_place(path: Path) -> None:
    """Require that a run's folder can be made at `path`, or written. Raises ConfigError."""
    from tempfile import TemporaryFile  # slow to import

    with _making(path):
        TemporaryFile(dir=next(parent for parent in (path, *path.absolute().parents) if parent.exists())).close()


@contextlib.contextmanager
def _making(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made: {files.reason_of(error)}; start in a folder that can be written, with --run-dir "
            "in one too"
            f"{see('runs#folder-not-writable')}"
        ) from None


class AppendedFile:
    """An append-only file of a run. While the disk is full, the text to write waits in memory.

    A checkpoint that fills the disk, and is then removed, must not end the run that it was to protect.

    Raises:
        ConfigError: the file cannot be opened: it is a folder, or must not be written.
    """

    def __init__(self, path: Path) -> None:
        with _making(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.path = path
            # Without a buffer: a process that is killed loses no line that it has written.
            self._file = os.fdopen(files.open_to_append(path), "ab", buffering=0)
        self._waiting = b""

    def write(self, content: bytes) -> None:
        self._waiting += content
        self.flush()

    def close(self) -> None:
        self.flush()
        self._file.close()

    def flush(self) -> None:
        """Write the waiting text, as far as the disk takes it."""
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise


def open_log(path: Path) -> TextIO:
    """Open a log in a run's folder, which is made, to append lines; ConfigError: it cannot be opened, or is a link."""
    with _making(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.fdopen(files.open_to_append(path), "a", encoding="utf-8", errors="replace", buffering=1)


def event_bytes(kind: str) -> bytes:
    """Return the bytes by which a line of a run's files with an event of this kind is known without parsing it.

    So every writer of events puts the kind first, and `json_text` a blank after each colon.
    """
    return f'"event": "{kind}"'.encode()


class JsonLines:
    """An append-only file of a run, of JSON objects, one a line; each line reaches the file in one write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = AppendedFile(path)

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(f"{json_text(record)}\n".encode())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class RunDirectory:
    """The paths and writers of one run. Making the object touches nothing; `create` makes the folders."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.json"
        self.identity = self.path / "run.json"
        self.branch = self.path / "branch.json"
        self.metrics = self.path / "metrics.jsonl"
        self.results = self.path / "results.json"
        self.failure = self.path / "failure.json"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"

    def rank_metrics(self, rank: int) -> Path:
        return self.path / "ranks" / f"rank-{rank:04d}.jsonl"

    def trace(self, rank: int) -> Path:
        return self.path / "traces" / f"rank-{rank:04d}.json"

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank:04d}.log"

    @property
    def holds_run(self) -> bool:
        """True if a run was started here: an empty or merely reserved folder holds none.

        Raises:
            ConfigError: the folder cannot be read.
        """
        try:
            return self.config.exists() or self.metrics.exists() or self.results.exists()
        except OSError as error:
            raise ConfigError(
                f"the run's folder {self.path} must be readable, and it cannot be read: {files.reason_of(error)}"
            ) from None

    def create(self) -> RunDirectory:
        """Make the missing folders. ConfigError: the path is no folder, or cannot be written."""
        self.require_folder()
        with _making(self.path):
            files.require_trusted(self.path)
            for folder in ("ranks", "logs"):
                (self.path / folder).mkdir(parents=True, exist_ok=True)
        return self

    def require_folder(self) -> None:
        """Refuse a path that is something else than a folder by a ConfigError."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"--run-dir ({self.path}) must be a folder, it is a file: choose another path")

    def stored_id(self) -> str | None:
        """Return the id of the run that is here; None if it has none yet, or its file is damaged."""
        with contextlib.suppress(ValueError):
            return uuid.UUID(str(_record(self.identity).get("id"))).hex
        return None

    def id(self) -> str:
        """Return the id of the run that is here, which gets one at the first call."""
        run = self.stored_id()
        if run is None:
            run = uuid.uuid4().hex
            with _making(self.identity):
                files.write_atomic(self.identity, json_text({"id": run, "format": FORMAT}) + "\n")
        return run

    def key(self) -> str:
        """Return a key that differs in a copy of this folder, and stays when it is renamed; call `id` before.

        A copy is another folder, and a folder that is restored from a backup has a new file. Device numbers are left
        out: on a network disk they differ from node to node.
        """
        return f"{self.path.stat().st_ino:x}-{self.identity.stat().st_ctime_ns:x}"

    def finished_steps(self) -> int | None:
        """Return the steps in results.json; None if no run has reached its end here."""
        return count_of(_record(self.results).get("steps"))

    def events(self, *kinds: str) -> Iterator[dict[str, Any]]:
        """Yield the events of some kinds in metrics.jsonl, in their order; a line that a crash cut is left out."""
        if not self.metrics.exists():
            return
        marks = [event_bytes(kind) for kind in kinds]
        try:
            file = files.open_plain(self.metrics)
        except OSError as error:
            raise ConfigError(f"{self.metrics} cannot be read: {files.reason_of(error)}") from None
        with file:
            for line in file:
                # To look for bytes is much faster than to parse: most lines are steps, which few readers ask for.
                if any(mark in line for mark in marks):
                    with contextlib.suppress(ValueError):
                        event = record_of_json(line)
                        if event.get("event") in kinds:
                            yield event

    def steps(self) -> list[dict[str, Any]]:
        """Return the steps in metrics.jsonl, each once as it counts, without those that were undone."""
        steps: list[dict[str, Any]] = []
        for event in self.events("step", "resume"):
            kept = last_kept_step(event)
            while kept is not None and steps and steps[-1]["step"] > kept:
                steps.pop()
            if kept is not None and event["event"] == "step":
                steps.append(event)
        return steps

    def require_room(self, needed: int) -> None:
        """Refuse a disk with fewer than `needed` free bytes under the folder by a ConfigError."""
        free = files.free_bytes(self.path)
        if free < needed:
            raise ConfigError(
                f"the free disk space under {self.path} ({size(free)}) must be at least what one checkpoint takes "
                f"({size(needed)}): make room, or set --run-dir to another disk"
                f"{see('runs#no-room-for-a-checkpoint')}"
            )

    def mark_latest(self, root: Path = RUNS) -> None:
        """Point `root`/latest to this run, atomically; the link is relative when the run lies in `root`."""
        link = root / "latest"
        if link.exists() and not link.is_symlink():
            raise ConfigError(f"{link} must be a symbolic link, which each run replaces: move what is there away")
        path = self.path.resolve()  # of `latest` itself, where a run goes on by that name
        temporary = root / f".latest.{os.getpid()}.tmp"
        # A link cannot be replaced in place: it is made under another name, and renamed over the former one.
        with _making(link):
            root.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(path.name if path.parent == root.resolve() else path, target_is_directory=True)
            temporary.replace(link)

    def write_config(self, yaml_text: str) -> None:
        with _making(self.config):
            _keep_former(self.config)
            files.write_atomic(self.config, yaml_text)

    def write_environment(
        self,
        versions: Mapping[str, str | None],
        devices: Iterable[str],
        cpus: int,
        command_line: Iterable[str] | None = None,
    ) -> None:
        """Record where and how this run was started; secrets are redacted, and only listed variables are recorded.

        Args:
            cpus: number of processors that the process may use.
            command_line: words that the user typed, if a launcher started this process (default: its own).
        """
        facts = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "time_zone": time.strftime("%Z"),
            "command": redacted_arguments(sys.argv if command_line is None else command_line),
            "directory": str(Path.cwd()),
            "host": platform.node(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "versions": dict(versions),
            "git": git_state(Path.cwd()),
            "cpus": cpus,
            "devices": list(devices),
            "variables": recorded_variables(os.environ),
        }
        with _making(self.environment):
            _keep_former(self.environment)
            files.write_atomic(self.environment, json_text(facts, indent=2) + "\n")

    def write_results(self, results: Mapping[str, Any]) -> None:
        files.write_atomic(self.results, json_text(results, indent=2) + "\n")

    def recorded_failure(self) -> dict[str, Any]:
        """Return the content of failure.json; {} if it is missing or damaged."""
        return _record(self.failure)

    def set_results_aside(self) -> None:
        """Keep the results of a run that is being continued under a number: until it ends again, it has none."""
        if self.results.exists():
            self.results.rename(_numbered(self.results))


def last_kept_step(event: Mapping[str, Any]) -> int | None:
    """Return the last of a run's earlier steps that an event does not undo; None for an event that undoes none.

    A run that resumes from a checkpoint undoes the steps after that one. A step that is recorded again undoes what was
    recorded from its number on: the run began again there.
    """
    step = event.get("step")
    kind = event.get("event")
    if type(step) is not int or kind not in ("step", "resume"):
        return None
    return step if kind == "resume" else step - 1


def _keep_former(path: Path) -> None:
    if path.is_file():
        files.write_atomic(_numbered(path), files.read_plain(path))


def _numbered(path: Path) -> Path:
    names = (path.with_name(f"{path.stem}-{number:04d}{path.suffix}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _record(path: Path) -> dict[str, Any]:
    """Return the record in a file; {} if the file cannot be read, or is damaged."""
    with contextlib.suppress(OSError, ValueError):
        return read_record(path)
    return {}


class RunLock:
    """The right to run in a folder: one process of one host has it, until it ends in whatever way.

    A context manager. Entering it raises ConfigError, which names the holder, where another process has the lock. The
    kernel releases it when the process ends. The file stays: if it were removed, two processes could lock two files.

    Attributes:
        problem: error of a file system that gives no locks, so that a second process would not be refused; else None.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._descriptor: int | None = None
        self.problem: str | None = None

    def __enter__(self) -> RunLock:
        with _making(self._run):
            descriptor = files.open_own(self._run / _LOCK, os.O_RDWR | os.O_CREAT)
        has_lock = False
        try:
            # `is_held` takes the lock for a moment, so a single refusal does not count.
            for pause in (0, 0.05, 0.1, 0.2):
                time.sleep(pause)
                if has_lock := files.lock(descriptor, wait=False):
                    break
        except OSError as error:
            # A disk without locks must not keep anybody from training: `problem` leads to a warning.
            has_lock = True
            self.problem = error.strerror
        if not has_lock:
            os.close(descriptor)
            holder = self.holder(self._run)
            who = ""
            if holder:
                who = f" (process {holder['pid']} on {holder['host']}, since {holder['started']})"
            raise ConfigError(
                f"--run-dir ({self._run}) is in use by another run{who}: wait for its end, stop it by "
                f"`shardwise stop {self._run}`, or choose another folder"
                f"{see('runs#run-folder-in-use')}"
            )
        facts = {"host": platform.node(), "pid": os.getpid(), "started": datetime.now(UTC).isoformat("T", "seconds")}
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, json_text(facts).encode(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._descriptor is not None
        # Emptied while it is locked: `holder` would name a process that has ended.
        os.truncate(self._descriptor, 0)
        os.close(self._descriptor)

    @staticmethod
    def holder(run: Path) -> dict[str, Any] | None:
        """Return host, pid and start time of the process that has the lock, or was killed while it had it."""
        holder = _record(run / _LOCK)
        return holder if None not in map(holder.get, ("host", "pid", "started")) else None

    @staticmethod
    def is_held(run: Path) -> bool:
        """Return True if a process runs in this folder, or if the file system cannot tell."""
        try:
            # Without waiting, as a pipe of this name would have the reader wait for a writer.
            descriptor = os.open(run / _LOCK, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            return not isinstance(error, FileNotFoundError)
        try:
            return not files.lock(descriptor, wait=False, shared=True)
        except OSError:
            return True
        finally:
            os.close(descriptor)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    return value


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the Git commit for a run's `environment.json`, and `modified`: True if tracked files differ from it.

    None outside of a repository.
    """
    # Costly to import, for the start of a run alone.
    import subprocess

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


class FollowedFolder:
    """The folder of a run under way, which its ranks find again after it is renamed.

    Attributes:
        renamed_to: present path of the folder if it was renamed; else None.
    """

    def __init__(self, path: Path) -> None:
        self.renamed_to: Path | None = None
        self._path = path.absolute()
        # An open descriptor stays with the folder when its name changes.
        self._descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def follow(self) -> None:
        """Leave a link of the old name if the folder was renamed since the last call.

        Raises:
            RunError: it is not found, or something else has its name.
        """
        status = os.fstat(self._descriptor)
        try:
            if os.path.samestat(status, self._path.stat()):
                return
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:
            # A network disk may not answer for a moment.
            return
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
            raise RunError(
                f"the run's folder ({self._path}) was renamed to {new_path} while the run trained, and a link of the "
                f"old name cannot be made ({files.reason_of(error)}): start again with --run-dir {new_path}"
            ) from None
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


def run_folder(text: str) -> Path:
    """The run's folder of an option, that to which `runs/latest` leads now: a run that starts changes the link."""
    path = Path(text)
    return path.parent / path.readlink() if path.is_symlink() else path
