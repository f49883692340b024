"""What the preceding tokens of a block add to the logits of a slot: low-rank products.

The slots of a block do not see each other's tokens. Conditioning turns those tokens into a code of
r numbers per slot and adds `markov_w2` code to the logits. It needs no pass through the layers, so
it is grown along a tree: each node has its parent's recurrent state.

    markov    code = w1[previous]
    rnn       code = tanh(o); (g, c, o) = joint [s; w1[previous]; h]; next state
              s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c), zero at the anchor

A selector adds to the logits of a slot's candidates, which are its best tokens; no others are
drafted. So a level of the tree needs no product over the vocabulary.

    selector  logit(b) + <predecessor[previous] * (W h), successor[b]> of a candidate b

Sources: DSpark (github.com/deepseek-ai/DeepSpec, MIT); DFlash 2 (draft_qwen3_dflash2.py of
NVIDIA-NeMo/Automodel, Apache-2.0), with the names of their tensors.

Legend: B batch, M anchors of a batch, K drafts of a block, F nodes expanded together, D width of
the target, r rank, X numbers per slot, v draft vocabulary, V vocabulary of the target, R slots, k
candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftheads.heads.layers import project

MARKOV_TYPES = {"markov": "vanilla", "rnn": "rnn"}
"""Conditioning -> its name in config.json."""


class Markov(nn.Module):
    """The previous token alone.

    It begins with zeros, so that a new head is one without conditioning.
    """

    def __init__(self, rank: int, hidden_size: int, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    def prepare(self, states_BKD: Tensor) -> Tensor:
        """Project the states of all slots to their share of the codes, (B, K, X)."""
        return states_BKD[..., :0]

    def step(
        self, read_BFr: Tensor, given_BFX: Tensor, carried_BFr: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Codes (B, F, r) of a slot, and the recurrent state for the next slot.

        read_BFr: `markov_w1` of the tokens before it. given_BFX: from `prepare`, for this slot.
        carried_BFr: the state; None: zeros.
        """
        return read_BFr, None

    def along(self, tokens_MK: Tensor, states_MKD: Tensor) -> Tensor:
        """The codes (M, K, r) of all slots; tokens_MK: the text's token before each prediction."""
        given_MKX = self.prepare(states_MKD)
        carried = None
        codes = []
        # at once, because each look-up has a gradient as large as the table
        read_MKr = self.markov_w1(tokens_MK)
        for slot in range(tokens_MK.shape[1]):
            one = slice(slot, slot + 1)
            code_M1r, carried = self.step(read_MKr[:, one], given_MKX[:, one], carried)
            codes.append(code_M1r)
        return torch.cat(codes, dim=1)


class Recurrent(Markov):
    """All preceding tokens of the block, and the slot's own state."""

    def __init__(self, rank: int, hidden_size: int, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__(rank, hidden_size, vocab_size, draft_vocab_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def prepare(self, states_BKD: Tensor) -> Tensor:
        weight = self.joint_proj.weight[:, -states_BKD.shape[-1] :]
        return project(states_BKD, weight, self.joint_proj.bias)

    def step(
        self, read_BFr: Tensor, given_BFX: Tensor, carried_BFr: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        rank = read_BFr.shape[-1]
        weight = self.joint_proj.weight
        joint = project(read_BFr, weight[:, rank : 2 * rank]) + given_BFX
        if carried_BFr is not None:
            joint = joint + project(carried_BFr, weight[:, :rank])
        gate_BFr, candidate_BFr, output_BFr = joint.chunk(3, dim=-1)
        gate_BFr = gate_BFr.sigmoid()
        candidate_BFr = candidate_BFr.tanh()
        if carried_BFr is None:
            return output_BFr.tanh(), candidate_BFr * (1 - gate_BFr)
        return output_BFr.tanh(), torch.lerp(candidate_BFr, carried_BFr, gate_BFr)


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
