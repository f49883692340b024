"""Heads for the tiny targets: random ones that seldom guess right, and ones that know a text by
heart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import pytest
import torch
from tiny_targets import greedy

from draftheads.heads.base import DraftHead
from draftheads.heads.batch import Batch
from draftheads.heads.drafting import Committed, Drafter
from draftheads.heads.formats.hub import HEADS
from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, StaticTree, TokenTree, Tree
from draftheads.heads.tree_drafting import TreeBuilder, tree_builder
from draftheads.infer.accept import Greedy
from draftheads.infer.engine import Speculator
from draftheads.infer.reading import Session
from draftheads.infer.rows import Row, Statistics, Step
from draftheads.infer.sources import DrafterSource

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in HEADS},
    "sequential-low-rank": ("sequential", {"rank": 24}),
    "sequential-hydra": ("sequential", {"conditioning": "hydra"}),
    "sequential-prefix": ("sequential", {"prefix": True}),
    "block-none": ("block", {"conditioning": "none"}),
    "block-markov": ("block", {"conditioning": "markov", "sample_from_anchor": False, "mask": 3}),
    "block-own": ("block", {"confidence": True, "embeddings": "own"}),
}
"""Every kind, and what differs so much within a kind that it must keep all promises by itself: name
-> (kind, choices).
"""
BLOCKS = [name for name in VARIANTS if name.startswith("block-")]
EACH = [pytest.param(name, marks=[pytest.mark.slow] * (name in BLOCKS)) for name in VARIANTS]
"""The variants as parameters of a test; those of block heads are for the full suite."""
DOMINO = {"conditioning": "domino", "rank": 6, "gru_size": 24}
DFLASH2 = {"rank": 8, "candidates": 6, "convolutions": True}
OF_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "block-domino": ("block", {"conditioning": "none", "design": DOMINO}),
    "block-dflash2": ("block", {"conditioning": "none", "design": DFLASH2, "mask": 3}),
}
"""What no recipe asks for."""
DRAFTING = [*EACH, *(pytest.param(name, marks=pytest.mark.slow) for name in OF_OTHERS)]
KINDS = [
    pytest.param(name, marks=[pytest.mark.thorough] * (name not in HEADS)) for name in VARIANTS
]
"""The same where the contract of heads (test_contract.py) is not what is tested: but for thorough
runs, one head of each kind.
"""
SMALL = {"depth": 4, "nodes": 24, "top_k": 3, "labels": "hard"}
"""Choices, of whatever kind has them, of a head that drafts little and stands on any target."""
BY_HEART = {"labels": "hard", "steps": 8}
"""Choices, of whatever kind has them, with which a head learns the very tokens of a batch."""


def make_head(kind: type[DraftHead], target: Target, **choices: Any) -> Any:
    """A new head with these choices of a recipe; vocabulary: target ids; unchecked: choices that a
    recipe refuses, and a head of others can have; design: what no recipe of ours asks for.
    """
    vocabulary, unchecked = choices.pop("vocabulary", None), choices.pop("unchecked", {})
    design = choices.pop("design", {})
    choices = kind.Choices(**choices).model_copy(update=unchecked)
    head = kind.create(target, choices, vocabulary)
    if not design:
        return head
    other = kind(replace(head.design, **design))
    other.load_state_dict(head.state_dict(), strict=False)
    other.choices = choices
    return other


def new_head(name: str, target: Target, **choices: Any) -> DraftHead:
    """A new head of one of the `VARIANTS` or `OF_OTHERS`; choices: those that its kind has."""
    kind, own = {**VARIANTS, **OF_OTHERS}[name]
    names = {*HEADS[kind].Choices.model_fields, "vocabulary", "unchecked", "design"}
    own = {key: value for key, value in {**own, **choices}.items() if key in names}
    return make_head(HEADS[kind], target, **own)


def random_head(name: str, target: Target, **choices: Any) -> DraftHead:
    """Behind the target's own last matrix, everything is drawn."""
    torch.manual_seed(1)
    head = new_head(name, target, **{**SMALL, **choices})
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "lm_head" not in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return head.eval()


def written_by(target: Target, prompts: Sequence[list[int]], new: int) -> Batch:
    """What a target writes after prompts of one length, one document per row."""
    tokens_BT = torch.tensor([prompt + greedy(target, prompt, new) for prompt in prompts])
    loss_mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    loss_mask_BT[:, : len(prompts[0])] = False
    positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    return Batch(tokens_BT, loss_mask_BT, positions_BT, torch.zeros_like(tokens_BT))


def overfitted(
    name: str, target: Target, batch: Batch, *, updates: int = 150, **choices: Any
) -> DraftHead:
    """A head that knows one batch by heart."""
    torch.manual_seed(0)
    head = new_head(name, target, **{**BY_HEART, **choices})
    features_BTD = target.features(batch, head.training_layers)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(updates):
        head(batch, features_BTD, target).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return head.eval()


def misread_drafts(monkeypatch: Any) -> None:
    """Sequential heads read other tokens than were drafted."""

    def build(*arguments: Any) -> TreeBuilder:
        builder = tree_builder(*arguments)
        add = builder.add

        def add_and_misread(logits_BFv: torch.Tensor) -> bool:
            more = add(logits_BFv)
            if more:
                builder.tokens_BF = (builder.tokens_BF - 1).clamp(min=0)
            return more

        builder.add = add_and_misread  # type: ignore[method-assign]
        return builder

    monkeypatch.setattr("draftheads.heads.base.tree_builder", build)


class Made(DrafterSource):
    """What a function returns, as the drafter of a generation; it has a tree of its own."""

    tree = DynamicTree(draft_nodes=1, depth=1, top_k=1)

    def __init__(self, make: Callable[[], Drafter]) -> None:
        self.make = make

    def check_tree(self, tree: Tree) -> None:
        pass

    def drafter(self, target: Target, tree: Tree | None = None) -> Drafter:
        return self.make()


class Recorder:
    """A drafter that notes what another one proposes."""

    cache = None

    def __init__(self, drafter: Drafter, trees: list[TokenTree]) -> None:
        self.drafter, self.trees = drafter, trees
        self.feature_layers = drafter.feature_layers

    def propose(self, committed: Committed) -> TokenTree:
        self.trees.append(self.drafter.propose(committed))
        return self.trees[-1]


def decode(
    target: Target, drafts: Any, prompts: Sequence[Sequence[int]], **choices: Any
) -> tuple[list[list[int]], list[Statistics]]:
    """Rows of output tokens, and the statistics of each row. drafts: or a function that makes the
    drafter. tree: as of `Speculator`.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    statistics = [Statistics() for _ in prompts]
    source = Made(drafts) if isinstance(drafts, FunctionType) else drafts
    speculator = Speculator(target, source, tree=choices.pop("tree", None))
    for steps in speculator.generate_batch(prompts, **choices):
        for row, step in enumerate(steps):
            if step is not None:
                rows[row] += step.tokens
                statistics[row].add(step)
    return rows, statistics


def drafts_of(
    head: DraftHead,
    target: Target,
    prompts: Sequence[Sequence[int]],
    new: int,
    tree: Tree | None = None,
) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Every tree that a greedy generation of `new` tokens verifies: (its tokens, its parents)."""
    trees: list[TokenTree] = []
    tree = tree or head.tree
    decode(
        target,
        lambda: Recorder(head.drafter(target, tree), trees),
        prompts,
        tree=tree,
        max_new_tokens=new,
    )
    return [(tree.tokens_BN.tolist(), tree.topology.parents_BN.tolist()) for tree in trees]


class Oracle:
    """A drafter that knows each row's continuation: the upper bound of every head with this tree.

    continuations: per row, the tokens that follow the prompt. noise: probability that a node is
    wrong, drawn with `seed`. Nodes of rank 0 hold the true token, the others hold wrong tokens.
    """

    feature_layers: tuple[int, ...] = ()
    cache = None

    def __init__(
        self,
        shape: StaticTree,
        continuations: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.shape, self.continuations = shape, continuations
        self.vocab_size, self.noise = vocab_size, noise
        self.written = [0] * len(continuations)
        self._generator = torch.Generator().manual_seed(seed)

    def propose(self, committed: Committed) -> TokenTree:
        """The known continuation on the path of rank 0."""
        started = any(self.written)  # the first call commits the prompt and one token
        roots = committed.last_tokens_B().tolist()
        rows = []
        for row, count in enumerate(committed.counts):
            self.written[row] += count if started else 1
            rows.append([roots[row], *self._drafts(self.continuations[row][self.written[row] :])])
        device = committed.tokens_BC.device
        return TokenTree(torch.tensor(rows, device=device), self.shape.topology(device))

    def _drafts(self, ahead: Sequence[int]) -> Iterator[int]:
        for path in self.shape.paths:
            truth = ahead[len(path) - 1] if len(path) <= len(ahead) else 0
            is_wrong = torch.rand((), generator=self._generator).item() < self.noise
            offset = path[-1] + self.shape.width if is_wrong else path[-1]
            yield (truth + offset) % self.vocab_size


def committed(rows: list[list[int]], features_BCD: torch.Tensor | None = None) -> Committed:
    """These tokens of each row, padded."""
    counts = [len(row) for row in rows]
    tokens_BC = torch.zeros(len(rows), max(counts), dtype=torch.long)
    for row, tokens in enumerate(rows):
        tokens_BC[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
    if features_BCD is None:
        features_BCD = torch.zeros(*tokens_BC.shape, 0)
    return Committed(tokens_BC, features_BCD, torch.tensor(counts), counts)


@torch.inference_mode()
def in_turns(
    engine: Speculator, prompt: list[int], new: int, chunk: int, session: Session | None = None
) -> Iterator[Step | None]:
    """As `generate`, with None after each part of the prompt but the last."""
    row = Row(engine.target, prompt, new)
    reading = engine.read([row], Greedy(), session, new, chunk)
    while not reading.advance():
        yield None
    yield reading.steps[0]
    while not row.finish:
        yield reading.slots.step()[row]
