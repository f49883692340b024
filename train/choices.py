"""A recipe's `head` section: one model per kind of head, told apart by `head.kind`.

Keys that only decoding reads may change between the launches of one run; each model names them.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Kind = Literal["medusa", "sequential", "eagle3", "eagle"]
Size = Annotated[int, Field(ge=1)]
Layer = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Refuses keys that it does not know, numbers that are not finite and values that are empty."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        """~ is the home folder in all names, as no shell expands it within key=~/value."""
        if not isinstance(values, dict):
            return values
        for name, value in values.items():
            field = cls.model_fields.get(name)
            if field and isinstance(value, bool) and field.annotation is not bool:
                raise ValueError(f"a number or a text as {name}, got {str(value).lower()}")
            if value == "":
                raise ValueError(f"a value for {name}, got nothing")
        home = os.path.expanduser
        return {key: home(x) if isinstance(x, str) else x for key, x in values.items()}


class MedusaChoices(Section):
    """Medusa heads (arXiv 2401.10774)."""

    decoding_keys: ClassVar[frozenset[str]] = frozenset({"nodes"})

    kind: Literal["medusa"] = Field("medusa", description="each guess made from one state alone")
    depth: int = Field(4, ge=1, le=16, description="heads = tokens guessed ahead")
    layers: int = Field(1, ge=1, le=8, description="residual blocks per head")
    lm_head: Literal["own", "shared"] = Field("own", description="shared: the target's, frozen")
    labels: Literal["hard", "soft"] = Field("hard", description="soft: the target's distribution")
    decay: float = Field(0.8, gt=0, le=1, description="weight of depth k is decay^k")
    vocabulary: int | None = Field(
        None, ge=2, description="keep only the N tokens that the target writes most; null: all"
    )
    nodes: int = Field(63, ge=1, description="draft nodes of the calibrated tree")


class LayerSizes(Section):
    """Sizes of a decoder layer."""

    heads: Size | None = Field(None, description="attention heads; null: the target's")
    kv_heads: Size | None = Field(None, description="key and value heads; null: the target's")
    head_dim: Size | None = Field(None, description="width of a head; null: the target's")
    intermediate_size: Size | None = Field(
        None, description="inner width of the MLP; null: the target's"
    )
    rope_theta: float | None = Field(None, gt=0, description="base of RoPE; null: the target's")
    rope_scaling: dict[str, Any] | None = Field(
        None, description="as in a model's config, e.g. {rope_type: llama3, factor: 8.0, ...}"
    )


class SequentialChoices(MedusaChoices, LayerSizes):
    """Medusa heads that know the token before (Hydra, arXiv 2402.05109). The sizes are those of the
    prefix layer.
    """

    decoding_keys: ClassVar[frozenset[str]] = frozenset({"nodes", "top_k"})

    kind: Literal["sequential"] = Field(  # type: ignore[assignment]
        "sequential", description="Medusa heads that know the tokens drafted before"
    )
    conditioning: Literal["markov", "state", "recurrent", "hydra"] = Field(
        "recurrent",
        description="markov: the token before changes the logits; state: it changes the hidden "
        "state; recurrent: so do all tokens since the root; hydra: these enter the head itself",
    )
    rank: Size | None = Field(
        None, description="inner width, not of hydra; null: 64 for markov, else the target's width"
    )
    prefix: bool = Field(False, description="a decoder layer reads the whole text first (Hydra++)")
    top_k: Size | None = Field(
        None,
        description="nodes expanded per level of a dynamic tree; null: a fixed, calibrated tree",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> SequentialChoices:
        if self.conditioning == "hydra" and self.rank is not None:
            raise ValueError("rank: null with conditioning: hydra, which has none; remove rank")
        sizes = [name for name in LayerSizes.model_fields if getattr(self, name) is not None]
        if sizes and not self.prefix:
            raise ValueError(
                f"prefix: true with {sizes[0]}, a size of the prefix layer; set prefix or remove it"
            )
        if self.top_k is not None:
            check_candidates(self.nodes, self.depth, self.top_k)
        return self


class DecoderChoices(LayerSizes):
    """What both kinds of EAGLE share: decoder layers that draft from their own output, and the
    dynamic tree that they fill.
    """

    decoding_keys: ClassVar[frozenset[str]] = frozenset({"nodes", "depth", "top_k"})

    layers: int = Field(1, ge=1, le=8, description="decoder layers")
    sliding_window: Size | None = Field(
        None, description="newest tokens that the draft layers see; null: all"
    )
    decay: float = Field(
        0.8, gt=0, le=1, description="weight of unrolled step k is decay^k, over their sum"
    )
    nodes: int = Field(59, ge=1, description="draft nodes of the dynamic tree")
    depth: int = Field(8, ge=1, le=32, description="tokens drafted ahead = depth of the tree")
    top_k: int = Field(10, ge=1, description="nodes expanded per level, and children per node")

    @model_validator(mode="after")
    def _enough_candidates(self) -> DecoderChoices:
        check_candidates(self.nodes, self.depth, self.top_k)
        return self


class Eagle3Choices(DecoderChoices):
    """EAGLE-3 (arXiv 2503.01840), with the switches of EAGLE-3.1 (arXiv 2605.09992) and the
    losses of arXiv 2602.23881.
    """

    kind: Literal["eagle3"] = Field(
        "eagle3", description="a decoder layer that reads the target's states, then its own output"
    )
    feature_layers: list[Layer] | None = Field(
        None,
        min_length=1,
        description="indices into hidden_states, 0 = embeddings; null: [2, n//2, n-3] of n layers",
    )
    vocabulary: int | None = Field(
        None, ge=2, description="draft only the N tokens that the target writes most; null: all"
    )
    fc_norm: bool = Field(False, description="normalise each captured feature")
    norm_output: bool = Field(False, description="the next step reads the normalised output")
    norm_before_fc: bool = Field(False, description="normalise the captured features together")
    norm_before_residual: bool = Field(False, description="the residual is the normalised feature")
    steps: int = Field(7, ge=1, le=16, description="steps of training-time test")
    labels: Literal["soft", "hard"] = Field(
        "soft", description="soft: the target's distribution; hard: the token that came"
    )
    loss: Literal["ce", "tv", "lk", "hybrid"] = Field(
        "ce",
        description="ce: cross-entropy; tv: total variation = 1 - acceptance; lk: -log acceptance; "
        "hybrid: l * ce + (1 - l) * tv with l = exp(-3 * acceptance)",
    )
    noise: float = Field(0.0, ge=0, description="uniform noise on the features, as for eagle")

    @model_validator(mode="after")
    def _fits_together(self) -> Eagle3Choices:
        if self.fc_norm and self.norm_before_fc:
            raise ValueError(
                "at most one of fc_norm and norm_before_fc, got both; set one to false"
            )
        if self.loss != "ce" and self.labels != "soft":
            raise ValueError(
                f"labels: soft with loss: {self.loss}, which compares distributions, got labels: "
                f"{self.labels}; set labels to soft or loss to ce"
            )
        if self.vocabulary is not None and self.vocabulary < self.top_k:
            raise ValueError(
                f"vocabulary of at least top_k = {self.top_k} tokens, got {self.vocabulary}"
            )
        return self


class EagleChoices(DecoderChoices):
    """EAGLE-1 (arXiv 2401.15077)."""

    kind: Literal["eagle"] = Field(
        "eagle", description="EAGLE-1: a decoder layer that predicts the target's features"
    )
    steps: int = Field(1, ge=1, le=16, description="steps that the head is unrolled in training")
    regression: float = Field(1.0, ge=0, description="weight of the SmoothL1 loss on features")
    classification: float = Field(0.1, ge=0, description="weight of the cross-entropy")
    labels: Literal["soft", "hard"] = Field(
        "soft",
        description="of the cross-entropy: the target's distribution, or the token that came",
    )
    noise: float = Field(
        0.2,
        ge=0,
        description="uniform noise on the features: (u - 0.5) * noise * 512 / sequence_length",
    )

    @model_validator(mode="after")
    def _something_to_learn(self) -> EagleChoices:
        if not self.regression and not self.classification:
            raise ValueError("regression or classification above 0, got 0 for both; raise one")
        return self


def check_candidates(nodes: int, depth: int, top_k: int) -> None:
    """Raise ValueError for a dynamic tree of more nodes than it has candidates."""
    most = top_k + (depth - 1) * top_k**2
    if nodes > most:
        raise ValueError(
            f"nodes of at most {most}, as many as a tree of depth {depth} with top_k {top_k} has "
            f"candidates (top_k + (depth - 1) * top_k^2), got {nodes}"
        )


HeadChoices = Annotated[
    MedusaChoices | SequentialChoices | Eagle3Choices | EagleChoices, Field(discriminator="kind")
]

HEAD_MODELS: dict[str, type[MedusaChoices] | type[DecoderChoices]] = {
    "medusa": MedusaChoices,
    "sequential": SequentialChoices,
    "eagle3": Eagle3Choices,
    "eagle": EagleChoices,
}
"""The model of each kind's `head` section."""
