"""Evaluation tasks of EleutherAI's `lm_eval`: its own, and those of YAML files of the user's in its format."""

from __future__ import annotations

import functools
import importlib.util
import io
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import ConfigError, DataError, first_line, listing, nearest_name, raise_problems
from shardwise.config import ModelConfig, TrainConfig
from shardwise.config.evaluation import EvaluationConfig

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]

_MAX_TOKENS = 256  # new tokens of a continuation where a task names no number, as for `--model hf`
_TOP_K = 50  # the likeliest tokens that are drawn from where a task names no number: the default of transformers


def require_lm_eval(settings: EvaluationConfig) -> None:
    """Raise ConfigError unless the data of tasks can be read: `lm_eval` is installed, their folder exists."""
    folder = settings.tasks_path
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("evaluation.tasks needs the package lm_eval: pip install 'shardwise[tasks]'")
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"evaluation.tasks_path ({folder}) must be a folder of task files (.yaml), and it is none")


@functools.cache
def find_tasks(settings: EvaluationConfig) -> TaskManager:
    """The index of `lm_eval` with all of `evaluation.tasks`; ConfigError as `require_lm_eval`, or of unknown names."""
    require_lm_eval(settings)
    names = settings.tasks
    folder = settings.tasks_path
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
    raise_problems(ConfigError, problems)
    return manager


def require_tasks(settings: EvaluationConfig, model: ModelConfig, train: TrainConfig, tokenizer: Path | None) -> None:
    """Read the data of `evaluation.tasks`, which are then in the cache of the library `datasets`.

    ConfigError: as `find_tasks`, or a task needs what no model here has. DataError: there is no tokenizer, or the data
    of a task cannot be read.
    """
    names = settings.tasks
    if tokenizer is None:
        raise DataError(
            f"evaluation.tasks ({listing(names)}) need data.tokenizer, as the data hold only tokens: name what made "
            "them"
        )
    manager = find_tasks(settings)
    problems = []
    tasks: dict[str, Any] = {}
    for name in names:
        try:
            with quiet_lm_eval():
                tasks |= manager.load([name])["tasks"]
        except Exception as error:  # noqa: BLE001  # the library's own, of the file system, of the network
            problems.append(f"the data of evaluation.tasks ({name}) cannot be read: {first_line(error)}")
    raise_problems(DataError, problems)
    longest = longest_task_input(model, train)
    raise_problems(ConfigError, [text for name, task in tasks.items() for text in _task_problems(name, task, longest)])


def _task_problems(name: str, task: Any, longest: int) -> list[str]:
    if getattr(task, "UNSAFE_CODE", False):
        return [f"evaluation.tasks ({name}) must not run code that a model writes, and this task does"]
    if getattr(task, "MULTIMODAL", False):
        return [f"evaluation.tasks ({name}) must be a task of text alone, and this one has images or sounds"]
    if task.get_config("output_type") != "generate_until":
        return []
    settings = ContinuationSettings.of(task.get_config("generation_kwargs") or {})
    problems = []
    if settings.unknown:
        problems.append(
            f"generation_kwargs of evaluation.tasks ({name}) must be until, max_gen_toks, do_sample, temperature, "
            f"top_p and top_k at most, and not {listing(settings.unknown)}"
        )
    if settings.draws and not (settings.temperature > 0 and 0 < settings.top_p <= 1 and settings.top_k >= 0):
        problems.append(
            f"do_sample of evaluation.tasks ({name}) needs a temperature ({settings.temperature}) above 0, a top_p "
            f"({settings.top_p}) above 0 and at most 1, and a top_k ({settings.top_k}) of at least 0 in its "
            "generation_kwargs"
        )
    if settings.max_tokens >= longest:
        problems.append(
            f"max_gen_toks of evaluation.tasks ({name}, {settings.max_tokens:,}) must be less than the tokens that the "
            f"model reads ({longest:,})"
        )
    return problems


def longest_task_input(model: ModelConfig, train: TrainConfig) -> int:
    return model.max_position_embeddings or train.sequence_length


@dataclass(frozen=True)
class ContinuationSettings:
    """The `generation_kwargs` in the data of an evaluation task; `draws`: tokens are drawn, not the likeliest."""

    max_tokens: int
    until: Sequence[str]
    draws: bool
    temperature: float
    top_p: float
    top_k: int
    unknown: Sequence[str]

    @staticmethod
    def of(settings: Mapping[str, Any]) -> ContinuationSettings:
        from lm_eval.models.utils import normalize_gen_kwargs  # type: ignore[import-untyped]

        kept = dict(normalize_gen_kwargs(dict(settings), _MAX_TOKENS))
        max_tokens = kept.pop("max_gen_toks")
        until = [ending for ending in kept.pop("until") if ending]
        draws = bool(kept.pop("do_sample"))
        # `do_sample` alone draws at temperature 0 there, which transformers refuses.
        temperature = float(kept.pop("temperature", 0.0)) if draws else 0.0
        top_p = float(kept.pop("top_p", 1.0))
        top_k = int(kept.pop("top_k", _TOP_K) or 0)
        return ContinuationSettings(max_tokens, until, draws, temperature, top_p, top_k, tuple(kept))


@contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """Keep out of logs and output what `lm_eval` and the libraries that load data of evaluation tasks print."""
    shown = sys.stderr if sys.stderr.isatty() else io.StringIO()
    # Its remarks on each attempt go to the standard error of its import.
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(shown), redirect_stderr(shown):
            yield
    finally:
        logger.setLevel(level)
