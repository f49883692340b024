"""Check a head folder, and upload it to the Hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    HfHubHTTPError,
    HTTPError,  # of the HTTP library that this version uses
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo

from draftheads.arguments import HUB_ID
from draftheads.heads.formats.card import HERE, REMOTE_CODE, is_hub_id, render_card
from draftheads.heads.formats.hub import CARD, CONFIG, WEIGHTS, HeadFolder, open_head, stored_head
from draftheads.heads.formats.table import as_ours
from draftheads.heads.target import adapter
from draftheads.scripts.public import is_local, public_config, public_facts, without_private

LICENCES = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0
bigcode-openrail-m afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear
c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0
cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0 cdla-permissive-2.0 wtfpl
ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl
lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0
odc-by odbl openmdw-1.0 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr
deepfloyd-if-license fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3
llama4 grok2-community gemma unknown other
"""
"""Licence identifiers of the Hub (its documentation's page "Licenses")."""


@dataclass(frozen=True)
class Upload:
    """The files of a repository. files: path there -> contents, or local path. card: one of them.
    notes: what readers will miss.
    """

    folder: Path
    repo_id: str
    files: dict[str, bytes | Path]
    card: str
    notes: list[str]

    def listing(self) -> str:
        """Every file with its size."""
        sizes = {
            name: len(each) if isinstance(each, bytes) else each.stat().st_size
            for name, each in self.files.items()
        }
        sizes["total"] = sum(sizes.values())
        return "\n".join(f"{size:>15,} bytes  {name}" for name, size in sizes.items())


def prepare(source: Path, repo_id: str, *, licence: str | None = None) -> Upload:
    """Check a head folder or run folder and collect the files for `publish`: without the paths and
    addresses of this machine in config and card, and without files that links bring in.

    licence: a Hub identifier, e.g. apache-2.0. Raises ValueError or FileNotFoundError for a folder
    that should not be published.
    """
    if not HUB_ID.fullmatch(repo_id):
        raise ValueError(f"repository {repo_id!r}: expected user/name in letters, digits and ._-")
    folder = open_head(source)
    if not folder.facts.has_tree or "target" not in folder.facts.json:
        raise ValueError(
            f"{folder.path / CONFIG}: expected a head in this project's own layout; draftheads "
            "convert SRC DST --to draftheads writes one"
        )
    has_adapter = bool(folder.facts.adapter or folder.adapter)
    is_downloaded = not Path(os.path.expanduser(source)).is_dir()  # as links into the Hub's cache
    root = folder.path.parents[1] if is_downloaded else folder.path
    own = {
        name: own_file(folder.path / name, root)
        for name in [CONFIG, WEIGHTS, CARD, *(adapter.FILES if has_adapter else ())]
    }
    head, stored = folder.read()
    public = stored_head(head, stored.tensors, public_facts(folder.facts.json))
    card = _card(folder, as_ours(public).config, repo_id, licence)
    facts = public_config(folder.facts.json)
    texts = {CONFIG: as_ours(stored_head(head, stored.tensors, facts)).config}
    if has_adapter:
        settings = adapter.read_settings(folder.path / adapter.FOLDER)
        texts[adapter.FILES[0]] = settings | {"base_model_name_or_path": facts["target"]["name"]}
        adapter.check_weights(own[adapter.FILES[1]], settings["r"])
    files: dict[str, bytes | Path] = {**own, CARD: card.encode()}
    files |= {name: f"{json.dumps(value, indent=2)}\n".encode() for name, value in texts.items()}
    files |= {name: text.encode() for name, text in REMOTE_CODE.items()}
    return Upload(folder.path, repo_id, files, card, list(_notes(folder, card)))


def own_file(path: Path, root: Path) -> Path:
    """Raises ValueError for a link that leaves `root`, FileNotFoundError for a missing file."""
    real = Path(os.path.realpath(path))  # resolve() fails at a link to itself
    if not real.is_relative_to(root.resolve()):
        raise ValueError(
            f"{path}: expected a file of this folder, got a link to {real}, which is not "
            "published; replace the link by a copy if the file belongs to the head"
        )
    if not real.is_file():
        raise FileNotFoundError(f"{path}: expected a file, found none; save or convert the head")
    return path


def _card(folder: HeadFolder, public: dict[str, Any], repo_id: str, licence: str | None) -> str:
    """The folder's card with the repository's name in its commands: rendered again, or, if the user
    has edited it, with private texts replaced.
    """
    path = folder.path / CARD
    text = path.read_text(encoding="utf-8")
    if text == render_card(folder.config) + "\n":
        text = render_card(public) + "\n"
    else:
        text = without_private(text, folder.facts.json)
    try:
        card = ModelCard(text.replace(HERE, repo_id))
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{path}: expected metadata in YAML first ({reason})") from error
    if licence is not None:
        card.data["license"] = licence
    check_licence(card.data.get("license"), path)
    return str(card)


def check_licence(licence: Any, place: Path) -> None:
    """Raise ValueError for a licence that the Hub does not know; None is no licence."""
    licences = LICENCES.split()
    for name in licence if isinstance(licence, list) else [licence]:
        if name is not None and name not in licences:
            near = get_close_matches(str(name).lower(), licences, 1, 0.0)[0]
            raise ValueError(
                f"--license, or {place}: expected a licence identifier of the Hub, got {name!r}; "
                f"try {near!r}, or other"
            )


def _notes(folder: HeadFolder, card: str) -> Iterator[str]:
    """Says what readers will miss."""
    target = folder.facts.target.name
    lora = folder.facts.target.lora
    if is_local(lora):
        yield f"the target's LoRA is not on the Hub ({lora}): others cannot load it"
    if not is_hub_id(target):
        yield f"the target is not on the Hub ({target}): others cannot load it"
    if "\nlicense:" not in card:
        yield "no licence: check the target's own, then pass --license"


def publish(
    upload: Upload, *, public: bool = False, revision: str = "main", overwrite: bool = False
) -> str:
    """Upload in one commit; returns its URL.

    Creates the repository, private unless `public`, and the branch `revision` if they do not exist;
    `public` also makes an existing repository public. overwrite: whether to replace files of a
    repository that is not of draft heads.

    Raises ValueError if the Hub refuses the card, for a repository of something else and for a
    public one without `public`; PermissionError if the Hub refuses access, ConnectionError if it
    cannot be reached.
    """
    api = HfApi()
    repo_id = upload.repo_id
    try:
        there = _repository(api, repo_id, revision)
        if there is not None:
            check_repository(api, there, upload, public=public, overwrite=overwrite)
        return _commit(api, there, upload, public=public, revision=revision)
    except HfHubHTTPError as error:
        if error.response.status_code not in (401, 403):
            raise
        raise PermissionError(  # the library's message has no next step
            f"{repo_id}: {api.endpoint} refused access (status {error.response.status_code}); log "
            "in (hf auth login), or set HF_TOKEN to a token that may write there"
        ) from error
    except (HTTPError, ConnectionError) as error:  # a hundred lines of the HTTP library
        raise ConnectionError(
            f"{repo_id}: expected an answer of {api.endpoint}, got none ({error!s:.200}); check "
            "network, HF_ENDPOINT and HF_HUB_OFFLINE, then publish again"
        ) from error


def _commit(
    api: HfApi, there: ModelInfo | None, upload: Upload, *, public: bool, revision: str
) -> str:
    api.create_repo(upload.repo_id, private=not public, exist_ok=True)
    if revision != "main" and not revision.startswith("refs/"):
        api.create_branch(upload.repo_id, branch=revision, exist_ok=True)
    operations: list[Any] = [CommitOperationAdd(*file) for file in upload.files.items()]
    old = set(adapter.FILES) & _files(there) - upload.files.keys()  # it would be loaded with these
    operations += map(CommitOperationDelete, sorted(old))
    commit = api.create_commit(
        upload.repo_id,
        operations,
        revision=revision,
        commit_message=f"Upload draft heads from {upload.folder.name}",
    )
    if there is not None and there.private and public:
        api.update_repo_settings(upload.repo_id, private=False)
    return str(commit.commit_url)


def _repository(api: HfApi, repo_id: str, revision: str) -> ModelInfo | None:
    """Returns what is there already, on the branch or on main, from which a new branch is made."""
    try:
        return api.model_info(repo_id, revision=revision)
    except RevisionNotFoundError:
        return api.model_info(repo_id)
    except RepositoryNotFoundError:
        return None


def _files(there: ModelInfo | None) -> set[str]:
    return {each.rfilename for each in there.siblings or ()} if there else set()


def check_repository(
    api: HfApi, there: ModelInfo, upload: Upload, *, public: bool, overwrite: bool
) -> None:
    """Raise ValueError for a public repository without `public`, and, without `overwrite`, for one
    with files of the same names that are not of draft heads.
    """
    if not there.private and not public:
        raise ValueError(
            f"{upload.repo_id}: expected a new or private repository, got a public one; pass "
            "--public to publish there"
        )
    replaced = sorted(_files(there) & upload.files.keys())
    if replaced and not overwrite and not _is_of_heads(api, there):
        raise ValueError(
            f"{upload.repo_id}: expected a new repository or one of draft heads, got one with "
            f"{', '.join(replaced)} of something else; choose another name, or pass --overwrite to "
            "replace them"
        )


def _is_of_heads(api: HfApi, there: ModelInfo) -> bool:
    """True if draftheads wrote its config.json."""
    if CONFIG not in _files(there):
        return False
    file = Path(api.hf_hub_download(there.id, CONFIG, revision=there.sha))
    text = file.read_text(encoding="utf-8", errors="replace")
    return bool(re.search(r'^ *"draftheads": \{', text, re.MULTILINE))
