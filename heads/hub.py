"""Head folders, on disk or on the Hub: save, open, load."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Sequence
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
from draftheads.heads.card import render_card, write_remote_code
from draftheads.heads.eagle import Eagle3Head, EagleHead
from draftheads.heads.files import staged
from draftheads.heads.formats.config import CONFIG as CONFIG
from draftheads.heads.formats.config import read_config as read_config
from draftheads.heads.formats.stored import INDEXES, WEIGHT_FILES, Stored, parts_of, target_name
from draftheads.heads.formats.table import as_ours, read_stored
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.sequential import SequentialHead
from draftheads.heads.target import Target
from draftheads.heads.tree import tree_from_json
from draftheads.heads.weights import same_weights

# Files of a head from the Hub, or from its cache on this machine.


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


# Head folders: config.json, model.safetensors, README.md and custom_generate/, on disk or on the
# Hub.
#
# Our own facts (format, target, tree, training) stand in one nested "draftheads" key of
# config.json; everything else there, and every tensor name, is what serving engines read.


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
    """Write the files of `save_head` into a folder that is there."""
    config = {
        "architectures": [head.architecture],
        **head.config(),
        "dtype": str(next(head.parameters()).dtype).removeprefix("torch."),
        "draftheads": {
            "format": FORMAT,
            "kind": head.kind,
            "target": about_target(target),
            "feature_layers": list(head.feature_layers),
            "adapter": target.adapter.facts() if target.adapter else None,
            "tree": head.tree.to_json(),
            "training": training or {},
            "measured": measured or [],
        },
    }
    tensors = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
    as_ours(Stored(folder / WEIGHTS, config, tensors), target).save(folder)
    (folder / CARD).write_text(render_card(config) + "\n")
    write_remote_code(folder)
    if target.adapter:
        target.adapter.save(folder / ADAPTER, target.name)


def about_target(target: Target) -> dict[str, Any]:
    """What a head records of the target that it stands on."""
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
    for name, text in (
        (CARD, render_card(config) + "\n"),
        (CONFIG, json.dumps(config, indent=2) + "\n"),
    ):
        part = folder / f".{name}.part"
        part.write_text(text)
        os.replace(part, folder / name)


def load_head(
    source: str | Path,
    *,
    target: Target | None = None,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
) -> DraftHead:
    """Load a head from its folder, from a training run's folder (its best or newest step), or from
    the Hub; also what others have published, in the layouts of `heads.formats`.

    The shape is read from tensor names; loading is strict. With `target`, the head is checked
    against it and moved to its device and dtype. Raises ValueError when widths or vocabularies
    differ, naming both; warns when they agree but the weights are not those that the head was
    trained on.
    """
    head, stored = read_head(source, target=target, revision=revision)
    head.load_state_dict(stored.tensors)
    if target is not None:
        head.to(target.device)
    floating = dtype or (target.dtype if target is not None else None)
    return (head.to(floating) if floating else head).eval()


def read_head(
    source: str | Path, *, target: Target | None = None, revision: str | None = None
) -> tuple[DraftHead, Stored]:
    """A head without its weights, and what is stored of it in our own words, once names, shapes and
    tree agree; source, target, revision and errors: as of `load_head`.
    """
    folder = find_head(source, revision=revision)
    stored = read_stored(folder, read_config(folder), target)
    facts = stored.facts
    kind = facts.get("kind", stored.config.get("model_type"))
    if kind not in HEADS:
        raise ValueError(
            f"{folder}: expected a head of kind {', '.join(HEADS)}, got {kind!r}; "
            "is this a head folder?"
        )
    with stored.named():
        with torch.device("meta"):  # nothing is allocated until names and shapes agree
            said = HEADS[kind].from_config(stored.config, stored.tensors)
        stored.check_names(set(said.state_dict()))
        if target is not None:
            check_target(said, target, facts.get("target") or {})
            check_adapter(facts.get("adapter"), target)
        stored.check_shapes(said.state_dict())
        head = HEADS[kind].from_config(stored.config, stored.tensors)
        if facts.get("tree"):
            head.tree = tree_from_json(facts["tree"])
            head.check_tree(head.tree)
    return head, stored


def load_pair(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
) -> tuple[Target, DraftHead]:
    """The target that a head records, with the adapter that it was trained together with if there
    is one, and the head on it. source, revision: as of `load_head`; dtype, device: as of
    `Target.load`.

    Raises ValueError for a head that records no target or does not fit it; warns when its weights
    are not those that the head was trained on.
    """
    name, commit = head_target(source, revision=revision)
    target = Target.load(name, dtype=dtype, device=device, revision=commit)
    adapter = head_adapter(source, revision=revision)
    if adapter is not None:
        target.attach(adapter)
    return target, load_head(source, target=target, revision=revision)


def head_target(source: str | Path, *, revision: str | None = None) -> tuple[str, str | None]:
    """(name, revision) of the target that a head records. Raises ValueError when it records
    none.
    """
    folder = find_head(source, revision=revision)
    config = read_config(folder)
    name = target_name(config)
    if name is None and "medusa_num_heads" in config and config.get("architectures"):
        # Medusa v1.0: the heads stand in one folder with their target
        return (str(source), None) if Path(source).is_dir() else _on_hub(source, revision)
    if name is None:
        raise ValueError(
            f"{folder}/{CONFIG} does not say which target it was trained for; pass --target"
        )
    return name, config.get("draftheads", {}).get("target", {}).get("revision")


def head_adapter(source: str | Path, *, revision: str | None = None) -> Path | None:
    """The folder of the adapter that a head was trained together with, for `Target.attach`; None
    where its target stayed as it was.
    """
    folder = find_head(source, revision=revision) / ADAPTER
    return folder if folder.is_dir() else None


def shared_adapter(sources: Sequence[str | Path]) -> Path | None:
    """The one adapter that all of these heads were trained together with, or None.

    Raises ValueError where they differ in it: no target is right for all of them.
    """
    adapters = {str(source): head_adapter(source) for source in sources}
    names = {name: path and stored_fingerprint(path) for name, path in adapters.items()}
    if len(set(names.values())) > 1:
        said = ", ".join(f"{name}: {each or 'none'}" for name, each in names.items())
        raise ValueError(
            f"expected heads that were trained with the same adapter of the target, got {said}; "
            "use one of them at a time"
        )
    return next(iter(adapters.values()), None)


def find_head(source: str | Path, *, revision: str | None = None) -> Path:
    """The local folder of a head: itself, a run's best (file `best`) or newest `step-*`, or a Hub
    snapshot: user/name, or user/name@revision.

    Raises FileNotFoundError for a local folder that holds no head.
    """
    folder = Path(os.path.expanduser(source))  # Path's own raises where there is no such user
    if (folder / CONFIG).is_file():
        return folder
    if folder.is_dir():
        best = folder / "best"
        steps = [best] if best.is_dir() else step_folders(folder)
        whole = [step for step in steps if (step / CONFIG).is_file()]
        if whole:
            return whole[-1]
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        raise FileNotFoundError(
            f"{folder}: expected a head folder ({CONFIG}, {WEIGHTS}) or a run with step-* folders, "
            f"found {found}"
        )
    if folder.is_absolute() or str(source).startswith((".", "~")) or str(source).count("/") != 1:
        raise FileNotFoundError(f"head {source}: no such folder, and not a Hub id (user/name)")
    repo_id, revision = _on_hub(source, revision)
    patterns = [CONFIG, *WEIGHT_FILES, *INDEXES, CARD, *ADAPTER_FILES]
    folder = head_snapshot(repo_id, revision, patterns)
    parts = {
        part for name in INDEXES if (folder / name).is_file() for part in parts_of(folder / name)
    }
    if parts and not any((folder / name).is_file() for name in WEIGHT_FILES):
        head_snapshot(repo_id, revision, sorted(parts))
    return folder


def step_folders(run: Path) -> list[Path]:
    """The step-* folders of a training run, oldest first; a copy with another name is the user's
    own.
    """
    named = {folder: re.fullmatch("step-([0-9]{6,})", folder.name) for folder in run.glob("step-*")}
    numbers = {folder: int(name[1]) for folder, name in named.items() if name and folder.is_dir()}
    return sorted(numbers, key=lambda folder: numbers[folder])


def _on_hub(source: str | Path, revision: str | None) -> tuple[str, str | None]:
    """Repository and revision of user/name or user/name@revision."""
    repo_id, _, at = str(source).partition("@")
    return repo_id, revision or at or None


def check_target(head: DraftHead, target: Target, recorded: dict[str, Any]) -> None:
    """Raise ValueError, naming both, when a head is too wide or narrow for a target or reads layers
    that it has not; warn when the weights are not those recorded (name, fingerprint; {} if none
    are).
    """
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
    if not same_weights(recorded.get("fingerprint"), target.fingerprint()):
        warnings.warn(
            f"this head was trained on other weights ({name}) than {target.name} has now: output "
            "stays the target's own, but fewer drafts will be accepted",
            stacklevel=3,
        )


def check_adapter(recorded: dict[str, Any] | None, target: Target) -> None:
    """Warn when a target's adapter is not the one that a head records (`facts`; None if none)."""
    expected = recorded["fingerprint"] if recorded else None
    got = target.adapter.fingerprint() if target.adapter else None
    if expected != got:
        remedy = "with Target.load(...).attach(head_adapter(head))" if expected else "alone"
        warnings.warn(
            f"this head was trained with {f'adapter {expected}' if expected else 'no adapter'} on "
            f"its target, {target.name} has {got or 'none'}: output stays the target's own, but "
            f"fewer drafts will be accepted; load the target {remedy}",
            stacklevel=4,
        )
