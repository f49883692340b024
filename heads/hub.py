"""Head folders, on disk or on the Hub: save, open, load.

A folder holds config.json, model.safetensors, README.md and custom_generate/. Our own facts
(format, target, tree, training) are in one nested "draftheads" key of config.json; everything else
there, and every tensor name, is what serving engines read.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from draftheads.heads.adapter import FILES as ADAPTER_FILES
from draftheads.heads.adapter import FOLDER as ADAPTER
from draftheads.heads.adapter import stored_fingerprint
from draftheads.heads.base import DraftHead
from draftheads.heads.card import HUB_ID, render_card, write_remote_code
from draftheads.heads.eagle import Eagle3Head, EagleHead
from draftheads.heads.files import staged, write_text
from draftheads.heads.formats.config import CONFIG as CONFIG
from draftheads.heads.formats.config import read_config as read_config
from draftheads.heads.formats.stored import (
    INDEXES,
    WEIGHT_FILES,
    Stored,
    named,
    read_files,
    shards,
    target_name,
)
from draftheads.heads.formats.table import as_ours, translated
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.pretrained import same_weights
from draftheads.heads.sequential import SequentialHead
from draftheads.heads.target import Target
from draftheads.heads.tree import tree_from_json

HEADS: dict[str, type[DraftHead]] = {
    kind.kind: kind for kind in (MedusaHead, SequentialHead, EagleHead, Eagle3Head)
}
"""Every head kind. A new one is a new file and a row here."""

FORMAT = 1
WEIGHTS, CARD = WEIGHT_FILES[0], "README.md"


def save_head(
    head: DraftHead,
    folder: str | Path,
    *,
    target: Target,
    training: dict[str, Any] | None = None,
    measured: list[dict[str, Any]] | None = None,
) -> Path:
    """Write a head folder; it appears complete or not at all, and replaces an older one in one
    step.

    training: facts of the run, as JSON. measured: rows of `bench --json` for the model card.
    """
    with staged(Path(folder)) as staging:
        write_head(head, staging, target=target, training=training, measured=measured)
    return Path(folder)


def write_head(
    head: DraftHead,
    folder: Path,
    *,
    target: Target,
    training: dict[str, Any] | None = None,
    measured: list[dict[str, Any]] | None = None,
) -> None:
    """Write the files of `save_head` into an existing folder."""
    facts = {
        "format": FORMAT,
        "kind": head.kind,
        "target": about_target(target),
        "feature_layers": list(head.feature_layers),
        "adapter": target.adapter.facts() if target.adapter else None,
        "tree": head.tree.to_json(),
        "training": training or {},
        "measured": measured or [],
    }
    config = head_config(head, next(head.parameters()).dtype, facts)
    tensors = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
    as_ours(Stored(config, tensors), target).save(folder)
    (folder / CARD).write_text(render_card(config) + "\n")
    write_remote_code(folder)
    if target.adapter:
        target.adapter.save(folder / ADAPTER, target.name)


def head_config(head: DraftHead, dtype: torch.dtype, facts: dict[str, Any]) -> dict[str, Any]:
    """config.json of a head folder in our own layout."""
    return {
        "architectures": [head.architecture],
        **head.config(),
        "dtype": str(dtype).removeprefix("torch."),
        "draftheads": facts,
    }


def about_target(target: Target) -> dict[str, Any]:
    """What a head records of its target."""
    return {
        "name": target.name,
        "revision": target.revision,
        "fingerprint": target.fingerprint(),
        "architecture": type(target.model).__name__,
        "layers": target.layers,
    }


def record_measured(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the measurements in a head's config.json and card (rows as for `save_head`)."""
    config = read_config(folder)
    config["draftheads"]["measured"] = rows
    write_text(folder / CARD, render_card(config) + "\n")
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True)
class HeadFolder:
    """A head folder on this machine, as `open_head` found it; nothing but config.json is read yet.

    name and revision: of its repository on the Hub, else the source as given and None.
    """

    path: Path
    config: dict[str, Any]
    name: str
    revision: str | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What draftheads recorded of the head; {} for a head of others."""
        facts: dict[str, Any] = self.config.get("draftheads") or {}
        return facts

    @property
    def target(self) -> tuple[str, str | None]:
        """Name and revision of the target that the head records. Raises ValueError for none."""
        name = target_name(self.config)
        if name is not None:
            return name, self.facts.get("target", {}).get("revision")
        if "medusa_num_heads" in self.config and self.config.get("architectures"):
            return self.name, self.revision  # Medusa v1.0: heads and target in one folder
        raise ValueError(
            f"{self.path / CONFIG} does not say which target it was trained for; pass --target"
        )

    @property
    def adapter(self) -> Path | None:
        """The adapter that the head was trained together with, for `Target.attach`."""
        folder = self.path / ADAPTER
        return folder if folder.is_dir() else None

    def read(self, target: Target | None = None) -> tuple[DraftHead, Stored]:
        """The head without weights (on the meta device), and what is stored of it in our own
        layout, once names, shapes and tree agree. target and errors: as for `load`.
        """
        with named(self.path):
            stored = translated(read_files(self.path, self.config), target)
            kind = stored.facts.get("kind", stored.config.get("model_type"))
            if kind not in HEADS:
                raise ValueError(
                    f"expected a head of kind {', '.join(HEADS)}, got {kind!r}; is this a head "
                    "folder?"
                )
            with torch.device("meta"):
                head = HEADS[kind].from_config(stored.config, stored.tensors)
            if target is not None:
                check_target(head, target, stored.facts)
            stored.check(head.state_dict())
            if stored.facts.get("tree"):
                head.tree = tree_from_json(stored.facts["tree"])
                head.check_tree(head.tree)
        return head, stored

    def load(self, target: Target | None = None, *, dtype: torch.dtype | None = None) -> DraftHead:
        """The head, strictly loaded; its shape is read from tensor names, whoever wrote it.

        With `target`, the head is checked against it and moved to its device and dtype. Raises
        ValueError when widths or vocabularies differ, naming both; warns when they agree but the
        weights are not those that the head was trained on.
        """
        checked, stored = self.read(target)
        with named(self.path):
            head = type(checked).from_config(stored.config, stored.tensors)
        head.tree = checked.tree
        head.load_state_dict(stored.tensors)
        if target is not None:
            head.to(target.device, dtype or target.dtype)
        elif dtype is not None:
            head.to(dtype)
        return head.eval()


def open_head(source: str | Path, *, revision: str | None = None) -> HeadFolder:
    """Find a head: a head folder, a training run's folder (its `best`, else its newest step), or
    user/name or user/name@revision on the Hub, whose files are downloaded.

    Raises FileNotFoundError where there is none, ValueError for a damaged config.json.
    """
    folder = Path(os.path.expanduser(source))  # Path.expanduser raises for an unknown user
    if folder.is_dir():
        path = _head_in(folder)
        return HeadFolder(path, read_config(path), str(source))
    repo_id, _, at = str(source).partition("@")
    if not HUB_ID.fullmatch(repo_id):
        raise FileNotFoundError(f"head {source}: no such folder, and not a Hub id (user/name)")
    revision = revision or at or None
    path = _download(repo_id, revision)
    return HeadFolder(path, read_config(path), repo_id, revision)


def load_head(
    source: str | Path,
    *,
    target: Target | None = None,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
) -> DraftHead:
    """`open_head(source, revision=revision).load(target, dtype=dtype)`."""
    return open_head(source, revision=revision).load(target, dtype=dtype)


def load_pair(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
) -> tuple[Target, DraftHead]:
    """The target that a head records, with the adapter that it was trained together with if there
    is one, and the head on it. source, revision: as of `open_head`; dtype, device: as of
    `Target.load`. Errors: as of `HeadFolder.target` and `HeadFolder.load`.
    """
    folder = open_head(source, revision=revision)
    name, commit = folder.target
    target = Target.load(name, dtype=dtype, device=device, revision=commit)
    if folder.adapter is not None:
        target.attach(folder.adapter)
    return target, folder.load(target)


def shared_adapter(heads: Sequence[HeadFolder]) -> Path | None:
    """The one adapter that all of these heads were trained together with, or None.

    Raises ValueError where they differ in it: no target is right for all of them.
    """
    fingerprints = {
        str(head.path): stored_fingerprint(head.adapter) if head.adapter else "none"
        for head in heads
    }
    if len(set(fingerprints.values())) > 1:
        got = ", ".join(f"{path}: {fingerprint}" for path, fingerprint in fingerprints.items())
        raise ValueError(
            f"expected heads that were trained with the same adapter of the target, got {got}; "
            "use one of them at a time"
        )
    return heads[0].adapter if heads else None


def step_folders(run: Path) -> list[Path]:
    """The step-* folders of a training run, oldest first; copies under other names are ignored."""
    steps = [
        folder
        for folder in run.glob("step-*")
        if folder.is_dir() and re.fullmatch("step-[0-9]{6,}", folder.name)
    ]
    return sorted(steps, key=lambda folder: int(folder.name.removeprefix("step-")))


def _head_in(folder: Path) -> Path:
    """The head folder in a local one."""
    best = folder / "best"
    candidates = [folder, best] if best.is_dir() else [folder, *reversed(step_folders(folder))]
    for candidate in candidates:
        if (candidate / CONFIG).is_file():
            return candidate
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
    raise FileNotFoundError(
        f"{folder}: expected a head folder ({CONFIG}, {WEIGHTS}) or a run with step-* folders, "
        f"found {found}"
    )


def _download(repo_id: str, revision: str | None) -> Path:
    """The files of a head; of a sharded model, the shards that hold one."""

    def snapshot(patterns: Sequence[str]) -> Path:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(patterns)))

    try:  # the library's messages are paragraphs, or do not name the repository
        folder = snapshot([CONFIG, *WEIGHT_FILES, *INDEXES, CARD, *ADAPTER_FILES])
        indexes = [folder / name for name in INDEXES if (folder / name).is_file()]
        if indexes and not any((folder / name).is_file() for name in WEIGHT_FILES):
            snapshot([part for index in indexes for part in shards(index)])
    except (LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        at = f" at {revision}" if revision else ""
        raise FileNotFoundError(
            f"head {repo_id}{at}: expected it on {constants.ENDPOINT} or in "
            f"{constants.HF_HUB_CACHE}, found neither; check name and revision, log in (hf auth "
            "login) if it is private, or, with HF_HUB_OFFLINE, load it once online"
        ) from error
    return folder


def check_target(head: DraftHead, target: Target, facts: dict[str, Any]) -> None:
    """Raise ValueError, naming both, when head and target differ in width or vocabulary or the head
    reads layers that the target has not; warn when the target's weights or adapter are not those
    recorded in `facts` ({}: nothing recorded).
    """
    recorded = facts.get("target") or {}
    name = recorded.get("name") or "its target"
    for what, expected, got in (
        ("hidden size", head.hidden_size, target.hidden_size),
        ("vocabulary", head.vocab_size, target.vocab_size),
    ):
        if expected != got:
            raise ValueError(
                f"head expects {what} {expected} ({name}), target has {got} ({target.name}); "
                "pass the target this head was trained for"
            )
    if not all(-1 <= layer <= target.layers for layer in head.feature_layers):
        raise ValueError(
            f"head reads states {list(head.feature_layers)} of its target ({name}), {target.name} "
            f"has 0 (embeddings) to {target.layers}; pass the target this head was trained for"
        )
    trained = (facts.get("adapter") or {}).get("fingerprint")
    attached = target.adapter.fingerprint() if target.adapter else None
    if not same_weights(recorded.get("fingerprint"), target.fingerprint()):
        warnings.warn(
            f"this head was trained on other weights ({name}) than {target.name} has now: output "
            "stays the target's own, but fewer drafts will be accepted",
            stacklevel=4,
        )
    elif trained != attached:
        warnings.warn(
            f"this head was trained with {f'adapter {trained}' if trained else 'no adapter'}, "
            f"{target.name} has {attached or 'none'}: output stays the target's own, but fewer "
            "drafts will be accepted; load_pair loads a head with its adapter",
            stacklevel=4,
        )
