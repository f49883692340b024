"""Greedy chains of a head, with the logits of their levels."""

from __future__ import annotations

from typing import Any

import torch
from tiny_targets import some_prompts

from draftheads.heads.batch import Batch
from draftheads.heads.drafting import Committed
from draftheads.heads.tree import DynamicTree
from draftheads.heads.tree_drafting import DynamicTreeBuilder


class Chain(DynamicTreeBuilder):
    """The builder of a greedy chain, which keeps the logits of its levels."""

    def add(self, logits_BFv: torch.Tensor, ids_Bv: torch.Tensor | None = None) -> bool:
        self.logits = [*getattr(self, "logits", []), logits_BFv[0, 0]]
        return super().add(logits_BFv, ids_Bv)


def our_chain(head: Any, target: Any, prompt: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Our draft tokens after a prompt, and their logits (K, v)."""
    tree = DynamicTree(head.depth, head.depth, 1)
    drafter = head.drafter(target, tree)
    drafter.builder = builder = Chain(tree, head.token_map)
    features_1TD = features_of(target, prompt, head.feature_layers)
    count_B = torch.tensor([len(prompt)])
    tokens = drafter.propose(Committed(prompt[None], features_1TD, count_B, [len(prompt)]))
    return tokens.tokens_BN[0, 1:].tolist(), torch.stack(builder.logits)


def assert_drafts_our_chain(plain: Any, head: Any, target: Any) -> None:
    """Of a restatement of an engine, behind prompts of two lengths. The engine's states are those
    after the tokens, ours those before them.
    """
    for prompt in some_prompts(3, 9):
        tokens = torch.tensor(prompt)
        drafts, logits = our_chain(head, target, tokens)
        states_TX = features_of(target, tokens, plain.facts["aux"])[0, 1:]
        expected, scores = plain.chain(states_TX, prompt[-1])
        length = len(drafts) - plain.facts.get("undrafted", 0)
        assert drafts[:length] == expected
        torch.testing.assert_close(logits[:length].double(), scores, rtol=1e-4, atol=1e-4)


def features_of(target: Any, prompt: torch.Tensor, layers: Any) -> torch.Tensor:
    places_1T = torch.arange(len(prompt))[None]
    documents = torch.zeros_like(places_1T)
    return target.features(Batch(prompt[None], places_1T > 0, places_1T, documents), layers)
