"""Names that the packages beside the core provide: commands, and functions that a key, an option or a command needs.

The core imports none of these packages: a name is resolved when it is used first.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from shardwise.base.errors import DataError

_COMMANDS = {
    "shardwise_plan": ("plan",),
    "shardwise_watch": ("ls", "top", "monitor", "report", "compare"),
    "shardwise_jobs": ("submit", "jobs", "supervise"),
    "shardwise_use": ("evaluate", "chat", "converse", "generate"),
}
COMMAND_MODULES = {
    **{name: f"{package}.cli.{name}" for package, names in _COMMANDS.items() for name in names},
    "checkpoint import": "shardwise_use.cli.import_",
}
"""Modules of the commands, and of the actions of commands, that are not in `shardwise.cli`."""
_FUNCTIONS = {
    "cluster": "shardwise_plan.device_specs:parse_cluster",
    "plot_runs": "shardwise_watch.plot:plot_runs",
    "sized_own": "shardwise_plan.own_model:own_model_stand_in",
    "predicted_step": "shardwise_plan.prediction_text:predicted_step",
    "draw_sample": "shardwise_use.generation:draw_sample",
    "gguf_export": "shardwise_use.gguf_file:GGUFExport",
    "require_readable": "shardwise_use.other_readers:require_readable",
    "evaluate_tasks": "shardwise_use.task_evaluation:evaluate_tasks",
    "recipe_of": "shardwise_use.porting.recipes:recipe_of",
    "cancel_waiting_jobs": "shardwise_jobs.jobs:cancel_waiting_jobs",
    "job_states": "shardwise_jobs.jobs:job_states",
}


def provided(name: str) -> Any:
    """The function of a package beside the core that has this name; the first use imports its package."""
    module, _, function = _FUNCTIONS[name].partition(":")
    return getattr(import_module(module), function)


def imported(name: str) -> ModuleType:
    """Import a registered module without garbage collection: its objects stay, and to search them frees nothing."""
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def make_callable(package: str, home: str) -> None:
    """Let a call of `package` call the function of its last name in the module `home`, which the first call imports.

    `shardwise.train` is the package of the training loop too. Python binds a subpackage to its name in its parent when
    it is first imported, and would replace a function of this name. So the package itself is what is called.
    """
    name = package.rpartition(".")[2]

    class Callable(ModuleType):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return getattr(import_module(home), name)(*arguments, **options)

        @property
        def __doc__(self) -> str | None:  # type: ignore[override]
            """The function's, so that `help` shows it."""
            import inspect

            return inspect.getdoc(getattr(import_module(home), name))

        @property
        def __signature__(self) -> Any:
            import inspect

            return inspect.signature(getattr(import_module(home), name))

    sys.modules[package].__class__ = Callable


def optional_library(module: str, who_needs: str, extra: str) -> Any:
    """The imported module of a library that is no dependency.

    Args:
        who_needs: beginning of the message, such as "parquet files need".
        extra: extra of this package that installs the library.

    Raises:
        DataError: the module is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise DataError(f"{who_needs} {library} ({error}): pip install 'shardwise[{extra}]'") from None
