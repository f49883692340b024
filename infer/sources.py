"""Sources of drafters: draft heads, or one of `infer.drafters`; and no drafts at all."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol, TypeGuard, runtime_checkable

from draftheads.heads.drafting import Committed, DraftCache, Drafter
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree, TokenTree, Topology, Tree


@runtime_checkable
class DrafterSource(Protocol):
    """Makes a drafter for each generation: a DraftHead, or one of `infer.drafters`."""

    @property
    @abstractmethod
    def tree(self) -> Tree:
        """The default tree of `drafter`."""

    @property
    def rows_may_leave(self) -> bool:
        """True if rows of a batch may leave and others take their places, between steps."""
        return False

    @abstractmethod
    def check_tree(self, tree: Tree) -> None:
        """Raise ValueError for a tree that its drafters cannot fill."""

    @abstractmethod
    def drafter(self, target: Target, tree: Tree | None = None) -> Drafter:
        """A new drafter, for one generation."""


def is_source(drafts: Any) -> TypeGuard[DrafterSource]:
    """True if these are a source of drafters, and not its class."""
    return isinstance(drafts, DrafterSource) and not isinstance(drafts, type)


def check_is_target(target: Any) -> None:
    """Raise TypeError for a model, a name or anything else."""
    if not isinstance(target, Target):
        raise TypeError(
            f"expected a Target, got {type(target).__name__}; use Target(model, tokenizer) or "
            "Target.load(name)"
        )


class NoDraft:
    """Drafts nothing, so that the engine decodes one token per forward like the plain model.

    idle: a drafter whose cache takes what is committed meanwhile.
    """

    feature_layers: tuple[int, ...] = ()
    cache: DraftCache | None = None
    tree = StaticTree(())
    rows_may_leave = True

    def __init__(self, idle: Drafter | None = None) -> None:
        self._root: Topology | None = None
        if idle is not None:
            self.feature_layers = idle.feature_layers
            self.cache = idle.cache

    def check_tree(self, tree: Tree) -> None:
        """Any tree stays empty."""

    def drafter(self, target: Target, tree: Tree | None = None) -> Drafter:
        """This one, which remembers nothing."""
        return self

    def propose(self, committed: Committed) -> TokenTree:
        """A tree that holds only the newest token."""
        if self.cache is not None:
            self.cache.commit(committed)
        tokens_B = committed.last_tokens_B()
        if self._root is None or self._root.parents_BN.device != tokens_B.device:
            self._root = self.tree.topology(tokens_B.device)
        return TokenTree(tokens_B[:, None], self._root)

    def rewind(self, length: int) -> None:
        """Nothing to forget."""
