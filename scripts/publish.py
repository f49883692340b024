"""Upload a checked head folder to the Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi

from draftheads.heads.hub import CARD, CONFIG, WEIGHTS, find_head, load_head

FILES = [CONFIG, WEIGHTS, CARD]


def publish(source: Path, repo_id: str, *, public: bool = False, revision: str = "main") -> str:
    """Upload config, weights and card of a head folder (or run folder) to `repo_id`; returns the
    commit's address.

    The folder is loaded strictly first, so that what is published is what loads. The repository is
    created when it does not exist, private unless `public`. Raises ValueError or FileNotFoundError
    for an unfit folder.
    """
    folder = check_folder(source)
    if repo_id.count("/") != 1:
        raise ValueError(f"repository {repo_id!r}: expected user/name")
    api = HfApi()
    api.create_repo(repo_id, private=not public, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        allow_patterns=FILES,
        revision=revision,
        commit_message=f"Upload draft heads from {folder.name}",
    )
    return str(commit.commit_url)


def check_folder(source: Path) -> Path:
    """The head folder behind `source`, once it has everything a published head needs.

    Raises ValueError naming what is missing or not loadable.
    """
    folder = find_head(source)
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder}: {', '.join(missing)} missing; a head folder has {', '.join(FILES)}"
        )
    load_head(folder)
    return folder
