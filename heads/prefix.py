"""A decoder layer that reads the whole text once per step, so that heads which guess from one state
know what stands before it (the prefix layer of Hydra++, arXiv 2402.05109).

Legend: B batch, T tokens, Q positions that ask, D width.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from draftheads.heads.base import Batch
from draftheads.heads.decoder import DecoderLayer, LayerShape, Memory, RMSNorm, Rope
from draftheads.heads.unroll import visible


class PrefixLayer(nn.Module):
    """One Llama layer and a final norm on the target's last states; it is a `Reader` for
    `heads.history`. Its branches are zero at first: new heads read the target's states, normed.
    """

    layer_count = 1
    window: int | None = None

    def __init__(self, shape: LayerShape, rope: Rope) -> None:
        super().__init__()
        self.shape, self.rope = shape, rope
        self.layer = DecoderLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.eps)
        nn.init.zeros_(self.layer.self_attn.o_proj.weight)
        nn.init.zeros_(self.layer.mlp.down_proj.weight)

    def forward(self, batch: Batch, features_BTD: Tensor) -> Tensor:
        """Training: the states (B, T, D) of packed rows whose documents do not see each other."""
        memories: list[Memory] = [RowMemory(visible(batch, self.window))]
        angles = self.rope(batch.positions_BT)
        return self.read(batch.tokens_BT, features_BTD, angles, memories)

    def read(
        self,
        tokens_BQ: Tensor,
        features_BQD: Tensor,
        angles: tuple[Tensor, Tensor],
        memories: list[Memory],
    ) -> Tensor:
        """The states (B, Q, D); the tokens are not looked at."""
        features_BQD = features_BQD.to(self.norm.weight.dtype)
        states_BQD: Tensor = self.norm(self.layer(features_BQD, angles, memories[0]))
        return states_BQD

    def config(self) -> dict[str, Any]:
        """Its shape, in the words of a Llama config."""
        rope = {"rope_theta": self.rope.theta, "rope_scaling": self.rope.scaling}
        return {**self.shape.config(), **rope}


class RowMemory:
    """Whole rows that attend to themselves, as the mask (B, T, T) allows."""

    def __init__(self, visible_BTT: Tensor) -> None:
        self.visible_B1TT = visible_BTT[:, None]

    def attend(self, q_BHQW: Tensor, k_BGQW: Tensor, v_BGQW: Tensor) -> Tensor:
        """(B, H, T, W)."""
        times = q_BHQW.shape[1] // k_BGQW.shape[1]  # groups and a mask have no fast kernel
        k_BHQW, v_BHQW = (each.repeat_interleave(times, dim=1) for each in (k_BGQW, v_BGQW))
        return F.scaled_dot_product_attention(q_BHQW, k_BHQW, v_BHQW, attn_mask=self.visible_B1TT)
