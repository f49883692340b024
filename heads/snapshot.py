"""Files of a head from the Hub, or from its cache on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)


def head_snapshot(repo_id: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """A folder with those files of a repository whose names match `patterns`.

    Raises FileNotFoundError when there is no such repository or revision, or when the Hub cannot be
    reached and the files were never loaded before.
    """
    try:  # the library's own lines go on for a paragraph, or do not say which repository is meant
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(patterns)))
    except LocalEntryNotFoundError as error:
        at = f" at {revision}" if revision else ""
        raise FileNotFoundError(
            f"head {repo_id}{at}: the Hub cannot be reached (or HF_HUB_OFFLINE is set); expected "
            f"it in {constants.HF_HUB_CACHE}, got nothing there; load it once online"
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"head {repo_id}: expected a folder, or a repository on {constants.ENDPOINT} that you "
            "may read, got neither; check the name, or log in (hf auth login) if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise FileNotFoundError(
            f"head {repo_id}: expected a branch, tag or commit of it, got {revision}; see "
            f"{constants.ENDPOINT}/{repo_id}/commits/main"
        ) from error
