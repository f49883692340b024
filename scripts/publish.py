"""Check a head folder, and upload it to the Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError

from draftheads.heads.adapter import FOLDER as ADAPTER
from draftheads.heads.card import HUB_ID, card_faults, for_repository, is_hub_id
from draftheads.heads.hub import CARD, CONFIG, WEIGHTS, find_head, load_head, read_config
from draftheads.heads.remote_code import REMOTE_CODE


@dataclass(frozen=True)
class Upload:
    """What goes into a repository. files: path there -> contents, or where they are. notes: what
    its reader will miss, though nothing is wrong.
    """

    folder: Path
    repo_id: str
    files: dict[str, bytes | Path]
    notes: list[str]

    @property
    def card(self) -> str:
        """The model card as it will be published."""
        card = self.files[CARD]
        assert isinstance(card, bytes)
        return card.decode()

    def listing(self) -> str:
        """Every file with its size."""
        sizes = {
            name: len(each) if isinstance(each, bytes) else each.stat().st_size
            for name, each in self.files.items()
        }
        sizes["in all"] = sum(sizes.values())
        return "\n".join(f"{size:>15,} bytes  {name}" for name, size in sizes.items())


def prepare(source: Path, repo_id: str, *, licence: str | None = None) -> Upload:
    """Everything that `publish` sends, once the folder has passed its checks; sends nothing.

    source: a head folder or a run folder. licence: a Hub identifier. Raises ValueError, naming all
    that is wrong, or FileNotFoundError.
    """
    if not HUB_ID.fullmatch(repo_id):
        raise ValueError(f"repository {repo_id!r}: expected user/name in letters, digits and ._-")
    folder = find_head(source)
    faults = list(_faults(folder))
    if faults:
        raise ValueError(f"{folder} is not fit to be published: {'; '.join(faults)}")
    card = for_repository((folder / CARD).read_text(), repo_id, licence)
    files: dict[str, bytes | Path] = {
        CARD: card.encode(),
        CONFIG: folder / CONFIG,
        WEIGHTS: folder / WEIGHTS,
        **{name: text.encode() for name, text in REMOTE_CODE.items()},
    }
    for path in sorted((folder / ADAPTER).glob("*")):
        files[f"{ADAPTER}/{path.name}"] = path
    return Upload(folder, repo_id, files, list(_notes(folder, card)))


def publish(upload: Upload, *, public: bool = False, revision: str = "main") -> str:
    """Send it in one commit, whose address is returned.

    A repository that does not exist is created, private unless `public`; so is the branch
    `revision`. Raises ValueError when the Hub refuses the card, PermissionError when it does not
    let us write.
    """
    api, repo_id = HfApi(), upload.repo_id
    operations = [CommitOperationAdd(name, contents) for name, contents in upload.files.items()]
    try:  # the library's line names a request, not what to do
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
        raise PermissionError(
            f"{repo_id}: expected to be let in by {api.endpoint}, got status "
            f"{error.response.status_code}; log in (hf auth login), or set HF_TOKEN to a token "
            "that may write there"
        ) from error
    return str(commit.commit_url)


def _faults(folder: Path) -> Iterator[str]:
    missing = [name for name in (CONFIG, WEIGHTS, CARD) if not (folder / name).is_file()]
    if missing:
        yield f"{', '.join(missing)} missing"
        return
    facts = read_config(folder).get("draftheads", {})
    lacking = [key for key in ("kind", "target", "tree") if not facts.get(key)]
    if lacking:
        yield (
            f'{CONFIG} does not say its {", ".join(lacking)} under "draftheads" (draftheads '
            "convert SRC DST --to draftheads writes that)"
        )
        return
    try:  # one fault among others
        head = load_head(folder)
    except ValueError as error:
        yield str(error).removeprefix(f"{folder}: ")
    else:
        for name, tensor in head.state_dict().items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                yield f"{name} has numbers that are not finite"
    if facts.get("adapter") and not any((folder / ADAPTER).glob("*.safetensors")):
        yield f"{CONFIG} speaks of an adapter, and {ADAPTER}/ holds none"
    yield from card_faults((folder / CARD).read_text())


def _notes(folder: Path, card: str) -> Iterator[str]:
    config = read_config(folder)
    facts = config["draftheads"]
    target = facts["target"].get("name")
    if not is_hub_id(target):
        yield f"the target is no repository on the Hub ({target}): others cannot load it by itself"
    if not facts.get("measured"):
        yield "nothing was measured: draftheads bench --card writes what was into the card"
    if not re.search(r"^license:", card, flags=re.MULTILINE):
        yield "no licence is stated: give --license, after a look at the target's own"
    places = sorted(set(re.findall(r'"((?:/|~/)[^"]+)"', json.dumps(config))))
    if places:
        yield f"{CONFIG} and the card name places on this machine: {', '.join(places)}"
