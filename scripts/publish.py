"""Check a head folder, and upload it to the Hub."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError

from draftheads.heads.adapter import FILES as ADAPTER_FILES
from draftheads.heads.card import HERE, HUB_ID, REMOTE_CODE, flat, is_hub_id
from draftheads.heads.formats.config import read_json
from draftheads.heads.formats.stored import opened
from draftheads.heads.hub import CARD, CONFIG, WEIGHTS, open_head

PLACES = re.compile(r"[a-z]\w+://\S+|(?<![\w.])(?:~?/|\.\.?/|[A-Za-z]:\\)[^\s\"'`,;]+")
"""URLs and local paths in a text."""


@dataclass(frozen=True)
class Upload:
    """The files of a repository. files: path there -> contents, or local path. notes: what readers
    will miss.
    """

    folder: Path
    repo_id: str
    files: dict[str, bytes | Path]
    notes: list[str]

    @property
    def card(self) -> str:
        """The published model card."""
        card = self.files[CARD]
        assert isinstance(card, bytes)
        return card.decode()

    def listing(self) -> str:
        """Every file with its size."""
        sizes = {
            name: len(each) if isinstance(each, bytes) else each.stat().st_size
            for name, each in self.files.items()
        }
        sizes["total"] = sum(sizes.values())
        return "\n".join(f"{size:>15,} bytes  {name}" for name, size in sizes.items())


def prepare(source: Path, repo_id: str, *, licence: str | None = None) -> Upload:
    """Check a head folder or run folder and collect the files for `publish`, without the paths and
    addresses of this machine in config and card.

    licence: a Hub identifier, e.g. apache-2.0. Raises ValueError or FileNotFoundError for a folder
    that should not be published.
    """
    if not HUB_ID.fullmatch(repo_id):
        raise ValueError(f"repository {repo_id!r}: expected user/name in letters, digits and ._-")
    folder = open_head(source)
    if "tree" not in folder.facts or "target" not in folder.facts:
        raise ValueError(
            f"{folder.path / CONFIG}: expected a head in this project's own layout; draftheads "
            "convert SRC DST --to draftheads writes one"
        )
    _check_finite(folder.path / WEIGHTS, folder.load().state_dict())
    files: dict[str, Any] = {WEIGHTS: folder.path / WEIGHTS}
    texts = {CONFIG: folder.config}
    if folder.facts.get("adapter") or folder.adapter:
        settings, weights = (folder.path / name for name in ADAPTER_FILES)
        with opened(weights) as file:
            _check_finite(weights, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        files[ADAPTER_FILES[1]], texts[ADAPTER_FILES[0]] = weights, read_json(settings)
    private = private_names(folder.config)
    card = _card(folder.path / CARD, repo_id, licence)
    files[CARD] = without(card, private).encode()
    target = folder.facts["target"].get("name")
    if target in private:
        private[target] = ""  # its last part may be the name of another model
    for name, value in texts.items():
        files[name] = f"{json.dumps(without(value, private), indent=2)}\n".encode()
    files |= {name: text.encode() for name, text in REMOTE_CODE.items()}
    notes = []
    if not is_hub_id(target):
        notes.append(f"the target is not on the Hub ({target}): others cannot load it")
    if not folder.facts.get("measured"):
        notes.append("no measurements: draftheads bench --card adds them to the card")
    if "\nlicense:" not in card:
        notes.append("no licence: check the target's own, then pass --license")
    return Upload(folder.path, repo_id, files, notes)


def publish(upload: Upload, *, public: bool = False, revision: str = "main") -> str:
    """Upload in one commit; returns its URL.

    Creates the repository, private unless `public`, and the branch `revision` if they do not exist.
    Raises ValueError if the Hub refuses the card, PermissionError if it refuses access.
    """
    api, repo_id = HfApi(), upload.repo_id
    operations = [CommitOperationAdd(name, contents) for name, contents in upload.files.items()]
    try:
        api.create_repo(repo_id, private=not public, exist_ok=True)
        if revision != "main" and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.create_commit(
            repo_id,
            operations,
            revision=revision,
            commit_message=f"Upload draft heads from {upload.folder.name}",
        )
    except HfHubHTTPError as error:
        if error.response.status_code not in (401, 403):
            raise
        raise PermissionError(  # the library's message has no next step
            f"{repo_id}: {api.endpoint} refused access (status {error.response.status_code}); log "
            "in (hf auth login), or set HF_TOKEN to a token that may write there"
        ) from error
    except ValueError as error:  # several lines about the card
        raise ValueError(" ".join(str(error).split())) from error
    return str(commit.commit_url)


def private_names(config: dict[str, Any]) -> dict[str, str]:
    """URLs and local paths in a config -> what is published instead: nothing for URLs, the last
    part of paths.
    """
    facts = flat(config)
    texts = [str(value) for value in facts.values()]
    names = {match[0] for text in texts for match in PLACES.finditer(text)}
    for key in ("draftheads.target.name", "draftheads.training.data.prompts.source"):
        name = str(facts.get(key, ""))
        if "/" in name and not is_hub_id(name):  # a relative path
            names.add(name)
    return {
        name: "" if "://" in name else re.split(r"[/\\]", name.rstrip("/\\"))[-1]
        for name in sorted(names, key=len, reverse=True)  # longer paths before their parents
    }


def without(value: Any, private: dict[str, str]) -> Any:
    """A text or JSON value with private names replaced."""
    if isinstance(value, dict):
        return {key: without(each, private) for key, each in value.items()}
    if isinstance(value, list):
        return [without(each, private) for each in value]
    if isinstance(value, str):
        for name, public in private.items():
            whole = rf"(?<![\w/.-]){re.escape(name)}(?![\w/-])"
            value = re.sub(whole, public, value)
    return value


def _card(path: Path, repo_id: str, licence: str | None) -> str:
    """The folder's card, with the repository's name in its commands."""
    try:  # users may have edited it
        card = ModelCard(path.read_text().replace(HERE, repo_id))
    except (ValueError, TypeError, yaml.YAMLError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{path}: expected metadata in YAML first ({reason})") from error
    missing = [key for key in ("library_name", "pipeline_tag", "tags") if not card.data.get(key)]
    if missing:
        raise ValueError(f"{path}: its metadata lacks {', '.join(missing)}")
    if licence:
        card.data["license"] = licence
    return str(card)


def _check_finite(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"{file}: {name} has numbers that are not finite")
