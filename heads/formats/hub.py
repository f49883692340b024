"""Head folders, on disk or on the Hub: save, open, load.

A folder contains config.json, model.safetensors, README.md and custom_generate/. Our metadata
(format, target, tree, training) is in one nested "draftheads" key of config.json; all other keys
and all tensor names are those that serving engines read.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftheads.arguments import head_folder
from draftheads.heads.base import DraftHead
from draftheads.heads.files import CONFIG as CONFIG
from draftheads.heads.files import read_json, staged, write_json, write_text
from draftheads.heads.formats.card import merge_sections, render_card, write_remote_code
from draftheads.heads.formats.config import read_config as read_config
from draftheads.heads.formats.facts import HeadFacts
from draftheads.heads.formats.stored import (
    CANDIDATES,
    INDEXES,
    WEIGHT_FILES,
    Stored,
    named,
    read_files,
    shards,
    target_name,
)
from draftheads.heads.formats.table import WRITERS, as_ours, loss, translated
from draftheads.heads.kinds import HEADS as HEADS
from draftheads.heads.online import download
from draftheads.heads.target.adapter import FILES as ADAPTER_FILES
from draftheads.heads.target.adapter import FOLDER as ADAPTER
from draftheads.heads.target.load import template_variables
from draftheads.heads.target.model import Target
from draftheads.heads.target.pretrained import same_weights
from draftheads.heads.tensors import dtype_name
from draftheads.heads.tree import DynamicTree, Tree
from draftheads.recipes import head_path

FORMAT = 1
WEIGHTS = WEIGHT_FILES[0]
CARD = "README.md"


def save_head(
    head: DraftHead,
    folder: str | Path,
    *,
    target: Target,
    training: dict[str, Any] | None = None,
) -> Path:
    """Write a head folder atomically, replacing an older one.

    training: metadata of the run, as JSON. Raises FileExistsError for a folder with anything else
    in it.
    """
    folder = Path(folder)
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    others = names - {CONFIG, WEIGHTS, CARD, ADAPTER, "custom_generate"}
    if CONFIG in names and "draftheads" not in read_json(folder / CONFIG):
        others.add(CONFIG)  # of a model
    if others:
        raise FileExistsError(
            f"{folder}: expected a new folder or one with a head alone, which is replaced; got one "
            f"with {', '.join(sorted(others)[:3])}; choose another"
        )
    with staged(folder) as staging:
        write_head(head, staging, target=target, training=training)
    return folder


def write_head(
    head: DraftHead,
    folder: Path,
    *,
    target: Target,
    training: dict[str, Any] | None = None,
) -> None:
    """Write the files of `save_head` into an existing folder."""
    facts = {
        "format": FORMAT,
        "kind": head.kind,
        "target": about_target(target),
        "feature_layers": list(head.feature_layers),
        "adapter": target.adapter.facts() if target.adapter else None,
        **tree_facts(head.tree),
        "training": training or {},
    }
    stored = stored_head(head, head.state_dict(), facts)
    as_ours(stored).save(folder)
    (folder / CARD).write_text(render_card(stored.config) + "\n")
    write_remote_code(folder)
    if target.adapter:
        target.adapter.save(folder / ADAPTER, target.name)


def tree_facts(tree: Tree) -> dict[str, Any]:
    """A head's record of its tree: of a fixed one also the paths of larger ones, in order."""
    if isinstance(tree, DynamicTree):
        return {"tree": tree.to_json()}
    return {"tree": tree.to_json(), "tree_order": [list(path) for path in tree.order]}


def stored_head(head: DraftHead, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> Stored:
    """A head with these tensors in our own layout."""
    dtype = next(each.dtype for each in tensors.values() if each.is_floating_point())
    config = {
        "architectures": [head.architecture],
        **head.config(),
        "dtype": dtype_name(dtype),
        "draftheads": facts,
    }
    return Stored(config, {name: tensor.contiguous() for name, tensor in tensors.items()})


def refusals(head: DraftHead, target: Target) -> str:
    """Which programs `convert` would not write this head for, and why; "" for none."""
    about = {"architecture": type(target.model).__name__, "layers": target.layers}
    facts = {"kind": head.kind, "target": about, "feature_layers": list(head.feature_layers)}
    config = {**head.config(), "architectures": [head.architecture], "draftheads": facts}
    stored = Stored(config, {})
    reasons: dict[str, list[str]] = {}
    for to in WRITERS:
        if reason := loss(to, stored):
            reasons.setdefault(reason, []).append(to)
    return "; ".join(f"{', '.join(each)}: {reason}" for reason, each in reasons.items())


def about_target(target: Target) -> dict[str, Any]:
    """The metadata of its target that a head records."""
    return {
        "name": target.name,
        "revision": target.revision,
        "lora": target.lora,
        "fingerprint": target.fingerprint(),
        "architecture": type(target.model).__name__,
        "layers": target.layers,
        "quantisation": target.quantisation,
        "dtype": target.saved_dtype,
        "eos_ids": list(target.eos_ids),
    }


def record_tuned(folder: Path, tree: Tree, facts: dict[str, Any]) -> None:
    """Replace the tree in a head's config.json and card. facts: where and how it was found; the
    tree of the training stays there, as `trained_tree`.
    """
    config = read_config(folder)
    recorded = config["draftheads"]
    trained = HeadFacts(recorded).trained_tree.to_json()
    recorded |= {"tree": tree.to_json(), "tuned": {**facts, "trained_tree": trained}}
    _rewrite(folder, config)


def _rewrite(folder: Path, config: dict[str, Any]) -> None:
    """Replace config.json, and in the card what nobody has edited."""
    old = render_card(read_config(folder)) + "\n"
    card = folder / CARD
    edited = card.read_text(encoding="utf-8") if card.is_file() else old
    write_text(card, merge_sections(edited, old, render_card(config) + "\n"))
    write_json(folder / CONFIG, config)


@dataclass(frozen=True)
class HeadFolder:
    """A head folder on this machine; so far, only its config.json has been read.

    name and revision: of its repository on the Hub; otherwise the source as given, and None.
    """

    path: Path
    config: dict[str, Any]
    name: str
    revision: str | None = None

    @property
    def facts(self) -> HeadFacts:
        """The record of draftheads; nothing for other layouts."""
        return Stored(self.config, {}).facts

    @property
    def target(self) -> tuple[str, str | None]:
        """Name and revision of the recorded target. Raises ValueError if none is recorded."""
        name = target_name(self.config)
        if name is not None:
            return name, self.facts.target.revision
        if "medusa_num_heads" in self.config and self.config.get("architectures"):
            return self.name, self.revision  # Medusa v1.0: heads and target in one folder
        raise ValueError(
            f"{self.path / CONFIG}: expected the target of a head, got none; pass it (target=NAME, "
            "or --target NAME); if this is a model, it is the target"
        )

    @property
    def template_args(self) -> dict[str, Any] | None:
        """The variables of the chat template with which the answers were made that the head learned
        from; None if that is not recorded. Raises ValueError for a damaged record.
        """
        data = self.facts.training.get("data") or {}
        variables = (data.get("sampling") or {}).get("template_args")
        if variables is None:
            return None
        with named(self.path / CONFIG):
            return template_variables(variables)

    @property
    def adapter(self) -> Path | None:
        """The adapter that the head was trained with, for `Target.attach`."""
        folder = self.path / ADAPTER
        return folder if folder.is_dir() else None

    def read(self, target: Target | None = None) -> tuple[DraftHead, Stored]:
        """The head without weights (on the meta device), and its contents in our own layout, after
        names, shapes and tree were checked. target, errors and warnings: as for `load`.
        """
        with named(self.path):
            stored = translated(read_files(self.path, self.config), target)
            kind = stored.facts.kind or stored.config.get("model_type")
            if kind not in HEADS:
                raise ValueError(
                    f"expected a head of kind {', '.join(HEADS)}, got {kind!r}; is this a head "
                    "folder?"
                )
            with torch.device("meta"):
                head = HEADS[kind].from_config(stored.config, stored.tensors)
            if target is not None:
                head.check_fit(target, stored.facts.target.title)
                if difference := target_difference(stored.facts, target):
                    warnings.warn(
                        f"this head was trained {difference}: output stays the target's own, but "
                        "fewer draft tokens will be accepted",
                        stacklevel=3,
                    )
            stored.check(head.state_dict())
            if stored.facts.has_tree:
                head.tree = stored.facts.tree
                head.check_tree(head.tree)
        return head, stored

    def load(self, target: Target | None = None, *, dtype: torch.dtype | None = None) -> DraftHead:
        """The head, strictly loaded from any layout; its shape is read from the tensors.

        With `target`, the head is checked against it and moved to its device and dtype. Raises
        ValueError when widths or vocabularies differ; warns when they match but the weights are
        not those that the head was trained on.
        """
        checked, stored = self.read(target)
        head = type(checked).from_config(stored.config, stored.tensors)
        head.tree = checked.tree
        head.load_state_dict(stored.tensors)
        if target is not None:
            head.to(target.device, dtype or target.dtype)
        elif dtype is not None:
            head.to(dtype)
        if head.tree.nodes == 1:
            machine = stored.facts.tuned.get("machine", "an unknown machine")
            warnings.warn(
                f"this head decodes without drafts: tuning found that none pay on {machine}; "
                "elsewhere, run `draftheads tune` again or choose a tree",
                stacklevel=2,
            )
        return head.eval()


def open_head(source: str | Path, *, revision: str | None = None) -> HeadFolder:
    """Find a head: a head folder, a training run's folder (its `best`, else its newest step), the
    packaged `smollm2`, or user/name or user/name@revision on the Hub, from which it is downloaded.

    Raises FileNotFoundError if there is none, ValueError for a damaged config.json.
    """
    folder = head_folder(head_path(source))
    if folder is not None:
        path = _head_in(folder)
        return HeadFolder(path, read_config(path), str(source))
    repo_id, _, at = str(source).partition("@")
    revision = revision or at or None
    path = download("head", repo_id, revision, [CONFIG, *CANDIDATES, CARD, *ADAPTER_FILES])
    weights = next((name for name in CANDIDATES if (path / name).is_file()), None)
    if weights in INDEXES:  # of a sharded checkpoint with its target, only those with heads
        download("head", repo_id, revision, shards(path / weights))
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
    """The target that a head records, with its LoRA, the adapter that the head was trained with and
    the chat template variables of its data, and the head on it. source, revision: as in
    `open_head`; dtype, device: as in `Target.load`. Errors: as in `HeadFolder.target` and
    `HeadFolder.load`.
    """
    folder = open_head(source, revision=revision)
    name, commit = folder.target
    lora = folder.facts.target.lora
    target = Target.load(name, dtype=dtype, device=device, revision=commit, lora=lora)
    target.template_args = folder.template_args or {}
    if folder.adapter is not None:
        target.attach(folder.adapter)
    return target, folder.load(target)


def shared_adapter(heads: Sequence[HeadFolder]) -> Path | None:
    """The adapter that all of these heads were trained with, or None.

    Raises ValueError if they differ in it: no target is right for all of them.
    """
    trained = [(head.path, head.facts.adapter_fingerprint or "none") for head in heads]
    _check_equal(trained, "trained with the same adapter of the target")
    return heads[0].adapter if heads else None


def shared_template_args(heads: Sequence[HeadFolder]) -> dict[str, Any]:
    """The chat template variables of the data of all these heads, as far as they record them.

    Raises ValueError if they differ: no prompt is right for all of them.
    """
    records = [(head.path, head.template_args) for head in heads]
    recorded = [(path, variables) for path, variables in records if variables is not None]
    _check_equal(recorded, "whose data has the same chat template variables, or --template-args")
    return recorded[0][1] if recorded else {}


def _check_equal(values: Sequence[tuple[Path, Any]], what: str) -> None:
    """Raise ValueError unless all heads, by their path, have one value."""
    if any(value != values[0][1] for _, value in values):
        got = ", ".join(f"{path}: {value}" for path, value in values)
        raise ValueError(f"expected heads {what}, got {got}; use one of them at a time")


def step_folders(run: Path) -> list[Path]:
    """The step-* folders of a training run, oldest first; copies under other names are ignored."""
    steps = [
        folder
        for folder in run.glob("step-*")
        if folder.is_dir() and re.fullmatch("step-[0-9]{6,}", folder.name)
    ]
    return sorted(steps, key=lambda folder: int(folder.name.removeprefix("step-")))


def _head_in(folder: Path) -> Path:
    best = folder / "best"
    candidates = [folder, best] if best.is_dir() else [folder, *reversed(step_folders(folder))]
    for candidate in candidates:
        if (candidate / CONFIG).is_file():
            return candidate
    names = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
    raise FileNotFoundError(
        f"{folder}: expected a head folder ({CONFIG}, {WEIGHTS}) or a run with step-* folders, "
        f"found {names}"
    )


def target_difference(facts: HeadFacts, target: Target) -> str:
    """Says how the target that a head was trained with differs from this one; "": it does not."""
    trained = facts.adapter_fingerprint
    attached = target.adapter.fingerprint() if target.adapter else None
    if not same_weights(facts.target.fingerprint, target.fingerprint()):
        return f"on other weights ({facts.target.title}) than {target.title} has now"
    if trained != attached:
        with_what = f"adapter {trained}" if trained else "no adapter"
        return f"with {with_what}, {target.title} has {attached or 'none'}"
    return ""
