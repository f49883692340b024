"""The parts of a run, made from its recipe: target, data, head, facts for the model card."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from draftheads.heads.base import DraftHead
from draftheads.heads.formats.hub import open_head
from draftheads.heads.kinds import HEADS
from draftheads.heads.target.lora import titled
from draftheads.heads.target.model import Target
from draftheads.heads.target.pretrained import same_weights
from draftheads.train.batches import Documents, Rows, Verification, release
from draftheads.train.data.answers import read_manifest
from draftheads.train.origin import continued_head, initial_head
from draftheads.train.recipe import Recipe

LOW_SHARE = 0.05
"""Share of learned tokens below which the data are suspicious."""

Log = Callable[[str], None]


@dataclass(frozen=True)
class TrainingData:
    """Rows to train on, held-out rows, and their origin."""

    documents: Documents
    train: Rows
    heldout: Rows
    manifest: dict[str, Any]
    path: Path

    @cached_property
    def verification(self) -> Verification:
        """Begins when it is first asked for: a trial of a few steps needs none."""
        return Verification(self.path, self.manifest)

    @cached_property
    def counts(self) -> dict[str, Any]:
        """Sizes and a digest, which change with the data."""
        return {
            "documents": len(self.documents),
            "tokens": self.documents.size,
            "learned_tokens": self.documents.learned,
            "digest": self.documents.digest(),
        }


def load_target(recipe: Recipe, accelerator: Accelerator) -> Target:
    """The frozen target, placed according to the recipe, with a new adapter if the recipe has one.

    Raises ValueError for a placement that this launch cannot provide.
    """
    target = Target.load(
        recipe.target,
        dtype=recipe.target_dtype,
        device=str(accelerator.device),
        revision=recipe.target_revision,
        placement="skeleton" if recipe.features.server else recipe.target_placement,
        bits=recipe.target_bits,
        lora=recipe.target_adapter,
    )
    if recipe.adapter:
        try:
            target.unembed_weight()
        except ValueError as error:
            raise ValueError(f"adapter: its divergence cannot be measured ({error})") from error
        torch.manual_seed(recipe.run.seed)
        target.adapt(**recipe.adapter.model_dump(include={"rank", "alpha", "layers", "modules"}))
    return target


def excess(recipe: Recipe, target: Target) -> list[str]:
    """A line for each size of the recipe that is larger than the target's."""
    length, vocabulary = recipe.data.sequence_length, recipe.head.draft_vocabulary or 0
    lines = []
    if length > target.context:
        context = f"{target.context}, the context of {target.name}"
        lines.append(f"data.sequence_length reduced from {length} to {context}")
    if vocabulary > target.vocab_size:
        lines.append(
            f"head.vocabulary reduced from {vocabulary} to {target.vocab_size}, all tokens of "
            f"{target.name}; set it to null"
        )
    return lines


def load_data(recipe: Recipe, target: Target, log: Log) -> TrainingData:
    """Read the answers and lay them out in rows. Raises ValueError for unusable data."""
    path, pack = recipe.data.path, recipe.data.pack
    manifest = read_manifest(path)
    origin = manifest.get("target", {})
    if not same_weights(origin.get("fingerprint"), target.fingerprint()):
        lora = origin.get("lora")
        raise ValueError(
            f"{path}: expected answers of {target.title} ({target.fingerprint()}), got answers of "
            f"{titled(origin.get('name'), lora)} ({origin.get('fingerprint')}); distill with this "
            f"target, or set target={origin.get('name')} target_adapter={lora or 'null'}"
        )
    if not origin:
        source = manifest["prompts"]["source"]
        log(f"data: a {source}; whether {target.name} wrote its answers cannot be checked")
    documents = Documents.open(path, target.vocab_size, str(target.name))
    length = min(recipe.data.sequence_length, target.context)
    for line in excess(recipe, target):
        log(line)
    spans, apart = documents.split(recipe.data.heldout)
    train = Rows(documents, spans, length, pack=pack, seed=recipe.run.seed)
    heldout = Rows(documents, apart, length, pack=pack, seed=0)
    release()
    for name, rows in {"training": train, "held-out": heldout}.items():
        if not len(rows):
            raise ValueError(
                f"{path}: expected tokens written by the target, got none in {len(rows.spans)} "
                f"{name} documents; check `learn` in answers-*, or distill more prompts"
            )
    learned, tokens = sum(train.learned), sum(train.sizes)
    log(
        f"data: {len(documents)} documents, {len(apart)} held out; {tokens:,} tokens in "
        f"{len(train)} rows of {length} ({tokens / len(train) / length:.0%} full), "
        f"{learned / tokens:.0%} learned"
    )
    if train.cut:
        log(f"cut long documents in {train.cut} places; raise data.sequence_length to avoid it")
    if learned / tokens < LOW_SHARE:
        log("warning: few tokens are learned; check for long prompts or missing answers")
    return TrainingData(documents, train, heldout, manifest, path)


def create_head(
    recipe: Recipe, target: Target, documents: Documents, saved: Path | None = None
) -> DraftHead:
    """A head of the recipe's kind, in float32 on the target's device: a new one, or the one that it
    continues. saved: the checkpoint of a run that is resumed.
    """
    choices, vocabulary = recipe.head, None
    if choices.source is not None:
        if saved is None:
            return initial_head(recipe, target, documents)
        return continued_head(open_head(saved), recipe, target, documents)
    if choices.draft_vocabulary is not None:
        vocabulary = documents.frequent_tokens(choices.draft_vocabulary, target.vocab_size)
    torch.manual_seed(recipe.run.seed)
    return HEADS[choices.kind].create(target, choices, vocabulary).float().to(target.device)


def versions() -> dict[str, str]:
    """Versions of the packages that affect results."""
    packages = ("draftheads", "torch", "transformers", "accelerate")
    return {name: importlib.metadata.version(name) for name in packages}


def training_facts(recipe: Recipe, data: TrainingData, accelerator: Accelerator) -> dict[str, Any]:
    """Facts about the training for the head's config.json, except results."""
    origin = ("target", "sampling", "prompts", "seed", "versions")
    device = f"CPU process ({platform.processor() or platform.machine()})"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return {
        "recipe": recipe.model_dump(mode="json"),
        "data": {**data.counts, **{key: data.manifest.get(key) for key in origin}},
        "versions": versions(),
        "hardware": f"{accelerator.num_processes} x {device}",
    }
