"""Block heads restated from their papers, slowly: one block at a time, one softmax over the keys of
its context and its own, in float64.

Legend: S slots, C places of the context, E keys, D width, H query heads, G key/value heads, W head
width, v draft vocabulary, r rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from plain_eagle import PlainHead
from plain_hydra import silu
from torch import Tensor

from draftheads.heads.block import BlockHead
from draftheads.heads.target.model import Target


class PlainBlock(PlainHead):
    """`weights` are float64 copies of the head's, which want gradients."""

    def __init__(self, head: BlockHead, target: Target) -> None:
        super().__init__(head)
        self.design = head.design
        self.vocabulary = list(range(head.vocab_size))
        if head.token_map is not None:
            self.vocabulary = head.token_map.tolist()
        target_VD = target.model.get_input_embeddings().weight.double()
        self.embeddings_VD = self.weights.get("embed_tokens.weight", target_VD)
        target_VD = target.model.lm_head.weight.double()
        self.unembed_vD = self.weights.get("lm_head.weight", target_VD)

    def inputs(self, features_TX: Tensor) -> list[Tensor]:
        """The context (C, D) of an anchor at each place of one text: the features of all tokens up
        to the anchor's, but the first token has none.
        """
        fused = [self.linear("fc", feature_X.double()) for feature_X in features_TX]
        normed_TD = torch.stack([self.norm("hidden_norm", fused_D) for fused_D in fused])
        return [normed_TD[1 : anchor + 1] for anchor in range(len(fused))]

    def states(self, context_CD: Tensor, anchor: int) -> Tensor:
        """The states of all slots that predict; the anchor's position is C."""
        mask = self.design.mask_token
        mask_D = self.weights["mask_embedding"] if mask is None else self.embeddings_VD[mask]
        masks = [mask_D] * (self.design.block_size - 1)
        x_SD = torch.stack([self.embeddings_VD[anchor], *masks])
        for number in range(self.design.layers):
            name = f"layers.{number}"
            h_SD = self.normed(f"{name}.input_layernorm", x_SD)
            x_SD = x_SD + self.around(
                f"{name}.attention_conv",
                h_SD,
                lambda h_SD, name=name: self.attend(f"{name}.self_attn", h_SD, context_CD),
            )
            h_SD = self.normed(f"{name}.post_attention_layernorm", x_SD)
            x_SD = x_SD + self.around(
                f"{name}.mlp_conv", h_SD, lambda h_SD, name=name: self.mlp(f"{name}.mlp", h_SD)
            )
        first = 0 if self.design.sample_from_anchor else 1
        return self.normed("norm", x_SD)[first:]

    def mlp(self, name: str, h_SD: Tensor) -> Tensor:
        gate_SI = silu(h_SD @ self.weights[f"{name}.gate_proj.weight"].T)
        up_SI = h_SD @ self.weights[f"{name}.up_proj.weight"].T
        return (gate_SI * up_SI) @ self.weights[f"{name}.down_proj.weight"].T

    def around(self, name: str, h_SD: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """A sub-layer, with its convolutions if it has some."""
        if not self.design.convolutions:
            return layer(h_SD)
        base_2tD = self.weights[f"{name}.base_kernel"]
        # (slots, before or after, tap, group)
        change = h_SD @ self.weights[f"{name}.kernel_projection.weight"].T
        change = change.view(len(h_SD), 2, 2, -1)
        group_D = torch.arange(h_SD.shape[1]) // 16

        def convolved(x_SD: Tensor, side: int) -> Tensor:
            out = []
            for slot in range(len(x_SD)):
                own_D, before_D = base_2tD[side] + change[slot, side][:, group_D]
                previous_D = x_SD[slot - 1] if slot else 0 * x_SD[0]
                out.append(own_D * x_SD[slot] + before_D * previous_D)
            return torch.stack(out)

        return convolved(layer(convolved(h_SD, 0)), 1)

    def normed(self, name: str, x_XD: Tensor) -> Tensor:
        mean_square = (x_XD * x_XD).mean(-1, keepdim=True)
        return self.weights[f"{name}.weight"] * x_XD / (mean_square + self.shape.eps).sqrt()

    def attend(self, name: str, h_SD: Tensor, context_CD: Tensor) -> Tensor:
        width, start = self.shape.head_dim, len(context_CD)
        both_ED = torch.cat([context_CD, h_SD])
        positions_E = torch.arange(len(both_ED))

        def heads(which: str, x_XD: Tensor) -> Tensor:
            return (x_XD @ self.weights[f"{name}.{which}_proj.weight"].T).unflatten(-1, (-1, width))

        q_SHW = self.normed(f"{name}.q_norm", heads("q", h_SD))
        q_SHW = self.all_turned(q_SHW, positions_E[start:])
        k_EGW = self.all_turned(self.normed(f"{name}.k_norm", heads("k", both_ED)), positions_E)
        v_EGW = heads("v", both_ED)
        queries, groups = q_SHW.shape[1], k_EGW.shape[1]
        out = []
        for slot in range(len(h_SD)):
            seen_E = torch.ones(len(both_ED), dtype=torch.bool)
            if self.design.window is not None:
                seen_E = start + slot - positions_E < self.design.window
            for head in range(queries):
                group = head * groups // queries
                weight_E = (k_EGW[seen_E, group] @ q_SHW[slot, head] / width**0.5).exp()
                out.append(weight_E @ v_EGW[seen_E, group] / weight_E.sum())
        out_SX = torch.stack(out).view(len(h_SD), -1)
        return out_SX @ self.weights[f"{name}.o_proj.weight"].T

    def all_turned(self, x_XHW: Tensor, positions_X: Tensor) -> Tensor:
        """RoPE: numbers m and m + W / 2 are one complex number, which turns."""
        real, imaginary = x_XHW.chunk(2, dim=-1)
        pairs = range(real.shape[-1])
        frequencies = torch.tensor([self.frequency(pair) for pair in pairs], dtype=torch.float64)
        angles = positions_X[:, None, None] * frequencies
        turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], dim=-1)

    def correction(self, states_KD: Tensor, tokens: list[int]) -> Tensor | None:
        """What the tokens from the anchor on add to the logits of the next prediction, (v,)."""
        if self.design.conditioning is None:
            return None
        if self.design.conditioning == "domino":
            return self.correction_of_domino(states_KD[len(tokens) - 1], tokens)
        w1_Vr, rank = self.weights["markov_head.markov_w1.weight"], self.design.rank
        state_r, output_r = torch.zeros(rank, dtype=torch.float64), w1_Vr[tokens[-1]]
        for token, state_D in zip(tokens, states_KD, strict=False):
            if self.design.conditioning == "rnn":
                read = torch.cat([state_r, w1_Vr[token], state_D])
                gate_r, new_r, output_r = self.linear("markov_head.joint_proj", read).split(rank)
                gate_r, output_r = torch.sigmoid(gate_r), torch.tanh(output_r)
                state_r = gate_r * state_r + (1 - gate_r) * torch.tanh(new_r)
        return self.weights["markov_head.markov_w2.weight"] @ output_r

    def correction_of_domino(self, state_D: Tensor, tokens: list[int]) -> Tensor | None:
        """None for the first prediction, of which only the anchor is known."""
        if len(tokens) == 1:
            return None
        size = self.design.gru_size
        state_g = torch.zeros(size, dtype=torch.float64)
        for token in tokens:
            read = self.weights["prefix_gru.weight_ih_l0"] @ self.embeddings_VD[token]
            kept = self.weights["prefix_gru.weight_hh_l0"] @ state_g
            reset_g = torch.sigmoid(read[:size] + kept[:size])
            update_g = torch.sigmoid(read[size : 2 * size] + kept[size : 2 * size])
            new_g = torch.tanh(read[2 * size :] + reset_g * kept[2 * size :])
            state_g = (1 - update_g) * new_g + update_g * state_g
        code_r = self.weights["embed_proj.0.weight"] @ torch.cat([state_D, state_g])
        return self.weights["embed_proj.2.weight"] @ silu(code_r)

    def given(self, states_KD: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor | None]:
        """Logits (v,) of the token after these, of which the first is the anchor; the confidence's
        logit, if any.
        """
        state_D, previous = states_KD[len(tokens) - 1], tokens[-1]
        logits_v = self.base(state_D)
        correction_v = self.correction(states_KD, tokens)
        if correction_v is not None:
            logits_v = logits_v + correction_v
        if self.design.candidates:
            logits_v = self.selected(logits_v, state_D, previous)
        if self.design.confidence is None:
            return logits_v, None
        if self.design.confidence == "state+token":
            state_D = torch.cat([state_D, self.weights["markov_head.markov_w1.weight"][previous]])
        return logits_v, self.linear("confidence_head.proj", state_D)[0]

    def base(self, state_D: Tensor) -> Tensor:
        """Logits (v,) without conditioning."""
        return self.unembed_vD @ state_D

    def selected(self, logits_v: Tensor, state_D: Tensor, previous: int) -> Tensor:
        """With what the selector adds to the best; the others are no candidates."""
        name = "candidate_selector"
        gate_r = self.weights[f"{name}.hidden_projection.weight"] @ state_D
        code_r = self.weights[f"{name}.predecessor_codebook"][previous] * gate_r
        known = logits_v.tolist()
        order = sorted(range(len(known)), key=lambda place: -known[place])
        out_v = torch.full_like(logits_v, -torch.inf)
        for place in order[: self.design.candidates]:
            successor_r = self.weights[f"{name}.successor_codebook"][self.vocabulary[place]]
            out_v[place] = logits_v[place] + code_r @ successor_r
        return out_v

    def logits(self, context_CD: Tensor, tokens: tuple[int, ...]) -> Tensor:
        """Logits (v,) of the token after an anchor with this context and what was drafted."""
        return self.given(self.states(context_CD, tokens[0]), list(tokens))[0]
