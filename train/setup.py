"""The parts of a run, made from its recipe: target, data, head, facts for the model card."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from draftheads.arguments import check_path
from draftheads.heads.base import DraftHead
from draftheads.heads.formats.hub import WEIGHTS, refusals
from draftheads.heads.kinds import HEADS
from draftheads.heads.target.adapter import FOLDER as ADAPTER
from draftheads.heads.target.lora import titled
from draftheads.heads.target.model import Target
from draftheads.heads.target.packing import shares_prefixes
from draftheads.heads.target.pretrained import same_weights
from draftheads.train.batches import (
    DataAmount,
    Documents,
    Order,
    Rows,
    Verification,
    release,
    share,
)
from draftheads.train.checkpoint import (
    RunState,
    Saved,
    check_data,
    load_optimizer_state,
    refuse_changes,
)
from draftheads.train.data.answers import Manifest, read_manifest
from draftheads.train.engines import Engine, make_engine, make_learner
from draftheads.train.launch import Log, main_process_log
from draftheads.train.origin import initial_head, read_origin
from draftheads.train.recipe import Recipe

LOW_SHARE = 0.05
"""Share of learned tokens below which the data are suspicious."""
PACKAGES = ("draftheads", "torch", "transformers", "accelerate")
"""Those whose versions affect results."""


@dataclass(frozen=True)
class TrainingData:
    """Rows to train on, held-out rows, and their origin."""

    documents: Documents
    train: Rows
    heldout: Rows
    manifest: Manifest
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


def check_inputs(recipe: Recipe) -> None:
    """Raise ValueError for paths that hold nothing, before the target is loaded."""
    check_path(recipe.target)
    read_manifest(recipe.data.path)


def frozen_target(recipe: Recipe, accelerator: Accelerator) -> Target:
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
    origin = manifest.target
    if not same_weights(origin.fingerprint, target.fingerprint()):
        raise ValueError(
            f"{path}: expected answers of {target.title} ({target.fingerprint()}), got answers of "
            f"{titled(origin.name, origin.lora)} ({origin.fingerprint}); distill with this "
            f"target, or set target={origin.name} target_adapter={origin.lora or 'null'}"
        )
    documents = Documents.open(path, target.vocab_size, str(target.name))
    length = min(recipe.data.sequence_length, target.context)
    for line in excess(recipe, target):
        log(line)
    spans, apart = documents.split(recipe.data.heldout)
    ways = {"pack": pack, "share_prefixes": pack and shares_prefixes(target)}
    train = Rows(documents, spans, length, seed=recipe.run.seed, **ways)
    heldout = Rows(documents, apart, length, seed=0, **ways)
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
    if train.prefix_tokens:
        log(f"{train.prefix_tokens:,} more tokens, of prefixes that documents share, are read once")
    if train.cut:
        log(f"cut long documents in {train.cut} places; raise data.sequence_length to avoid it")
    if learned / tokens < LOW_SHARE:
        log("warning: few tokens are learned; check for long prompts or missing answers")
    return TrainingData(documents, train, heldout, manifest, path)


def first_state(
    recipe: Recipe,
    accelerator: Accelerator,
    target: Target,
    data: TrainingData,
    saved: Saved | None,
) -> RunState:
    """The state to start from. A resumed run keeps its rows per step, and its length unless the
    recipe's has changed.
    """
    world = accelerator.num_processes
    log = main_process_log(accelerator)
    reading = DataAmount(len(data.train), data.train.length, recipe.run.epochs_of_size, world)
    per_batch = recipe.data.rows_per_batch
    if saved:
        rows_per_step = saved.state.rows_per_step
        planned = saved.state.planned_steps(recipe)
    else:
        rows_per_step, note = reading.rows_per_step(recipe.run.tokens_per_step, per_batch)
        planned = recipe.run.steps
        if note:
            log(note)
    order = Order(len(data.train), rows_per_step, recipe.run.seed)
    share(order.step(0), per_batch, 0, world)  # raises if processes cannot share a step
    state = RunState(
        steps=planned or order.steps(recipe.run.epochs or 1),
        rows_per_step=rows_per_step,
        recipe=recipe,
        target=target.fingerprint(),
        data=data.counts,
        versions={name: importlib.metadata.version(name) for name in PACKAGES},
    )
    warning = reading.warning(state.steps, rows_per_step)
    if warning and not recipe.run.minutes:
        log(warning)
    if saved:
        return resumed(saved, state, log)
    if recipe.head.source is not None:
        origin = read_origin(recipe, target)
        state = replace(state, origin=origin, lacks_evaluation=True)
        log(f"continuing {origin}")
    return state


def resumed(saved: Saved, state: RunState, log: Log) -> RunState:
    """The state of a checkpoint under the recipe and versions of `state`. Raises ValueError if step
    n would not mean the same: for other weights of the target, or other data.
    """
    recipe = state.recipe
    if not same_weights(saved.state.target, state.target):
        change = f"{saved.state.target} -> {state.target}"
        refuse_changes(saved, f"weights of {recipe.target}", [change])
    check_data(saved, recipe.data.path, state.data["digest"])
    log(f"resuming {saved.folder} at step {saved.state.step} of {state.steps}")
    if saved.state.versions != state.versions:
        log(f"not bit for bit: saved with {saved.state.versions}, now {state.versions}")
    return replace(saved.state, recipe=recipe, steps=state.steps, versions=state.versions)


def create_head(
    recipe: Recipe, target: Target, documents: Documents, saved: Path | None = None
) -> DraftHead:
    """A head of the recipe's kind, in float32 on the target's device: a new one, or the one that it
    continues. saved: the checkpoint of a run that is resumed, whose weights the head and the
    target's adapter then have.
    """
    choices = recipe.head
    if choices.source is None:
        vocabulary = None
        if choices.draft_vocabulary is not None:
            vocabulary = documents.frequent_tokens(choices.draft_vocabulary, target.vocab_size)
        torch.manual_seed(recipe.run.seed)
        head = HEADS[choices.kind].create(target, choices, vocabulary).float().to(target.device)
    else:
        head = initial_head(recipe, target, documents, saved)
    if saved:
        head.load_state_dict(load_file(saved / WEIGHTS))
        if target.adapter:
            target.adapter.restore(saved / ADAPTER)
    head.recompute = recipe.run.gradient_checkpointing
    return head


def create_engine(
    recipe: Recipe,
    head: DraftHead,
    target: Target,
    accelerator: Accelerator,
    saved: Path | None = None,
) -> Engine:
    """Create the engine of a head, with a checkpoint's optimizer state. Logs what is trained."""
    log = main_process_log(accelerator)
    learner = make_learner(recipe, head, target)
    log(f"training {learner.size:,} parameters of the {head.kind} head; the target is frozen")
    if readers := refusals(head, target):
        log(f"convert will refuse this head for {readers}")
    engine = make_engine(learner, recipe.optim, accelerator)
    if saved:
        engine.restore(load_optimizer_state(saved))
    return engine


def free_unread(
    recipe: Recipe, target: Target, data: TrainingData, head: DraftHead, log: Log
) -> None:
    """Free the parts of the target that the run does not read again."""
    if recipe.decodes or target.adapter:
        return
    is_cached = recipe.features.mode == "cached"
    shares = data.train.prefix_tokens or data.heldout.prefix_tokens
    prefills = shares and target.ways.packing == "alone"
    spares_lm_head = not (head.needs_unembed or recipe.features.server or prefills)
    freed = target.release(lm_head=spares_lm_head, layers=is_cached)
    log(f"freed {freed / 1e6:.4g} MB of the target, not needed to train")


def training_facts(
    state: RunState, results: dict[str, Any], data: TrainingData, accelerator: Accelerator
) -> dict[str, Any]:
    """Facts about the training for the head's config.json. results: of an evaluation."""
    origin = ("target", "sampling", "prompts", "seed", "versions")
    manifest = data.manifest.as_written()
    device = f"CPU process ({platform.processor() or platform.machine()})"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return {
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": state.seconds,
        "loss": state.loss,
        **results,
        "recipe": state.recipe.model_dump(mode="json"),
        "data": {**data.counts, **{key: manifest.get(key) for key in origin}},
        "versions": state.versions,
        "hardware": f"{accelerator.num_processes} x {device}",
    }
