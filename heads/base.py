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
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from draftheads.heads.batch import Batch
from draftheads.heads.choices import HeadChoices
from draftheads.heads.cpu.linear import PackedBits, can_pack, has_int8, pack_layers
from draftheads.heads.drafting import DraftCache, Drafter
from draftheads.heads.layers import Cached
from draftheads.heads.losses import RANKS, Teacher
from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, Tree
from draftheads.heads.tree_drafting import tree_builder

Result = TypeVar("Result")


def counted(cells: Tensor, size: int) -> Tensor:
    """How often each number from 0 to size - 1 occurs, (size,): `bincount` without waiting for the
    device. Greater ones count nowhere.
    """
    counts = torch.zeros(size + 1, dtype=torch.long, device=cells.device)
    ones = torch.ones((), dtype=torch.long, device=cells.device).expand(cells.numel())
    return counts.scatter_add_(0, cells.flatten().clamp(max=size), ones)[:size]


def rank_counts(depths: Tensor, ranks: Tensor, depth: int) -> Tensor:
    """`HeadLoss.ranks_KR` of rows at depths from 0 to depth - 1. Deeper rows count nowhere."""
    columns = RANKS + 1
    counts = counted(depths * columns + ranks, depth * columns)
    return counts.view(depth, columns)


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
    Drafting: ClassVar[type[Any]]
    """Its drafter, made from a head, a target and a tree."""
    architecture: ClassVar[str]
    """The `architectures` entry of config.json, by which serving engines choose a class."""

    if TYPE_CHECKING:  # an attribute of the class would be in the way of a buffer

        @property
        def token_map(self) -> Tensor | None:
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
        """Whether the labels are the target's distribution, not the true tokens."""
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
        """Whether `forward` or `token_ranks` use the target's lm_head."""

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

    def drafter(self, target: Target, tree: Tree | None = None) -> Drafter:
        """A new drafter, for one generation. tree: None for the head's own."""
        drafter: Drafter = self.Drafting(self, target, tree or self.tree)
        return drafter

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
        """Refresh all `Cached` values, at the start of a generation.

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
        for module in self.modules():
            for value in vars(module).values():
                if isinstance(value, Cached):
                    value.refresh()

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

    def check_labels(self, target: Target) -> None:
        """Raise ValueError, before the first step, for soft labels of a target without logits."""
        if self.has_soft_labels:
            target.unembed(torch.zeros(1, target.hidden_size).to(target.device, target.dtype))

    def teacher(
        self,
        features_BTD: Tensor,
        places_R: np.ndarray,
        target: Target,
        *,
        acceptance: bool = False,
    ) -> Teacher | None:
        """The labels of rows whose last states are at these places of the flattened features; None
        for hard labels.
        """
        if not self.has_soft_labels:
            return None
        last_PD = features_BTD[..., -self.hidden_size :].flatten(0, -2).to(target.dtype)

        def logits(places_U: Tensor) -> Tensor:
            return target.unembed(last_PD[places_U])

        return Teacher(
            places_R,
            logits,
            self.token_map,
            vocab_size=target.vocab_size,
            acceptance=acceptance,
        )

    def pack(self, target: Target) -> Self:
        """Prepare for drafting on a CPU, if that is the device: large weights are multiplied in
        int8, of which torch has kernels for most CPUs, or as oneDNN lays them out. Drafts change by
        rounding, output does not. Weights that change afterwards are not seen.
        """
        bits: PackedBits | None = 8 if has_int8() else None
        dtype = next(self.parameters()).dtype
        if target.device.type == "cpu" and (bits or can_pack(target.device, dtype)):
            pack_layers(self, bits, keep=list(self.modules()))
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
    """What the drafters of our heads share that grow a tree level by level.

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
