"""A target's last matrix, as heads read it that share it or learn from the target's distribution.

Legend: V vocabulary.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel


class Unembedding:
    """Logits of hidden states. name: of the model, for messages."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.model, self.name = model, name

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own logits (..., V) of last-layer hidden states.

        Raises ValueError where lm_head(hidden) is not what the model returns (its logits are scaled
        or capped).
        """
        self.check()
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits.to(hidden.device)

    def weight(self) -> Tensor:
        """The matrix (V, hidden) where the model takes its token ids, after the same check.

        Raises ValueError also where there is a bias, which the weight alone would leave out.
        """
        self.check()
        lm_head = self.model.get_output_embeddings()
        if getattr(lm_head, "bias", None) is not None:
            raise ValueError(
                f"{self.name}: its lm_head has a bias, which shared heads leave out; "
                "use heads with their own lm_head and hard labels"
            )
        weight: Tensor = lm_head.weight
        return weight if weight.device == self.model.device else self._copy

    def check(self) -> None:
        """Raise ValueError where lm_head(hidden) is not what the model returns."""
        if self._fault:
            raise ValueError(self._fault)

    def prepare_release(self) -> None:
        """Check what could not be checked later, and forget copies."""
        _ = self._fault
        self.__dict__.pop("_copy", None)

    @cached_property
    def _copy(self) -> Tensor:
        """Of a matrix that stands elsewhere than the features, made once."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.to(self.model.device)

    @cached_property
    @torch.no_grad()
    def _fault(self) -> str | None:
        config = self.model.config.get_text_config(decoder=True)
        lm_head = self.model.get_output_embeddings()
        tokens = torch.arange(min(4, lm_head.weight.shape[0]), device=self.model.device)[None]
        out = self.model(tokens, use_cache=False, output_hidden_states=[-1])
        got = lm_head(out.hidden_states[-1])
        if torch.allclose(got.float(), out.logits.float().to(got.device), rtol=1e-3, atol=1e-3):
            return None
        causes = ("final_logit_softcapping", "logit_scale", "logits_scaling", "dim_model_base")
        found = [f"{key}={value}" for key in causes if (value := getattr(config, key, None))]
        return (
            f"{self.name}: lm_head(hidden state) is not this model's logits "
            f"({', '.join(found) or 'another layer comes between them'}); "
            "use heads with their own lm_head and hard labels"
        )
