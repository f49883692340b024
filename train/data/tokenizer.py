"""A target's tokenizer and end tokens, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class TextSide:
    """The text side of a target. eos_ids: tokens that end its answers."""

    name: str
    tokenizer: Any
    eos_ids: tuple[int, ...]
    revision: str | None = None

    @classmethod
    def load(cls, name: str, revision: str | None = None) -> TextSide:
        """Read from a folder or a Hub id. Raises ValueError if no tokenizer is found."""
        path = str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
            eos_ids = _eos_ids(path, revision) or [tokenizer.eos_token_id]
        except Exception as error:  # a damaged file raises errors of many types
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{name}: expected a target's folder or Hub id with a tokenizer, found none that "
                f"can be read ({reason}); give one with --target, or download it again"
            ) from error
        return cls(name, tokenizer, tuple(one for one in eos_ids if one is not None), revision)


def _eos_ids(path: str, revision: str | None) -> list[int]:
    for config in (GenerationConfig, AutoConfig):
        try:
            found = config.from_pretrained(path, revision=revision).eos_token_id
        except (OSError, ValueError, AttributeError):  # a folder may hold a tokenizer alone
            if (Path(path) / "generation_config.json").is_file():
                raise  # without it, other end tokens would be learned
            continue
        if found is not None:
            return list(found) if isinstance(found, list) else [found]
    return []
