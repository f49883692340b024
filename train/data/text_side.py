"""The text side of a target, for whoever needs no weights: its tokenizer and its end tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from draftheads.heads.target.placement import (
    ASKS_FOR_CODE,
    OWN_CODE,
    end_ids,
    location,
    read_config,
    read_generation_config,
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
        """Read from a folder or a Hub id. Raises ValueError if no tokenizer is found."""
        folder = Path(os.path.expanduser(name))
        path = str(folder) if folder.exists() else name
        try:
            place, file = location(path)
            tokenizer = AutoTokenizer.from_pretrained(
                place, revision=revision, trust_remote_code=False, **file
            )
            tokenizer("")  # what its files say is used here for the first time
        except Exception as error:  # a damaged file raises errors of many types
            if ASKS_FOR_CODE in str(error):
                raise ValueError(f"target {name}: {OWN_CODE}") from error
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{name}: expected a target's folder or Hub id with a tokenizer, found none that "
                f"can be read ({reason}); give one with --target, or download it again"
            ) from error
        eos = _eos_token_id(path, revision)
        eos_ids = end_ids(tokenizer.eos_token_id if eos in (None, []) else eos, name)
        return cls(name, tokenizer, eos_ids, revision)


def _eos_token_id(path: str, revision: str | None) -> Any:
    """That of generation_config.json, else of config.json; None if neither has one."""
    generation = read_generation_config(path, revision)
    if generation is not None and generation.eos_token_id is not None:
        return generation.eos_token_id
    try:
        return getattr(read_config(path, revision), "eos_token_id", None)
    except (OSError, ValueError):
        if generation is not None:
            raise  # other end tokens would be learned without it
        return None  # the folder may only have a tokenizer
