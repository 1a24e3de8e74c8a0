"""From the command line to a command's module, and from its errors to text and an exit code."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from shardwise import __version__
from shardwise.base.errors import ConfigError, RunError, ShardwiseError
from shardwise.base.registered import imported
from shardwise.base.terminal import take_any_character
from shardwise.cli import output
from shardwise.cli.help import COMMAND_GROUPS, HelpFormatter, help_of_actions, help_of_commands, module_of
from shardwise.launch.environment import joined, keep_own, may_be_a_task

COMMANDS = [name for group in COMMAND_GROUPS.values() for name in group]
_HELP = ("-h", "--help")
_INTERNAL = ("supervise", "converse")  # commands that only a job's script or another command calls
_JOINING = (["train"], ["evaluate"], ["generate"])  # commands whose ranks srun or mpirun can start


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong with the arguments, which every rank would print; `keys`: those that the command reads.

    None: it reads all keys.
    """

    arguments: Sequence[str] = ()
    keys: Sequence[str] | None = None

    def error(self, message: str) -> NoReturn:
        # Costly to import, for a mistake alone.
        from shardwise.cli.wrong_arguments import problems_of_arguments

        raise ConfigError(problems_of_arguments(self, message, self.arguments, self.keys))

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Before 3.13, Python takes the value of `--option=--` for a mark of its own, and gives an empty list.
        if action.option_strings and "--" in arg_strings:
            self.error(f"argument {'/'.join(action.option_strings)}: expected one argument")
        return super()._get_values(action, arg_strings)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names and return its exit code.

    0 done, 2 wrong input, 1 failed, 75 stopped with a checkpoint. A process that is this command ends here.
    """
    code = _exit_code(list(sys.argv[1:] if argv is None else argv))
    if argv is None and "torch" in sys.modules:
        # As Python ends, but for the modules, which it would take apart: those of torch take a quarter of a second.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _exit_code(arguments: list[str]) -> int:
    _open_closed_streams()
    take_any_character()
    keep_own()
    try:
        if may_be_a_task() and arguments[:1] in _JOINING:
            # Costly to import, for the few starts by srun and mpirun.
            from shardwise.launch.external_launchers import adopt_task

            adopt_task()
        code = _dispatch(arguments)
        # Flushed here and not at exit, so that a reader who has gone is met inside of this `try`.
        sys.stdout.flush()
        return code
    except ShardwiseError as error:
        return _fail(error, arguments)
    except KeyboardInterrupt:
        return _fail(ShardwiseError("stopped by Ctrl-C (SIGINT)"))
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            from shardwise.base.files import path_refusal

            if (refusal := path_refusal(error)) is None:
                raise
            return _fail(refusal)
        # The reader, such as `head`, has gone; Python's own flush at exit must not complain about it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _open_closed_streams() -> None:
    """Let standard streams that the caller has closed, as `>&-` does, lead nowhere, in child processes too."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: the stream's
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


def _fail(error: ShardwiseError, arguments: Sequence[str] = ()) -> int:
    """Show an error and return its exit code; `arguments`: those of the command line, for one that is refused."""
    from shardwise.base.errors import counted_text
    from shardwise.launch.first_failure import Failure, show_failure

    place = joined()
    text = counted_text(error)
    if isinstance(error, ConfigError) and (corrected := _corrected(list(arguments))):
        text = f"{text}\n{corrected}"
    failure = Failure(place.rank if place is not None else 0, text, error.exit_code)
    show_failure(failure, place)
    if place is not None:
        from shardwise.launch.external_launchers import end_step

        end_step(failure)
    return error.exit_code


def _corrected(arguments: list[str]) -> str:
    """The command line as it was most likely meant; empty if none of its names is wrong."""
    if not arguments or arguments[0] not in COMMANDS:
        return ""
    name, module, further = _resolved(arguments)
    if hasattr(module, "ACTIONS"):
        return ""
    from shardwise.cli.wrong_arguments import corrected_command

    parser = _parser(name, module)
    return corrected_command(parser, further, parser.keys)


def _resolved(arguments: list[str]) -> tuple[str, ModuleType, list[str]]:
    name, *further = arguments
    module = imported(module_of(name))
    if further and further[0] in getattr(module, "ACTIONS", ()):
        return f"{name} {further[0]}", imported(module_of(name, further[0])), further[1:]
    return name, module, further


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name not in COMMANDS and name not in _INTERNAL:
        return _without_command(arguments)
    # Otherwise pydantic looks for plugins in every installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    name, module, further = _resolved(arguments)
    if hasattr(module, "ACTIONS"):
        return _without_action(name, module, further)
    parser = _parser(name, module)
    parser.arguments = further
    parsed = parser.parse_intermixed_args(further)
    try:
        code: int = module.run(parsed)
    except SystemExit as error:
        # Raised by code of the user's own: a command ends only by its return.
        from shardwise.base.errors import error_text

        raise RunError(f"shardwise {name} was ended before it was done: {error_text(error)}") from error
    except RunError as error:
        # A path that may not be entered is wrong input, unless a run trains there.
        if name == "train" or not getattr(error, "refused", False):
            raise
        raise ConfigError(str(error)) from None
    return code


def _parser(name: str, module: ModuleType) -> _Parser:
    parser = _Parser(prog=f"shardwise {name}", description=module.__doc__, allow_abbrev=False)
    parser.formatter_class = HelpFormatter
    parser.keys = getattr(module, "KEYS", None)
    module.configure(parser)
    return parser


def _without_command(arguments: list[str]) -> int:
    first = arguments[0] if arguments else "--help"
    if first == "--version":
        output.line(f"shardwise {__version__}")
        return 0
    if first in _HELP:
        output.raw(help_of_commands())
        return 0
    if first.partition("=")[0] == "--completion":
        # Costly to import: all commands are.
        from shardwise.cli.completion import completion_script

        shell = first.partition("=")[2] or " ".join(arguments[1:])
        output.raw(completion_script(shell))
        return 0
    from shardwise.cli.wrong_arguments import unknown_command

    raise ConfigError(unknown_command(arguments, COMMANDS))


def _without_action(name: str, package: ModuleType, arguments: list[str]) -> int:
    if not arguments or arguments[0] in _HELP:
        output.raw(help_of_actions(name, package.__doc__ or "", package.ACTIONS))
        return 0
    from shardwise.cli.wrong_arguments import unknown_action

    raise ConfigError(unknown_action(name, arguments[0], [*package.ACTIONS]))
