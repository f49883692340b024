"""The text side of a target, for whoever needs no weights: its tokenizer and its end tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftheads.heads.target.placement import (
    end_ids,
    read_config,
    read_generation_config,
    read_tokenizer,
)


@dataclass(frozen=True)
class TextSide:
    """The tokenizer of a target. eos_ids: tokens that end its answers."""

    name: str
    tokenizer: Any
    eos_ids: tuple[int, ...]
    revision: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, name: str, revision: str | None = None) -> TextSide:
        """Read from a folder or a Hub id. Raises OSError or ValueError if no tokenizer is found."""
        tokenizer = read_tokenizer(name, revision)
        generation = read_generation_config(name, revision)
        eos: Any = None if generation is None else generation.eos_token_id
        if eos is None:
            try:
                eos = getattr(read_config(name, revision), "eos_token_id", None)
            except (OSError, ValueError):
                if generation is not None:
                    raise  # other end tokens would be learned without it
                # else the folder may only have a tokenizer
        eos_ids = end_ids(tokenizer.eos_token_id if eos in (None, []) else eos, name)
        return cls(name, tokenizer, eos_ids, revision)
