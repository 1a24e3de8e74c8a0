"""Packages that can be called: `shardwise.train(config)`, though `shardwise.train` is the package of the training loop.

Python binds a subpackage to its name in its parent when it is first imported. A function of the same name would be
replaced by it at that moment, so the package itself is what is called.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def make_callable(package: str, home: str) -> None:
    """Let a call of `package` call the function of its last name in the module `home`, which the first call imports."""
    name = package.rpartition(".")[2]

    class Callable(ModuleType):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return getattr(import_module(home), name)(*arguments, **options)

        @property
        def __doc__(self) -> str | None:  # type: ignore[override]
            """The function's, so that `help` shows it."""
            return inspect.getdoc(getattr(import_module(home), name))

        @property
        def __signature__(self) -> inspect.Signature:
            return inspect.signature(getattr(import_module(home), name))

    sys.modules[package].__class__ = Callable
