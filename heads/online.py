"""The Hugging Face Hub: whether it can be reached, and its refusals in one line."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from huggingface_hub import constants, get_session, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from draftheads.arguments import PATIENCE, near_name, nowhere


def hub_answers() -> bool:
    """True if the Hub can be reached. Without a network, transformers would ask for every file of a
    model for half a minute before it looks at the cache.
    """
    return not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT)


@cache
def _answers(site: str) -> bool:
    try:
        get_session().head(site, timeout=PATIENCE)
    except Exception:  # of the HTTP library, which differs between versions
        return False
    return True


def download(what: str, name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The folder with these files of a repository. what: the word for it in the one line of a
    FileNotFoundError.
    """
    try:  # the library's messages are paragraphs, or do not name the repository
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        line = refusal(error, name, revision) or " ".join(str(error).split())
        raise FileNotFoundError(f"{what} {name}: {line}") from error


def refusal(error: BaseException, name: str, revision: str | None = None) -> str | None:
    """One line for an error with which the Hub refused a repository, or with which transformers
    reports that; None for other errors.

    name: the repository's, or the path of a folder that does not exist.
    """
    site = constants.ENDPOINT
    causes = list[BaseException]()
    raised: BaseException | None = error
    while raised is not None and raised not in causes:
        causes.append(raised)
        raised = raised.__cause__ or raised.__context__
    for cause in causes:
        if isinstance(cause, GatedRepoError):
            return (
                "expected access to a gated repository, got none; accept its licence at "
                f"{site}/{name}, then log in: hf auth login"
            )
        if isinstance(cause, RevisionNotFoundError):
            return (
                f"expected the branch, tag or commit {revision}, found none on {site}; check the "
                "revision"
            )
        if isinstance(cause, RepositoryNotFoundError):
            return nowhere(name)
        if isinstance(cause, LocalEntryNotFoundError | OfflineModeIsEnabled):
            why = f"{site} cannot be reached"
            advice = "check the network"
            if constants.HF_HUB_OFFLINE:
                why = "HF_HUB_OFFLINE is set"
                advice = "unset it to load them once"
            return (
                f"expected a folder, or its files in {constants.HF_HUB_CACHE}, found neither"
                f"{near_name(name)}, and {why}; {advice}, or pass a folder"
            )
    return None
