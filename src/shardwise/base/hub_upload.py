"""Upload of an exported model to the Hugging Face hub.

The token stays where `huggingface_hub` reads it (HF_TOKEN, or `hf auth login`), as for what is fetched.
"""

from __future__ import annotations

import sys
from pathlib import Path

from shardwise.base.errors import ConfigError, RunError
from shardwise.base.hub import hub_address, is_hub_name
from shardwise.base.redaction import redacted


def require_upload(repository: str) -> None:
    """Raise ConfigError where `repository` is no hub id of the form owner/name, or no token is known."""
    from huggingface_hub import get_token

    if not is_hub_name(repository):
        raise ConfigError(
            f"--push ({repository}) must be a repository of the hub, owner/name, of letters, digits, '-', '_' and '.'"
        )
    if get_token() is None:
        raise ConfigError(
            f"--push ({repository}) needs a token that may write: set HF_TOKEN, or run `hf auth login` "
            f"({hub_address()}/settings/tokens)"
        )


def upload(folder: Path, repository: str, message: str) -> str:
    """Upload all files of a folder as one commit, to a new private repository if need be; returns its address."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    site = hub_address()
    try:
        HfApi().create_repo(repository, private=True, exist_ok=True)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        added = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in files]
        # `upload_folder` makes a commit of each 250 files, and every 5 minutes: readers would see parts of two models.
        HfApi().create_commit(repository, added, commit_message=message)
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = f"{site} answers with status {status}"
        if status in (401, 403):
            fix = f"set HF_TOKEN to one that may write to {repository}"
            reason = f"{site} refuses the token in use (status {status}): {fix}"
        raise RunError(f"{folder} could not be uploaded as {repository}: {reason}") from None
    except Exception as error:  # noqa: BLE001  the client's transport decides on the type; the user reads a sentence
        first, _, _ = redacted(str(error)).partition("\n")
        raise RunError(f"{folder} could not be uploaded as {repository}: {site} cannot be reached ({first})") from None
    return f"{site}/{repository}"
