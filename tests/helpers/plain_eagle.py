"""EAGLE heads restated from their papers, slowly: one pair, one attention head, one number at a
time, in float64. A memory is a list of (position, keys, values); a root that goes on by itself does
so on a copy of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftheads.heads.batch import Batch
from draftheads.heads.losses import RANKS
from draftheads.heads.target.model import Target

Memories = list[list[tuple[int, Tensor, Tensor]]]  # one list of entries per layer


def awake(head: Any) -> Any:
    """The head with weights that all matter, the norms' too."""
    torch.manual_seed(5)
    for name, parameter in head.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
        elif "lm_head" not in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return head


class PlainHead:
    """What both kinds share. `weights` are float64 copies of the head's, which want gradients."""

    def __init__(self, head: Any) -> None:
        self.head, self.shape = head, head.design.shape
        self.weights = {
            name: parameter.detach().double().requires_grad_()
            for name, parameter in head.named_parameters()
        }

    def linear(self, name: str, x_D: Tensor) -> Tensor:
        out_D = self.weights[f"{name}.weight"] @ x_D
        return out_D + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else out_D

    def norm(self, name: str, x_D: Tensor) -> Tensor:
        mean_square = (x_D * x_D).sum() / len(x_D)
        return self.weights[f"{name}.weight"] * x_D / (mean_square + self.shape.eps).sqrt()

    def mlp(self, name: str, x_D: Tensor) -> Tensor:
        gate = self.linear(f"{name}.gate_proj", x_D)
        return self.linear(
            f"{name}.down_proj", gate / (1 + (-gate).exp()) * self.linear(f"{name}.up_proj", x_D)
        )

    def frequency(self, pair: int) -> float:
        """Radians per position of the pair-th two numbers of a head."""
        frequency = self.head.rope.theta ** (-2 * pair / self.shape.head_dim)
        scaling = self.head.rope.scaling
        if scaling is None:
            return frequency
        assert scaling["rope_type"] == "llama3"
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        return kept * frequency + (1 - kept) * frequency / scaling["factor"]

    def turned(self, x_W: Tensor, position: int) -> Tensor:
        """RoPE: number m turns with number m + W / 2."""
        half = len(x_W) // 2
        out: list[Tensor] = [x_W[0]] * len(x_W)
        for pair in range(half):
            angle = position * self.frequency(pair)
            a, b = x_W[pair], x_W[pair + half]
            out[pair] = a * math.cos(angle) - b * math.sin(angle)
            out[pair + half] = a * math.sin(angle) + b * math.cos(angle)
        return torch.stack(out)

    def attention(self, name: str, x_E: Tensor, position: int, memory: list[Any]) -> Tensor:
        """Add this pair's entry to `memory` and attend to all of it that the window leaves."""
        width, groups = self.shape.head_dim, self.shape.kv_heads
        queries = self.by_head(f"{name}.q", x_E)
        keys = [self.turned(k, position) for k in self.by_head(f"{name}.k", x_E)]
        memory.append((position, keys, self.linear(f"{name}.v_proj", x_E).split(width)))
        window = self.head.window or math.inf
        seen = [(k, v) for place, k, v in memory if position - place < window]
        out = []
        for number, query in enumerate(queries):
            group = number * groups // len(queries)
            query = self.turned(query, position)
            scores = torch.stack([(query * k[group]).sum() for k, _ in seen]) / width**0.5
            parts = scores.exp() / scores.exp().sum()
            out.append(sum(part * v[group] for part, (_, v) in zip(parts, seen, strict=True)))
        return self.linear(f"{name}.o_proj", torch.cat(out))

    def by_head(self, name: str, x_E: Tensor) -> list[Tensor]:
        """Queries or keys; Qwen3 norms those of each head, before they turn."""
        each = self.linear(f"{name}_proj", x_E).split(self.shape.head_dim)
        is_normed = f"{name}_norm.weight" in self.weights
        return [self.norm(f"{name}_norm", x_W) for x_W in each] if is_normed else list(each)

    def layer(self, name: str, x_D: Tensor, position: int, memory: list[Any]) -> Tensor:
        """A Llama layer; EAGLE-1's first one has no input norm."""
        bare = self.head.kind == "eagle" and name == "layers.0"
        normed = x_D if bare else self.norm(f"{name}.input_layernorm", x_D)
        x_D = x_D + self.attention(f"{name}.self_attn", normed, position, memory)
        return x_D + self.mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x_D))

    def fuse(self, feature_D: Tensor) -> Tensor:
        return feature_D

    def state(self, hidden_H: Tensor) -> Tensor:
        return hidden_H

    def advance(self, token_D: Tensor, hidden_H: Tensor, position: int, own: Memories) -> Tensor:
        raise NotImplementedError


class PlainEagle3(PlainHead):
    def fuse(self, feature_D: Tensor) -> Tensor:
        design, width = self.head.design, self.shape.hidden_size
        if design.norm_before_fc:
            feature_D = self.norm("input_norm", feature_D)
        if design.fc_norm:
            parts = enumerate(feature_D.split(width))
            feature_D = torch.cat([self.norm(f"fc_norm.{n}", part) for n, part in parts])
        return self.linear("fc", feature_D)

    def advance(self, token_D: Tensor, hidden_H: Tensor, position: int, own: Memories) -> Tensor:
        design = self.head.design
        name = "midlayer" if design.layers == 1 else "layers.0"
        normed = self.norm(f"{name}.hidden_norm", hidden_H)
        both = torch.cat([self.norm(f"{name}.input_layernorm", token_D), normed])
        residual = normed if design.norm_before_residual else hidden_H
        x = residual + self.attention(f"{name}.self_attn", both, position, own[0])
        x = x + self.mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x))
        for number in range(1, design.layers):
            x = self.layer(f"layers.{number}", x, position, own[number])
        return self.norm("norm", x) if design.norm_output else x

    def state(self, hidden_H: Tensor) -> Tensor:
        return hidden_H if self.head.design.norm_output else self.norm("norm", hidden_H)


class PlainEagle(PlainHead):
    def advance(self, token_D: Tensor, hidden_H: Tensor, position: int, own: Memories) -> Tensor:
        x = self.linear("fc", torch.cat([token_D, hidden_H]))
        for number in range(self.head.design.layers):
            x = self.layer(f"layers.{number}", x, position, own[number])
        return x


def plain_unroll(
    plain: PlainHead, batch: Batch, features_BTD: Tensor, target: Target, steps: int
) -> dict[tuple[int, int, int], Tensor]:
    """The head's hidden state at each (row, root, step) that is judged."""
    said = {}
    for row, documents in enumerate(batch.documents_BT.tolist()):
        embedded_TD = target.embed(batch.tokens_BT[row]).double()
        for document in set(documents) - {-1}:
            first = documents.index(document)
            stop = first + documents.count(document)
            memories: Memories = [[] for _ in range(plain.head.layer_count)]
            for root in range(first + 1, stop):  # the first token makes no pair
                hidden = plain.fuse(features_BTD[row, root].double())
                hidden = plain.advance(embedded_TD[root], hidden, root - first, memories)
                own = [list(memory) for memory in memories]
                for step in range(steps):
                    guessed = root + step + 1
                    if guessed >= stop or not all(batch.loss_mask_BT[row, root : guessed + 1]):
                        break
                    if step:
                        token_D, position = embedded_TD[root + step], root - first + step
                        hidden = plain.advance(token_D, hidden, position, own)
                    said[row, root, step] = hidden
    return said


def plain_rank(logits_v: Tensor, token: int, vocabulary: list[int]) -> int:
    """How many logits are greater than the token's. Tokens of -inf are never drafted."""
    if token not in vocabulary or logits_v[vocabulary.index(token)] == -torch.inf:
        return RANKS
    return min(int((logits_v > logits_v[vocabulary.index(token)]).sum()), RANKS)


def plain_loss(logits_v: Tensor, teacher_V: Tensor | int, vocabulary: list[int]) -> Tensor:
    """The cross-entropy of one row. teacher_V: the target's logits, or the token that came (hard
    labels).
    """
    log_q_v = logits_v - logits_v.exp().sum().log()
    if isinstance(teacher_V, int):
        known = teacher_V in vocabulary
        return -log_q_v[vocabulary.index(teacher_V)] if known else 0.0 * logits_v[0]
    if int(teacher_V.argmax()) not in vocabulary:
        return 0.0 * logits_v[0]
    p_v = F.softmax(teacher_V[vocabulary], dim=0)
    return -(p_v * log_q_v).sum()
