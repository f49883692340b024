"""Drafts with a smaller causal LM of the same vocabulary.

Legend: B batch, C committed tokens of a step, F nodes of a level that are expanded, Q queries, P
nodes expanded so far, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftheads.heads.cache import ROOM, SlotCache
from draftheads.heads.drafting import Committed
from draftheads.heads.target.masks import Masks
from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, TokenTree, Tree, check_fits
from draftheads.heads.tree_drafting import gather_nodes, grow, tree_builder
from draftheads.infer.sources import DrafterSource, NoDraft, check_is_target

DEFAULT_TREE = DynamicTree(draft_nodes=8, depth=4, top_k=4)


@dataclass(frozen=True)
class DraftModel(DrafterSource):
    """A small causal LM that drafts for targets with the same vocabulary.

    model: loaded like a target, on the target's device. Raises TypeError if it is not a `Target`.
    """

    model: Target
    tree: Tree = DEFAULT_TREE

    def __post_init__(self) -> None:
        check_is_target(self.model)

    def check_tree(self, tree: Tree) -> None:
        """Raise ValueError for a tree wider than the vocabulary."""
        check_fits(tree, self.model.vocab_size)

    def drafter(self, target: Target, tree: Tree | None = None) -> ModelDrafter:
        """A new drafter, for one generation. Raises ValueError unless both models map the same
        tokens to the same ids.
        """
        model = self.model
        if model.tokenizer is None or target.tokenizer is None:
            same = model.vocab_size == target.vocab_size
        else:
            same = model.tokenizer.get_vocab() == target.tokenizer.get_vocab()
        if not same:
            raise ValueError(
                f"draft model {model.name}: expected the vocabulary of {target.name}, got another; "
                "use a smaller model of the same family"
            )
        return ModelDrafter(model, tree or self.tree, target.vocab_size)


class ModelDrafter:
    """Grows a tree level by level; the nodes of a level pass through the model together.

    Beyond the model's context it drafts nothing.
    """

    feature_layers: tuple[int, ...] = ()
    cache = None  # `slots` belong to a whole model, whose rows do not leave

    def __init__(self, model: Target, tree: Tree, vocabulary: int) -> None:
        if model.is_hybrid:
            raise ValueError(
                f"draft model {model.name}: expected attention layers alone, got recurrent ones, "
                "too; draft with heads or n-grams, or with another model"
            )
        self.model = model
        self.depth = tree.depth
        self.vocabulary = min(vocabulary, model.vocab_size)
        self.builder = tree_builder(tree, None, model.device)
        self.masks = Masks(model.model)
        self.slots: SlotCache | None = None
        self.unread: list[list[int]] = []  # committed, not yet read, per row
        self.is_full = False

    def skip(self, committed: Committed) -> None:
        """Postpone reading these tokens until the next draft, so that the model needs one pass for
        several steps.
        """
        unread = self.unread or [[] for _ in committed.counts]
        rows = zip(unread, committed.tokens_BC.tolist(), committed.counts, strict=True)
        self.unread = [[*text, *tokens[:count]] for text, tokens, count in rows]

    def propose(self, committed: Committed) -> TokenTree:
        if any(self.unread):
            committed = self._with_unread(committed)
        longest = self.slots.table.longest if self.slots else 0
        self.is_full |= longest + max(committed.counts) + self.depth > self.model.context
        if self.is_full:
            return NoDraft().propose(committed)
        logits_B1V = self._commit(committed)
        return grow(self.builder, committed.last_tokens_B(), logits_B1V, self._pass)

    def rewind(self, length: int) -> None:
        known = self.slots.table.longest if self.slots else 0
        self.unread = [text[: max(length - known, 0)] for text in self.unread]
        if self.slots is not None and known >= length:
            self.slots.table.rewind([length])
            self.is_full = False

    def _with_unread(self, committed: Committed) -> Committed:
        self.skip(committed)
        counts = [len(text) for text in self.unread]
        integers = committed.count_B.new_tensor
        tokens_BC = pad_sequence([integers(text) for text in self.unread], batch_first=True)
        self.unread = []
        return replace(committed, tokens_BC=tokens_BC, count_B=integers(counts), counts=counts)

    def _commit(self, committed: Committed) -> Tensor:
        """Append the new tokens. Returns logits_B1V after the newest token of each row."""
        known = self.model.model.get_input_embeddings().weight.shape[0]
        # larger ids pad the target's vocabulary; the model may have fewer of them
        tokens_BC = committed.tokens_BC.clamp(max=known - 1)
        counts = committed.counts
        rows, length = tokens_BC.shape
        if self.slots is None:
            self.slots = self.model.new_cache(rows, length + ROOM)
            texts = [row[:n] for row, n in zip(tokens_BC.tolist(), counts, strict=True)]
            logits_B1V = self.model.prefill(texts, self.slots, ()).logits_BNV
            return logits_B1V[:, :, : self.vocabulary].float()
        chain_1CC = torch.ones(1, length, length, dtype=torch.bool, device=tokens_BC.device).tril_()
        depths_1C = torch.arange(length, device=tokens_BC.device)[None]
        logits_BCV = self._pass(tokens_BC, chain_1CC, depths_1C)
        self.slots.table.advance(counts)
        return gather_nodes(logits_BCV, committed.last_B1())

    def _pass(self, tokens_BQ: Tensor, seen_BQP: Tensor, depths_1P: Tensor) -> Tensor:
        """Logits (B, Q, V) after Q new nodes, which follow the text and P - Q earlier nodes.
        seen_BQP: the nodes that each new one attends to. depths_1P: distances from the end of the
        text.
        """
        assert self.slots is not None
        table = self.slots.table
        queries, nodes = seen_BQP.shape[1:]
        table.reserve(queries, after=nodes - queries)
        positions_BQ = table.lengths_B[:, None] + depths_1P[:, -queries:]
        mask = self.masks(table.visible(seen_BQP), positions_BQ, table.positions(depths_1P))
        with self.model.longrope.factors(positions_BQ + 1):  # else by the longest row
            logits_BQV, _ = self.model.call(tokens_BQ, mask, positions_BQ, self.slots)
        return logits_BQV[:, :, : self.vocabulary].float()
