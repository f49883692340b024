"""Training that starts from a head (`head.from`): any that can be loaded, for this target or one of
the same width and vocabulary.

"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftheads.heads.base import DraftHead
from draftheads.heads.choices import HeadChoices
from draftheads.heads.formats.hub import open_head
from draftheads.heads.mtp.checkpoint import NATIVE, native_head, native_shape
from draftheads.heads.mtp.head import MtpHead
from draftheads.heads.target.model import Target
from draftheads.heads.target.pretrained import same_weights
from draftheads.heads.vocabulary import token_map
from draftheads.train.batches import Documents
from draftheads.train.recipe import Recipe


@dataclass(frozen=True)
class Origin:
    """The head that a run continues. revision: on the Hub. target, fingerprint: those that it was
    trained on, if they are recorded. has_moved: whether this one has other weights.
    tokens: what it had read in training. tokens_per_step: its τ on this target before the first
    step, decoded or else simulated.
    """

    name: str
    revision: str | None
    target: str | None
    fingerprint: str | None
    has_moved: bool
    tokens: int | None
    tokens_per_step: float | None = None

    def __str__(self) -> str:
        if self.has_moved:
            return f"{self.name} on another target than {self.target}, on which it was trained"
        return f"{self.name} on the target that it was trained on"


def read_origin(recipe: Recipe, target: Target) -> Origin:
    """Find what a recipe's head.from names."""
    if is_native(recipe):
        return Origin(
            "its own MTP layer", None, str(target.name), target.fingerprint(), False, None
        )
    folder = open_head(str(recipe.head.source))
    facts = folder.facts
    return Origin(
        folder.name,
        folder.revision,
        facts.target.name,
        facts.target.fingerprint,
        not same_weights(facts.target.fingerprint, target.fingerprint()),
        facts.training.get("tokens"),
    )


def is_native(recipe: Recipe) -> bool:
    """True if training starts from the MTP layer in the target's own checkpoint."""
    return recipe.head.kind == MtpHead.kind and recipe.head.source == NATIVE


def initial_head(
    recipe: Recipe, target: Target, documents: Documents, saved: Path | None = None
) -> DraftHead:
    """The head that head.from names, or that of a checkpoint of the run, in float32, to be trained
    with a recipe. Its sizes stay, but head.vocabulary of MTP heads, which learn no matrix of it:
    they draft the most frequent tokens of these documents.

    Raises ValueError for a head of another kind, sizes, or width or vocabulary of the target.
    """
    if is_native(recipe) and saved is None:
        head: DraftHead = native_head(target)
    else:
        # other weights of the target are what a head is trained further for
        with warnings.catch_warnings(action="ignore"):
            folder = open_head(saved or str(recipe.head.source))
            head = folder.load(target, dtype=torch.float32)
        check_shape(head, recipe)
    size = recipe.head.draft_vocabulary
    if size is not None and isinstance(head, MtpHead):
        frequent = documents.frequent_tokens(size, target.vocab_size)
        head.limit_to(token_map(frequent, target.vocab_size))
    head.train_with(recipe.head)
    if head.needs_unembed:
        target.unembed_weight()
    return head.float().to(target.device).train()


def initial_shape(recipe: Recipe, target: Target) -> DraftHead:
    """The head that head.from names, on the meta device. Raises as `initial_head`."""
    if is_native(recipe):
        head: DraftHead = native_shape(target)
    else:
        with warnings.catch_warnings(action="ignore"):
            head, _ = open_head(str(recipe.head.source)).read(target)
        check_shape(head, recipe)
    head.train_with(recipe.head)
    return head


def check_shape(head: DraftHead, recipe: Recipe) -> None:
    """Raise ValueError for a head of another kind or of other sizes than a recipe has."""
    if head.kind != recipe.head.kind:
        raise ValueError(
            f"head.from={recipe.head.source}: expected a head of kind {recipe.head.kind}, got "
            f"{head.kind}; set head.kind={head.kind}"
        )
    for key, value in sizes_of(head, recipe.head).items():
        choice = getattr(recipe.head, key)
        is_free = key == "vocabulary" and isinstance(head, MtpHead)
        is_given = key in recipe.head.model_fields_set and not is_free
        if is_given and choice not in (None, value):
            raise ValueError(
                f"head.{key}: expected {value}, which the head has that head.from names, got "
                f"{choice}; leave it out, or leave head.from out to train a new head"
            )


def sizes_of(head: DraftHead, choices: HeadChoices) -> dict[str, Any]:
    """The sizes of a head, by those keys of a recipe that only new heads obey."""
    design = getattr(head, "design", None)
    sizes: dict[str, Any] = {}
    if "vocabulary" in type(choices).model_fields:
        sizes["vocabulary"] = None if head.token_map is None else len(head.token_map)
    for key in type(choices).model_fields.keys() - choices.decoding_keys - {"vocabulary"}:
        choice = getattr(choices, key)
        for owner in (head, design, getattr(design, "shape", None)):
            value = getattr(owner, key, None)
            value = list(value) if isinstance(value, tuple) else value
            if isinstance(value, int | str | list) and isinstance(choice, type(value) | None):
                sizes[key] = value
    return sizes
