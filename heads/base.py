"""The interface of a draft head: what training and inference share.

The alignment law, obeyed everywhere in this project:

    features[i] is the target state from which tokens[i] was predicted.

So the hidden state that the target computed *at* position i is the feature of token i + 1, and the
first token of a sequence has no feature (zeros take its place). Head k = 1..K of a Medusa head
reads features[i] and predicts tokens[i + k]; tokens[i] itself is already committed: it is the root
of the tree.

Legend: B batch, T tokens, D feature width, K draft depth, R ranks, M positions with a loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from draftheads.heads.batch import Batch
from draftheads.heads.choices import HeadChoices
from draftheads.heads.cpu.linear import pack_head
from draftheads.heads.drafting import DraftCache, Drafter
from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, Tree
from draftheads.heads.tree_drafting import tree_builder

Result = TypeVar("Result")


class HeadLoss(NamedTuple):
    """The result of `DraftHead.forward`. A tuple, because DeepSpeed and FSDP only find tensors in
    tuples.
    """

    loss: Tensor
    """Scalar, *summed* over tokens with a loss; the training loop divides by their global count."""
    ranks_KR: Tensor
    """int64 (K, RANKS + 1): how often the true token had rank r at each depth with a loss. The last
    column counts all worse ranks.
    """


class DraftHead(nn.Module, ABC):
    """The weights of a head, how it is trained and how it drafts.

    The frozen target is passed to the methods that need it. It is never a submodule, so it cannot
    leak into the head's state_dict, optimizer or DDP wrapper.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    """Its name in the model card."""
    paper: ClassVar[str]
    """URL of its source."""
    Choices: ClassVar[type[HeadChoices]]
    """Its section of a recipe."""
    architecture: ClassVar[str]
    """The `architectures` entry of config.json, by which serving engines choose a class."""

    token_map: Tensor | None
    """int64 (v,): target ids of the draft vocabulary, rising; None: all."""
    choices: HeadChoices
    """How it is trained; of a loaded head the defaults."""
    tree: Tree
    """The default tree of `drafter`."""
    hidden_size: int
    vocab_size: int
    recompute: bool = False
    """Gradient checkpointing: layers are computed again in the backward pass. Never saved."""
    rows_may_leave: ClassVar[bool] = True
    """A drafter knows of a row what is in its `cache`, so rows may leave a batch and join it."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = self.Choices()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(hidden size {self.hidden_size}, {self.tree!r})"

    __str__ = nn.Module.__repr__
    """Its layers, as of any module."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """K, the number of tokens that the head predicts after the newest committed one."""

    @property
    @abstractmethod
    def feature_layers(self) -> tuple[int, ...]:
        """Indices into the target's hidden states (0 = embeddings, -1 = last, after the norm)."""

    @property
    def has_soft_labels(self) -> bool:
        """True if the labels are the target's distribution, not the true tokens."""
        return getattr(self.choices, "labels", "hard") == "soft"

    @property
    def training_layers(self) -> tuple[int, ...]:
        """The states that `forward` and `token_ranks` read: the features; for soft labels, also the
        last state, at the end.
        """
        layers = self.feature_layers
        if self.has_soft_labels and layers[-1] != -1:
            return (*layers, -1)
        return layers

    @property
    @abstractmethod
    def needs_unembed(self) -> bool:
        """True if `forward` or `token_ranks` use the target's lm_head."""

    @abstractmethod
    def check_tree(self, tree: Tree) -> None:
        """Raise ValueError for a tree that this head cannot fill."""

    @abstractmethod
    def forward(self, batch: Batch, features_BTD: Tensor, target: Target) -> HeadLoss:
        """The training loss. It is `forward` so that the hooks of DDP, DeepSpeed and FSDP fire."""

    @abstractmethod
    def token_ranks(self, batch: Batch, features_BTD: Tensor, target: Target) -> Tensor:
        """The observations from which trees are built.

        Returns ranks_MK, int64: for each position with a loss, the rank of the true token at each
        depth; -1 if it is RANKS or worse, or after the end of the document.
        """

    @abstractmethod
    def drafter(self, target: Target, tree: Tree | None = None) -> Drafter:
        """A new drafter, for one generation. tree: None for the head's own."""

    def check_fit(self, target: Target, name: str = "its target") -> None:
        """Raise ValueError when head and target differ in width or vocabulary or the head reads
        layers that the target does not have. name: of the head's own target.
        """
        for what, expected, got in (
            ("hidden size", self.hidden_size, target.hidden_size),
            ("vocabulary", self.vocab_size, target.vocab_size),
        ):
            if expected != got:
                raise ValueError(
                    f"head expects {what} {expected} ({name}), target has {got} ({target.title}); "
                    "pass the target this head was trained for"
                )
        if not all(-1 <= layer <= target.layers for layer in self.feature_layers):
            raise ValueError(
                f"head reads states {list(self.feature_layers)} ({name}), target has 0 "
                f"(embeddings) to {target.layers} ({target.title}); pass the target this head was "
                "trained for"
            )

    def begin_drafting(self, target: Target, tree: Tree) -> None:
        """To be called at the start of a generation.

        Raises ValueError for a tree that it cannot fill, as `check_fit`, and when it is not on the
        target's device.
        """
        self.check_tree(tree)
        self.check_fit(target)
        for weight in self.parameters():
            if weight.device != target.device:
                raise ValueError(
                    f"expected heads on {target.device}, where their target is, got "
                    f"{weight.device}; use head.to(target.device)"
                )
        self.refresh()

    def refresh(self) -> None:
        """Discard the products of weights that were kept for drafting, where these have changed."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The architecture as config.json keys, named as serving engines expect them."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> DraftHead:
        """A head without weights. Its shape is that of the tensors where they show it, because
        configs may be wrong.
        """

    @classmethod
    @abstractmethod
    def create(
        cls, target: Target, choices: Any = None, vocabulary: Sequence[int] | None = None
    ) -> DraftHead:
        """A new head for `target`, ready to be trained.

        choices: an instance of `Choices`; None: its defaults. vocabulary: target ids of a reduced
        draft vocabulary; None: all. Raises ValueError for a target that this head does not fit.
        """

    def train_with(self, choices: Any) -> None:
        """Set the choices of a recipe; those of sizes are of no effect. With a field `top_k`, they
        also give the tree.
        """
        self.choices = choices
        top_k = getattr(choices, "top_k", None)
        if top_k is not None:
            self.tree = DynamicTree(choices.nodes, self.depth, top_k)

    def pack(self, target: Target) -> Self:
        """Prepare for drafting on a CPU, if that is the device (see `pack_head`). Weights that
        change afterwards are not seen.
        """
        pack_head(self, target.device)
        return self

    def cast(self, features: Tensor) -> Tensor:
        """Features in the dtype of the head."""
        return features.to(next(self.parameters()).dtype)

    def checkpointed(self, part: Callable[..., Result], *arguments: Any) -> Result:
        """part(*arguments). With `recompute`, the backward pass calls it again, so it must be
        deterministic.
        """
        if not (self.recompute and torch.is_grad_enabled()):
            return part(*arguments)
        result: Result = checkpoint(part, *arguments, use_reentrant=False, preserve_rng_state=False)
        return result


class TreeDrafter:
    """The shared part of our heads' drafters that grow a tree level by level.

    cache: for heads with layers of their own, set by the drafter of a kind.
    """

    cache: DraftCache | None = None

    def __init__(self, head: DraftHead, target: Target, tree: Tree) -> None:
        head.begin_drafting(target, tree)
        self.head = head
        self.target = target
        self.depth = tree.depth
        self.feature_layers: tuple[int, ...] = head.feature_layers
        self.builder = tree_builder(tree, head.token_map, target.device)

    def rewind(self, length: int) -> None:
        """See `Drafter.rewind`."""
        if self.cache is not None:
            self.cache.rewind(length)
