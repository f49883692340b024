"""Sequential heads restated from their papers, slowly: one position, one head, one token at a time,
in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from plain_eagle import PlainHead
from torch import Tensor

from draftheads.heads.sequential import SequentialHead
from draftheads.heads.target.model import Target


def awake(head: Any) -> Any:
    """The head with weights that all matter: none is zero, none drowns the others."""
    torch.manual_seed(5)
    for name, parameter in head.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=2 * parameter.shape[1] ** -0.5)
    return head


def silu(x_D: Tensor) -> Tensor:
    return x_D / (1 + (-x_D).exp())


class PlainSequential(PlainHead):
    """`weights` are float64 copies of the head's, which want gradients."""

    def __init__(self, head: SequentialHead, target: Target) -> None:
        self.weights = {
            name: parameter.detach().double().requires_grad_()
            for name, parameter in head.named_parameters()
        }
        self.sequential = head
        self.vocabulary = list(range(head.vocab_size))
        if head.token_map is not None:
            self.vocabulary = head.token_map.tolist()
        self.embeddings_VD = target.model.get_input_embeddings().weight.double()
        self.unembed_vD = target.model.lm_head.weight.double()[self.vocabulary]
        if head.prefix is not None:
            self.shape = head.prefix.shape
            self.head = SimpleNamespace(kind=head.kind, rope=head.prefix.rope, window=None)

    def inputs(self, features_TD: Tensor) -> list[Tensor | None]:
        """What the heads read at each place of one text, whose first token has no feature."""
        features = [feature_D.double() for feature_D in features_TD]
        if self.sequential.prefix is None:
            return [None, *features[1:]]
        memory: list[Any] = []
        states: list[Tensor | None] = [None]
        for position, feature_D in enumerate(features[1:]):
            state_D = self.layer("prefix.layer", feature_D, position, memory)
            states.append(self.norm("prefix.norm", state_D))
        return states

    def embed(self, token: int) -> Tensor:
        embedded_D = self.embeddings_VD[token]
        if not self.sequential.normed:
            return embedded_D
        mean_square = (embedded_D * embedded_D).sum() / len(embedded_D)
        return embedded_D / (mean_square + torch.finfo(torch.float32).eps).sqrt()

    def block(self, k: int, x_E: Tensor) -> Tensor:
        grounded = self.sequential.conditioning == "hydra"
        for j in range(self.sequential.layers):
            kept = self.linear(f"blocks.{k}.residual", x_E) if grounded and j == 0 else x_E
            x_E = kept + silu(self.linear(f"blocks.{k}.layers.{j}", x_E))
        return x_E

    def unembed(self, k: int, x_D: Tensor) -> Tensor:
        if not self.sequential.own_lm_head:
            return self.unembed_vD @ x_D
        logits_v = self.linear(f"lm_heads.{k}", x_D)
        return logits_v + self.weights[f"biases.{k}"] if f"biases.{k}" in self.weights else logits_v

    def logits(self, input_D: Tensor, path: Sequence[int]) -> Tensor:
        """After the tokens of `path`, the root first; over the draft vocabulary."""
        k, embedded = len(path) - 1, [self.embed(token) for token in path]
        if self.sequential.conditioning == "hydra":
            return self.unembed(k, self.block(k, torch.cat([input_D, *embedded])))
        hidden_D = self.block(k, input_D)
        code_r = self.code(k, input_D, embedded)
        return self.unembed(k, hidden_D + self.linear(f"up.{k}", code_r))

    def code(self, k: int, input_D: Tensor, embedded: Sequence[Tensor]) -> Tensor:
        both = torch.cat([self.block(k, input_D), embedded[k]])
        code_r = self.linear(f"down.{k}", both)
        if k > 0:
            code_r = code_r + self.linear(f"carry.{k - 1}", self.code(k - 1, input_D, embedded))
        return silu(code_r)
