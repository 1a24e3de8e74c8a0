"""Talk with a model in the terminal.

If the model's tokenizer has a chat template, your lines are your part of a conversation. Without a template the model
continues your text, and an empty line continues its last text. The text appears while it is generated; the keys and
values of all tokens so far are cached.

Ctrl-C stops an answer, and Ctrl-D or /quit leaves. /reset begins a new conversation, and /temperature T changes the
temperature.

The keys of `shardwise generate` can be set.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shardwise.base.errors import ConfigError, RunError
from shardwise.cli import output
from shardwise.launch.environment import joined
from shardwise_use.cli.model_argument import HELP
from shardwise_use.cli.sampling import add_sampling_options, require_valid_sampling

_POLL_SECONDS = 0.2
_PROMPT = "> "
_LONGEST_PARENT = 70
"""Bytes of the path of the temporary folder, below which the path of a socket in it is short enough."""
_COMMANDS = "/reset begins anew, /temperature T changes the temperature, /quit leaves; Ctrl-C stops an answer"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=HELP)
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="such as parallel.tensor=2")
    parser.add_argument("--system", metavar="TEXT", help="instruction before the conversation")
    add_sampling_options(parser, max_tokens=512, top_p=0.95)
    parser.add_argument("--stats", action="store_true", help="print the number of tokens and the speed of each answer")


def run(arguments: argparse.Namespace) -> int:
    require_valid_sampling(arguments)
    return talk_with_model(arguments, system=arguments.system, shows_stats=arguments.stats)


def talk_with_model(
    arguments: argparse.Namespace, *, completes: bool = False, system: str | None = None, shows_stats: bool = False
) -> int:
    """Start the process of the model, and pass texts between it and the terminal.

    The model is in a process of its own, so that the first line appears at once, and Ctrl-C stops an answer and not the
    model. `completes`: it continues texts even if it has a chat template.
    """
    if joined() is not None:
        raise ConfigError("a conversation must be started by itself, and not by torchrun, srun or mpirun: give --nproc")
    output.progress(f"loading {arguments.checkpoint} …")
    # The path of a socket has at most 107 bytes on Linux, and 103 elsewhere.
    parent = None if len(os.fsencode(tempfile.gettempdir())) < _LONGEST_PARENT else "/tmp"
    with (
        tempfile.TemporaryDirectory(prefix="shardwise-", dir=parent) as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        path = Path(folder) / "socket"
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(_POLL_SECONDS)
        command = [sys.executable, "-P", "-m", "shardwise", "converse", arguments.checkpoint, *arguments.overrides]
        command += [f"--socket={path}", f"--max-tokens={arguments.max_tokens}"]
        command += [f"--system={system}"] if system is not None else []
        command += [f"--nproc={arguments.nproc}"] if arguments.nproc is not None else []
        command += ["--completes"] if completes else []
        # In a session of its own, Ctrl-C in the terminal does not reach it.
        model = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            channel = _accept(listener, model)
            if channel is not None:
                with contextlib.closing(channel):
                    _Terminal(channel, arguments, shows_stats=shows_stats).run()
            code = model.wait()
        finally:
            model.terminate()
            model.wait()
    if code < 0:
        raise RunError(
            f"the process of the model was killed ({signal.Signals(-code).name}), usually for want of memory"
        )
    return code


def _accept(listener: socket.socket, model: subprocess.Popen[bytes]) -> Connection | None:
    while model.poll() is None:
        with contextlib.suppress(TimeoutError):
            connection = listener.accept()[0]
            connection.settimeout(None)
            return Connection(connection.detach())
    return None


class _Terminal:
    def __init__(self, channel: Connection, arguments: argparse.Namespace, *, shows_stats: bool) -> None:
        self._channel = channel
        self._sampling = {name: getattr(arguments, name) for name in ("temperature", "top_p", "seed")}
        self._shows_stats = shows_stats
        self._max_tokens = arguments.max_tokens
        self._is_interactive = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        try:
            ready = self._channel.recv()
        except (EOFError, OSError):
            return
        if ready["max_tokens"] < self._max_tokens:
            output.progress(f"an answer has at most {ready['max_tokens']:,} tokens, half of what the model reads")
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        if self._is_interactive:
            # Only its import is needed: input() then edits lines and knows earlier ones.
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401
            kind = (
                "write a message"
                if ready["has_template"]
                else "write the beginning of a text, and the model continues it"
            )
            output.line(f"{kind}; {_COMMANDS}")
        try:
            while True:
                if request := self._command(self._read()):
                    self._answer(request)
        except EOFError:
            pass
        except OSError:
            return  # the model has gone, and its exit code says why
        if self._is_interactive:
            output.line()

    def _read(self) -> str:
        """A line of the person's; EOFError: there is no more."""
        if self._is_interactive and select.select([sys.stdin], [], [], 0)[0]:
            # A line, or the end of the input, that came before the prompt: readline would wait past that end.
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            output.line(f"{_PROMPT}{line.rstrip()}")
            return line.removesuffix("\n")
        while True:
            try:
                return input(_PROMPT if self._is_interactive else "")
            except KeyboardInterrupt:
                output.line("(Ctrl-D leaves)")

    def _command(self, line: str) -> dict[str, Any] | None:
        """The request for the model; None if there is none. EOFError: the person leaves."""
        if not line.startswith("/"):
            request = {"text": line, **self._sampling}
            self._sampling["seed"] += 1
            return request
        name, _, value = line.partition(" ")
        if name in ("/quit", "/exit", "/bye"):
            raise EOFError
        if name in ("/reset", "/clear"):
            self._channel.send({"reset": True})
        elif name == "/temperature":
            self._change_temperature(value)
        elif name in ("/help", "/?"):
            output.progress(_COMMANDS)
        else:
            output.progress(f"there is no command {name}: {_COMMANDS}")
        return None

    def _change_temperature(self, value: str) -> None:
        try:
            temperature = float(value)
        except ValueError:
            temperature = math.nan
        if 0 <= temperature < math.inf:
            self._sampling["temperature"] = temperature
        else:
            output.progress(f"/temperature ({value}) must be a number of at least 0, such as /temperature 0.7")

    def _answer(self, request: dict[str, Any]) -> None:
        """Send a request and show the answer, which Ctrl-C stops. OSError: the model has gone."""
        previous = signal.signal(signal.SIGINT, lambda *_: self._channel.send({"stop": True}))
        try:
            self._channel.send(request)
            while not self._show(self._channel.recv()):
                pass
        except EOFError:
            raise ConnectionResetError from None
        finally:
            signal.signal(signal.SIGINT, previous)

    def _show(self, message: dict[str, Any]) -> bool:
        if "refused" in message:
            output.progress(message["refused"])
            return True
        if "piece" in message:
            sys.stdout.write(output.text(message["piece"]))
            sys.stdout.flush()
            return False
        output.line()
        if self._shows_stats:
            tokens = message["tokens"]
            speed = f", then {(tokens - 1) / message['decode_seconds']:,.0f} tokens/s" if tokens > 1 else ""
            output.progress(f"{tokens:,} tokens; the first after {message['prefill_seconds']:.2f} s{speed}")
        return True
