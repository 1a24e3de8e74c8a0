"""Objects of the user's own that a configuration names as package.module:Name, and what their errors say."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise.base.errors import RAISED, ConfigError, error_text, nearest_name, see

_given: dict[str, object] = {}


@contextmanager
def given_objects(objects: Mapping[str, object]) -> Iterator[None]:
    """A context in which names of `hooks` are imported as these objects of the user's, which no module need have."""
    before = dict(_given)
    _given.update(objects)
    try:
        yield
    finally:
        _given.clear()
        _given.update(before)


def object_name(value: object) -> str:
    """The name that a configuration records for an object of the user's: module:Name of it, or of its class."""
    named = value if hasattr(value, "__qualname__") else type(value)
    name = re.sub(r"\W+", "_", named.__qualname__)
    module = getattr(named, "__module__", None)
    # A method of C, such as a list's append, has no module of its own.
    if not module:
        module = type(getattr(named, "__self__", named)).__module__
    return f"{module}:{name}"


def load_user_object(key: str, path: str, is_of_kind: Callable[[object], bool], kind: str) -> Any:
    """The object of the user's that `package.module:Name` names, from the current directory or an installed package.

    Args:
        is_of_kind: predicate of objects that the key may name.
        kind: words for that kind, which follow "must be".

    Raises:
        ConfigError: it cannot be imported, does not exist, or is of another kind.
    """
    if path in _given:
        value = _given[path]
        source = f"{key} ({path})"
    else:
        module_name, _, name = path.partition(":")
        module = _import(key, path, module_name)
        source = f"{key} ({path}): {getattr(module, '__file__', None) or module_name}"
        value = getattr(module, name, None)
        if value is None:
            near = nearest_name(name, [known for known, member in vars(module).items() if is_of_kind(member)])
            raise ConfigError(f"{source} lacks {name}" + (f"; did you mean {near}?" if near else ""))
        source += f": {name}"
    if not is_of_kind(value):
        raise ConfigError(f"{source} must be {kind}")
    return value


def accepts(function: Callable[..., Any], *arguments: object, **options: object) -> bool:
    """True if a function of the user's can be called with these arguments, or does not tell."""
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError:
        return False
    except ValueError:
        # A function of C may have no signature.
        return True
    return True


def _import(key: str, path: str, module_name: str) -> ModuleType:
    """Import a module from the current directory or, if it is not there, from the installed packages.

    The command `shardwise` does not search the current directory by itself. While the module is imported the directory
    is searched first, as by `python -m`; afterwards last, so that no file in it replaces a module of a library.
    """
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(module_name)
    except RAISED as error:
        missing = str(error.name) if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(
                f"{key} ({path}): there is no module {missing} in {folder} nor among the installed packages; start in "
                "the folder that holds it, or install it"
                f"{see('runs#own-code-not-found')}"
            ) from error
        raise ConfigError(
            f"{key} ({path}) cannot be imported: {error_text(error)}{see('runs#own-code-fails')}"
        ) from error
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)
