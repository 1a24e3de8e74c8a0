"""Evaluation tasks of EleutherAI's `lm_eval`: its own, and those of YAML files of the user's in its format."""

from __future__ import annotations

import functools
import importlib.util
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.base.errors import ConfigError, DataError, listing, nearest_name
from shardwise.config import EvaluationConfig
from shardwise.data.reading.content import first_line

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]


@functools.cache
def find_tasks(settings: EvaluationConfig) -> TaskManager:
    """The index of `lm_eval` in which all of `evaluation.tasks` are.

    Raises:
        ConfigError: `lm_eval` is not installed, the folder of task files is missing, or a name is unknown.
    """
    names = settings.tasks
    folder = settings.tasks_path
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("evaluation.tasks needs the package lm_eval: pip install 'shardwise[tasks]'")
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"evaluation.tasks_path ({folder}) must be a folder of task files (.yaml), and it is none")
    # It takes seconds to import.
    from lm_eval.tasks import TaskManager

    if folder is not None:
        # The index of the library's own tasks takes seconds more.
        manager = TaskManager(include_path=folder, include_defaults=False)
        if set(names) <= set(manager.all_tasks):
            return manager
    manager = TaskManager(include_path=folder)
    problems = []
    for name in names:
        if name not in manager.all_tasks:
            near = nearest_name(name, manager.all_tasks)
            hint = f"did you mean {near}?" if near else "`lm-eval ls tasks` lists them"
            problems.append(f"evaluation.tasks ({name}) must be a task of lm_eval or of evaluation.tasks_path: {hint}")
    if problems:
        raise ConfigError(problems)
    return manager


def require_tasks(settings: EvaluationConfig, tokenizer: Path | None) -> None:
    """Read the data of the tasks, which are then in the cache of the library `datasets`.

    Args:
        tokenizer: folder of the model's tokenizer; None if it is not known.

    Raises:
        ConfigError: as `find_tasks`. DataError: there is no tokenizer, or the data of a task cannot be read.
    """
    if tokenizer is None:
        raise DataError(
            f"evaluation.tasks ({listing(settings.tasks)}) need data.tokenizer, as the data hold only tokens: name "
            "what made them"
        )
    manager = find_tasks(settings)
    problems = []
    for name in settings.tasks:
        try:
            with without_bars():
                manager.load([name])
        except Exception as error:  # noqa: BLE001  # the library's own, of the file system, of the network
            problems.append(f"the data of evaluation.tasks ({name}) cannot be read: {first_line(error)}")
    if problems:
        raise DataError(problems)


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep progress bars and remarks of libraries out of logs, and all that they print out of a command's output."""
    shown = sys.stderr if sys.stderr.isatty() else io.StringIO()
    with redirect_stdout(shown), redirect_stderr(shown):
        yield
