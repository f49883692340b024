"""Multi-token prediction: a head that is one more decoder layer of the target (DeepSeek-V3, arXiv
2412.19437, section 2.2).

It is an autoregressive head like EAGLE-1: the embedded token i and feature i, the target's state
after its final norm, predict token i + 1 through the target's own lm_head, and its normed output
replaces features that the target has not computed yet. Layer, norms and RoPE use the target's own
classes. Many models are published with such a layer (`checkpoint`); other models can get a new one.

Legend: B batch, Q queries, D width of target and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from draftheads.heads.eagle import AutoregressiveHead, UnrolledChoices
from draftheads.heads.layers import Angles, Memory, check_embeddings
from draftheads.heads.mtp.layer import INSTEAD, LayerOrigin, run_layer, why_not_runnable
from draftheads.heads.target.model import Target
from draftheads.heads.target.pretrained import decoder_layers, describe, final_norm
from draftheads.heads.tensors import integers, matrix, needed
from draftheads.heads.vocabulary import SharedRows, check_ids, token_map


class MtpChoices(UnrolledChoices):
    """Multi-token prediction by a layer of the target's kind (arXiv 2412.19437)."""

    kind: Literal["mtp"] = Field("mtp", description="one more layer of the target's own kind")
    vocabulary: int | None = Field(None, ge=2, description="N most frequent tokens; null: all")
    steps: int = Field(4, ge=1, le=16, description="steps for which training unrolls the layer")


@dataclass(frozen=True)
class MtpDesign:
    """The architecture of an MTP head."""

    origin: LayerOrigin
    hidden_size: int
    vocab_size: int
    states_first: bool = False  # joined as [state; embedding], else as [embedding; state]
    bias: bool = False  # of the projection

    @classmethod
    def of(cls, target: Target) -> Self:
        """The design of a layer for this target, like its last layer with attention.

        Raises ValueError for a target whose embeddings, lm_head or RoPE cannot be shared.
        """
        check_embeddings(target)
        target.unembed_weight()
        if target.has_long_rope:
            raise ValueError(
                f"{describe(target.model)} has RoPE that changes with the length of the text, "
                f"which a draft head's cache does not support; {INSTEAD}"
            )
        origin = LayerOrigin.of(target.model.config)
        return cls(origin, target.hidden_size, target.vocab_size)

    @classmethod
    def read(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> MtpDesign:
        """The design of stored tensors, which show width and switches. Raises ValueError for
        missing keys.
        """
        words, layer = needed(config, "vocab_size", "mtp_layer")
        width = len(matrix(tensors, "eh_proj.weight"))
        origin = LayerOrigin(*reversed(needed(layer, "number", "config")))
        return cls(
            origin,
            width,
            words,
            states_first=bool(config.get("mtp_hidden_states_first")),
            bias="eh_proj.bias" in tensors,
        )


class MtpHead(AutoregressiveHead):
    """One more layer of the target, which reads its own output.

    Its tensors have the names of transformers' `MtpLayer`.
    """

    kind = "mtp"
    title, paper = "MTP", "https://arxiv.org/abs/2412.19437"
    Choices = MtpChoices
    choices: MtpChoices
    architecture = "MtpModel"
    needs_unembed = True
    token_map: Tensor | None  # int64 (v,), target ids of the draft vocabulary; None: all

    def __init__(self, design: MtpDesign) -> None:
        super().__init__()
        self.design, parts = design, design.origin.parts()
        self.hidden_size = width = design.hidden_size
        self.vocab_size = design.vocab_size
        self.register_buffer("token_map", None)
        self.limit_to(None)
        self._shared_rows = SharedRows()
        self.layer_count, self.feature_layers = 1, (-1,)
        self.rope = self.layer_rope = parts.rope()
        self.window = parts.window
        self.enorm, self.hnorm = parts.norm(), parts.norm()
        self.eh_proj = nn.Linear(2 * width, width, bias=design.bias)
        self.mtp_block = parts.layer().eval()
        self.post_norm = parts.norm()

    @classmethod
    def create(
        cls,
        target: Target,
        choices: MtpChoices | None = None,
        vocabulary: Sequence[int] | None = None,
    ) -> MtpHead:
        """A new head for `target`. It starts as a copy of the target's last layer with attention,
        applied to the sum of state and embedded token.

        Raises ValueError for a target without such a layer, and for one whose layers are quantised
        or not in memory.
        """
        design = MtpDesign.of(target)
        head = cls(design)
        head.limit_to(token_map(vocabulary, target.vocab_size))
        head.train_with(choices or MtpChoices())
        layer = decoder_layers(target.model)[design.origin.number]
        theirs = layer.state_dict()
        mine = head.mtp_block.state_dict()
        is_whole = theirs.keys() == mine.keys() and all(
            tensor.shape == mine[name].shape
            and type(tensor) is Tensor
            and (mine[name].is_meta or not tensor.is_meta)
            for name, tensor in theirs.items()
        )
        if not is_whole:
            raise ValueError(
                f"{describe(target.model)}: expected a last layer whose weights can be copied, got "
                "one that is quantised, divided or not in memory; load the target whole"
            )
        head.mtp_block.load_state_dict(theirs)
        head.post_norm.load_state_dict(final_norm(target.model).state_dict())
        head.eh_proj.weight.data.copy_(torch.eye(head.hidden_size).repeat(1, 2))
        head.check_layer(target)
        return head

    def limit_to(self, ids_v: Tensor | None) -> None:
        """Draft only tokens with these ascending ids; None: all."""
        self.token_map = ids_v
        self.draft_vocab_size = self.vocab_size if ids_v is None else len(ids_v)

    def check_layer(self, target: Target) -> None:
        """Raise ValueError if the layer does not work with a draft head's memory."""
        if next(self.parameters()).is_meta:
            return
        reason = why_not_runnable(self.mtp_block, self.hidden_size, self.layer_rope)
        if reason:
            raise ValueError(
                f"{describe(target.model)}: its layers cannot draft, as a trial shows: {reason}; "
                f"{INSTEAD}"
            )

    def train(self, mode: bool = True) -> Self:
        """Keep the layer without dropout, because gradient checkpointing runs it twice."""
        super().train(mode)
        self.mtp_block.eval()
        return self

    def advance(
        self, embedded_BQD: Tensor, hidden_BQH: Tensor, angles: Angles, memories: Sequence[Memory]
    ) -> Tensor:
        dtype = hidden_BQH.dtype  # autocast must not narrow the residual stream
        inputs = [self.enorm(embedded_BQD), self.hnorm(hidden_BQH)]
        if self.design.states_first:
            inputs.reverse()
        hidden_BQD = self.eh_proj(torch.cat(inputs, dim=-1)).to(dtype)
        hidden_BQD = run_layer(self.mtp_block, hidden_BQD, self.layer_rope, angles, memories)
        normed_BQD: Tensor = self.post_norm(hidden_BQD).to(hidden_BQD.dtype)
        return normed_BQD

    def unembed_weight(self, target: Target) -> Tensor:
        return self._shared_rows.of(target, self.token_map)

    def layer_tensors(self) -> dict[str, Tensor]:
        """The weights without the draft vocabulary, which engines do not know."""
        return {name: x for name, x in self.state_dict().items() if name != "token_map"}

    def config(self) -> dict[str, Any]:
        """config.json in our own layout, with the target's text config."""
        origin = self.design.origin
        return {
            "model_type": "mtp",
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "mtp_hidden_states_first": self.design.states_first,
            "mtp_layer": {"number": origin.number, "config": origin.config},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> MtpHead:
        head = cls(MtpDesign.read(config, tensors))
        ids_v = integers(tensors, "token_map")
        if ids_v is not None:
            check_ids(ids_v.tolist(), head.vocab_size)
        head.limit_to(ids_v)
        return head
