"""Choices of a recipe, checked by pydantic: what all sections share, and what all kinds of heads
share. Each kind's own stand in its file.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

# Limits that no recipe means to pass: a larger number is refused before anything is loaded.
LARGEST = 2**43
"""Of all numbers: epochs are shuffled by seed * 1,000,003 + epoch, an int64."""
WIDEST = 2**18
"""Inner width of a layer."""
MOST_HEADS = 2**12
"""Attention heads of a layer, and the width of one."""
MOST_RANKS = 2**15
"""Rank of a product of two thin matrices."""


def expanded(value: Any) -> Any:
    """A text with its `~`, which no shell expands in key=~/value; other values as they are."""
    return os.path.expanduser(value) if isinstance(value, str) else value


class Section(BaseModel):
    """Refuses unknown keys, empty values, non-finite and absurdly large numbers."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, serialize_by_alias=True
    )

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for key, value in values.items():
            if value == "":  # of an unset variable, as in run.output=$OUT
                raise ValueError(f"{key} is empty; set it, or leave it out")
            kinds = str(cls.model_fields[key].annotation) if key in cls.model_fields else "bool"
            if isinstance(value, bool) and "bool" not in kinds:  # pydantic takes true for 1
                raise ValueError(f"{key}: expected a number or a text, got {str(value).lower()}")
        plain = {key: expanded(value) for key, value in values.items()}
        for key, field in cls.model_fields.items():
            is_one = isinstance(plain.get(key), str | int)  # as in run.trackers=wandb
            if is_one and "list[" in str(field.annotation):
                plain[key] = [plain[key]]
        return plain

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        if isinstance(value, int | float) and value > LARGEST:
            raise ValueError(f"expected a number of at most {LARGEST:.3g}")
        return value


class HeadChoices(Section):
    """The section `head` of a recipe: base of the choices of each kind, which all have defaults.

    A kind's choices have the fields `kind`, a Literal with its name, and `nodes`, the draft tokens
    of its tree. A field `vocabulary` is the size of a reduced draft vocabulary.
    """

    decoding_keys: ClassVar[frozenset[str]] = frozenset({"nodes"})
    """Keys that only decoding reads, so they may change when a run is resumed."""
    takes_adapter: ClassVar[bool] = False
    """True if the heads can be trained together with an adapter of the target."""

    source: str | None = Field(
        None,
        alias="from",
        description="head, run or Hub id to continue; mtp: target, its own; null: new",
        exclude_if=lambda source: source is None,
    )

    if TYPE_CHECKING:  # as fields of this class they would precede all others in recorded recipes
        kind: str = ""
        nodes: int = 0

    @property
    def draft_vocabulary(self) -> int | None:
        """Size of the draft vocabulary; None: all tokens of the target."""
        return getattr(self, "vocabulary", None)


class LayerSizes(Section):
    """Sizes of a decoder layer; null: as in the target."""

    heads: int | None = Field(None, ge=1, le=MOST_HEADS, description="attention heads")
    kv_heads: int | None = Field(None, ge=1, le=MOST_HEADS, description="key-value heads")
    head_dim: int | None = Field(
        None, ge=1, le=MOST_HEADS, description="width of an attention head"
    )
    intermediate_size: int | None = Field(
        None, ge=1, le=WIDEST, description="inner width of the MLP"
    )
    rope_theta: float | None = Field(None, gt=0, description="RoPE base frequency")
    rope_scaling: dict[str, Any] | None = Field(None, description="as in a model's config.json")
