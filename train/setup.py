"""The parts of a run, made from its recipe: target, data, head, and what a card says of them."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from accelerate import Accelerator

from draftheads.heads.base import DraftHead
from draftheads.heads.hub import HEADS
from draftheads.heads.pretrained import same_weights
from draftheads.heads.target import Target
from draftheads.train.batches import Documents, Rows
from draftheads.train.data.answers import read_answers, read_manifest
from draftheads.train.recipe import Recipe

LOW_SHARE = 0.05
"""Share of learned tokens below which something is likely wrong with the data."""

Log = Callable[[str], None]


@dataclass(frozen=True)
class TrainingData:
    """Rows to train on, rows held out, and where they come from."""

    documents: Documents
    train: Rows
    heldout: Rows
    manifest: dict[str, Any]

    @cached_property
    def counts(self) -> dict[str, Any]:
        """What changes when the data changes."""
        return {
            "documents": len(self.documents.spans),
            "tokens": len(self.documents.tokens_N),
            "learned_tokens": int(self.documents.learn_N.sum()),
            "digest": self.documents.digest(),
        }


def load_target(recipe: Recipe, accelerator: Accelerator) -> Target:
    """The frozen target, placed as the recipe says, with a new adapter where one is to learn.

    Raises ValueError for a placement that this launch does not have.
    """
    target = Target.load(
        recipe.target,
        dtype=recipe.target_dtype,
        device=str(accelerator.device),
        revision=recipe.target_revision,
        placement=recipe.target_placement,
        bits=recipe.target_bits,
    )
    if recipe.adapter:
        try:
            target.unembed_weight()
        except ValueError as error:
            raise ValueError(f"adapter: its divergence cannot be measured ({error})") from error
        torch.manual_seed(recipe.run.seed)
        target.adapt(**recipe.adapter.model_dump(include={"rank", "alpha", "layers", "modules"}))
    return target


def load_data(recipe: Recipe, target: Target, log: Log) -> TrainingData:
    """Read the answers, refuse what cannot be learned from, and lay them out in rows."""
    path, pack = recipe.data.path, recipe.data.pack
    manifest = read_manifest(path)
    origin = manifest.get("target", {})
    if not same_weights(origin.get("fingerprint"), target.fingerprint()):
        raise ValueError(
            f"{path}: expected answers of {target.name} ({target.fingerprint()}), got answers of "
            f"{origin.get('name')} ({origin.get('fingerprint')}); distill with this target, or set "
            f"target={origin.get('name')}"
        )
    documents = Documents.read(read_answers(path))
    check_tokens(recipe, int(documents.tokens_N.max()), target.vocab_size)
    length = min(recipe.data.sequence_length, target.context)
    if length < recipe.data.sequence_length:
        log(f"data.sequence_length is cut to {length}, the context of {target.name}")
    spans, apart = documents.split(recipe.data.heldout)
    train = Rows(documents, spans, length, pack=pack, seed=recipe.run.seed)
    heldout = Rows(documents, apart, length, pack=pack, seed=0)
    for name, rows in {"trained on": train, "held out": heldout}.items():
        if not len(rows):
            raise ValueError(
                f"{path}: expected tokens written by the target, got none in {len(rows.spans)} "
                f"documents that are {name}; look at `learn` in its answers-*.jsonl and distill "
                "more prompts"
            )
    learned, tokens = sum(train.learned), sum(train.sizes)
    log(
        f"data: {len(documents.spans)} documents, {len(apart)} held out; {tokens:,} tokens in "
        f"{len(train)} rows of {length} ({tokens / len(train) / length:.0%} full), "
        f"{learned / tokens:.0%} learned"
    )
    if train.cut:
        log(f"{train.cut} cuts in documents longer than a row; raise data.sequence_length")
    if learned / tokens < LOW_SHARE:
        log("warning: few tokens are learned; are prompts that long, or are answers missing?")
    return TrainingData(documents, train, heldout, manifest)


def check_tokens(recipe: Recipe, largest: int, vocabulary: int) -> None:
    """Raise ValueError for data whose largest token id the target does not have."""
    if largest >= vocabulary:
        raise ValueError(
            f"{recipe.data.path}: expected token ids below {vocabulary} ({recipe.target}), got "
            f"{largest}; distill with this target"
        )


def create_head(recipe: Recipe, target: Target, documents: Documents) -> DraftHead:
    """A new head of the recipe's kind, in float32 on the target's device."""
    choices = recipe.head.model_dump(exclude={"kind"})
    if size := choices.pop("vocabulary", None):
        choices["vocabulary"] = documents.frequent_tokens(size, target.vocab_size)
    torch.manual_seed(recipe.run.seed)
    return HEADS[recipe.head.kind].create(target, **choices).float().to(target.device)


def describe_trained(head: DraftHead, target: Target, log: Log) -> None:
    """Print how much is trained; nothing of the target but its adapter may be."""
    adapter = list(target.adapter.parameters.values()) if target.adapter else []
    trained = [p for p in head.parameters() if p.requires_grad] + adapter
    changing = {id(parameter) for parameter in adapter}
    frozen = [p for p in target.model.parameters() if id(p) not in changing]
    assert not any(p.requires_grad for p in frozen), "the target must be frozen"
    total, held = (sum(p.numel() for p in each) for each in (trained, frozen))
    log(f"training {total:,} parameters of the {head.kind} head; the target's {held:,} are frozen")


def versions() -> dict[str, str]:
    """Versions of the packages that affect results."""
    packages = ("draftheads", "torch", "transformers", "accelerate")
    return {name: importlib.metadata.version(name) for name in packages}


def facts(recipe: Recipe, data: TrainingData, accelerator: Accelerator) -> dict[str, Any]:
    """What a published head says of its training, apart from results."""
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
