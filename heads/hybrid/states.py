"""Recurrent states of hybrid targets: linear attention, state spaces, short convolutions.

A state belongs to a row and summarises its whole text, whatever its length. It cannot be rolled
back, and need not be: verification leaves the committed state unchanged and computes a state for
each node of the tree from the state of the node's parent. `keep` then commits the state of the last
accepted node. So the mixers, which are the only parts of a model with such states, see each node
after its parent, as they see one token after another in plain decoding.

Legend: B rows, N nodes, T tokens, R nodes of one level over all rows, D hidden width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftheads.heads.hybrid.trees import (
    Arguments,
    Branches,
    LayerStates,
    Levels,
    Mixer,
    OneNode,
    TreePass,
    Window,
    can_branch,
)
from draftheads.heads.tree import Topology

ASKS = {"update_conv_state", "update_recurrent_state"}
"""Methods of transformers' caches to which a mixer passes its states."""
CACHE = ("cache", "past_key_values", "cache_params")
"""Names of the cache argument in transformers' models and mixers."""
KNOWN = "a version of transformers that draftheads knows"

SNAPSHOTS = 4
"""Number of remembered states, at earlier lengths of a text."""

Mixing = Literal["tree", "levels", "tokens"]
"""How mixers run. "tree": all nodes of a tree in one call, if the mixer's code is known; "levels":
one call per level; "tokens": one call per level, and mixers that forget their state when they get
several tokens read one token at a time.
"""

StatesByLayer = dict[int, LayerStates]
"""States (B, ...) of the mixers, by layer."""
Snapshot = tuple[int, StatesByLayer]
"""The number of tokens of a text, and the states after them."""


class States:
    """The states of all rows of a cache: one dict of tensors (B, ...) for each mixer.

    Before each forward pass, `read` or `branch` announces its tokens or nodes. mixers: those of the
    model.
    """

    def __init__(self, batch: int, mixers: Sequence[Mixer], mixing: Mixing = "tree") -> None:
        self.rows = batch
        self.mixing = mixing
        branching = [each for each in mixers if mixing == "tree" and each.branching]  # in one call
        self._branches = {each.layer_idx: Branches(each) for each in branching}
        self._snapshots: list[Snapshot] = []
        self._read: StatesByLayer = {}
        self._passes: dict[int, TreePass] = {}  # passes over the newest trees, by layer
        self._counts: list[int] = []
        self._topology: Topology | None = None
        self._begin(0, {})

    def _begin(self, length: int, committed: StatesByLayer) -> None:
        """Continue from these states, without a past."""
        self.length = length
        self.committed = committed
        self._earlier: Snapshot = (0, {})  # the states before the last step
        self._is_fixed = False
        self._is_torn = False  # between `keep` and `note`: the states may not be those of `length`

    def fix(self) -> None:
        """Let the next step overwrite the committed states in place."""
        self._is_torn = True
        if not self._is_fixed:
            self.committed = _each(self.committed, _own)
            self._earlier = (self.length, _each(self.committed, _own))
            self._is_fixed = True

    def free(self) -> None:
        """Undo `fix`."""
        self._is_fixed = False

    def tensors(self) -> list[Tensor]:
        """The committed states, and those before the last step."""
        both = (self.committed, self._earlier[1])
        return [state for each in both for kinds in each.values() for state in kinds.values()]

    def read(self, counts: Sequence[int]) -> None:
        """Announce a pass over tokens of the texts, `counts[b]` of row b. `commit` then commits all
        of them.
        """
        self._remember()
        self._read = {number: dict(kinds) for number, kinds in self.committed.items()}
        self._counts = list(counts)
        self._topology = None

    def commit(self) -> None:
        """Commit the states after the tokens of `read`."""
        self.length += self._counts[0]
        self.committed = self._read
        self._is_fixed = False
        self._remember()

    def branch(self, topology: Topology) -> None:
        """Announce a pass over the nodes of trees, some of which `keep` will commit."""
        self._topology = topology
        self._passes = {}

    def keep(self, last_B: Tensor) -> None:
        """Commit the states of these nodes; -1 leaves a row's state unchanged."""
        self._is_torn = True
        kept = {number: each.after(last_B) for number, each in self._passes.items()}
        self._topology = None
        self._passes = {}
        if self._is_fixed:
            _copy(self.committed, self._earlier[1])
            _copy(kept, self.committed)
        else:
            self._earlier = (self.length, self.committed)
            self.committed = kept

    def note(self, counts: Sequence[int]) -> None:
        """Take the numbers of tokens by which `keep` extended the rows."""
        self._earlier = (self.length, self._earlier[1])
        self.length += counts[0]
        self._is_torn = False

    def _remember(self) -> None:
        """Remember the committed states."""
        if self.rows == 1 and self.committed:
            snapshots = [snapshot for snapshot in self._snapshots if snapshot[0] < self.length]
            self._snapshots = [*snapshots[1 - SNAPSHOTS :], (self.length, self.committed)]

    def rewind(self, length: int) -> int:
        """Return to the newest known states of at most `length` tokens of the only row. Known are
        the present states and those before the last step, unless it was interrupted, and those at
        the beginning or end of a prompt. Returns the number of tokens.
        """
        snapshots: list[Snapshot] = [(0, {}), *self._snapshots]
        if not self._is_torn:
            snapshots += [self._earlier, (self.length, self.committed)]
        known = [snapshot for snapshot in snapshots if snapshot[0] <= length]
        snapshot = max(known, key=lambda snapshot: snapshot[0])
        self._begin(*snapshot)
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot[0] < self.length]
        return self.length

    def mix(self, mixer: Mixer, hidden_BND: Tensor, arguments: Arguments) -> Tensor:
        """The output of a mixer in this pass."""
        topology = self._topology
        number = mixer.layer_idx
        if topology is None:
            return self._mix_tokens(mixer, hidden_BND, arguments)
        if hidden_BND.shape[1] == 1:
            tree_pass: TreePass = OneNode(mixer)
        elif number in self._branches:
            tree_pass = self._branches[number]
        else:
            tree_pass = Levels(mixer)
        tree_pass.start(self.committed[number], topology)
        self._passes[number] = tree_pass
        return tree_pass.run(hidden_BND, arguments)

    def _mix_tokens(self, mixer: Mixer, hidden_BTD: Tensor, arguments: Arguments) -> Tensor:
        """Run rows of equal numbers of tokens together. Padding would enter their states."""
        out_BTD = torch.zeros_like(hidden_BTD)
        states = self._read.setdefault(mixer.layer_idx, {})
        for count in set(self._counts) - {0}:
            rows = [row for row, other in enumerate(self._counts) if other == count]
            window = Window({key: state[rows] for key, state in states.items()})
            width = 1 if states and self.mixing == "tokens" else count
            for start in range(0, count, width):
                tokens_RTD = hidden_BTD[rows, start : start + width]
                out_RTD = mixer.plain(tokens_RTD, window, arguments)
                out_BTD[rows, start : start + width] = out_RTD
            for key, state in window.states.items():
                if len(rows) == self.rows:
                    states[key] = state
                    continue
                if key not in states:
                    states[key] = state.new_zeros(self.rows, *state.shape[1:])
                states[key][rows] = state
        return out_BTD

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.rows = len(rows)
        self.committed = _each(self.committed, lambda state: state[rows])

    def join(self, other: States, places: Sequence[int]) -> None:
        """Copy row i of `other` to row places[i]; places after the last row add rows."""
        self.rows = max(self.rows, max(places) + 1)
        for number, states in other.committed.items():
            mine = self.committed.setdefault(number, {})
            for key, state in states.items():
                more = state.new_zeros(self.rows, *state.shape[1:])
                if key in mine:
                    more[: len(mine[key])] = mine[key]
                more[places] = state
                mine[key] = more

    def take(self, other: States, place: int, length: int) -> None:
        """Continue from a row of `other` with `length` tokens, and from its known past."""
        self._begin(length, _each(other.committed, lambda state: state[[place]]))
        self._snapshots = self._snapshots or list(other._snapshots)


def _each(states: StatesByLayer, change: Callable[[Tensor], Tensor]) -> StatesByLayer:
    """Apply `change` to all states."""
    return {
        number: {key: change(state) for key, state in kinds.items()}
        for number, kinds in states.items()
    }


def _own(state: Tensor) -> Tensor:
    """A contiguous copy, so that its strides do not depend on what computed it."""
    return state.clone(memory_format=torch.contiguous_format)


def _copy(states: StatesByLayer, into: StatesByLayer) -> None:
    for number, kinds in states.items():
        for key, state in kinds.items():
            into[number][key].copy_(state)


def install(model: PreTrainedModel) -> list[Mixer]:
    """Make the mixers of a model use our states when they are called with our cache. With another
    cache, or none, they work as before. Returns the mixers.
    """
    mixers: list[Any] = [module for module in model.modules() if is_mixer(module)]
    for mixer in mixers:
        mixer.__class__ = tree_mixer(mixer.__class__)
        if hasattr(mixer, "_old_forward"):  # accelerate calls it behind its hooks
            mixer._old_forward = MethodType(type(mixer).forward, mixer)
    return mixers


def is_mixer(module: nn.Module) -> bool:
    """True if a module keeps recurrent states in a cache."""
    kind: Any = type(module)
    return asks_for_states(kind)


@cache
def asks_for_states(kind: Any) -> bool:
    """True if the code of a class keeps recurrent states in a cache."""
    members = [member for base in kind.__mro__ for member in vars(base).values()]
    codes = [getattr(inspect.unwrap(each), "__code__", None) for each in members if callable(each)]
    return any(ASKS & {*code.co_names} for code in codes if code is not None)


def cache_argument(kind: Any, method: str = "forward") -> str:
    """The name of the cache argument of a method, or of the base class's method to which it passes
    its options. Raises ValueError if it is none of CACHE, because a cache under another name could
    silently get lost among the options.
    """
    codes = [vars(base)[method] for base in kind.__mro__ if method in vars(base)]
    found = [name for code in codes for name in inspect.signature(code).parameters if name in CACHE]
    if not found:
        raise ValueError(
            f"{kind.__name__}: expected {method} with an argument {' or '.join(CACHE)}, got none; "
            f"use a causal LM that takes a cache, or {KNOWN}"
        )
    return found[0]


@cache
def tree_mixer(kind: Any) -> Any:
    """A subclass of a mixer's class that passes its work to `States`. It is a class, not a function
    on a module, so that a copy of the model runs its own weights.
    """
    if issubclass(kind, TreeMixer):
        return kind
    plain = inspect.unwrap(kind.forward)
    own = {
        "names": tuple(inspect.signature(kind.forward).parameters)[1:],
        "cache_name": cache_argument(kind),
        "code": staticmethod(plain),
        "branching": can_branch(plain),
    }
    return type(kind.__name__, (TreeMixer, kind), own)


class TreeMixer(Mixer):
    """A mixer that passes its work to `States`; see `tree_mixer`."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """The mixer's own forward, split into parts if it is called with our cache."""
        inputs = {**dict(zip(self.names, arguments, strict=False)), **options}
        for name, value in inputs.items():  # the caller may use another name for the cache
            states = getattr(value, "states", None)
            if isinstance(states, States):
                del inputs[name]
                hidden_BND = inputs.pop("hidden_states")
                inputs.pop("attention_mask", None)  # there is no padding
                return states.mix(self, hidden_BND, inputs)
        return super().forward(*arguments, **options)
