"""A trial of a target by a tiny decode: can it follow a token tree, and how must its layers run?

Whatever a model's config says, its states in a tree must be those of the same texts without one.

Legend: B batch, T tokens, N tree nodes, D feature width, L tokens of a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from draftheads.heads.batch import Batch
from draftheads.heads.cache import SlotCache
from draftheads.heads.hybrid.states import Mixing
from draftheads.heads.target.packing import Packing
from draftheads.heads.target.pretrained import ADVICE, describe, states_argument
from draftheads.heads.tree import TokenTree, Topology

LENGTH = 33
"""Of a text that is decoded as one deep tree: twice as deep as n-grams make them."""
PARENTS = [-1, 0, 0, 1, 2]
"""The tree of the trial, by its nodes' parents:

    0 --- 1 --- 3
      `-- 2 --- 4
"""
PATHS = {3: [0, 1, 3], 4: [0, 2, 4]}
"""Its leaves -> the nodes from the root to them."""
ALONE = frozenset({"cpu"})
"""Devices that compute what a mask hides: most of the attention in a row of many documents."""


@dataclass(frozen=True)
class Ways:
    """The ways in which the layers of a target run."""

    mixing: Mixing = "tree"
    """Recurrent ones over a tree."""
    packing: Packing = "resets"
    """All of them over packed documents."""


@torch.no_grad()  # not inference mode: buffers that a model creates here may be used in training
def working_ways(target: Any) -> Ways:
    """The first ways in which a target gives the states of plain text. Raises ValueError if there
    are none. target: a `Target`, whose module imports this one.
    """
    result: Ways | str = ""
    # in int8, "levels": nodes are computed as tokens are, to the last bit
    mixings = get_args(Mixing)[bool(target.bits) :] if target.is_hybrid else ("tree",)
    for mixing in mixings:
        try:
            result = _trial(target, mixing)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model's own code may raise anything; decoding would meet it
            result = f"its forward fails with {error!r:.200}"
        if isinstance(result, Ways):
            return result
    raise ValueError(
        f"{describe(target.model)} cannot follow a token tree, as a trial with a few tokens "
        f"shows: {result}; {ADVICE}"
    )


def _trial(target: Any, mixing: Mixing) -> Ways | str:
    """Decode the tree after two prompts of different lengths. Returns the ways that work, or the
    fault. Nothing is random.
    """
    ids = torch.linspace(target.vocab_size // 4, 3 * target.vocab_size // 4, 12).long().tolist()
    prompts = [ids[:4], ids[4:7]]
    drafts = ids[7:]
    cache = target.new_cache(2, 16, mixing)
    for _ in target.prefill_chunks(prompts, cache, [-1], chunk=2 if target.is_hybrid else None):
        pass
    nodes_BND = _node_states(target, cache, [drafts, drafts], PARENTS)
    # the same paths as plain text; "long" and "short" say after which prompt
    texts = [prompt + [drafts[n] for n in path] for prompt in prompts for path in PATHS.values()]
    plain_BTD = _plain_states(target, [text + ids[: len(texts[0]) - len(text)] for text in texts])
    if fault := _fault_of_states(target, plain_BTD):
        return fault
    plain = [states_TD[: len(text)] for text, states_TD in zip(texts, plain_BTD, strict=True)]
    long_3, long_4, short_3, _ = plain
    if _differ(target, long_4[:-2], long_3[:-2]):  # they share the prompt and the root
        return "it is not causal: later tokens change earlier states"
    leaves_LD = nodes_BND[:, [*PATHS]].flatten(0, 1)
    if _differ(target, leaves_LD, torch.stack([states_LD[-1] for states_LD in plain])):
        return "nodes do not see their own path, or not at its positions"

    # keep the path to leaf 3, which then follows as the only node
    cache.keep(torch.tensor([PATHS[3][:-1]] * 2, device=target.device), [2, 2])
    leaf_B1D = _node_states(target, cache, [drafts[3:4]] * 2, [-1])
    if _differ(target, leaf_B1D[:, 0], torch.stack([long_3[-1], short_3[-1]])):
        return "kept nodes do not continue their own path"
    if target.is_hybrid and mixing == "tree" and _differ(target, *_deep(target, ids)):
        return "deep nodes do not see their own path"
    packing = _packing(target, texts, short_3[:-1])
    return Ways(mixing, packing) if packing else "packed documents see each other in training"


def _node_states(
    target: Any, cache: SlotCache, tokens: list[list[int]], parents: list[int]
) -> Tensor:
    """Last states (B, N, D) of the nodes of trees."""
    topology = Topology(torch.tensor([parents], device=target.device))
    tree = TokenTree(torch.tensor(tokens, device=target.device), topology)
    states_BND: Tensor = target.verify(tree, cache, [-1]).features_BND
    return states_BND


def _plain_states(target: Any, texts: list[list[int]]) -> Tensor:
    """Last states (B, T, D) of texts without trees."""
    tokens_BT = torch.tensor(texts, device=target.device)
    out = target.model(tokens_BT, use_cache=False, output_hidden_states=states_argument([-1]))
    states_BTD: Tensor = out.hidden_states[-1]
    return states_BTD.to(target.device)


def _fault_of_states(target: Any, plain_BTD: Tensor) -> str | None:
    if plain_BTD.ndim != 3 or plain_BTD.shape[2] != target.hidden_size:
        shape = tuple(plain_BTD.shape)
        return f"its last states are {shape}, expected texts x tokens x {target.hidden_size}"
    if not plain_BTD.isfinite().all():
        return f"its states are not finite in {target.dtype}"
    return None


def _deep(target: Any, ids: list[int]) -> tuple[Tensor, Tensor]:
    """States (L, D) of deep chains, as trees and as plain text. Each repeats one token, by which
    errors in a recurrence over all nodes grow most.
    """
    length = min(LENGTH, target.context)
    texts = [ids[:1] * length, ids[-1:] * length]
    cache = target.new_cache(2, length, "tree")
    target.prefill([text[:1] for text in texts], cache, ())
    chain = list(range(-1, length - 2))
    nodes_BND = _node_states(target, cache, [text[1:] for text in texts], chain)
    return nodes_BND.flatten(0, 1), _plain_states(target, texts)[:, 1:].flatten(0, 1)


def _packing(target: Any, texts: list[list[int]], expected_LD: Tensor) -> Packing | None:
    """Finds what keeps packed documents apart; None if nothing does. texts: two of seven tokens,
    one of six. expected_LD: states of the last one but for its last token.
    """
    # two rows of two documents each, the second one the same: does it see the first?
    documents_BT = torch.tensor([[0] * 7 + [1] * 6] * 2)
    tokens_BT = torch.tensor([texts[0] + texts[2], texts[1] + texts[2]])
    positions_BT = torch.tensor([[*range(7), *range(6)]] * 2)
    batch = Batch(tokens_BT, tokens_BT >= 0, positions_BT, documents_BT).to(target.device)
    # rows are as long as the longest document of those beside each other: LongRoPE counts tokens
    is_alone = target.is_hybrid or (target.device.type in ALONE and not target.has_long_rope)
    ways: tuple[Packing, ...] = ("alone",) if is_alone else ("resets", "mask")
    for way in ways:
        one_LD, other_LD = target.states(batch, [-1], way)[:, 8:]
        leaks = _differ(target, one_LD, other_LD, 0.05)
        if not leaks and not _differ(target, one_LD, expected_LD):
            return way
    return None


def _differ(target: Any, got_LD: Tensor, expected_LD: Tensor, rounding: float = 0.25) -> bool:
    """True if states differ by more than rounding, relative to how much states vary.

    In low precision most of them must differ, because a few may be far off (by another choice of
    experts).
    """
    exact = (
        target.dtype == torch.float32
        and torch.get_float32_matmul_precision() == "highest"
        and not target.quantisation
    )
    got_LD = got_LD.float()
    expected_LD = expected_LD.float()
    size = expected_LD.norm(dim=-1).mean()
    spread = (expected_LD - expected_LD.mean(0)).norm(dim=-1).mean().clamp(min=1e-3 * size)
    error_L = (got_LD - expected_LD).norm(dim=-1)
    worst = error_L.max() if exact else error_L.median()
    return not bool(worst <= spread * (1e-3 if exact else rounding))
