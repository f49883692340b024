"""A recipe's section `adapter`: the target learns a little, together with its heads (Medusa-2)."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from draftheads.train.choices import Section


class AdapterChoices(Section):
    """A LoRA adapter on the target, kept near the untouched target by its divergence from it
    (arXiv 2401.10774, 2.2 and 2.3: two stages, or a weight that grows; self-distillation).
    """

    rank: int = Field(32, ge=1, description="of every change of a matrix")
    alpha: float = Field(16.0, gt=0, description="a change is multiplied by alpha / rank")
    layers: int | None = Field(
        None, ge=1, description="how many layers it changes, counted from the last; null: all"
    )
    modules: list[str] | None = Field(
        None,
        min_length=1,
        description="matrices it changes, e.g. [q_proj, v_proj]; null: all of those layers",
    )
    lr: float = Field(5e-4, gt=0, description="its peak learning rate; optim.lr is the heads'")
    start: float = Field(0.25, ge=0, lt=1, description="share of steps that train heads alone")
    heads_weight: float = Field(
        1.0, gt=0, description="of the heads' loss, beside the divergence, in what it learns from"
    )
    ramp: Literal["constant", "sine"] = Field(
        "constant", description="sine: that weight grows from 0 as sin does up to pi/2"
    )
    agreement: float = Field(
        0.98,
        ge=0,
        le=1,
        description="share of held-out tokens at which the target's first choice must stay what it "
        "was, for a checkpoint to become the best",
    )

    def weight(self, done: float) -> float:
        """Of the heads' loss in what the adapter learns from, when `done` of the run is done; 0
        while heads learn alone.
        """
        if done < self.start:
            return 0.0
        joint = (done - self.start) / (1 - self.start)
        return self.heads_weight * (math.sin(joint * math.pi / 2) if self.ramp == "sine" else 1.0)
