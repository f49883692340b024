"""Recurrent states of hybrid targets: linear attention, state spaces, short convolutions.

A state belongs to a row and stands for its whole text, whatever its length. It cannot be rolled
back, and need not be: verification leaves the committed state where it is and computes a state for
each node of the tree, from that of the node's parent. `keep` then takes the state of the last
accepted node. So the mixers, which are the only parts of a model with such states, see one node
after its parent, as they see one token after another in plain decoding.

Legend: B rows, N nodes, T tokens, R nodes of one level over all rows, D hidden width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftheads.heads.branching import Branches, Key, can_branch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from draftheads.heads.tree import Topology

ASKS = {"get_conv_state", "get_recurrent_state"}
"""Methods of transformers' caches by which a mixer asks for its states."""
CACHE = ("cache_params", "past_key_values")
"""Names of a mixer's argument that is the cache."""

MARKS = 4
"""States that are remembered, of earlier lengths of a text."""

Level = tuple[Tensor, Tensor, Tensor]
"""int64 (R,), three times: rows, nodes and their parents."""
Committed = dict[int, dict[Key, Tensor]]
Mark = tuple[int, Committed]
"""States of a text of so many tokens."""
Mixer = Callable[[Tensor, Any], Tensor]
"""Hidden states and what is taken for the cache, a Window or Branches -> hidden states."""


class Window:
    """What a mixer takes for the cache: the states of the rows that it is called with."""

    def __init__(self, states: dict[Key, Tensor]) -> None:
        self.states = states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Append to the inputs that the convolution still sees. Returns all of them."""
        before = self.states.get(("conv", state_idx))
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        if before is None:
            missing = max(0, size - conv_states.shape[-1])
            inputs = nn.functional.pad(conv_states, (missing, 0))
        else:
            inputs = torch.cat([before, conv_states], dim=-1)
        self.states["conv", state_idx] = inputs[..., -size:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Nothing is rolled back."""
        return False


class States:
    """The states of all rows of a cache, one dict of tensors (B, ...) for each mixer.

    Before each forward pass, `read` or `branch` says what it will be over. forgets: mixers that
    take several tokens begin without a state, so that later ones run one by one. by_level: no mixer
    runs over a tree in one call.
    """

    def __init__(self, batch: int, *, forgets: bool = False, by_level: bool = False) -> None:
        self.rows, self.forgets, self.by_level = batch, forgets, by_level
        self.length, self.committed = 0, dict[int, dict[Key, Tensor]]()
        self._marks: list[Mark] = []
        self._before: Mark = (0, {})
        self._read: Committed = {}
        self._nodes: Committed = {}  # (B, 1 + N, ...): the committed state, then those of the nodes
        self._branches: dict[int, Branches] = {}  # of mixers that took all nodes in one call
        self._counts: list[int] = []
        self._topology: Topology | None = None
        self._levels: list[Level] | None = None

    def read(self, counts: Sequence[int]) -> None:
        """The next pass is over tokens of the texts, `counts[b]` of row b. `commit` then takes all
        of them.
        """
        self._mark()
        self._read = copied(self.committed)
        self._counts, self._topology = list(counts), None

    def commit(self) -> None:
        """Commit the states after what was read."""
        self.length, self.committed = self.length + self._counts[0], self._read

    def branch(self, topology: Topology) -> None:
        """The next pass is over the nodes of trees, of which `keep` will take some."""
        if self._topology is None:
            self._mark()
        self._topology, self._levels = topology, None
        self._nodes, self._branches = {}, {}

    def keep(self, last_B: Tensor, count: int) -> None:
        """Commit the states of these nodes; -1: the state stays. count: tokens that the first row
        grows by.
        """
        rows_B = torch.arange(self.rows, device=last_B.device)
        kept = {
            number: {key: state[rows_B, last_B + 1] for key, state in states.items()}
            for number, states in self._nodes.items()
        }
        kept |= {number: branches.after(last_B) for number, branches in self._branches.items()}
        self._before = (self.length, self.committed)
        self.length, self.committed = self.length + count, kept
        self._nodes, self._branches = {}, {}

    def _mark(self) -> None:
        """Remember the states of now."""
        if self.rows == 1 and self.committed:
            self._marks = [*self._marks[1 - MARKS :], (self.length, self.committed)]

    def rewind(self, length: int) -> int:
        """Return to the newest known states of at most `length` tokens of the only row: those of
        now, before the last step, or at the beginning or end of a prompt. Returns of how many.
        """
        known = [(0, {}), *self._marks, self._before, (self.length, self.committed)]
        mark = max((mark for mark in known if mark[0] <= length), key=lambda mark: mark[0])
        self.length, self.committed = mark
        self._before = (0, {})
        self._marks = [mark for mark in self._marks if mark[0] < self.length]
        return self.length

    def mix(
        self, number: int, mixer: Mixer, hidden_BND: Tensor, *, can_branch: bool = False
    ) -> Tensor:
        """The output of a mixer in this pass. number: of its layer. can_branch: it also takes
        Branches.
        """
        if self._topology is None:
            return self._mix_tokens(number, mixer, hidden_BND)
        if not can_branch or self.by_level or hidden_BND.shape[1] == 1:
            return self._mix_levels(number, mixer, hidden_BND, self._topology)
        branches = Branches(self.committed[number], self._topology)
        self._branches[number] = branches
        return mixer(hidden_BND, branches)

    def _mix_tokens(self, number: int, mixer: Mixer, hidden_BTD: Tensor) -> Tensor:
        """Rows of equal numbers of tokens run together: padding would enter their states."""
        out_BTD = torch.zeros_like(hidden_BTD)
        for count in set(self._counts) - {0}:
            rows = [row for row, other in enumerate(self._counts) if other == count]
            before = self._read.get(number, {})
            window = Window({key: state[rows] for key, state in before.items()})
            width = 1 if before and self.forgets else count
            for start in range(0, count, width):
                tokens_RTD = hidden_BTD[rows, start : start + width]
                out_BTD[rows, start : start + width] = mixer(tokens_RTD, window)
            states = self._read.setdefault(number, {})
            for key, state in window.states.items():
                if len(rows) == self.rows:
                    states[key] = state
                    continue
                if key not in states:
                    states[key] = state.new_zeros(self.rows, *state.shape[1:])
                states[key][rows] = state
        return out_BTD

    def _mix_levels(
        self, number: int, mixer: Mixer, hidden_BND: Tensor, topology: Topology
    ) -> Tensor:
        """Level by level, each node from the state of its parent."""
        out_BND = torch.empty_like(hidden_BND)
        nodes = hidden_BND.shape[1]
        states = self._nodes[number] = {
            key: torch.cat([state[:, None], state.new_empty(self.rows, nodes, *state.shape[1:])], 1)
            for key, state in self.committed[number].items()
        }
        self._levels = self._levels or levels_of(topology, self.rows)
        for rows_R, nodes_R, parents_R in self._levels:
            window = Window({key: state[rows_R, parents_R + 1] for key, state in states.items()})
            out_BND[rows_R, nodes_R] = mixer(hidden_BND[rows_R, nodes_R][:, None], window)[:, 0]
            for key, state in window.states.items():
                states[key][rows_R, nodes_R + 1] = state
        return out_BND

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows alone."""
        self.rows = len(rows)
        for states in self.committed.values():
            for key, state in states.items():
                states[key] = state[rows]

    def join(self, other: States, places: Sequence[int]) -> None:
        """Row i of `other` becomes row places[i]; places after the last row add rows."""
        self.rows = max(self.rows, max(places) + 1)
        for number, states in other.committed.items():
            mine = self.committed.setdefault(number, {})
            for key, state in states.items():
                more = state.new_zeros(self.rows, *state.shape[1:])
                if key in mine:
                    more[: len(mine[key])] = mine[key]
                more[places] = state
                mine[key] = more


def levels_of(topology: Topology, rows: int) -> list[Level]:
    """The nodes of trees in order of depth, a level at a time."""
    parents_BN = topology.parents_BN.expand(rows, -1)
    levels_BN = topology.levels_BN.expand(rows, -1)
    levels = []
    for level in range(1, int(levels_BN.max()) + 1):
        rows_R, nodes_R = (levels_BN == level).nonzero(as_tuple=True)
        levels.append((rows_R, nodes_R, parents_BN[rows_R, nodes_R]))
    return levels


def copied(states: Committed) -> Committed:
    """The same tensors."""
    return {number: dict(kinds) for number, kinds in states.items()}


def install(model: PreTrainedModel) -> bool:
    """Let the mixers of a model take our states where they are called with our cache; with others,
    and without one, they work as ever. Returns whether there are any.
    """
    mixers: list[Any] = [module for module in model.modules() if is_mixer(module)]
    for mixer in mixers:
        mixer.__class__ = redirected(mixer.__class__)
        if hasattr(mixer, "_old_forward"):  # accelerate's, behind its hooks
            mixer._old_forward = MethodType(type(mixer).forward, mixer)
    return bool(mixers)


def has_mixers(model: PreTrainedModel) -> bool:
    """Whether some layers have recurrent states, in a cache of transformers."""
    return any(map(is_mixer, model.modules()))


def is_mixer(module: nn.Module) -> bool:
    """Whether a module asks a cache for recurrent states."""
    kind: Any = type(module)
    return asks_for_states(kind)


@cache
def asks_for_states(kind: Any) -> bool:
    """Whether the code of a class does."""
    members = [member for base in kind.__mro__ for member in vars(base).values()]
    codes = [getattr(inspect.unwrap(each), "__code__", None) for each in members if callable(each)]
    return any(ASKS & {*code.co_names} for code in codes if code is not None)


@cache
def redirected(kind: Any) -> Any:
    """A class of mixers that hand their work to `States`. A class and no function of a module: a
    copy of the model must run its own weights.
    """
    return kind if issubclass(kind, Redirected) else type(kind.__name__, (Redirected, kind), {})


class Redirected(nn.Module):
    """See `redirected`."""

    layer_idx: int

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """That of the mixer, in parts if it is called with our cache."""
        signature = inspect.signature(super().forward)
        given = signature.bind(*arguments, **options).arguments
        name = next(each for each in CACHE if each in signature.parameters)
        states = getattr(given.get(name), "states", None)
        if not isinstance(states, States):
            return super().forward(*arguments, **options)
        more = given.pop("kwargs", {})
        hidden_BTD = given.pop("hidden_states")
        forward: Any = super().forward

        def mixer(hidden_RTD: Tensor, cache: Window | Branches) -> Tensor:
            arguments = {**given, **more, "attention_mask": None, name: cache}
            if isinstance(cache, Branches):
                return cache.run(forward.__func__, self, hidden_RTD, **arguments)
            out: Tensor = forward(hidden_RTD, **arguments)
            return out

        return states.mix(
            self.layer_idx, mixer, hidden_BTD, can_branch=can_branch(forward.__func__)
        )
