"""Runs one recurrent layer (a mixer) over the nodes of trees, each node after its parent.

There are three ways. `OneNode`: a tree with only its root runs like a token in plain decoding.
`Levels`: one call per depth, for any mixer. `Branches`: all nodes in one call, for mixers whose
inner functions are known.

A mixer of transformers calls two inner functions with the tokens of a sequence: a causal
convolution over the last inputs, and a linear recurrence. `Branches` passes the nodes of a tree in
place of tokens. Projections, gates and norms process each node alone, and the two inner functions
are replaced by others that follow parent pointers. The mixer's own code runs, with other globals.
No node has a state of its own: a linear recurrence equals attention over the path to the root, with
weights that decay, plus a term of the committed state. Only the state of the kept node is computed.

Legend: B rows, N nodes, R nodes of one level over all rows, D hidden width, C channels, K inputs of
a convolution, H heads, Q width of a key, V width of a value. A state is (B, H, Q, V).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftheads.heads.tree import Topology

CONVOLUTION, DELTA_RULE, MAMBA2 = (
    "causal_conv1d_fn",
    "torch_chunk_gated_delta_rule",
    "mamba2_chunk_scan",
)
"""Names of inner functions in transformers' modules."""
EPSILON = 1e-6
"""Epsilon of the norm of keys and queries."""

Key = tuple[str, int]
"""Kind of a state, "conv" or "recurrent", and its number."""
LayerStates = dict[Key, Tensor]
"""The states (B, ...) of one mixer."""
Arguments = dict[str, Any]
"""The arguments of a mixer without hidden states and cache."""


class Mixer(nn.Module):
    """A recurrent layer of transformers; see `states.tree_mixer`."""

    layer_idx: int
    names: tuple[str, ...]
    """Names of the parameters of its forward."""
    cache_name: str
    code: Any
    """Its forward in transformers."""
    branching: bool
    """True if it can run over a tree in one call."""

    def plain(self, hidden_RTD: Tensor, window: Window, arguments: Arguments) -> Tensor:
        """The output of its own code, with another cache."""
        out: Tensor = super().forward(hidden_RTD, **{**arguments, self.cache_name: window})
        return out


def can_branch(code: Any) -> bool:
    """True if a mixer's forward can run over a tree: it calls inner functions that are known."""
    names = {*code.__code__.co_names}
    recurs = "update_recurrent_state" in names
    return CONVOLUTION in names and (not recurs or bool(names & {DELTA_RULE, MAMBA2}))


class MixerCache:
    """Stands in for the cache of a mixer: the states of the rows that it is called with, which are
    never rolled back. Older transformers read `layers`, and then the attributes below from each of
    them.
    """

    states: LayerStates
    record_past = False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("recurrent", state_idx))

    def is_recording_past(self, layer_idx: int) -> bool:
        return self.record_past

    @property
    def layers(self) -> Mapping[int, MixerCache]:
        return defaultdict(lambda: self)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return ("conv", state_idx) in self.states

    @property
    def conv_states(self) -> Mapping[int, Tensor]:
        return {number: each for (kind, number), each in self.states.items() if kind == "conv"}

    @property
    def recurrent_states(self) -> Mapping[int, Tensor]:
        return {number: each for (kind, number), each in self.states.items() if kind != "conv"}


class Window(MixerCache):
    """Keeps the states after tokens."""

    def __init__(self, states: LayerStates) -> None:
        # other strides change the order of sums
        self.states = {key: state.contiguous() for key, state in states.items()}

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Append to the inputs that the convolution still reads. Returns all of them."""
        before = self.states.get(("conv", state_idx))
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        if before is None:
            missing = max(0, size - conv_states.shape[-1])
            inputs = F.pad(conv_states, (missing, 0))
        else:
            inputs = torch.cat([before, conv_states], dim=-1)
        self.states["conv", state_idx] = inputs[..., -size:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states


class TreePass(ABC):
    """A pass of one mixer over the nodes of trees: a way to run it, and the states afterwards."""

    def __init__(self, mixer: Mixer) -> None:
        self.mixer = mixer

    def start(self, committed: LayerStates, topology: Topology) -> None:
        """Prepare for `run`. committed: the mixer's states (B, ...), before the root."""
        self.committed = committed
        self.topology = topology

    @abstractmethod
    def run(self, hidden_BND: Tensor, arguments: Arguments) -> Tensor:
        """The output of the mixer."""

    @abstractmethod
    def after(self, last_B: Tensor) -> LayerStates:
        """The states after these nodes, (B, ...); -1: the committed ones."""


class OneNode(TreePass):
    """Runs a tree with only its root like a token in plain decoding."""

    def run(self, hidden_B1D: Tensor, arguments: Arguments) -> Tensor:
        # copies, as some mixers write a token's state where the last one was
        window = Window({key: state.clone() for key, state in self.committed.items()})
        self.states = window.states
        return self.mixer.plain(hidden_B1D, window, arguments)

    def after(self, last_B: Tensor) -> LayerStates:
        return kept(self.committed, self.states, last_B)


class Levels(TreePass):
    """Runs level by level, each node from the state of its parent, with one call of the mixer per
    level, in which each node is a row of one token.
    """

    def run(self, hidden_BND: Tensor, arguments: Arguments) -> Tensor:
        out_BND = torch.empty_like(hidden_BND)
        rows, nodes = hidden_BND.shape[:2]
        self.states = {  # (B, 1 + N, ...): the committed state, then those of the nodes
            key: torch.cat([state[:, None], state.new_empty(rows, nodes, *state.shape[1:])], dim=1)
            for key, state in self.committed.items()
        }
        parents_BN = self.topology.parents_BN.expand(rows, -1)
        levels_BN = self.topology.levels_BN.expand(rows, -1)
        for level in range(1, int(levels_BN.max()) + 1):
            rows_R, nodes_R = (levels_BN == level).nonzero(as_tuple=True)
            above_R = parents_BN[rows_R, nodes_R] + 1
            window = Window({key: state[rows_R, above_R] for key, state in self.states.items()})
            tokens_R1D = hidden_BND[rows_R, nodes_R][:, None]
            out_BND[rows_R, nodes_R] = self.mixer.plain(tokens_R1D, window, arguments)[:, 0]
            for key, state in window.states.items():
                self.states[key][rows_R, nodes_R + 1] = state
        return out_BND

    def after(self, last_B: Tensor) -> LayerStates:
        rows_B = torch.arange(len(last_B), device=last_B.device)
        return {key: state[rows_B, last_B + 1] for key, state in self.states.items()}


class Branches(TreePass, MixerCache):
    """Runs all nodes in one call of the mixer's own code, whose inner functions are replaced by
    those below. The mixer gets this object as its cache.
    """

    def __init__(self, mixer: Mixer) -> None:
        super().__init__(mixer)
        plain = mixer.code
        inner = {
            CONVOLUTION: self._convolve,
            DELTA_RULE: self._gated_delta_rule,
            MAMBA2: self._mamba2,
        }
        scope = {**plain.__globals__, **inner}
        del scope["__name__"]  # else a compiler looks names up in transformers' module
        self._code = FunctionType(
            plain.__code__, scope, None, plain.__defaults__, plain.__closure__
        )
        self._code.__kwdefaults__ = plain.__kwdefaults__
        self._convolution = 0  # the number of the next convolution
        self._paths_BCNK: dict[int, Tensor] = {}
        self._recurrence: tuple[Tensor, Tensor, Tensor] | None = None
        self._is_mamba = False  # then states are (B, H, V, Q)

    def run(self, hidden_BND: Tensor, arguments: Arguments) -> Tensor:
        self.states = self.committed
        arguments = {**arguments, self.mixer.cache_name: self}
        out: Tensor = self._code(self.mixer, hidden_BND, **arguments)
        return out

    def after(self, last_B: Tensor) -> LayerStates:
        node_B = last_B.clamp(min=0)
        rows_B = torch.arange(len(last_B), device=last_B.device)
        after: LayerStates = {}
        for number, paths_BCNK in self._paths_BCNK.items():
            after["conv", number] = paths_BCNK[rows_B, :, node_B]
        if self._recurrence is not None:
            decay_BHN, key_BHNQ, value_BHNV = self._recurrence
            ancestors_BN = self.topology.ancestors_BNN.expand(len(last_B), -1, -1)[rows_B, node_B]
            # S_n of the kept node only, by the formula in `_attend`
            total_BH1 = decay_BHN[rows_B, :, node_B][:, :, None]
            weight_BHN = (total_BH1 - decay_BHN).masked_fill(~ancestors_BN[:, None], -torch.inf)
            key_BHNQ = key_BHNQ * weight_BHN.exp()[..., None]
            before = self.committed["recurrent", 0]
            state = total_BH1[..., None].exp() * self._as_state(before)
            state = state + key_BHNQ.transpose(2, 3) @ value_BHNV
            after["recurrent", 0] = self._as_state(state).to(before.dtype)
        self._paths_BCNK = {}
        self._recurrence = None
        return kept(self.committed, after, last_B)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Does nothing: the mixer calls `_convolve` next, with these inputs."""
        self._convolution = state_idx
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Does nothing: `after` computes the states."""
        return recurrent_states

    def _convolve(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """The convolution over each node and the K - 1 inputs before it on its path. (B, C, N) ->
        (B, C, N).
        """
        before_BCK = self.committed["conv", self._convolution]
        inputs_BCX = torch.cat([before_BCK, hidden_states.to(before_BCK.dtype)], dim=-1)
        rows, channels, size = before_BCK.shape
        index_BX = self._taps(size).flatten(1)
        paths_BCX = inputs_BCX.gather(2, index_BX[:, None].expand(rows, channels, -1))
        paths_BCNK = paths_BCX.view(rows, channels, -1, size)
        self._paths_BCNK[self._convolution] = paths_BCNK
        out_BCN = (paths_BCNK.to(weight.dtype) * weight[:, None, -size:]).sum(-1)
        if bias is not None:
            out_BCN = out_BCN + bias[:, None]
        if activation is not None:  # "silu" or "swish", as for the kernel of this name
            out_BCN = F.silu(out_BCN)
        return out_BCN.to(hidden_states.dtype)

    def _taps(self, size: int) -> Tensor:
        """int64 (B|1, N, K): the positions of the inputs on each node's path, where the first K
        inputs are those of the text.
        """
        # Walk K - 1 steps up from each node. Inputs are K of the text, then N of the tree, so node
        # n is at K + n, and the place above the root, number -1, is the text's last input: K - 1.
        parents_BN = self.topology.parents_BN
        at_BN = torch.arange(parents_BN.shape[1], device=parents_BN.device).expand_as(parents_BN)
        taps = []
        for _ in range(size):
            taps.append(size + at_BN)
            above_BN = parents_BN.gather(1, at_BN.clamp(min=0))
            at_BN = torch.where(at_BN >= 0, above_BN, at_BN - 1)
        return torch.stack(taps[::-1], dim=-1)

    def _gated_delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """state = exp(g) state; then state += key beta (value - key state) (arXiv:2412.06464)."""
        heads = value.shape[2]
        query_BHNQ, key_BHNQ, value_BHNV = (_heads_first(x, heads) for x in (query, key, value))
        if options.get("use_qk_l2norm_in_kernel"):
            query_BHNQ, key_BHNQ = (
                x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()
                for x in (query_BHNQ, key_BHNQ)
            )
        query_BHNQ = query_BHNQ * query.shape[-1] ** -0.5
        decay_BHN, share_BHN = (options[name].float().transpose(1, 2) for name in ("g", "beta"))
        out_BHNV = self._attend(query_BHNQ, key_BHNQ, value_BHNV, decay_BHN, share_BHN)
        state: Tensor = options["initial_state"]
        return out_BHNV.transpose(1, 2).contiguous().to(value.dtype), state

    def _mamba2(
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """state = exp(dt A) state + B dt x; its reader is C (arXiv:2405.21060)."""
        self._is_mamba = True
        heads = hidden_states.shape[2]
        if (bias_H := options.get("dt_bias")) is not None:
            dt = dt + bias_H.to(dt.dtype)
        if options.get("dt_softplus"):
            dt = F.softplus(dt)
        dt_BHN = dt.clamp(*options.get("dt_limit", (0.0, float("inf")))).transpose(1, 2)
        x_BHNV, key_BHNQ, query_BHNQ = (_heads_first(x, heads) for x in (hidden_states, B, C))
        decay_BHN = A.float()[:, None] * dt_BHN
        value_BHNV = x_BHNV * dt_BHN[..., None].float()
        out_BHNV = self._attend(query_BHNQ, key_BHNQ, value_BHNV, decay_BHN, None)
        if (skip_H := options.get("D")) is not None:
            out_BHNV = out_BHNV + skip_H[:, None, None] * x_BHNV
        state: Tensor = options["initial_states"]
        return out_BHNV.transpose(1, 2).contiguous(), state

    def _attend(
        self,
        query_BHNQ: Tensor,
        key_BHNQ: Tensor,
        value_BHNV: Tensor,
        decay_BHN: Tensor,
        correction_BHN: Tensor | None,
    ) -> Tensor:
        """The values that each node's query reads from its path and from the committed state, (B,
        H, N, V).

        decay_BHN: logarithms. correction_BHN: for each value, the share by which it replaces what
        its key already reads; None: values are added.
        """
        # With decay g_n, key k_n and value u_n of a node n, and S the committed state,
        #     S_n = e^{g_n} S_parent(n) + k_n u_n^T.
        # Let G_n be the sum of g over the path from the root to n. Unrolled along the path,
        #     S_n = e^{G_n} S + sum_m e^{G_n - G_m} k_m u_m^T  over n and its ancestors m,
        # and what a query reads, q_n^T S_n, is one matrix product over all nodes: linear attention
        # whose mask is the ancestor relation and whose weights are e^{G_n - G_m} <= 1, as g <= 0.
        ancestors_B1NN = self.topology.ancestors_BNN[:, None]
        state_BHQV = self._as_state(self.committed["recurrent", 0]).float()
        total_BHN = (ancestors_B1NN.float() @ decay_BHN[..., None])[..., 0]
        between_BHNN = total_BHN[..., :, None] - total_BHN[..., None, :]
        weight_BHNN = between_BHNN.masked_fill(~ancestors_B1NN, -torch.inf).exp()
        since_BHN1 = total_BHN.exp()[..., None]
        if correction_BHN is not None:
            # The delta rule writes what its value differs from what the decayed state has for the
            # key: u_n = b_n (v_n - k_n^T e^{g_n} S_parent(n)). Unrolled as above, with
            # A_nm = b_n e^{G_n - G_m} k_n.k_m for proper ancestors m of n, else 0:
            #     (I + A) u = b (v - e^G k^T S).
            share_BHN1 = correction_BHN[..., None]
            known_BHNV = since_BHN1 * (key_BHNQ @ state_BHQV)
            value_BHNV = share_BHN1 * (value_BHNV - known_BHNV)
            read_BHNN = share_BHN1 * weight_BHNN * (key_BHNQ @ key_BHNQ.transpose(2, 3))
            # Parents come before children, so A is below the diagonal; the diagonal of `read_BHNN`
            # is not read. Substitution, as powers of A grow as 3^N where tokens repeat.
            value_BHNV = torch.linalg.solve_triangular(
                read_BHNN, value_BHNV, upper=False, unitriangular=True
            )
        self._recurrence = (total_BHN, key_BHNQ, value_BHNV)
        out_BHNV = since_BHN1 * (query_BHNQ @ state_BHQV)
        return out_BHNV + weight_BHNN * (query_BHNQ @ key_BHNQ.transpose(2, 3)) @ value_BHNV

    def _as_state(self, state: Tensor) -> Tensor:
        """Convert a mixer's state to (B, H, Q, V), or back."""
        return state.transpose(2, 3) if self._is_mamba else state


def _heads_first(x_BNGQ: Tensor, heads: int) -> Tensor:
    """(B, H, N, Q) in float32: heads of a group share its values."""
    x_BNHQ = x_BNGQ.float().repeat_interleave(heads // x_BNGQ.shape[2], dim=2)
    return x_BNHQ.transpose(1, 2)


def kept(committed: LayerStates, after: LayerStates, last_B: Tensor) -> LayerStates:
    """The states after the last node of each row; -1: the committed ones."""
    states = {}
    for key, state in after.items():
        stays = (last_B < 0).view(-1, *[1] * (state.ndim - 1))
        states[key] = torch.where(stays, committed[key], state)
    return states
