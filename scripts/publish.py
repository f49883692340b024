"""Check a head folder, and upload it to the Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError

from draftheads.heads.adapter import FILES as ADAPTER_FILES
from draftheads.heads.adapter import FOLDER as ADAPTER
from draftheads.heads.card import (
    HUB_ID,
    PLACES,
    REMOTE_CODE,
    card_faults,
    for_repository,
    is_hub_id,
    private_names,
    without,
)
from draftheads.heads.formats.config import read_json
from draftheads.heads.formats.stored import opened
from draftheads.heads.hub import CARD, CONFIG, WEIGHTS, find_head, load_head, read_config

LICENCES = """
apache-2.0 mit openrail openrail++ bigscience-openrail-m creativeml-openrail-m bigcode-openrail-m
bigscience-bloom-rail-1.0 afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause c-uda cc
bsd-3-clause-clear cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0
cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0
cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl
gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl
apple-amlr mpl-2.0 odc-by odbl openmdw-1.0 osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl
lgpl-lr deepfloyd-if-license fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2
llama3.3 llama4 gemma unknown other
"""
"""Identifiers that the Hub knows; it refuses a card with another one."""


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
    """Everything that `publish` sends, once the folder has passed its checks; sends nothing. What
    config and card say of this machine and its network stays here.

    source: a head folder or a run folder. licence: a Hub identifier. Raises ValueError, naming all
    that is wrong, or FileNotFoundError.
    """
    folder = find_head(source)
    faults = [*_asked(repo_id, licence), *_faults(folder)]
    if faults:
        raise ValueError(f"{folder} is not fit to be published: {'; '.join(faults)}")
    config = read_config(folder)
    private = private_names(config)
    card = without(for_repository((folder / CARD).read_text(), repo_id, licence), private)
    if (target := config["draftheads"]["target"].get("name")) in private:
        private[target] = ""  # its last part, where models are looked up, may be another's model
    files: dict[str, bytes | Path] = {
        CARD: card.encode(),
        CONFIG: _json(without(config, private)),
        WEIGHTS: folder / WEIGHTS,
        **{name: text.encode() for name, text in REMOTE_CODE.items()},
    }
    for name in ADAPTER_FILES if (folder / ADAPTER).is_dir() else ():
        path = folder / name
        files[name] = _json(without(read_json(path), private)) if name.endswith(".json") else path
    return Upload(folder, repo_id, files, list(_notes(folder, card, set(files))))


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


def _json(value: dict[str, Any]) -> bytes:
    return f"{json.dumps(value, indent=2)}\n".encode()


def _asked(repo_id: str, licence: str | None) -> Iterator[str]:
    if not HUB_ID.fullmatch(repo_id):
        yield f"repository {repo_id!r}: expected user/name in letters, digits and ._-"
    known = LICENCES.split()
    if licence is not None and licence not in known:
        near = get_close_matches(licence.lower(), known, 1, 0.0)[0]
        yield (
            f"--license {licence!r}: expected an identifier that the Hub knows, {near!r} perhaps, "
            "or other"
        )


def _faults(folder: Path) -> Iterator[str]:
    expected = [CONFIG, WEIGHTS, CARD, *(ADAPTER_FILES if (folder / ADAPTER).is_dir() else ())]
    links = [name for name in (*expected, ADAPTER) if (folder / name).is_symlink()]
    if links:
        yield f"expected files, got symbolic links, which are not followed: {', '.join(links)}"
    missing = [name for name in expected if not (folder / name).is_file()]
    if missing:
        yield f"{', '.join(missing)} missing"
    checks = {CONFIG: _config_faults, WEIGHTS: _weight_faults, CARD: _card_faults}
    if (folder / ADAPTER).is_dir():
        checks[ADAPTER_FILES[1]] = _adapter_faults
    for name, check in checks.items():
        try:  # one fault among others
            if name not in missing:
                yield from check(folder)
        except (ValueError, OSError) as error:
            yield str(error).removeprefix(f"{folder}/").removeprefix(f"{folder}: ")


def _config_faults(folder: Path) -> Iterator[str]:
    facts = read_config(folder).get("draftheads") or {}
    lacking = [key for key in ("kind", "target", "tree") if not facts.get(key)]
    if lacking:
        yield (
            f'{CONFIG} does not say its {", ".join(lacking)} under "draftheads" (draftheads '
            "convert SRC DST --to draftheads writes that)"
        )
    elif max(facts.get("feature_layers") or [0]) > (facts["target"].get("layers") or 1 << 30):
        yield (
            f"{CONFIG}: feature_layers {facts['feature_layers']} are beyond the target's "
            f"{facts['target']['layers']} layers"
        )
    if facts.get("adapter") and not (folder / ADAPTER).is_dir():
        yield f"{CONFIG} speaks of an adapter, and there is no folder {ADAPTER}/"


def _weight_faults(folder: Path) -> Iterator[str]:
    """That are not faults of the config."""
    try:
        read_config(folder)
    except (ValueError, OSError):
        return
    yield from _not_finite(load_head(folder).state_dict())


def _adapter_faults(folder: Path) -> Iterator[str]:
    read_json(folder / ADAPTER_FILES[0])
    with opened(folder / ADAPTER_FILES[1]) as file:
        yield from _not_finite({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def _card_faults(folder: Path) -> Iterator[str]:
    yield from card_faults((folder / CARD).read_text())


def _not_finite(tensors: dict[str, torch.Tensor]) -> Iterator[str]:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            yield f"{name} has numbers that are not finite"


def _notes(folder: Path, card: str, sent: set[str]) -> Iterator[str]:
    facts = read_config(folder)["draftheads"]
    target = facts["target"].get("name")
    if not is_hub_id(target):
        yield f"the target is no repository on the Hub ({target}): others cannot load it by itself"
    if not facts.get("measured"):
        yield "nothing was measured: draftheads bench --card writes what was into the card"
    if not re.search(r"^license:", card, flags=re.MULTILINE):
        yield "no licence is stated: give --license, after a look at the target's own"
    places = {match[0] for match in PLACES.finditer(card) if match[0].startswith(("/", "~"))}
    if places:
        yield f"{CARD} names places on this machine: {', '.join(sorted(places))}"
    known = {Path(name).parts[0] for name in sent}
    left = [path for path in folder.iterdir() if path.name not in known]
    left += [each for each in (folder / ADAPTER).glob("*") if f"{ADAPTER}/{each.name}" not in sent]
    if left:
        yield f"left out: {', '.join(sorted(str(each.relative_to(folder)) for each in left))}"
