"""Tree drafting restated: searches over a plain function of token paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tiny_targets import VOCABULARY

from draftheads.heads.drafting import Committed
from draftheads.heads.sequential import SequentialHead
from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, StaticTree, TokenTree

Path = tuple[int, ...]  # token ids behind the root, or ranks
Model = Callable[[int, Path], Sequence[float]]  # (root, path) -> logits over the draft vocabulary


def paths_of(tree: TokenTree, row: int) -> list[Path]:
    """The token path of each node behind the root, after checking that this is a tree: parents
    first, level by level, siblings distinct.
    """
    tokens = tree.tokens_BN[row].tolist()
    parents_BN = tree.topology.parents_BN
    parents = parents_BN[row % len(parents_BN)].tolist()
    assert parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
    paths: list[Path] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    assert len(set(paths)) == len(paths)
    depths = [len(path) for path in paths]
    assert depths == sorted(depths)
    assert depths == tree.topology.depths_BN[row % len(tree.topology.depths_BN)].tolist()
    return paths[1:]


def log_probabilities(logits: Sequence[float]) -> list[float]:
    total = math.log(sum(math.exp(each) for each in logits))
    return [each - total for each in logits]


def searched(model: Model, root: int, limits: DynamicTree, token_map: Sequence[int]) -> list[Path]:
    """Expand and rerank, restated: the paths that are kept, in the order of their discovery."""
    candidates: list[tuple[float, Path]] = []
    frontier: list[tuple[float, Path]] = [(0.0, ())]
    for _ in range(limits.depth):
        level = []
        for score, path in frontier:
            chances = log_probabilities(model(root, path))
            best = sorted(range(len(chances)), key=lambda place: -chances[place])  # noqa: B023
            for place in best[: limits.top_k]:
                level.append((score + chances[place], (*path, token_map[place])))
        candidates += level
        frontier = sorted(level, key=lambda candidate: -candidate[0])[: limits.top_k]
    ranking = sorted(range(len(candidates)), key=lambda number: -candidates[number][0])
    return [candidates[number][1] for number in sorted(ranking[: limits.draft_nodes])]


DEPTH = 3
COMMITS = [[7, 4], [2, 3], [1, 3]]  # tokens that each of two rows gets in each step
FIXED = StaticTree(((1,), (0,), (0, 0), (0, 2), (1, 1), (3,), (0, 2, 0), (1, 1, 4), (0, 2, 1)))
TREES = [FIXED, StaticTree.from_widths((2, 1)), DynamicTree(12, 3, 3), DynamicTree(5, 2, 4)]


def two_texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and features, drawn."""
    torch.manual_seed(9)
    return torch.randint(0, VOCABULARY, (2, 13)), torch.randn(2, 13, 32)


def committed_steps(tokens_BT, features_BTD) -> list[Committed]:
    """What a drafter is handed when two texts grow by COMMITS; the padding is not zero."""
    steps, done = [], [0, 0]
    for counts in COMMITS:
        places_BC = torch.tensor(done)[:, None] + torch.arange(max(counts))
        rows_B1 = torch.arange(2)[:, None]
        new = (tokens_BT[rows_B1, places_BC], features_BTD[rows_B1, places_BC])
        steps.append(Committed(*new, torch.tensor(counts), counts))
        done = [before + count for before, count in zip(done, counts, strict=True)]
    return steps


def expected_paths(model, root: int, tree, names) -> list[tuple[int, ...]]:
    """The token paths of a tree, in the order of its nodes."""
    if isinstance(tree, DynamicTree):
        return searched(model, root, tree, names)
    tokens: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    for ranks in sorted(tree.paths, key=lambda path: (len(path), path)):
        before = tokens[ranks[:-1]]
        logits = model(root, before)
        order = sorted(range(len(names)), key=lambda place: -logits[place])  # noqa: B023
        tokens[ranks] = (*before, names[order[ranks[-1]]])
    return list(tokens.values())[1:]


def plain_drafts(plain: Any, tokens_BT, features_BTD) -> list[Any]:
    """Token paths of each row, in each step, for each of TREES, as a restatement drafts them."""
    texts = [plain.inputs(features_TD) for features_TD in features_BTD]
    drafts, done = [], [0, 0]
    for counts in COMMITS:
        done = [before + count for before, count in zip(done, counts, strict=True)]
        for row, length in enumerate(done):
            known: dict[Any, Any] = {}

            def model(root, path, state_D=texts[row][length - 1], known=known):
                if path not in known:
                    known[path] = plain.logits(state_D, (root, *path)).tolist()
                return known[path]

            root = int(tokens_BT[row, length - 1])
            drafts.append([expected_paths(model, root, tree, plain.vocabulary) for tree in TREES])
    return drafts


def drafts_of(head: SequentialHead, target: Target, tokens_BT, features_BTD) -> list[Any]:
    """The same, as the head drafts them."""
    drafters, drafts = [head.drafter(target, tree) for tree in TREES], []
    for committed in committed_steps(tokens_BT, features_BTD):
        trees = [drafter.propose(committed) for drafter in drafters]
        drafts += [[paths_of(tree, row) for tree in trees] for row in range(2)]
    return drafts
