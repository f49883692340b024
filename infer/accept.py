"""Acceptance rules: the path of a verified tree to keep, and the token after it.

Legend: B batch, N tree nodes, C longest accepted path, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftheads.heads.target.model import Decoded
from draftheads.heads.tree import TokenTree
from draftheads.infer.draws import Draws, SeededRow

LEAST_TEMPERATURE = 1e-5
"""Below it, sampling is practically greedy, and the divided logits can overflow."""


class Accepted(NamedTuple):
    """The path to keep in each row, from the root (node 0), which is already committed."""

    path_BN: Tensor  # int64 node numbers; row b has count_B[b], root included, then any
    count_B: Tensor  # int64
    last_B: Tensor  # int64, the last node of each path
    bonus_B: Tensor  # int64, the target's own token after it

    def read(self) -> tuple[list[int], bool]:
        """The counts, and whether every path is nodes 0, 1, 2, ..., so that nothing moves in the
        cache. The only device sync of a step.
        """
        if self.path_BN.shape[1] == 1:  # nothing drafted: no device sync
            return [1] * len(self.path_BN), True
        counts, last = torch.stack([self.count_B, self.last_B]).tolist()
        # node numbers increase along a path: if the last equals count - 1, it is 0, 1, 2, ...
        return counts, all(node == count - 1 for node, count in zip(last, counts, strict=True))


@dataclass(frozen=True)
class Acceptance(ABC):
    """A rule that follows the target's own choices while they are in the tree. One call may choose
    for all rows whose rules are equal.

    draws: its random numbers, which greedy rules never use.
    """

    lossless: ClassVar[bool] = True  # the output has exactly the target's own distribution
    draws: Draws = field(default_factory=Draws, kw_only=True, repr=False, compare=False)

    def __call__(self, logits_BNV: Tensor, tree: TokenTree) -> Accepted:
        """Choose a path; logits_BNV[b, n] is the target's prediction after node n."""
        return follow(tree, self.choose(logits_BNV))

    def as_generate(self) -> dict[str, Any] | None:
        """The sampling arguments of transformers' own `generate` with the output, or the
        distribution, that this rule has without drafts; None if there are none. `bench` needs them.
        """
        return None

    @abstractmethod
    def choose(self, logits: Tensor) -> Tensor:
        """The target's own next token, (...), for logits (..., V)."""

    @property
    def sees_drafts(self) -> bool:
        """True if what is drafted changes the output."""
        return not self.lossless

    def prepare(self, rows: Sequence[SeededRow]) -> None:
        """Called before each choice."""
        self.draws.prepare(rows)

    def constants(self) -> tuple[Any, ...]:
        """The constants of compiled and recorded steps: its kind and fields. Raises TypeError if
        each choice needs more, for which `prepare` stands.
        """
        if type(self).prepare is not Acceptance.prepare:
            raise TypeError("its choices depend on the row")
        return (type(self), *self._fields())

    def all_draws(self) -> list[Draws]:
        """The draws of each rule that this one is made of."""
        return [self.draws]

    def _fields(self) -> Iterator[Any]:
        return ((name, value) for name, value in vars(self).items() if name != "draws")

    def seed(self, seed: int) -> None:
        """Decide what is drawn in all rows that come without a seed, in their order."""
        self.draws.seed(seed)

    def branch(self) -> Self:
        """The same rule for one generation, whose draws others that use the rule leave alone."""
        branch = copy(self)
        object.__setattr__(branch, "draws", copy(self.draws))
        return branch


@dataclass(frozen=True)
class Greedy(Acceptance):
    """Keep the target's argmax: the output of greedy decoding."""

    def choose(self, logits: Tensor) -> Tensor:
        """The argmax, the first of equals."""
        return logits.max(-1).indices  # a CPU's argmax of bfloat16 takes six times as long

    def as_generate(self) -> dict[str, Any]:
        """Greedy search."""
        return {"do_sample": False}


@dataclass(frozen=True)
class Sampled(Acceptance):
    """Lossless sampling with temperature, top-k and top-p as in transformers.

    The target draws one token at every node. That is speculative sampling with a point-mass
    proposal: since siblings are distinct, child x is accepted with probability p(x), and the token
    after a rejection follows p without the children.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if not (isinstance(self.top_p, Real) and 0 <= self.top_p <= 1):
            raise ValueError(f"top_p {self.top_p!r}: expected 0 to 1; 1 keeps all tokens")
        if not isinstance(self.top_k, Integral) or self.top_k < 0:
            raise ValueError(f"top_k {self.top_k!r}: expected a whole number; 0 keeps all tokens")

    def __call__(self, logits_BNV: Tensor, tree: TokenTree) -> Accepted:
        """Follow one draw at each node."""
        return follow(tree, self.draws.draw(self.scores(logits_BNV), tree.topology.depths_BN))

    def choose(self, logits: Tensor) -> Tensor:
        """One draw from the filtered distribution."""
        return self.draws.draw(self.scores(logits))

    def scores(self, logits: Tensor) -> Tensor:
        """float32 logits (..., V) of the distribution that is sampled."""
        return filtered_logits(logits, self.temperature, self.top_p, self.top_k)

    def as_generate(self) -> dict[str, Any]:
        """Sampling, by the same arguments."""
        return {
            "do_sample": True,
            "temperature": float(self.temperature),
            "top_p": float(self.top_p),
            "top_k": self.top_k,
        }


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless logits can be divided by it."""
    if not (isinstance(temperature, Real) and LEAST_TEMPERATURE <= temperature < math.inf):
        raise ValueError(
            f"temperature {temperature!r}: expected above 0 ({LEAST_TEMPERATURE} or more); "
            "greedy decoding is temperature 0 in commands and the rule Greedy in Python"
        )


def follow(tree: TokenTree, chosen_BN: Tensor) -> Accepted:
    """Descend the tree while a child equals the target's choice at its parent.

    chosen_BN: int64, the target's choice after each node.
    """
    if tree.tokens_BN.shape[1] == 1:  # nothing drafted
        root_B1 = torch.zeros_like(chosen_BN)
        return Accepted(root_B1, root_B1[:, 0] + 1, root_B1[:, 0], chosen_BN[:, 0])
    # a node is right if the target chose its token at its parent; siblings are distinct, so the
    # kept nodes form one path, and the deepest ends it
    right_BN = tree.tokens_BN == chosen_BN.gather(
        1, tree.topology.parent_or_root_BN.expand_as(chosen_BN)
    )
    best_B = (kept(tree, right_BN) * tree.topology.levels_BN).argmax(1)
    return take(tree, best_B, chosen_BN.gather(1, best_B[:, None])[:, 0])


def kept(tree: TokenTree, right_BN: Tensor) -> Tensor:
    """bool (B, N): the root, and the drafted nodes that are right, as are all on their paths. A
    node that pads the tree is never kept.
    """
    right_BN = right_BN & tree.topology.is_drafted_BN
    return ~(tree.topology.below_root_BNN & ~right_BN[:, None, :]).any(-1)


def take(tree: TokenTree, best_B: Tensor, bonus_B: Tensor) -> Accepted:
    """The path to node best_B of each row."""
    shape = tree.tokens_BN.shape
    rows_B = torch.arange(shape[0], device=best_B.device)
    on_path_BN = tree.topology.ancestors_BNN.expand(*shape, -1)[rows_B, best_B]
    levels_B = tree.topology.levels_BN.expand(shape).gather(1, best_B[:, None])[:, 0]
    # node order is depth order: a stable sort moves the path to the front, in order
    path_BN = torch.sort(on_path_BN, dim=1, descending=True, stable=True).indices
    return Accepted(path_BN, levels_B, best_B, bonus_B)


def commit(
    tree: TokenTree, out: Decoded, accepted: Accepted, path_BC: Tensor
) -> tuple[Tensor, Tensor]:
    """The tokens (B, C) of the accepted nodes, then the bonus token, and the states (B, C, D) that
    predicted them. path_BC: as much of `accepted.path_BN` as is needed.
    """
    if tree.tokens_BN.shape[1] == 1:
        tokens_BC = accepted.bonus_B[:, None]
    else:
        tokens_BC = tree.tokens_BN.gather(1, path_BC).roll(-1, dims=1)
        tokens_BC.scatter_(1, accepted.count_B[:, None] - 1, accepted.bonus_B[:, None])
    if out.features_BND is None:
        features_BCD = path_BC.new_zeros(*path_BC.shape, 0, dtype=torch.float)
    else:
        index_BCD = path_BC[:, :, None].expand(-1, -1, out.features_BND.shape[-1])
        features_BCD = out.features_BND.gather(1, index_BCD)
    return tokens_BC, features_BCD


def filtered_logits(logits: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """float32 logits (..., V) after temperature, top-k and top-p of transformers, in that order."""
    warpers = LogitsProcessorList()
    if temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(float(temperature)))
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    return processed(logits, warpers)


def processed(logits: Tensor, processors: LogitsProcessorList) -> Tensor:
    """float32 logits (..., V) after processors that do not read the previous tokens."""
    scores = logits.float().reshape(-1, logits.shape[-1])
    for processor in processors:
        scores = processor(torch.empty(0, device=logits.device), scores)
    return scores.reshape(logits.shape)
