"""A target's tokenizer and end tokens, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig


@dataclass(frozen=True)
class TextSide:
    """What is needed to read and write for a target. eos_ids: tokens that end its answers."""

    name: str
    tokenizer: Any
    eos_ids: tuple[int, ...]
    revision: str | None = None

    @classmethod
    def load(cls, name: str, revision: str | None = None) -> TextSide:
        """Of a folder or a Hub id. Raises ValueError where no tokenizer is found."""
        path = str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
            ends = _eos_ids(path, revision) or [tokenizer.eos_token_id]
        # what a damaged file leads to has many types; others speak of Hub and config files
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{name}: expected a target's folder or Hub id with a tokenizer, found none that "
                f"can be read ({reason}); give one with --target, or download it again"
            ) from error
        return cls(name, tokenizer, tuple(one for one in ends if one is not None), revision)


def _eos_ids(path: str, revision: str | None) -> list[int]:
    for config in (GenerationConfig, AutoConfig):
        try:
            found = config.from_pretrained(path, revision=revision).eos_token_id
        except (OSError, ValueError, AttributeError):  # a folder may hold a tokenizer alone
            if config is GenerationConfig and (Path(path) / "generation_config.json").is_file():
                raise  # other end tokens would be learned in silence
            continue
        if found is not None:
            return list(found) if isinstance(found, list) else [found]
    return []
