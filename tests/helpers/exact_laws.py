"""Exact distributions of texts over six words, and the chi-square test against them."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import torch
from tiny_heads import decode, random_head
from tiny_targets import random_model

from draftheads.heads.base import DraftHead
from draftheads.heads.target.model import Target
from draftheads.heads.tree import TokenTree, Tree
from draftheads.infer.accept import Acceptance, Sampled, filtered_logits
from draftheads.infer.draws import Draws

WORDS = 6
RUNS = 6000


def chi_square(observed: Counter, expected: dict) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; outcomes expected fewer than 5 times are
    pooled.
    """
    total = sum(observed.values())
    common = {key for key, p in expected.items() if p * total >= 5}
    cells = [(observed[key], expected[key] * total) for key in common]
    rest = total - sum(want for _, want in cells)
    if rest > 1e-9:
        cells.append((total - sum(got for got, _ in cells), rest))
    return sum((got - want) ** 2 / want for got, want in cells), len(cells) - 1


def surely_below(freedom: int) -> float:
    """A bound that a true chi-square variable exceeds about once in a million (Wilson-Hilferty, z =
    4.75).
    """
    return freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3


class FreshDraws(Draws):
    """Independent numbers for so many rows, which are quicker to make than those of their seeds."""

    def __init__(self, rows: int, seed: int) -> None:
        super().__init__()
        self.rows = rows
        self.generator = torch.Generator().manual_seed(seed)
        self.seed(seed)

    def next(self, count: int, purpose: str = "token") -> torch.Tensor:
        shape = self.rows, count
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)


class MarkovTarget:
    """A target whose next-token distribution depends on the last token only: logits_VV."""

    def __init__(self, seed: int = 0) -> None:
        self.logits_VV = (
            torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(seed)) * 2
        )

    def two_token_law(self, root: int, temperature: float, top_p: float, top_k: int) -> dict:
        p = torch.softmax(filtered_logits(self.logits_VV, temperature, top_p, top_k), -1)
        return {(a, b): float(p[root, a] * p[a, b]) for a, b in product(range(WORDS), repeat=2)}


def six_words(name: str) -> Target:
    model = random_model(name)
    model.resize_token_embeddings(WORDS, mean_resizing=False)
    return Target(model, name=f"six-words-{name}")


def whole_law(target: Target, prompt: list[int], new: int, rule: Sampled) -> dict:
    """The exact probability of every text of `new` tokens after a prompt."""
    texts_MA = torch.cartesian_prod(*[torch.arange(WORDS)] * new)
    prompt_MT = torch.tensor([prompt]).expand(len(texts_MA), -1)
    with torch.no_grad():
        logits = target.model(torch.cat([prompt_MT, texts_MA], dim=1)).logits[:, -new - 1 : -1]
    filtered = filtered_logits(logits, rule.temperature, rule.top_p, rule.top_k)
    p_MA = torch.softmax(filtered, -1).gather(2, texts_MA[:, :, None])[..., 0]
    return {tuple(text): float(p) for text, p in zip(texts_MA.tolist(), p_MA.prod(1), strict=True)}


def two_tokens(target: MarkovTarget, tree: TokenTree, rule: Acceptance) -> Counter:
    """How often a step on the trees of these rows, with a draw onwards, writes each two tokens."""
    accepted = rule(target.logits_VV[tree.tokens_BN], tree)
    after_B = rule.draws.draw(rule.scores(target.logits_VV[accepted.bonus_B]))
    observed: Counter = Counter()
    for row, count in enumerate(accepted.count_B.tolist()):
        written = tree.tokens_BN[row, accepted.path_BN[row, 1:count]].tolist()
        observed[tuple([*written, int(accepted.bonus_B[row]), int(after_B[row])][:2])] += 1
    return observed


def small_head(kind: str, target: Target, vocabulary: list[int] | None = None) -> DraftHead:
    return random_head(kind, target, depth=3, nodes=6, top_k=2, vocabulary=vocabulary)


def whole_engine_statistic(target: Target, head: DraftHead, tree: Tree) -> tuple[float, int]:
    """Four tokens: the prefill's, and those of one to three steps, on trees that differ by row."""
    prompt, rule = [3, 1, 4, 1, 5], Sampled(temperature=4.0, top_k=4)
    rule.seed(2)
    choices = {"tree": tree, "sampling": rule, "max_new_tokens": 4}
    rows, statistics = decode(target, head, [prompt] * (RUNS // 2), **choices)
    assert {row.steps for row in statistics} == {1, 2, 3}, "drafts are accepted and refused"
    return chi_square(Counter(map(tuple, rows)), whole_law(target, prompt, 4, rule))
