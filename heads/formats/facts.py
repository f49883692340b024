"""The record that draftheads keeps of a head: the section "draftheads" of its config.json."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from draftheads.heads.target.lora import titled
from draftheads.heads.tree import StaticTree, Tree, tree_from_json


@dataclass(frozen=True)
class TargetFacts:
    """The target that a head was trained on, as far as it is recorded."""

    name: str | None
    revision: str | None
    lora: str | None  # merged into it
    fingerprint: str | None
    architecture: str | None  # class of its model
    layers: int | None
    quantisation: str | None
    dtype: str | None  # of its saved weights
    eos_ids: tuple[int, ...]

    @property
    def title(self) -> str:
        """Its name and its LoRA's, for people."""
        return titled(self.name, self.lora) if self.name else "its target"


@dataclass(frozen=True)
class HeadFacts:
    """A view of the section, whose types were checked when config.json was read (`read_config`).

    json: the section as it is in the file; {} for heads in other projects' layouts.
    """

    json: dict[str, Any]

    @property
    def is_ours(self) -> bool:
        """True if the folder is in our own layout; conversions for others lack the format."""
        return "format" in self.json

    @property
    def kind(self) -> str:
        """The kind of head, one of `HEADS`; "" if it is not recorded."""
        return self.json.get("kind") or ""

    @cached_property
    def target(self) -> TargetFacts:
        """The recorded target."""
        values = self.json.get("target") or {}
        fields: dict[str, Any] = {key: values.get(key) for key in TargetFacts.__dataclass_fields__}
        fields["eos_ids"] = tuple(values.get("eos_ids") or ())
        return TargetFacts(**fields)

    @property
    def feature_layers(self) -> list[int]:
        """Indices into the target's hidden states; [] if they are not recorded."""
        return self.json.get("feature_layers") or []

    @property
    def adapter(self) -> dict[str, Any] | None:
        """The target's adapter that the head was trained with."""
        return self.json.get("adapter")

    @property
    def adapter_fingerprint(self) -> str | None:
        """The adapter's fingerprint; None without one."""
        return (self.adapter or {}).get("fingerprint")

    @property
    def has_tree(self) -> bool:
        """True if a tree is recorded; [] is one without drafts."""
        return self.json.get("tree") is not None

    @property
    def tree(self) -> Tree:
        """The default tree. Raises ValueError if there is none, or anything else."""
        tree = tree_from_json(self.json.get("tree"))
        order = tree_from_json(self.json.get("tree_order") or [])
        if isinstance(tree, StaticTree) and isinstance(order, StaticTree):
            more = (path for path in order.paths if path not in tree.paths)
            return StaticTree(tree.paths, tuple(more))
        return tree

    @property
    def tuned(self) -> dict[str, Any]:
        """Where and how `tune` chose the tree; {} if it did not."""
        return self.json.get("tuned") or {}

    @property
    def trained_tree(self) -> Tree:
        """The tree with which the head was saved, before any tuning; without drafts if unknown."""
        return tree_from_json(self.tuned.get("trained_tree", self.json.get("tree") or []))

    @property
    def training(self) -> dict[str, Any]:
        """The record of the head's training; {} if there is none."""
        return self.json.get("training") or {}
