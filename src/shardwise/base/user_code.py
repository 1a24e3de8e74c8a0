"""Objects of the user's own that a configuration names as package.module:Name, and what their errors say."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise.base.errors import ConfigError, nearest_name, see

RAISED = (Exception, SystemExit)
"""What code of the user's own may raise. `sys.exit(0)` would end a run as if all its steps were done."""
_given: dict[str, object] = {}


@contextmanager
def given(objects: Mapping[str, object]) -> Iterator[None]:
    """Inside, these names stand for these objects: a program gives a hook that no module need have."""
    before = dict(_given)
    _given.update(objects)
    try:
        yield
    finally:
        _given.clear()
        _given.update(before)


def name_of(value: object) -> str:
    """What a configuration records of an object that a program gives: module:Name of it, or of its class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    name = re.sub(r"\W+", "_", named.__qualname__)
    module = getattr(named, "__module__", None) or type(getattr(named, "__self__", named)).__module__
    return f"{module}:{name}"  # a method of C, such as a list's append, has no module of its own


def load(key: str, path: str, is_wanted: Callable[[object], bool], wanted: str) -> Any:
    """The object that `package.module:Name` names, from the current directory or an installed package.

    Args:
        key: the configuration's, for messages.
        is_wanted: whether an object is of the kind that the key names.
        wanted: that kind, after "must be".

    Raises:
        ConfigError: it cannot be imported, is not there, or is of another kind.
    """
    if path in _given:
        value, where = _given[path], f"{key} ({path})"
    else:
        module_name, _, name = path.partition(":")
        module = _import(key, path, module_name)
        value, where = (
            getattr(module, name, None),
            f"{key} ({path}): {getattr(module, '__file__', None) or module_name}",
        )
        if value is None:
            near = nearest_name(name, [other for other, one in vars(module).items() if is_wanted(one)])
            raise ConfigError(f"{where} lacks {name}" + (f"; did you mean {near}?" if near else ""))
        where += f": {name}"
    if not is_wanted(value):
        raise ConfigError(f"{where} must be {wanted}")
    return value


def accepts(function: Callable[..., Any], *arguments: object, **options: object) -> bool:
    """Whether a function can be called with so many arguments; True where it does not tell."""
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError:
        return False
    except ValueError:  # a function of C
        return True
    return True


def error_text(error: BaseException) -> str:
    """The error, and where the user's own code raised it."""
    libraries = [Path(__file__).parent.parent]
    if (torch := sys.modules.get("torch")) is not None and torch.__file__:
        libraries.append(Path(torch.__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and not any(Path(frame.filename).is_relative_to(library) for library in libraries)
        and not _is_pythons(Path(frame.filename))
    ]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    if isinstance(error, SystemExit):
        code = "" if error.code is None else repr(error.code)
        return f"sys.exit({code}) was called{place}"
    text = f": {error}" if str(error) else ""
    return f"{type(error).__name__}{text}{place}"


def _is_pythons(file: Path) -> bool:
    """Whether a file is of the standard library; installed packages lie below it, and may be the user's own."""
    standard = Path(sysconfig.get_path("stdlib"))
    return file.is_relative_to(standard) and file.relative_to(standard).parts[0] not in (
        "site-packages",
        "dist-packages",
    )


def _import(key: str, path: str, module_name: str) -> ModuleType:
    """Import a module from the current directory or, if it is not there, from the installed packages.

    The command `shardwise` does not search the current directory by itself. While the module is imported the directory
    is searched first, as by `python -m`; afterwards last, so that no file in it replaces a module of a library.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except RAISED as error:
        missing = str(error.name) if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(
                f"{key} ({path}): there is no module {missing} in {here} nor among the installed packages; start in "
                "the folder that holds it, or install it"
                f"{see('runs#own-code-not-found')}"
            ) from error
        raise ConfigError(
            f"{key} ({path}) cannot be imported: {error_text(error)}{see('runs#own-code-fails')}"
        ) from error
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)
