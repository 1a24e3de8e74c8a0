"""Commands in processes that have imported torch already, which otherwise takes longer than most of what they do.

A server imports all that the commands do, and forks a process for each. In such a process, what starts another Python
(the launcher, a chat) forks as well. There are the same processes with the same parents, sessions,
signals and exit codes as ever, and no state that two commands share; only `exec` and the imports are left out. Linux
alone.

Run as a program, this is the server. It ends with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import math
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

# Nothing that reads the environment when it is imported, and nothing that `-m` runs.
_IMPORTED = (
    "numpy", "safetensors.torch", "tokenizers", "torch.utils.checkpoint", "torch.utils.tensorboard",
    "fsspec.implementations.local", "s3fs", "tabulate", "wcwidth.table_wide", "wcwidth.textwrap", "jinja2.sandbox",
    "numpy.ma", "orjson", "encodings.idna", "shardwise.launch.node", "shardwise.distributed.rendezvous",
    "shardwise_use.inference_jobs", "shardwise.config.sparse",
    *(f"shardwise.data.formats.{name}" for name in ("text", "chat", "hdf5", "megatron", "packing_cache", "tokens")),
    "shardwise.data.formats.streamed_text",
    "shardwise_use.importing", "shardwise.train", "shardwise.launch.local", "shardwise.data.prepare",
    "shardwise.train.run", "shardwise.verify.cell_training", "shardwise.cli.run_preparation",
    "shardwise.launch.rank_process", "shardwise.pipeline.schedule", "shardwise.launch.failed_run",
    "shardwise.checkpoint.load_weights", "shardwise.train.evaluator", "shardwise.models.llama", "shardwise.models.bert",
    "shardwise.models.gpt", "shardwise.models.gpt_neox", "shardwise.models.user_model", "shardwise.layers.experts",
    "shardwise_use.cli.chat", "shardwise_use.cli.converse", "shardwise_use.cli.evaluate", "shardwise_use.cli.generate",
    *(f"shardwise.cli.{name}" for name in ("train", "stop", "verify", "checkpoint", "data", "recipes")),
)  # fmt: skip


def can_run(program: Sequence[str]) -> bool:
    """Whether the program is this Python, which runs a module or a script on the CPU: no accelerator is forked."""
    if os.environ.get("TEST_DEVICE", "cpu") != "cpu":
        return False
    return sys.platform == "linux" and program[:1] == (sys.executable,) and _begin(program) is not None


class Job:
    """A program that `can_run`, under way; what it prints goes into files.

    Has of `subprocess.Popen` what the tests use.
    """

    def __init__(self, program: Sequence[str], *, at: Path, variables: Mapping[str, str], stdin: Path) -> None:
        self.returncode: int | None = None
        server = _server()
        folder = tempfile.mkdtemp(dir=Path(server).parent)
        self._printed = [Path(folder, name) for name in ("out", "err")]
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(server)
        self._stream = self._connection.makefile("rw")
        asked = [[*program], str(at), {**variables}, str(stdin), [*map(str, self._printed)]]
        print(json.dumps(asked), file=self._stream, flush=True)
        self.pid = int(self._stream.readline())

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        return self._ended_within(0.0)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait until it has ended; standard output and standard error.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        if self._ended_within(timeout) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        out, err = (file.read_text() for file in self._printed)
        return out, err

    def _ended_within(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], seconds)[0]:
            self.returncode = int(self._stream.readline())
            self._stream.close()
            self._connection.close()
        return self.returncode


@functools.cache
def _server() -> str:
    """Where the server of this process listens; it is started here, and `tests.costs` charges it."""
    place = str(Path(tempfile.mkdtemp(prefix="shardwise-warm-"), "socket"))
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYDANTIC_DISABLE_PLUGINS": "__all__",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # read as the compiler is imported; tests/e2e/test_compile.py says why
    }
    # It ends when this process no longer holds the pipe that it reads.
    held, hold = os.pipe()
    told, tell = os.pipe()
    streams = [(os.POSIX_SPAWN_DUP2, held, 0), (os.POSIX_SPAWN_DUP2, tell, 1)]
    os.posix_spawn(sys.executable, [sys.executable, "-P", __file__, place], variables, file_actions=streams)
    os.close(held)
    os.close(tell)
    assert os.read(told, 6) == b"ready\n"
    os.close(told)
    atexit.register(os.close, hold)  # until then it is open
    return place


class _Stderr:
    """Standard error of whoever writes, for the handlers that torch makes as it is imported."""

    def write(self, text: str) -> None:
        (sys.__stderr__ if sys.stderr is self else sys.stderr).write(text)

    def flush(self) -> None:
        (sys.__stderr__ if sys.stderr is self else sys.stderr).flush()


def _serve(place: str) -> None:
    sys.stderr = _Stderr()
    for name in _IMPORTED:
        importlib.import_module(name)
    os.fsync = lambda _file: None  # as in tests/conftest.py
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1
    warnings.simplefilter("error")  # as in pyproject.toml
    # Libraries tell each other; what shardwise calls is told as its own.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("error", category=DeprecationWarning, module="shardwise")
    warnings.filterwarnings("ignore", ".* found in sys.modules after import of package")  # this server has them all
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # torch's compiler hides it
    signal.signal(signal.SIGCHLD, _wait_for_those_who_answer)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        os.write(1, b"ready\n")
        while listener in select.select([0, listener], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _answer(connection)
            connection.close()
    shutil.rmtree(Path(place).parent, ignore_errors=True)


def _wait_for_those_who_answer(*_: object) -> None:
    """Not ignored, so that their processor time, with that of the commands, is this process's."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _answer(connection: socket.socket) -> NoReturn:
    """In a process of its own: fork the command, wait for it, and tell how it ended."""
    try:
        with connection.makefile("rw") as stream:
            program, at, variables, stdin, names = json.loads(stream.readline())
            child = os.fork()
            if child == 0:
                files = [os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND) for name in names]
                _become(program, [os.open(stdin, os.O_RDONLY), *files], variables, at)
            print(child, file=stream, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=stream, flush=True)
    finally:
        os._exit(0)


def _begin(program: Sequence[str]) -> int | None:
    """Where `-m MODULE …` or `SCRIPT …` is in what starts a Python; None where there are other options."""
    first = next((index for index, word in enumerate(program) if index and word not in ("-P", "-u")), None)
    return first if first is not None and (program[first] == "-m" or program[first].endswith(".py")) else None


def _become(program: Sequence[str], files: Sequence[int], variables: Mapping[str, str], at: str | None) -> NoReturn:
    """Go on as after `exec` of the program, and end as Python does."""
    code = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, 1024)
        os.chdir(at or ".")
        os.environ.clear()
        os.environ.update(variables)
        # The launcher's own: a thread that was not forked may hold their locks.
        weakref.finalize._registry.clear()
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)) or number == signal.SIGCHLD:
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        begin = _begin(program)
        sys.argv = list(program[begin + (program[begin] == "-m") :])
        own = Path.cwd() if program[begin] == "-m" else Path(program[begin]).resolve().parent
        given = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]
        sys.path[:] = [*([] if "-P" in program[:begin] else [str(own)]), *given, *_PATH]
        sys.modules.pop("sitecustomize", None)
        if any(Path(entry, "sitecustomize.py").exists() for entry in given):
            importlib.import_module("sitecustomize")
        for name in ("shardwise.launch.local", "shardwise_use.cli.chat"):
            starter = importlib.import_module(name)
            starter.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": _start})  # type: ignore[attr-defined]
        code = _run(sys.argv[0], program[begin] == "-m")
    finally:
        os._exit(code)


def _run(name: str, is_module: bool) -> int:
    code = 0
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001  the last words of Python itself
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


class _Fork:
    """A Python that was forked to run a module or script; has of `subprocess.Popen` what the launchers use."""

    def __init__(self, program: Sequence[str], variables: Mapping[str, str], stdin: int) -> None:
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            _become(program, [stdin, 1, 2], {**variables}, None)

    def __enter__(self) -> _Fork:
        return self

    def __exit__(self, *_: object) -> None:
        if self.stdin is not None:
            self.stdin.close()
        self.wait()

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _start(args: Sequence[str], env: Mapping[str, str] = os.environ, stdin: int | None = None, **options: Any) -> Any:
    """What stands for `subprocess.Popen` in the launchers: a fork where a Python runs a module or script."""
    program = tuple(map(os.fspath, args))
    plain = {name: value for name, value in options.items() if value is not None} == {"start_new_session": True}
    if not (plain and can_run(program)):
        return subprocess.Popen(args, env=env, stdin=stdin, **options)
    if stdin == subprocess.PIPE:
        read, write = os.pipe()
        process = _Fork(program, env, read)
        os.close(read)
        process.stdin = os.fdopen(write, "wb")
        return process
    with Path(os.devnull).open() as null:
        return _Fork(program, env, 0 if stdin is None else null.fileno())


_PATH = list(sys.path)

if __name__ == "__main__":
    _serve(sys.argv[1])
