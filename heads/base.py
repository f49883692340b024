"""What every draft head is: the types that training and inference share.

The alignment law, obeyed everywhere in this project:

    features[i] is the target state from which tokens[i] was predicted.

So a hidden state that the target computed *at* position i is the feature of token i + 1, and the
first token of a sequence has no feature (zeros take its place). Head k of a Medusa head (k = 1..K)
reads features[i] and guesses tokens[i + k]; tokens[i] itself is the tree's root, already committed.

Legend: B batch, T tokens, A newly committed tokens, D feature width, K draft depth, R ranks, M
positions with a loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from draftheads.heads.batch import Batch
from draftheads.heads.target import Target
from draftheads.heads.tree import TokenTree, Tree

Result = TypeVar("Result")

RANKS = 10
"""How many ranks of the right token training statistics tell apart."""


class HeadLoss(NamedTuple):
    """What `DraftHead.forward` returns; a tuple, as DeepSpeed and FSDP find tensors only in those.

    loss: scalar, *summed* over learned tokens; the loop divides by the global number of them.
    ranks_KR: int64, how often the right token had rank r at each depth that the loss looks at; the
    last of RANKS + 1 columns counts all worse ranks.
    """

    loss: Tensor
    ranks_KR: Tensor


@dataclass(frozen=True)
class Committed:
    """The tokens that a decoding step added to each row; the only thing a drafter ever sees.

    tokens_BA: int64; row b's new tokens are `tokens_BA[b, :count_B[b]]`, the rest is padding.
    features_BAD: by the alignment law, the target state from which each of them was predicted.
    count_B: int64, at least 1 for a running row, 0 for a finished one (whose root is then
    meaningless). counts: the same on the host, so that no drafter has to wait for the device.
    """

    tokens_BA: Tensor
    features_BAD: Tensor
    count_B: Tensor
    counts: list[int]

    def last_tokens_B(self) -> Tensor:
        """The newest committed token of each row: the root of the next tree."""
        if self.tokens_BA.shape[1] == 1:
            return self.tokens_BA[:, 0]
        return self.tokens_BA.gather(1, self._last_B1())[:, 0]

    def last_features_BD(self) -> Tensor:
        """The feature of the newest committed token of each row."""
        index_B1D = self._last_B1()[:, :, None].expand(-1, 1, self.features_BAD.shape[-1])
        return self.features_BAD.gather(1, index_B1D)[:, 0]

    def _last_B1(self) -> Tensor:
        return (self.count_B - 1).clamp(min=0)[:, None]


class Drafter(Protocol):
    """Proposes a token tree for each step of one generation, and is thrown away with it."""

    feature_layers: tuple[int, ...]
    """The hidden states of the target that `Committed.features_BAD` concatenates."""

    def propose(self, committed: Committed) -> TokenTree:
        """A tree whose node 0 is each row's newest committed token."""
        ...


class Stateless(nn.Module):
    """A module whose result depends on its tensors and weights alone, as compilers like it."""


class DraftHead(nn.Module, ABC):
    """A head kind: its configuration and weights, how it is trained, how it drafts.

    The frozen target is handed to the methods that need it and never becomes a submodule, so it
    cannot leak into the head's state_dict, optimizer or DDP wrapper.
    """

    kind: ClassVar[str]
    architecture: ClassVar[str]
    """The `architectures` entry that serving engines look for in config.json."""

    tree: Tree
    """The tree that `drafter` uses when it is not given one."""
    hidden_size: int
    vocab_size: int
    recompute: bool = False
    """Gradient checkpointing: the backward pass computes layers again. Never saved."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """How many tokens ahead of the newest committed one the head guesses (K)."""

    @property
    @abstractmethod
    def feature_layers(self) -> tuple[int, ...]:
        """Indices into the target's hidden states (0 = embeddings, -1 = last, after the norm)."""

    @property
    def training_layers(self) -> tuple[int, ...]:
        """The states that `forward` and `token_ranks` read: features, then those of labels."""
        return self.feature_layers

    @property
    @abstractmethod
    def needs_unembed(self) -> bool:
        """Whether `forward` or `token_ranks` ask the target for logits or its last matrix."""

    @abstractmethod
    def check_tree(self, tree: Tree) -> None:
        """Raise ValueError, with the reason, for a tree that this head cannot fill."""

    @abstractmethod
    def forward(self, batch: Batch, features_BTD: Tensor, target: Target) -> HeadLoss:
        """The training loss. It is `forward` so that the hooks of DDP, DeepSpeed and FSDP fire."""

    @abstractmethod
    def token_ranks(self, batch: Batch, features_BTD: Tensor, target: Target) -> Tensor:
        """ranks_MK, int64: at each position with a loss, the rank at each depth of the token that
        really came; -1 where it is RANKS or worse or the document has ended. Trees are built of it.
        """

    @abstractmethod
    def drafter(self, target: Target, tree: Tree | None = None) -> Drafter:
        """A fresh drafter for one generation."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The architecture as config.json keys, as serving engines name them."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> DraftHead:
        """A head without weights, its shape read from the tensors first: configs may lie."""

    @classmethod
    @abstractmethod
    def create(cls, target: Target, **choices: Any) -> DraftHead:
        """A new head for `target`, ready to be trained; choices: the recipe's `head.*` keys."""

    def compile_layers(self, **options: Any) -> None:
        """Compile all `Stateless` layers in place; no name in `state_dict` changes. options: of
        `torch.compile`.
        """
        for module in self.modules():
            if isinstance(module, Stateless):
                module.compile(dynamic=True, **options)

    def checkpointed(self, part: Callable[..., Result], *arguments: Any) -> Result:
        """part(*arguments); with `recompute`, the backward pass calls it again, so it must be
        deterministic.
        """
        if not (self.recompute and torch.is_grad_enabled()):
            return part(*arguments)
        result: Result = checkpoint(part, *arguments, use_reentrant=False, preserve_rng_state=False)
        return result
