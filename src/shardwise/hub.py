"""Where weights come from: a Hugging Face folder on this machine, or a hub id, fetched once into Hugging Face's cache.

A hub id is fetched by the launching process and then opened from the cache. Only safetensors, JSON and tokenizer files
are fetched: a pickle is never opened. The token that gated repositories need stays where `huggingface_hub` reads it
(HF_TOKEN, or `hf auth login`): it is no argument here, and no text of ours has it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlsplit

from shardwise.errors import ConfigError, listing, nearest_name

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BESIDE_WEIGHTS = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template.jinja",
)  # fmt: skip
"""What a model's folder has beside its weights and config.json."""
_FETCHED = ("config.json", SINGLE, INDEX, "model-*.safetensors", *BESIDE_WEIGHTS)
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# As the hub has them: owner/name, or the name alone of its oldest models.
_ID = re.compile(r"(?!.*(--|\.\.))([A-Za-z0-9]([\w.-]*\w)?/)?\w([\w.-]*\w)?", re.ASCII)
_LONGEST_ID = 96
_SHOWN = 6


def is_url(load: str) -> bool:
    """Whether `checkpoint.load` names a checkpoint by a URL, such as s3://bucket/run/step-00000100."""
    return "://" in load


def resolve(
    load: str, revision: str | None = None, *, cached: bool = False, announce: Callable[[str], None] | None = None
) -> Path:
    """The folder with the weights that `checkpoint.load` and `checkpoint.revision` name.

    A folder is taken as it is. Anything else is a hub id, fetched unless the cache has it; several processes may do so
    at once, each file is fetched by one of them.

    Args:
        cached: open the hub id from the cache, and ask nobody. announce: called with one line before a fetch.

    Raises:
        ConfigError: no such folder, repository or revision, no access to it, or no safetensors in it.
    """
    folder = Path(load).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ConfigError(
                f"checkpoint.revision ({revision}) must be left out: checkpoint.load ({load}) is a folder, "
                "and only a hub id has revisions"
            )
        weight_files(folder)
        return folder
    if problem := _path_problem(load, folder):
        raise ConfigError(problem)
    return _from_cache(load, revision) if cached else _fetch(load, revision, announce)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder.

    Raises:
        ConfigError: there are none (pickled weights are named, with the way out), or the index is broken.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        try:
            index = (folder / INDEX).read_bytes()
        except OSError as error:
            raise ConfigError(f"{folder / INDEX} cannot be read: {error.strerror or error}") from None
        return [folder / name for name in indexed(index, folder, lambda name: (folder / name).is_file())]
    if not folder.is_dir():
        raise ConfigError(f"checkpoint.load ({folder}) must be a folder with weights: there is none of that name")
    raise ConfigError(_without_weights(str(folder), [path.name for path in folder.iterdir()], _in_run(folder)))


def indexed(index: bytes, folder: object, is_there: Callable[[str], bool]) -> list[str]:
    """The files that the index of `folder`, anywhere, names.

    Raises:
        ConfigError: it is none, or names what is not there.
    """
    try:
        names = sorted(set(json.loads(index)["weight_map"].values()))
        inside = not any("/" in name or "\\" in name or name in (".", "..") for name in names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = f"{folder}/{INDEX} is no index of safetensors files ({error!r}): fetch or copy it again"
        raise ConfigError(text) from None
    if not names or not inside:
        raise ConfigError(
            f"{folder}/{INDEX} must name files of its own folder, and it names {listing(names) or 'none'}"
        )
    if absent := [name for name in names if not is_there(name)]:
        raise ConfigError(f"{folder} lacks {listing(absent)}, of which its index says that they hold weights")
    return names


def _without_weights(shown: str, names: Iterable[str], hint: str = "") -> str:
    """Why the files called `names` are no weights that can be loaded."""
    names = sorted(names)
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if not names:
        return f"checkpoint.load ({shown}) must hold {SINGLE}: it is empty"
    if pickled:
        return (
            f"checkpoint.load ({shown}) must hold safetensors, and its weights are pickled ({_some(pickled)}): opening "
            "a pickle can run any code that its author put there. Where you trust it, write it anew by transformers: "
            "from_pretrained(…), then save_pretrained(…)"
        )
    return f"checkpoint.load ({shown}) must hold {SINGLE} or {INDEX}: it has {_some(names)}{hint}"


def _in_run(folder: Path) -> str:
    """Where `folder` is a run's, the newest weights in it."""
    newest = max((path.parent for path in folder.glob("checkpoints/*/model*.safetensors*")), default=None)
    return f"; did you mean {newest}?" if newest else ""


def _some(names: list[str]) -> str:
    return listing([*names[:_SHOWN], f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else names)


def _path_problem(load: str, path: Path) -> str | None:
    """Why `load`, which is no folder, is no hub id either."""
    if path.exists():
        if path.suffix in _PICKLED:
            return _without_weights(load, [path.name])
        return f"checkpoint.load ({load}) must be a folder, it is a file: set checkpoint.load={path.parent}"
    missing = f"checkpoint.load ({load}) must be a folder with weights: there is none of that name in {Path.cwd()}"
    owner = load.partition("/")[0]
    if load.startswith((".", "/", "~")) or load.endswith("/") or load.count("/") > 1 or Path(owner).is_dir():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest_name(path.name, siblings)
        return f"{missing}; did you mean {path.parent / near}?" if near else missing
    if len(load) > _LONGEST_ID or load.endswith(".git") or not _ID.fullmatch(load):
        return f"{missing}, and a hub id reads owner/name, of letters, digits, '-', '_' and '.'"
    return None


def _from_cache(repository: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(_download(snapshot_download, repository, revision, local_files_only=True))
    except LocalEntryNotFoundError:
        raise ConfigError(
            f"checkpoint.load ({_named(repository, revision)}) must be in the cache of this machine "
            f"({constants.HF_HUB_CACHE}): fetch it there by `hf download`, or share the cache by HF_HOME"
        ) from None
    weight_files(folder)
    return folder


def _fetch(repository: str, revision: str | None, announce: Callable[[str], None] | None) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if announce is None or not sys.stderr.isatty():
        disable_progress_bars()
    site = _site(constants.ENDPOINT)
    try:
        folder = Path(_download(snapshot_download, repository, revision, local_files_only=True))
        weight_files(folder)
        if revision == folder.name:
            return folder  # a commit never changes
    except (LocalEntryNotFoundError, ConfigError):
        if announce is not None:
            place = constants.HF_HUB_CACHE
            announce(f"fetching {_named(repository, revision)} from {site}: once, then cached in {place}")
    try:
        folder = Path(_download(snapshot_download, repository, revision))
        if not any((folder / name).is_file() for name in (SINGLE, INDEX)):
            names = HfApi().list_repo_files(repository, revision=folder.name)
            raise ConfigError(_without_weights(repository, [name for name in names if "/" not in name]))
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  the client's transport decides on the type; the user reads a sentence
        raise ConfigError(_refusal(error, repository, revision, site)) from None
    weight_files(folder)
    return folder


def _download(download: Callable[..., str], repository: str, revision: str | None, **options: bool) -> str:
    return download(repository, revision=revision, allow_patterns=list(_FETCHED), ignore_patterns=["*/*"], **options)


def _refusal(error: Exception, repository: str, revision: str | None, site: str) -> str:
    """What a failed fetch means, and what helps."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, HfHubHTTPError):
        error = error.__cause__
    page, tokens = f"{site}/{repository}", f"{site}/settings/tokens"
    key = f"checkpoint.load ({_named(repository, revision)})"
    if isinstance(error, GatedRepoError):
        return f"{key} is gated: accept its licence on {page}, then set HF_TOKEN to a token of that account ({tokens})"
    if isinstance(error, RevisionNotFoundError):
        return f"checkpoint.revision ({revision}) must be a branch, tag or commit of {repository}: see {page}"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{key}: there is no such folder in {Path.cwd()}, and on {site} no such repository that this account may "
            f"read: check the name, or set HF_TOKEN to a token that may ({tokens})"
        )
    if isinstance(error, LocalEntryNotFoundError):
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{site} cannot be reached"
        return (
            f"{key} cannot be fetched: {offline}, and the cache {constants.HF_HUB_CACHE} lacks it; fetch it where "
            "there is access (`hf download`), and set checkpoint.load to the folder"
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return f"{key}: {site} refuses the token in use (status {status}): set HF_TOKEN to a valid one ({tokens})"
        return f"{key} cannot be fetched: {site} answers with status {status}; try again later"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
    return f"{key} cannot be fetched from {site} into {constants.HF_HUB_CACHE}: {reason}"


def _named(repository: str, revision: str | None) -> str:
    return repository if revision is None else f"{repository} at revision {revision}"


def _site(endpoint: str) -> str:
    """The hub's address without a log-in that may be part of it."""
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
