"""The parts of a run, made from its recipe: target, data, head, optimizer, and the facts that are
published.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from draftheads.heads.base import DraftHead
from draftheads.heads.hub import HEADS
from draftheads.heads.placement import check_placement
from draftheads.heads.target import Target
from draftheads.heads.weights import same_weights
from draftheads.train.batches import Documents, Rows
from draftheads.train.data.answers import read_answers, read_manifest
from draftheads.train.launch import agreeing, first_process_first
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

    def counts(self) -> dict[str, Any]:
        """What changes when the data changes."""
        return {
            "documents": len(self.documents.spans),
            "tokens": len(self.documents.tokens_N),
            "learned_tokens": int(self.documents.learn_N.sum()),
            "digest": self.documents.digest(),
        }


def load_target(recipe: Recipe, accelerator: Accelerator) -> Target:
    """The frozen target, placed as the recipe says.

    Raises ValueError for a placement that this launch does not have.
    """
    placement, bits = recipe.target_placement, recipe.target_bits
    check_placement(placement, bits)

    def load() -> Target:
        return Target.load(
            recipe.target,
            dtype=recipe.target_dtype,
            device=str(accelerator.device),
            revision=recipe.target_revision,
            placement=placement,
            bits=bits,
        )

    if placement == "sharded":  # all processes load together, and the first one downloads
        return load()
    with agreeing(accelerator):
        with first_process_first(accelerator):  # one download, not one per process
            target = load()
        if recipe.adapter:
            _adapt(target, recipe)
    return target


def _adapt(target: Target, recipe: Recipe) -> None:
    assert recipe.adapter is not None
    try:
        target.unembed_weight()
    except ValueError as error:
        raise ValueError(f"adapter: its divergence cannot be measured ({error})") from error
    torch.manual_seed(recipe.run.seed)
    keys = {"rank", "alpha", "layers", "modules"}
    target.adapt(**recipe.adapter.model_dump(include=keys))


def load_data(recipe: Recipe, target: Target, log: Log) -> TrainingData:
    """Read the answers, refuse what cannot be learned from, and lay them out in rows."""
    path = recipe.data.path
    manifest = read_manifest(path)
    _check_origin(recipe, manifest, target)
    documents = Documents.read(read_answers(path))
    check_tokens(recipe, int(documents.tokens_N.max()), target.vocab_size)
    length = min(recipe.data.sequence_length, target.context)
    if length < recipe.data.sequence_length:
        log(f"data.sequence_length is cut to {length}, the context of {target.name}")
    spans, apart = documents.split(recipe.data.heldout)
    train = Rows(documents, spans, length, pack=recipe.data.pack, seed=recipe.run.seed)
    heldout = Rows(documents, apart, length, pack=recipe.data.pack, seed=0)
    data = TrainingData(documents, train, heldout, manifest)
    if not len(train) or not len(heldout):
        raise ValueError(
            f"{path}: expected tokens written by the target, got none in "
            f"{len(spans if not len(train) else apart)} documents that are "
            f"{'trained on' if not len(train) else 'held out'}; look at `learn` in its "
            "answers-*.jsonl and distill more prompts"
        )
    _describe(data, len(apart), log)
    return data


def check_tokens(recipe: Recipe, largest: int, vocabulary: int) -> None:
    """Raises ValueError for data whose largest token id the target does not have."""
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


def check_trained(head: DraftHead, target: Target, log: Log) -> None:
    """Assert that nothing of the target is trained but its adapter, and print what is."""
    trained = {name: p for name, p in head.named_parameters() if p.requires_grad}
    adapter = target.adapter.parameters if target.adapter else {}
    changing = {id(parameter) for parameter in adapter.values()}
    frozen = [p for p in target.model.parameters() if id(p) not in changing]
    own = {id(parameter) for parameter in trained.values()}
    assert not any(p.requires_grad or id(p) in own for p in frozen), "the target must freeze"
    trained |= adapter
    kinds = Counter(
        (re.sub(r"\d+", "*", name), tuple(parameter.shape)) for name, parameter in trained.items()
    )
    total = sum(parameter.numel() for parameter in trained.values())
    held = sum(p.numel() for p in frozen)
    log(f"training {total:,} parameters of the {head.kind} head; the target's {held:,} are frozen")
    for (name, shape), count in kinds.items():
        log(f"  {count} x {name} {list(shape)}")


def versions() -> dict[str, str]:
    """Of what computes."""
    packages = ("draftheads", "torch", "transformers", "accelerate")
    return {name: importlib.metadata.version(name) for name in packages}


def facts(recipe: Recipe, data: TrainingData, accelerator: Accelerator) -> dict[str, Any]:
    """What a published head should say of its training, apart from results."""
    manifest = {
        key: data.manifest.get(key) for key in ("target", "sampling", "prompts", "seed", "versions")
    }
    return {
        "recipe": recipe.model_dump(mode="json"),
        "data": {**data.counts(), **manifest},
        "versions": versions(),
        "hardware": _hardware(accelerator),
    }


def _check_origin(recipe: Recipe, manifest: dict[str, Any], target: Target) -> None:
    origin = manifest.get("target", {})
    fingerprint = origin.get("fingerprint")
    if not same_weights(fingerprint, target.fingerprint()):
        raise ValueError(
            f"{recipe.data.path}: expected answers of {target.name} ({target.fingerprint()}), "
            f"got answers of {origin.get('name')} ({fingerprint}); distill with this target, "
            f"or set target={origin.get('name')}"
        )


def _describe(data: TrainingData, apart: int, log: Log) -> None:
    train, documents = data.train, len(data.documents.spans)
    learned, tokens = sum(train.learned), sum(train.sizes)
    same = " and trained on, for want of others" if documents == 1 else ""
    log(
        f"data: {documents} documents, {apart} held out{same}; {tokens:,} tokens in "
        f"{len(train)} rows of {train.length} ({tokens / len(train) / train.length:.0%} full), "
        f"{learned / tokens:.0%} learned"
    )
    if train.cut:
        log(
            f"{train.cut} cuts in documents longer than a row; "
            "raise data.sequence_length to keep them whole"
        )
    if learned / tokens < LOW_SHARE:
        log("warning: few tokens are learned; are prompts that long, or are answers missing?")


def _hardware(accelerator: Accelerator) -> str:
    if torch.cuda.is_available():
        return f"{accelerator.num_processes} x {torch.cuda.get_device_name()}"
    return (
        f"{accelerator.num_processes} x CPU process ({platform.processor() or platform.machine()})"
    )
