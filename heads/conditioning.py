"""What the preceding tokens of a block add to the logits of a slot: low-rank products.

The slots of a block do not see each other's tokens. Conditioning turns those tokens into a code of
r numbers per slot and adds a matrix (v, r) times the code to the logits. It needs no pass through
the layers, so it is grown along a tree: each node has its parent's recurrent state.

    markov    code = w1[previous]
    rnn       code = tanh(o); (g, c, o) = joint [s; w1[previous]; h]; next state
              s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c), zero at the anchor
    domino    code = silu(W [h; s]); s = GRU(embeddings of all tokens from the anchor to the
              previous one); zero for the first prediction, which has no correction

A selector adds to the logits of a slot's candidates, which are its best tokens; no others are
drafted. So a level of the tree needs no product over the vocabulary.

    selector  logit(b) + <predecessor[previous] * (W h), successor[b]> of a candidate b

Sources: DSpark (github.com/deepseek-ai/DeepSpec, MIT), Domino (arXiv 2605.29707) and DFlash 2
(draft_qwen3_dflash2.py of NVIDIA-NeMo/Automodel, Apache-2.0), with the names of their tensors.

Legend: B batch, M anchors of a batch, K drafts of a block, F nodes expanded together, D width of
the target, r rank, E numbers read of a token, g numbers of the recurrent state, X numbers per slot,
v draft vocabulary, V vocabulary of the target, k candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftheads.heads.layers import project

MARKOV_TYPES = {"markov": "vanilla", "rnn": "rnn"}
"""Conditioning -> its name in config.json."""


Embed = Callable[[Tensor], Tensor]
"""The embeddings (..., D) of token ids (...), as a head reads them."""


class Markov(nn.Module):
    """The previous token alone.

    It begins with zeros, so that a new head is one without conditioning.
    """

    def __init__(self, rank: int, hidden_size: int, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    @property
    def output(self) -> nn.Linear:
        """The matrix (v, r) whose product with a code is added to the logits."""
        return self.markov_w2

    def read(self, tokens: Tensor, embed: Embed) -> Tensor:
        """What `step` needs of tokens (...), (..., E)."""
        codes: Tensor = self.markov_w1(tokens)
        return codes

    def prepare(self, states_BKD: Tensor) -> Tensor:
        """Project the states of all slots to their share of the codes, (B, K, X)."""
        return states_BKD[..., :0]

    def step(
        self, read_BFE: Tensor, given_BFX: Tensor, carried_BFg: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Codes (B, F, r) of a slot, and the recurrent state for the next slot.

        read_BFE: from `read`, of the tokens before it. given_BFX: from `prepare`, for this slot.
        carried_BFg: the state; None at the first prediction.
        """
        return read_BFE, None


class Recurrent(Markov):
    """All preceding tokens of the block, and the slot's own state."""

    def __init__(self, rank: int, hidden_size: int, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__(rank, hidden_size, vocab_size, draft_vocab_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def prepare(self, states_BKD: Tensor) -> Tensor:
        weight = self.joint_proj.weight[:, -states_BKD.shape[-1] :]
        return project(states_BKD, weight, self.joint_proj.bias)

    def step(
        self, read_BFE: Tensor, given_BFX: Tensor, carried_BFg: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        rank = read_BFE.shape[-1]
        weight = self.joint_proj.weight
        joint = project(read_BFE, weight[:, rank : 2 * rank]) + given_BFX
        if carried_BFg is not None:
            joint = joint + project(carried_BFg, weight[:, :rank])
        gate_BFr, candidate_BFr, output_BFr = joint.chunk(3, dim=-1)
        gate_BFr = gate_BFr.sigmoid()
        candidate_BFr = candidate_BFr.tanh()
        if carried_BFg is None:
            return output_BFr.tanh(), candidate_BFr * (1 - gate_BFr)
        return output_BFr.tanh(), torch.lerp(candidate_BFr, carried_BFg, gate_BFr)


class Domino:
    """All tokens from the anchor on, and the slot's own state; methods as of `Markov`.

    It is no module, because published files have its layers at the top, among the head's.
    """

    def __init__(self, prefix_gru: nn.ParameterDict, embed_proj: nn.Sequential) -> None:
        self.weight_ih: Tensor = prefix_gru["weight_ih_l0"]
        self.weight_hh: Tensor = prefix_gru["weight_hh_l0"]
        self.narrow = cast(nn.Linear, embed_proj[0])
        self.output = cast(nn.Linear, embed_proj[2])

    def read(self, tokens: Tensor, embed: Embed) -> Tensor:
        return project(embed(tokens).to(self.weight_ih.dtype), self.weight_ih)

    def prepare(self, states_BKD: Tensor) -> Tensor:
        return project(states_BKD, self.narrow.weight[:, : states_BKD.shape[-1]])

    def step(
        self, read_BFE: Tensor, given_BFX: Tensor, carried_BFg: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        reset_BFg, update_BFg, new_BFg = read_BFE.chunk(3, dim=-1)
        if carried_BFg is None:
            state_BFg = new_BFg.tanh() * (1 - update_BFg.sigmoid())
            return given_BFX.new_zeros(given_BFX.shape), state_BFg
        before = project(carried_BFg, self.weight_hh).chunk(3, dim=-1)
        new_BFg = (new_BFg + (reset_BFg + before[0]).sigmoid() * before[2]).tanh()
        state_BFg = torch.lerp(new_BFg, carried_BFg, (update_BFg + before[1]).sigmoid())
        weight = self.narrow.weight[:, -state_BFg.shape[-1] :]
        return F.silu(given_BFX + project(state_BFg, weight)), state_BFg


class Selector(nn.Module):
    """The previous token and the slot's own state choose among the candidates."""

    def __init__(self, rank: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def codes(self, before: Tensor, states: Tensor) -> Tensor:
        """Numbers (..., r) of slots with these states (..., D), after these tokens (...)."""
        gates = project(states, self.hidden_projection.weight)
        return self.predecessor_codebook[before] * gates

    def forward(
        self, before_BF: Tensor, state_BD: Tensor, logits_Bk: Tensor, tokens_Bk: Tensor
    ) -> Tensor:
        """The logits of a slot's candidates after each of the tokens before_BF, (B, F, k).

        logits_Bk, tokens_Bk: of the candidates; all tokens are ids of the target.
        """
        codes_BFr = self.codes(before_BF, state_BD[:, None])
        added_BFk: Tensor = codes_BFr @ self.successor_codebook[tokens_Bk].transpose(1, 2)
        return logits_Bk[:, None] + added_BFk


CONDITIONING: dict[str, type[Markov]] = {"markov": Markov, "rnn": Recurrent}
Conditioning = Markov | Domino


def codes_along(
    conditioning: Conditioning, tokens_MK: Tensor, states_MKD: Tensor, embed: Embed
) -> Tensor:
    """The codes (M, K, r) of all slots; tokens_MK: the text's token before each prediction."""
    given_MKX = conditioning.prepare(states_MKD)
    carried = None
    codes = []
    # at once, because each look-up has a gradient as large as the table
    read_MKE = conditioning.read(tokens_MK, embed)
    for slot in range(tokens_MK.shape[1]):
        one = slice(slot, slot + 1)
        code_M1r, carried = conditioning.step(read_MKE[:, one], given_MKX[:, one], carried)
        codes.append(code_M1r)
    return torch.cat(codes, dim=1)
