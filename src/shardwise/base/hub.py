"""Repositories of Hugging Face's hub: a hub id is fetched once into the cache of this machine.

The launching process fetches a hub id, and the ranks open it from the cache. Only safetensors, JSON, tokenizer and
licence files are fetched: a pickle is never opened. The token that gated repositories need stays where
`huggingface_hub` reads it (HF_TOKEN, or `hf auth login`): no argument here takes it, and no message contains it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from shardwise.base.errors import ConfigError, nearest_name, see
from shardwise.base.progress import progress

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZERS = (
    (TOKENIZER,), ("vocab.json", "merges.txt"), ("tokenizer.model",), ("vocab.txt",),
    ("tekken.json",), ("gpt2-vocab.json", "gpt2-merges.txt"),
)  # fmt: skip
"""Sets of files that are a tokenizer, in the order in which they are looked for; the last is Megatron-LM's names."""
CHAT_TEMPLATES = "additional_chat_templates"
"""The folder of the chat templates that have names."""
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", *TOKENIZERS[-1],
    "tekken.json", "chat_template.jinja", "chat_template.json", f"{CHAT_TEMPLATES}/*.jinja",
)  # fmt: skip
"""Patterns of a tokenizer's files."""
LICENCES = tuple(
    f"{spelling}*"
    for word in ("license", "licence", "notice", "copying", "use_policy")
    for spelling in (word, word.upper(), word.capitalize())
)
"""Patterns of the files with the terms of use, as repositories spell them: LICENSE, license.txt, USE_POLICY.md."""

# Files in folders are not fetched, such as the weights of another format, except for those of `CHAT_TEMPLATES`: no
# pattern of other files begins with a star, so none matches in a folder whose name begins as that does.
_IN_FOLDERS = f"[!{CHAT_TEMPLATES[0]}]*/*"
# The hub's own rule: owner/name, or for its oldest models the name alone.
HUB_ID = re.compile(r"(?=.{1,96}$)(?!.*(--|\.\.|\.git$))([A-Za-z0-9]([\w.-]*\w)?/)?\w([\w.-]*\w)?", re.ASCII)
HUB_ID_RULE = "a hub id reads owner/name, of letters, digits, '-', '_' and '.'"
FOUND = {
    "cache": "known to the cache of this machine",
    "hub": "on the hub, fetched when the run starts",
    "unknown": "not in the cache of this machine, and the hub cannot be reached from here",
}
"""The words of a dry run about a hub id, by the result of `find_on_hub`."""
# A dry run does not wait longer for the hub's answer.
_PATIENCE_SECONDS = 10.0
# Names of files in the hub's cache: SHA-256 of large files, git's hash of others.
_SHA256 = re.compile("[0-9a-f]{64}")
_GIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class HubFiles:
    """A repository on the hub, and the files that are needed of it."""

    key: str
    repository: str
    revision: str | None  # branch, tag or commit; None: the main branch
    patterns: tuple[str, ...]
    # Function that returns the message if files with these names are not enough, else None.
    lacking: Callable[[Collection[str]], str | None] = lambda names: None
    # True to check the hashes of files in the cache and fetch damaged ones again; only for small files.
    verified: bool = False
    # Function that raises ConfigError for a folder with enough names that lacks something else.
    check: Callable[[Path], None] = lambda folder: None
    repo_type: Literal["model", "dataset"] = "model"
    hint: str = ""  # end of a message, with another name that may have been meant
    no_revision: str = ""  # message if the repository has no such revision; empty: the usual one

    @property
    def named(self) -> str:
        return self.repository if self.revision is None else f"{self.repository} at revision {self.revision}"

    def require(self, folder: Path) -> None:
        """Raises ConfigError if the folder lacks needed files."""
        self.require_names(_names(folder))
        self.check(folder)

    def require_names(self, names: Collection[str]) -> None:
        """Raises ConfigError if files with these names are not enough."""
        if (problem := self.lacking(names)) is not None:
            raise ConfigError(problem)

    def download(self, *, local_files_only: bool = False) -> Path:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            self.repository, repo_type=self.repo_type, revision=self.revision, allow_patterns=[*self.patterns],
            ignore_patterns=[_IN_FOLDERS], local_files_only=local_files_only,
        )  # fmt: skip
        return Path(folder)


def is_hub_name(name: str) -> bool:
    """True if `name` reads owner/name, as a repository on the hub does."""
    return "/" in name and HUB_ID.fullmatch(name) is not None


def can_only_be_path(name: str) -> bool:
    """True if `name` is no hub id but a path, by the way in which it is written or as its first folder is there."""
    # Before the first run there is no folder of runs.
    is_written = name.startswith((".", "/", "~", "runs/")) or name.endswith("/") or name.count("/") > 1
    return is_written or Path(name.partition("/")[0]).is_dir()


def fetch_or_open(
    place: Path | HubFiles, *, cached: bool = False, announce: Callable[[str], None] | None = None
) -> Path:
    """A path as it is, or the folder of the hub's files at their newest commit, whose name is the commit's.

    What the cache lacks is fetched. Several processes may call this at once: each file is fetched by one of them.

    Args:
        cached: True to open files from the cache, without a request.
        announce: called with one line before a fetch.

    Raises:
        ConfigError: no such repository or revision, no access to it, or the needed files are not in it.
    """
    if isinstance(place, Path):
        return place
    if not cached:
        return _fetch(place, announce)
    try:
        return _from_cache(place)
    except LookupError:
        from huggingface_hub import constants

        raise ConfigError(
            f"{place.key} ({place.named}) must be in the cache of this machine "
            f"({constants.HF_HUB_CACHE}): fetch it there by `hf download`, or share the cache by HF_HOME"
        ) from None


def find_on_hub(files: HubFiles) -> Literal["cache", "hub", "unknown"]:
    """The place of files of the hub, a word of `FOUND`; ConfigError if the hub refuses them. Nothing is fetched."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    with contextlib.suppress(LookupError, ConfigError):  # the cache lacks them
        _from_cache(files)
        return "cache"
    ask = HfApi().dataset_info if files.repo_type == "dataset" else HfApi().model_info
    try:
        answer = ask(files.repository, revision=files.revision, timeout=_PATIENCE_SECONDS)
    except HfHubHTTPError as error:
        if error.response.status_code >= 500:
            return "unknown"
        raise ConfigError(_refusal(error, files)) from None
    except Exception:  # noqa: BLE001  the client's transport decides on the type
        return "unknown"
    files.require_names([file.rfilename for file in answer.siblings or [] if "/" not in file.rfilename])
    return "hub"


def hub_address() -> str:
    """The hub's address without a log-in."""
    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    return f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"


def split_revision(named: str, key: str) -> tuple[str, str | None]:
    """The hub's repository and revision of `owner/name@revision`; ConfigError, which calls it `key`, if @ ends it."""
    repository, at, revision = named.partition("@")
    if at and not revision:
        raise ConfigError(f"{key} must have a branch, tag or commit after @, or no @")
    return repository, revision or None


def require_hub_id(name: str, path: Path, must: str, *, is_file: bool = False) -> None:
    """Raises ConfigError if `name`, which is no existing path, is no hub id either; `must` begins the message."""
    missing = f"{must}: there is none of that name in {Path.cwd()}"
    if is_file or can_only_be_path(name):
        near = nearest_name(path.name, _names(path.parent))
        raise ConfigError(missing + (f"; did you mean {path.parent / near}?" if near else ""))
    if not HUB_ID.fullmatch(name):
        raise ConfigError(f"{missing}, and {HUB_ID_RULE}")


def _from_cache(files: HubFiles) -> Path:
    """The folder in the cache of this machine; LookupError if it has none, ConfigError if needed files lack there."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = files.download(local_files_only=True)
    except LocalEntryNotFoundError:
        raise LookupError from None
    files.require(folder)
    return folder


def drop_damaged_files(folder: Path, patterns: Iterable[str] = ("**/*",)) -> list[Path]:
    """Delete and return files of a commit's folder in the hub's cache that changed since they were fetched."""
    damaged = [
        path
        for path in sorted({path for pattern in patterns for path in folder.glob(pattern)})
        if path.is_file() and _is_damaged(path.resolve())
    ]
    for path in damaged:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
    return damaged


def _is_damaged(content: Path) -> bool:
    """True if a file of the cache differs from its name: the SHA-256 of large files, git's hash of others."""
    with content.open("rb") as file:
        # Git hashes a header with the size before the content.
        if _SHA256.fullmatch(content.name):
            digest = hashlib.file_digest(file, hashlib.sha256)
        elif _GIT.fullmatch(content.name):
            header = f"blob {content.stat().st_size}\0".encode()
            digest = hashlib.file_digest(file, lambda: hashlib.sha1(header, usedforsecurity=False))
        else:
            return False
    return digest.hexdigest() != content.name


def _fetch(files: HubFiles, announce: Callable[[str], None] | None) -> Path:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if announce is None or not sys.stderr.isatty():
        disable_progress_bars()
    # Its line about a repository without these files: our own message says it.
    logging.getLogger("huggingface_hub._snapshot_download").setLevel(logging.ERROR)
    try:
        folder = _from_cache(files)
        if files.verified and drop_damaged_files(folder, files.patterns):
            raise LookupError
        if files.revision == folder.name:
            return folder  # a commit never changes
    except (LookupError, ConfigError):
        if announce is not None:
            announce(f"fetching {files.named} from {hub_address()}: once, then cached in {constants.HF_HUB_CACHE}")
    blobs = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=files.repository, repo_type=files.repo_type), "blobs")
    is_logged = announce is not None and not sys.stderr.isatty()  # on a terminal the client shows bars
    try:
        with progress(f"fetching {files.named}", shown=is_logged, done=lambda: _size(blobs)):
            folder = files.download()
        folder.mkdir(parents=True, exist_ok=True)  # the client makes none if it fetches nothing
        if files.lacking(_names(folder)) is not None:  # what the repository has instead is told
            names = HfApi().list_repo_files(files.repository, revision=folder.name, repo_type=files.repo_type)
            files.require_names([name for name in names if "/" not in name])
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  the client's transport decides on the type; the user reads a sentence
        raise ConfigError(_refusal(error, files)) from None
    files.require(folder)
    return folder


def _size(folder: Path) -> int:
    """The bytes of the files in a folder, some of which another process may remove meanwhile."""
    total = 0
    for file in folder.glob("*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


def _names(folder: Path) -> list[str]:
    """The names in a folder; none if it does not exist, as the hub's client makes none if it fetches nothing."""
    return [file.name for file in folder.iterdir()] if folder.is_dir() else []


def _refusal(error: Exception, files: HubFiles) -> str:
    from huggingface_hub import constants, errors

    site = hub_address()
    # The client reports an answer of the hub as a missing entry of the cache.
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, errors.HfHubHTTPError):
        error = error.__cause__
    page = f"{site}/datasets/{files.repository}" if files.repo_type == "dataset" else f"{site}/{files.repository}"
    key = f"{files.key} ({files.named})"
    token = f"HF_TOKEN to a token of that account ({site}/settings/tokens)"
    match error:
        case errors.GatedRepoError():
            hint = files.hint if files.repo_type == "model" else ""
            return f"{key} is gated: accept its licence on {page}, then set {token}{hint}{see('data#gated-repository')}"
        case errors.RevisionNotFoundError():
            revision = "checkpoint.revision" if files.key == "checkpoint.load" else f"the revision of {files.key}"
            usual = f"{revision} ({files.revision}) must be a branch, tag or commit of {files.repository}: see {page}"
            return files.no_revision or usual
        case errors.RepositoryNotFoundError():
            return (
                f"{key} is no path, and {site} has no such repository that this account may read: check the name, or "
                f"accept the licence on {page} and set {token}{files.hint}"
            )
        case errors.LocalEntryNotFoundError():
            offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{site} cannot be reached"
            return (
                f"{key} cannot be fetched: {offline}, and the cache {constants.HF_HUB_CACHE} lacks it; fetch it where "
                f"there is access (`hf download`), and share the cache by HF_HOME or name the files' path{files.hint}"
            )
        case errors.HfHubHTTPError():
            status = error.response.status_code
            fix = "set HF_TOKEN to a valid token" if status in (401, 403) else "try again later"
            return f"{key} cannot be fetched: {site} answers with status {status}; {fix}"
    reason = (isinstance(error, OSError) and error.strerror) or type(error).__name__
    return f"{key} cannot be fetched from {site} into {constants.HF_HUB_CACHE}: {reason}"


def holds_tokenizer(names: Collection[str]) -> bool:
    """True if a repository on Hugging Face's hub, or its copy in the cache, has a tokenizer among these files."""
    return any(set(kind) <= set(names) for kind in TOKENIZERS)
