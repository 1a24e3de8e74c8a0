"""Agreement of ranks: before a training on software, configuration, folder and errors, and later on who asks to stop.

A job may run on several machines, which need not have the same software and files.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from shardwise import __version__
from shardwise.base.errors import ConfigError, listing
from shardwise.base.yaml_and_json import by_dotted_key
from shardwise.distributed import collectives
from shardwise.distributed.collectives import raise_on_all_ranks
from shardwise.distributed.mesh import Group, Mesh, join

_Result = TypeVar("_Result")
_FOLDER = "the run's folder"
_SHOWN = 5  # differences that are told, and ranks of each
_FIRST_POLL_SECONDS = 0.01
_LONGEST_POLL_SECONDS = 5.0


@cache
def package_versions() -> Mapping[str, str]:
    """The versions of packages on which the ranks of a training must agree."""
    packages = ("torch", "numpy", "tokenizers", "safetensors", "huggingface_hub", "pydantic")
    return {"shardwise": __version__} | {package: importlib.metadata.version(package) for package in packages}


def while_others_wait(work: Callable[[], _Result], group: Group) -> _Result:
    """Do a training's work on one rank that may take long, and wait until all ranks have done theirs. Collective.

    A collective fails when a rank does not call it in time, so the ranks tell each other every few seconds whether they
    still work. They wait no longer once the work has failed on one of them, which then raises its error.
    """
    if group.size == 1:
        return work()
    thread = ThreadPoolExecutor(1, thread_name_prefix="preparation")
    future = thread.submit(work)
    # The thread ends after this work; a user who interrupts the run does not wait for it.
    thread.shutdown(wait=False)
    seconds = _FIRST_POLL_SECONDS
    while True:
        # Asked once in a round: the work may end between two questions.
        is_done = future.done()
        has_failed = is_done and future.exception() is not None
        someone_works, someone_failed = collectives.reduce_numbers((not is_done, has_failed), group)
        if not someone_works or someone_failed:
            return future.result()
        wait([future], timeout=seconds)
        seconds = min(2 * seconds, _LONGEST_POLL_SECONDS)


@contextmanager
def raised_on_every_rank(group: Group) -> Iterator[None]:
    """Let every rank of a training raise the problems of a ConfigError that the body raises on any. Collective."""
    problems: list[str] = []
    try:
        yield
    except ConfigError as error:
        problems = error.problems
    raise_on_all_ranks(problems, group)


def require_same_on_ranks(settings: Mapping[str, Any], mesh: Mesh, run_path: Path | None = None) -> None:
    """Compare package versions, the configuration and the run's folder of all ranks with rank 0's. Collective.

    Args:
        settings: the configuration, by its sections and keys.
        run_path: folder that this rank was given; None accepts that of rank 0, whatever it is.

    Raises:
        ConfigError: ranks differ; raised on every rank, with the values and the ranks.
    """
    software = {"Python": platform.python_version()} | {
        name: package_versions()[name] for name in ("torch", "shardwise")
    }
    values = software | by_dotted_key(settings)
    first = collectives.broadcast_object(values | {_FOLDER: None if run_path is None else str(run_path)}, mesh.world)
    folder = first[_FOLDER]
    alike = run_path is None or (folder is not None and Path(folder).resolve() == run_path.resolve())
    values[_FOLDER] = folder if alike else str(run_path)
    _refuse_differences(values, first, mesh.world)


def require_same_run_dir(run_dir: Path | None, timeout: float) -> None:
    """Require that all ranks were given the same folder of the run, or none: None. Joins the job first. Collective.

    Args:
        timeout: seconds, as in `join`.

    Raises:
        ConfigError: folders differ; raised on every rank, with the folders and the ranks.
    """
    join(timeout=timeout)
    world = Group.world()
    require_equal({"run_dir": None if run_dir is None else str(run_dir.absolute())}, world, places=("run_dir",))


def require_equal(values: Mapping[str, Any], world: Group, places: Sequence[str] = ()) -> None:
    """Raise ConfigError on every rank, with what differs, where any rank's values are not the first rank's. Collective.

    Args:
        places: names of absolute paths, which are compared without symbolic links.
    """
    first = collectives.broadcast_object(values, world)
    compared = dict(values)
    for name in places:
        if first[name] and values[name] and Path(first[name]).resolve() == Path(values[name]).resolve():
            compared[name] = first[name]
    _refuse_differences(compared, first, world)


def _refuse_differences(values: Mapping[str, Any], first: Mapping[str, Any], world: Group) -> None:
    """Raise ConfigError on every rank where any rank's values are not those of the first. Collective."""
    differences = []
    for name in {**first, **values}:
        if first.get(name) != values.get(name):
            differences.append((name, first.get(name), values.get(name)))
    # The ranks of a healthy job exchange no more than this flag.
    if not collectives.any_rank(bool(differences), world):
        return
    ranks_by_text: dict[str, list[int]] = {}
    for rank, rank_differences in enumerate(collectives.all_gather_objects(differences, world)):
        for name, first_value, value in rank_differences:
            text = f"{name} must be the same on all ranks: {first_value} on rank 0, and {value}"
            ranks_by_text.setdefault(text, []).append(rank)
    problems = [
        f"{text} on {'rank' if len(ranks) == 1 else 'ranks'} {listing(ranks, most=_SHOWN)}"
        for text, ranks in ranks_by_text.items()
    ]
    if len(problems) > _SHOWN:
        problems = [*problems[:_SHOWN], f"{len(problems) - _SHOWN} more differ"]
    raise ConfigError(problems)


def agree_to_stop(reason: str | None, mesh: Mesh, is_complete: bool) -> tuple[str | None, bool]:
    """The first rank's reason to stop, and whether the work of any rank is complete; the same on every rank."""
    if mesh.world.size == 1:
        return reason, is_complete
    # Two numbers in each call; the texts, which take a slower exchange of objects, travel only when there is one.
    stop, complete = collectives.reduce_numbers((reason is not None, is_complete), mesh.world)
    return first_stop_reason(reason, mesh) if stop else None, bool(complete)


def first_stop_reason(reason: str | None, mesh: Mesh) -> str | None:
    """The reason of the first rank that has one, the same on every rank."""
    reasons = collectives.all_gather_objects(reason, mesh.world)
    return next((text for text in reasons if text is not None), None)
